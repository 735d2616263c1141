"""What a user is told who misspells something, or asks for what is not there."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jpaged import LLM, AsyncLLMEngine, EngineArgs, cli
from jpaged.api.errors import CheckpointError, InvalidParameterError, ModelNotFoundError
from jpaged.assets import demo_model_path
from jpaged.host import devices
from jpaged.models import ModelConfig
from jpaged.serving.listeners import Listeners
from jpaged.serving.options import ServerOptions

ROOT = Path(__file__).parents[1]


def run(*words, **environment):
    command = [sys.executable, "-m", "jpaged", *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, cwd=ROOT)


def test_a_gpu_that_is_not_there_is_named_with_what_is_missing():
    done = run("generate", "hi", JAX_PLATFORMS="cuda")
    assert done.returncode == 1
    assert "JAX_PLATFORMS=cuda asks for a GPU, but JAX finds none: " in done.stderr
    assert "defect" not in done.stderr


def test_what_is_missing_is_driver_plugin_or_their_fit(monkeypatch):
    monkeypatch.setattr(devices, "find_library", lambda name: None)
    monkeypatch.setattr(devices, "Path", lambda path: Path("/nowhere"))
    assert "no NVIDIA driver" in devices.missing_for_gpus()
    monkeypatch.setattr(devices, "find_library", lambda name: "libcuda.so.1")
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    assert "pip install 'jpaged[cuda12]'" in devices.missing_for_gpus()
    monkeypatch.setattr(devices, "find_spec", lambda name: object())
    assert "cannot use the driver" in devices.missing_for_gpus()
    assert "JAX_PLATFORMS=tpu: no TPU" in devices.no_device_message({"JAX_PLATFORMS": "tpu"}, "no TPU")


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "score", "run-batch"])
def test_a_misspelt_option_comes_with_the_one_that_was_meant(capsys, command):
    required = ["-i", "a", "-o", "b"] if command in ("score", "run-batch") else []
    assert cli.main([command, *required, "--max-model-length", "5"]) == 2
    assert "unrecognized option --max-model-length; did you mean --max-model-len?" in capsys.readouterr().err


def test_an_option_that_only_others_have_comes_with_what_to_do(capsys):
    assert cli.main(["generate", "hi", "--speculative-config", "{}"]) == 2
    assert "unrecognized option --speculative-config: there is no speculative decoding" in capsys.readouterr().err
    for option, said in (
        ("tp-size", "it is --tensor-parallel-size"),
        ("hf-overrides", "copy of the model's directory"),
    ):
        assert cli.main(["generate", "hi", f"--{option}", "2"]) == 2
        error = capsys.readouterr().err
        assert f"unrecognized option --{option}: " in error
        assert said in error
    assert cli.main(["models", "--device", "cpu"]) == 2  # which has no options of engines
    assert "JAX_PLATFORMS" not in capsys.readouterr().err


def test_a_misspelt_keyword_comes_with_the_one_that_was_meant():
    with pytest.raises(InvalidParameterError, match=r"no option 'max_model_length'; did you mean max_model_len\?"):
        LLM(max_model_length=5)


def test_a_model_may_be_given_as_a_path():
    assert EngineArgs(model=Path("a") / "b", tokenizer=Path("c")) == EngineArgs(model="a/b", tokenizer="c")
    with pytest.raises(ModelNotFoundError, match="/no/such/model does not exist"):
        LLM(Path("/no/such/model"))


@pytest.mark.parametrize("make", [AsyncLLMEngine, lambda m: AsyncLLMEngine.from_engine_args(EngineArgs(model=m))])
def test_an_asynchronous_engine_takes_a_models_name(make):
    with pytest.raises(ModelNotFoundError, match="/no/such/model does not exist"):
        make("/no/such/model")


def test_files_that_are_no_certificate_are_named(tmp_path):
    for name in ("cert", "key"):
        (tmp_path / name).write_text("nothing")
    with pytest.raises(InvalidParameterError, match=r"ssl_certfile=.*cert and ssl_keyfile=.*key are not a PEM"):
        ServerOptions(ssl_certfile=str(tmp_path / "cert"), ssl_keyfile=str(tmp_path / "key"))


@pytest.mark.parametrize("host", ["nowhere.invalid", "a" * 300])
def test_a_host_that_is_no_address_is_named(host):
    with pytest.raises(OSError, match=f"cannot listen on {host}: it is no address of this machine"):
        Listeners.on_port(host, 0)


def test_the_file_that_holds_a_wrong_token_is_blamed(tmp_path):
    shutil.copy(demo_model_path() / "config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "two"}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id must be a token id"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("prompt", ["", "  "])
def test_an_empty_prompt_is_refused_before_a_model_is_loaded(capsys, prompt):
    assert cli.main(["generate", prompt, "--model", "/no/such/model"]) == 1
    assert "The prompt is empty" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["tools/page_screenshots.py", "examples/train_story_model/sample.py"])
def test_scripts_name_the_package_that_they_need(script):
    hide = "import sys, runpy; sys.modules.update(httpx=None, torch=None); sys.argv[0] = sys.argv[1];"
    code = hide + "runpy.run_path(sys.argv[1], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, str(ROOT / script)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "needs " in done.stderr
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_asynchronous_engine_of_a_name_alone_generates():
    async def scene():
        async with AsyncLLMEngine(demo_model_path()) as engine:
            async for output in engine.generate("Once"):
                last = output
        return last

    assert asyncio.run(asyncio.wait_for(scene(), 300)).outputs[0].text
