"""A server's options, and what clients see of them."""

from types import SimpleNamespace

import pytest

from jpaged.api.errors import InvalidParameterError
from jpaged.assets import demo_model_path
from jpaged.cli import main
from jpaged.processes.request_log import RequestLog
from jpaged.processes.traces import Traces
from jpaged.serving.app import build_app
from jpaged.serving.options import AppOptions, ServerOptions, public_name
from jpaged.text.tokenizer import Tokenizer
from tests.text.tokenizers_for_tests import tokenizer


def test_a_models_public_name_has_no_path(tmp_path, monkeypatch):
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert public_name(str(tmp_path / "my-model")) == "my-model"
    assert public_name("my-model/") == public_name("./my-model") == "my-model"
    assert public_name("/srv/not/there") == "there"
    assert public_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert public_name(None) == "jpaged-demo"


def test_errors_of_requests_name_no_path():
    assert Tokenizer.load(demo_model_path()).name == "demo_model"
    assert Tokenizer(tokenizer("byte-level"), "some/model").name == "some/model"


@pytest.mark.parametrize("number", [0, -1, 65, 1000])
def test_no_more_api_processes_than_any_machine_has_a_use_for(number):
    with pytest.raises(InvalidParameterError, match="api_workers must be at"):
        ServerOptions(api_workers=number)


@pytest.mark.parametrize("mode", [0o0, 0o400, 0o1666])
def test_a_socket_that_its_own_user_cannot_use_is_refused(mode):
    with pytest.raises(InvalidParameterError, match="uds_mode must be from 600 to 777"):
        ServerOptions(uds_mode=mode)


def test_those_who_watch_requests_are_told_in_the_order_in_which_they_need_each_other():
    """The log names the trace of a request, which it has when its spans were made."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    engine = SimpleNamespace(observers=[], tokenizer=None)
    options = AppOptions(log_requests=True, log_prompts=True, otlp_traces_endpoint="http://127.0.0.1:9")
    build_app(engine, options)
    assert [type(one) for one in engine.observers] == [Traces, RequestLog]
    for one in engine.observers:
        one.close()


def test_prompts_are_logged_only_as_part_of_the_lines_of_requests():
    with pytest.raises(InvalidParameterError, match="log_prompts needs log_requests"):
        AppOptions(log_prompts=True)


def test_a_chat_template_of_the_options_takes_the_place_of_the_models():
    engine = SimpleNamespace(observers=[], tokenizer=Tokenizer.load(demo_model_path()))
    build_app(engine, AppOptions(chat_template="{{ messages[0].content }}!"))
    assert engine.tokenizer.render_chat([{"role": "user", "content": "Hello"}]) == "Hello!"
    with pytest.raises(InvalidParameterError, match="chat_template needs a tokenizer"):
        build_app(SimpleNamespace(tokenizer=None), AppOptions(chat_template="x"))
    with pytest.raises(InvalidParameterError, match="chat_template is empty"):
        AppOptions(chat_template=" \n")


def test_a_chat_templates_file_that_cannot_be_read_is_named(tmp_path, capsys):
    (tmp_path / "bytes").write_bytes(b"\xff")
    for path in (tmp_path / "missing", tmp_path / "bytes"):
        assert main(["serve", "--chat-template", str(path)]) != 0
        assert f"--chat-template {path} cannot be read" in capsys.readouterr().err
