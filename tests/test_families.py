"""Every family made of `jpaged.models.blocks`, through every path of the engine, against transformers in float32.

A process of eight devices runs a model: prompts computed in chunks, prefix hits, preemption, several samples and
scores, some models on one device and some on two or four. Here transformers checks what came of it.
"""

from pathlib import Path

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

CASES = [pytest.param(case, id=case.name) for case in models_of_blocks()]


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_scores_by_every_path_are_those_of_transformers(case: TinyModel, tmp_path: Path) -> None:
    found = call_with_eight_devices("tests.parallel.family_runs:tokens_by_path", case.name)
    model = torch_model(case)
    plain = [found[f"degree {degree}"] for degree in degrees(case.name)]
    assert (case.name in SPARSE) == ("expert parallel" in found)
    plain += [found["expert parallel"]] if case.name in SPARSE else []
    tokens = plain[0]["chunked"]
    for prompt, generated in zip(prompts(), tokens, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + generated])).logits[0]
        assert generated == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert len({token for generated in tokens for token in generated}) > 10, "a text that wanders"

    assert found["expanded"] == (case.name in EXPANDED)
    assert all(one["chunked"] == one["prefix hits"] == tokens for one in plain)
    assert plain[0]["hits"] > 0
    assert all(one["hits"] == plain[0]["hits"] for one in plain)
    assert all(generated == tokens for generated in found["preempted"])
    assert found["preemptions"] > 0
    assert found["samples"] == [tokens[3]] * NUM_SAMPLES
    if case.name in HYBRID:
        assert found["small chunks"] == tokens

    ours = models.build(models.ModelConfig.from_dict(case.config), "float32")
    assert (case.name in SPARSE) == (plain[0]["load"] is not None)
    assert all(one["load"] == plain[0]["load"] for one in plain)
    if case.name in SPARSE:
        computed = sum(len(prompt) + len(generated) - 1 for prompt, generated in zip(prompts(), tokens, strict=True))
        counts = {sum(layer) for layer in plain[0]["load"]}
        assert counts == {computed * ours.config.routing.per_token}, "every device counts all tokens"

    prompt = prompts()[-1]
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
    theirs = expected[range(len(prompt) - 1), prompt[1:]].tolist()
    assert found["scores"] == pytest.approx(theirs, abs=1e-4)

    model.save_pretrained(tmp_path)
    stored = checkpoint.match(ours, checkpoint.find_tensors(tmp_path))  # refuses what is missing, and what is too much
    assert stored.keys() == set(range(len(ours.pieces)))
