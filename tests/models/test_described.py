"""docs/models.md says what the registry and the tests say; `jpaged models` prints it."""

import re

import pytest

from jpaged import models
from jpaged.cli import main
from jpaged.cli.models import markdown
from jpaged.models import registry
from tests.support.models_page import shown, table_of_tests


def test_the_page_shows_the_families_of_the_registry() -> None:
    assert shown("jpaged models --markdown") == markdown()


def test_the_page_shows_the_configurations_of_the_tests() -> None:
    assert shown("tests") == table_of_tests()


def test_every_family_of_jpaged_is_described() -> None:
    described = {name: about for about, names in models.described_architectures() for name in names}
    assert set(described) == set(models.supported_architectures())
    for name in registry._families:
        assert described[name].models, name
        assert described[name].features, name


def test_the_command_lists_families_from_outside_too(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(registry, "_families", dict(registry._families))
    monkeypatch.setattr(registry, "_abouts", dict(registry._abouts))
    llama = registry.family_of("LlamaForCausalLM")
    models.register("FoxForCausalLM", llama)
    models.register("WolfForCausalLM", llama, models.About("Wolf", "7B", "howls"))
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "FoxForCausalLM" in out
    assert re.search(r"Wolf\n  architectures  WolfForCausalLM\n  models         7B\n  features       howls", out)
    assert "Gemma3ForCausalLM, Gemma3ForConditionalGeneration" in out
