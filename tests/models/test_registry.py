"""Families from outside the package: how they become known, here and in other processes."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jpaged import models
from jpaged.api.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from jpaged.models import registry
from jpaged.models.families.llama import LLAMA
from jpaged.models.families.opt import OPTFamily
from tests.tiny_models import tiny_model

ROOT = Path(__file__).parents[2]

FAMILY = """
from dataclasses import dataclass
from jpaged.models import register
from jpaged.models.families.llama import LLAMA, LlamaConfig

@dataclass(frozen=True, kw_only=True)
class FoxConfig(LlamaConfig):
    tails: int

class Fox:
    model_type, base_prefix, derived_tensors = "fox", LLAMA.base_prefix, ""

    def read_config(self, read):
        return FoxConfig(**vars(LLAMA.read_config(read)), tails=read.integer("tails"))

    module, tensors = LLAMA.module, LLAMA.tensors

FOX = Fox()
"""
CONFIG = tiny_model("llama-mha-d16").config | {"architectures": ["FoxForCausalLM"], "model_type": "fox", "tails": 9}

ASK = """
import json, pickle, sys
if len(sys.argv) > 2:
    config = pickle.loads(bytes.fromhex(sys.argv[2]))
else:
    from jpaged.models import ModelConfig
    config = ModelConfig.from_dict(json.loads(sys.argv[1]))
from jpaged.models import build, supported_architectures
assert build(config, "float32").num_parameters > 0
assert "FoxForCausalLM" in supported_architectures()
print(type(config).__module__, config.tails)
"""


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten."""
    monkeypatch.setattr(registry, "_families", dict(registry._families))
    monkeypatch.setattr(registry, "_imported", set(registry._imported))
    monkeypatch.delenv(registry.MODULES_VARIABLE, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """Of a family that registers itself."""
    path = tmp_path / "fox_family.py"
    path.write_text(FAMILY + '\nregister("FoxForCausalLM", FOX)\n')
    yield path
    sys.modules.pop("fox_family", None)


def ask(*arguments: str, folder: Path, **environment: str) -> str:
    """What another process says of the configuration."""
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-P", "-c", ASK, *arguments]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def tiny(name: str) -> models.ModelConfig:
    return models.ModelConfig.from_dict(tiny_model(name).config)


def test_a_registered_family_runs_an_architecture_until_another_takes_its_place() -> None:
    models.register("FoxForCausalLM", LLAMA)
    config = models.ModelConfig.from_dict(CONFIG)
    assert config.architecture == "FoxForCausalLM"
    assert models.build(config).num_parameters == models.build(tiny("llama-mha-d16")).num_parameters
    models.register("FoxForCausalLM", OPTFamily())
    with pytest.raises(CheckpointError, match="ffn_dim"):
        models.ModelConfig.from_dict(CONFIG)


def test_the_model_type_of_a_family_stands_in_for_missing_architectures(file: Path, monkeypatch) -> None:
    monkeypatch.setenv(registry.MODULES_VARIABLE, str(file))
    config = {name: value for name, value in CONFIG.items() if name != "architectures"}
    assert models.ModelConfig.from_dict(config).architecture == "FoxForCausalLM"


def test_a_map_that_leaves_a_parameter_out_or_names_one_too_many_is_refused() -> None:
    class Careless:
        model_type, base_prefix, derived_tensors = LLAMA.model_type, LLAMA.base_prefix, ""
        read_config, module = LLAMA.read_config, LLAMA.module

        def tensors(self, config):
            return [replace(piece, parameter=piece.parameter.replace("norm", self.calls)) for piece in self.pieces]

    careless = Careless()
    careless.pieces = models.build(tiny("llama-mha-d16")).pieces
    models.register("FoxForCausalLM", careless)
    config = models.ModelConfig.from_dict(CONFIG)
    careless.calls = "nrom"
    with pytest.raises(ValueError, match=r"fills nothing of layers\.0\.attention_norm\.scale"):
        models.build(config)
    careless.calls = "norm"
    careless.pieces = (*careless.pieces, replace(careless.pieces[0], parameter="more"))
    with pytest.raises(ValueError, match="the module has not, more"):
        models.build(config)


@pytest.mark.parametrize(
    ("architecture", "family", "says"),
    [("", LLAMA, "must be a name"), ("Fox", object(), "lacks model_type"), ("Fox", OPTFamily, "register an object")],
)
def test_what_is_no_family_is_refused_when_it_is_registered(architecture: str, family: object, says: str) -> None:
    with pytest.raises(InvalidParameterError, match=says):
        models.register(architecture, family)  # type: ignore[arg-type]


def test_another_process_knows_the_families_that_the_environment_names(file: Path) -> None:
    by_file = {registry.MODULES_VARIABLE: f" jpaged.models ,{file}"}
    assert ask(json.dumps(CONFIG), folder=file.parent, **by_file) == "fox_family 9"
    by_name = {registry.MODULES_VARIABLE: "fox_family", "PYTHONPATH": f"{ROOT}{os.pathsep}{file.parent}"}
    assert ask(json.dumps(CONFIG), folder=ROOT, **by_name) == "fox_family 9"


def test_another_process_knows_the_families_of_installed_packages(tmp_path: Path) -> None:
    (tmp_path / "foxes.py").write_text(FAMILY)
    (tmp_path / "foxes-1.0.dist-info").mkdir()
    (tmp_path / "foxes-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: foxes\nVersion: 1.0\n")
    (tmp_path / "foxes-1.0.dist-info" / "entry_points.txt").write_text("[jpaged.models]\nFoxForCausalLM = foxes:FOX\n")
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    assert ask(json.dumps(CONFIG), folder=ROOT, PYTHONPATH=path) == "foxes 9"


@pytest.fixture
def broken_package(tmp_path: Path, monkeypatch) -> Iterator[None]:
    """An installed package whose entry point cannot be imported, which comes before one that can."""
    (tmp_path / "foxes.py").write_text(FAMILY)
    entries = {"broken": "BrokenForCausalLM = broken_wolves:WOLF", "foxes": "FoxForCausalLM = foxes:FOX"}
    for name, entry in entries.items():
        directory = tmp_path / f"{name}-1.0.dist-info"
        directory.mkdir()
        (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (directory / "entry_points.txt").write_text(f"[jpaged.models]\n{entry}\n")
    (tmp_path / "broken_wolves.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("foxes", None)


@pytest.mark.usefixtures("broken_package")
class TestABrokenPackage:
    def test_its_model_is_refused_in_words_that_name_the_package_and_the_cause(self) -> None:
        for _ in range(2):
            with pytest.raises(InvalidParameterError) as refused:
                models.ModelConfig.from_dict(CONFIG | {"architectures": ["BrokenForCausalLM"]})
            for part in (
                "BrokenForCausalLM",
                "'broken_wolves:WOLF'",
                "package 'broken'",
                "no_such_dependency",
                "update",
            ):
                assert part in str(refused.value)
            assert isinstance(refused.value.__cause__, ModuleNotFoundError)

    def test_an_object_that_is_no_family_is_refused_likewise(self, tmp_path: Path) -> None:
        (tmp_path / "broken_wolves.py").write_text("WOLF = 7\n")
        with pytest.raises(InvalidParameterError, match=r"package 'broken'.*lacks model_type"):
            models.ModelConfig.from_dict(CONFIG | {"architectures": ["BrokenForCausalLM"]})
        sys.modules.pop("broken_wolves", None)

    @pytest.mark.parametrize("named", [["FoxForCausalLM"], ["BrokenForCausalLM", "FoxForCausalLM"], None])
    def test_other_models_work(self, named: list[str] | None) -> None:
        config = models.ModelConfig.from_dict(CONFIG | {"architectures": named})
        assert config.architecture == "FoxForCausalLM"

    def test_a_model_type_that_nobody_has_is_unsupported_and_what_could_not_be_asked_is_named(self) -> None:
        with pytest.raises(UnsupportedModelError, match=r"model_type 'badger'.*package 'broken'"):
            models.ModelConfig.from_dict(CONFIG | {"architectures": None, "model_type": "badger"})


def test_a_configuration_crosses_to_a_process_that_finds_its_class_by_the_environment(file: Path, monkeypatch) -> None:
    """As helpers that compile get it, which read no config.json. A shard's stays a shard's."""
    monkeypatch.setenv(registry.MODULES_VARIABLE, str(file))
    config = models.ModelConfig.from_dict(CONFIG).shard(2)
    assert pickle.loads(pickle.dumps(config)) == config
    sent = pickle.dumps(config).hex()
    assert ask("", sent, folder=ROOT, **{registry.MODULES_VARIABLE: str(file)}) == "fox_family 9"


def test_a_process_that_cannot_know_a_family_says_how_it_could(file: Path) -> None:
    refusal = ask(json.dumps(CONFIG), folder=file.parent)
    assert "FoxForCausalLM" in refusal
    assert registry.MODULES_VARIABLE in refusal
    with pytest.raises(UnsupportedModelError, match="adding_a_model"):
        models.ModelConfig.from_dict(CONFIG)


@pytest.mark.parametrize("name", ["no_such_module", "no_such_file.py"])
def test_what_the_environment_names_and_is_not_there_is_refused_by_name_each_time(name: str, monkeypatch) -> None:
    monkeypatch.setenv(registry.MODULES_VARIABLE, name)
    for _ in range(2):
        with pytest.raises(InvalidParameterError, match=f"{registry.MODULES_VARIABLE} names '{name}'"):
            models.ModelConfig.from_dict(CONFIG)


def test_a_file_is_not_taken_for_another_module_of_its_name(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "json.py").write_text("")
    monkeypatch.setenv(registry.MODULES_VARIABLE, str(tmp_path / "json.py"))
    with pytest.raises(InvalidParameterError, match="rename the file"):
        models.supported_architectures()


def test_programs_of_a_family_depend_on_its_source(file: Path, monkeypatch) -> None:
    monkeypatch.setenv(registry.MODULES_VARIABLE, str(file))
    ours, theirs = tiny("llama-mha-d16"), models.ModelConfig.from_dict(CONFIG)
    first = models.build(theirs).source_digest
    assert models.build(ours).source_digest == models.build(tiny("gpt2")).source_digest != first
    assert models.build(theirs).source_digest == first
    file.write_text(file.read_text() + "\n# edited\n")
    assert models.build(theirs).source_digest != first
