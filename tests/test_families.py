"""Every family made of `jpaged.models.blocks`, through every path of the engine, against transformers in float32.

A process of eight devices runs a group of models: prompts computed in chunks, prefix hits, preemption, several samples,
scores, and tensor parallelism over two devices and over four. Here transformers checks what came of it.
"""

from pathlib import Path
from typing import Any

import pytest

from jpaged import models
from jpaged.models.loading import checkpoint
from tests.parallel.eight_devices import call_with_eight_devices
from tests.parallel.family_runs import EXPANDED, HYBRID, NUM_SAMPLES, SPARSE, degrees, prompts
from tests.tiny_models import TinyModel, models_of_blocks, torch_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
torch.set_num_threads(1)
pytestmark = pytest.mark.transformers

SIZE = 10
GROUPS = [tuple(models_of_blocks()[first : first + SIZE]) for first in range(0, len(models_of_blocks()), SIZE)]
CASES = [
    pytest.param(case, group, marks=pytest.mark.xdist_group(group[0].name), id=case.name)
    for group in GROUPS
    for case in group
]

_found: dict[str, Any] = {}


def found_for(case: TinyModel, group: tuple[TinyModel, ...]) -> dict[str, Any]:
    """What the process that ran the group found for the case."""
    if case.name not in _found:
        names = [one.name for one in group]
        _found.update(call_with_eight_devices("tests.parallel.family_runs:tokens_by_path", *names))
    return _found[case.name]


@pytest.mark.parametrize(("case", "group"), CASES)
def test_tokens_and_scores_by_every_path_are_those_of_transformers(
    case: TinyModel, group: tuple[TinyModel, ...], tmp_path: Path
) -> None:
    found, model = found_for(case, group), torch_model(case)
    tokens = found["chunked"]
    for prompt, generated in zip(prompts(), tokens, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + generated])).logits[0]
        assert generated == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert len({token for generated in tokens for token in generated}) > 10, "a text that wanders"

    assert found["expanded"] == (case.name in EXPANDED)
    assert found["prefix hits"] == tokens
    assert found["hits"] > 0
    assert all(generated == tokens for generated in found["preempted"])
    assert found["preemptions"] > 0
    assert found["samples"] == [tokens[3]] * NUM_SAMPLES
    for degree in degrees(case.name):
        assert found[f"tensor parallel {degree}"] == tokens
        assert found.get(f"expert parallel {degree}", tokens) == tokens
    assert (case.name in SPARSE) == ("expert parallel 2" in found) == (found["load"] is not None)
    for degree in (2, 4) if case.name in SPARSE else ():
        assert found[f"loads {degree}"] == [found["load"]] * 2, "every device counts all tokens"

    if case.name in HYBRID:
        assert found["small chunks"] == tokens
        assert all(found[f"split states {degree}"] == [tokens, found["hits"]] for degree in degrees(case.name))

    prompt = prompts()[-1]
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
    theirs = expected[range(len(prompt) - 1), prompt[1:]].tolist()
    assert found["scores"] == pytest.approx(theirs, abs=1e-4)

    model.save_pretrained(tmp_path)
    ours = models.build(models.ModelConfig.from_dict(case.config), "float32")
    stored = checkpoint.match(ours, checkpoint.find_tensors(tmp_path))  # refuses what is missing, and what is too much
    assert stored.keys() == set(range(len(ours.pieces)))
