"""Benchmarks have all programs compiled before they measure. Their tests read no figures and take what they use."""

from collections.abc import Iterator

import pytest

from jpaged.executor.start import startup


@pytest.fixture(scope="package", autouse=True)
def programs_on_first_use() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup, "compiles_on_first_use", lambda *asked: True)
        yield
