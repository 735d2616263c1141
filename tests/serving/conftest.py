"""A server that the tests of tools and of other dialects share."""

import pytest

from tests.serving.server_process import Server
from tests.support.thinking_model import thinking_model


@pytest.fixture(scope="session")
def thinking_server(tmp_path_factory):
    """One API process, and a model whose template switches reasoning."""
    directory = tmp_path_factory.mktemp("server")
    server = Server(directory / "log", "--model", str(thinking_model(directory / "model")))
    yield server
    server.close()
