"""Logits that are not finite end the request that has them, with an error, and no other."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.config import EngineArgs
from jpaged.api.errors import MalformedRowError
from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.assets import demo_model_path
from jpaged.cli import main
from jpaged.frontend.llm_engine import LLMEngine
from jpaged.llm import LLM
from jpaged.scoring.scorer import Scorer
from tests.tiny_models import DEMO_ENGINE

BAD_TOKEN = 300
GOOD, BAD = [*range(5, 45)], [*range(5, 25), BAD_TOKEN, *range(26, 45)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The demo model with a token whose embedding is NaN: whoever has it in the prompt gets nothing but NaN."""
    directory = tmp_path_factory.mktemp("not-finite")
    shutil.copytree(demo_model_path(), directory, dirs_exist_ok=True)
    path = directory / "model.safetensors"
    weights = load_file(path)
    (name,) = (name for name in weights if "embed_tokens" in name)
    changed = weights[name].copy()
    changed[BAD_TOKEN] = np.nan
    save_file(weights | {name: changed}, path)
    config = json.loads((directory / "config.json").read_text())
    assert not config.get("tie_word_embeddings") or changed.shape[0] > BAD_TOKEN
    return str(directory)


@pytest.fixture(scope="module")
def engine(directory):
    return LLMEngine(EngineArgs(model=directory, verbose=False, **DEMO_ENGINE))


def answers(engine, requests):
    """The last output of each request: {name: (prompt, params)}."""
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step() if output.finished}
        engine.core.check_integrity()
    return found


PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    "seeded": SamplingParams(seed=3, max_tokens=12, ignore_eos=True),
    "truncated": SamplingParams(seed=3, top_p=0.9, top_k=20, max_tokens=12, ignore_eos=True),
    "logprobs": SamplingParams(seed=3, logprobs=2, max_tokens=12, ignore_eos=True),
    "two": SamplingParams(seed=3, n=2, max_tokens=12, ignore_eos=True),
    "streamed": SamplingParams(seed=3, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE),
    "search": BeamSearchParams(beam_width=2, max_tokens=6),
}


def test_a_request_with_such_logits_ends_with_an_error_and_those_beside_it_are_right(engine):
    calm = answers(engine, {name: (GOOD, params) for name, params in PARAMS.items()})
    before = engine.get_metrics().num_not_finite
    both = {f"bad {name}": (BAD, params) for name, params in PARAMS.items()}
    both |= {name: (GOOD, params) for name, params in PARAMS.items()}
    found = answers(engine, both)
    for name in PARAMS:
        assert [one.token_ids for one in found[name].outputs] == [one.token_ids for one in calm[name].outputs]
        bad = found[f"bad {name}"].outputs
        assert [completion.finish_reason for completion in bad] == ["error"] * len(bad)
        assert all(not completion.token_ids and completion.text == "" for completion in bad)
    again = answers(engine, {"bad again": (BAD, PARAMS["greedy"]), "again": (GOOD, PARAMS["greedy"])})
    assert again["bad again"].num_cached_tokens <= BAD.index(BAD_TOKEN)  # what it left behind is hit by nobody
    assert again["again"].outputs[0].token_ids == calm["greedy"].outputs[0].token_ids
    stats = engine.get_metrics()
    assert stats.num_not_finite - before == len(PARAMS) + 1
    assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)


@pytest.mark.parametrize("order", ["bg", "bgb", "bbg"])
@pytest.mark.parametrize("kind", ["greedy", "logprobs", "two", "search"])
def test_who_shares_the_beginning_of_such_a_request_is_computed_again_without_it(engine, kind, order):
    assert engine.reset_prefix_cache()
    calm = answers(engine, {"calm": (GOOD, PARAMS[kind])})["calm"].outputs
    assert engine.reset_prefix_cache()
    before = engine.get_metrics().num_not_finite
    asked = {f"{name} {i}": (BAD if name == "b" else GOOD, PARAMS[kind]) for i, name in enumerate(order)}
    for name, output in answers(engine, asked).items():
        assert {one.finish_reason for one in output.outputs} == {"error" if name[0] == "b" else "length"}
        if name[0] == "g":
            assert [one.token_ids for one in output.outputs] == [one.token_ids for one in calm]
    stats = engine.get_metrics()
    assert stats.num_not_finite - before == order.count("b")
    assert stats.num_used_blocks == 0


def test_generate_logs_once_how_many_such_requests_there_were(engine, monkeypatch, caplog):
    monkeypatch.setattr("jpaged.llm._start_engine", lambda args, weights: engine)
    llm = LLM()
    prompts = [{"prompt_token_ids": one} for one in (BAD, GOOD[::-1], BAD)]
    outputs = llm.generate(prompts, PARAMS["greedy"], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length", "error"]
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "2 of 3 requests ended with finish_reason 'error'. The model's logits are not"
    )


def test_a_row_with_such_log_probabilities_is_refused(directory):
    scorer = Scorer(directory, verbose=False, **DEMO_ENGINE)
    assert np.isfinite(scorer.score([{"text": GOOD}], use_tqdm=False)[0].score.logprob)
    with pytest.raises(MalformedRowError, match=r"rows\[1\]: The model's logits are not finite"):
        scorer.score([{"text": GOOD}, {"text": BAD}], use_tqdm=False)


def test_commands_say_so_and_exit_with_1(directory, tmp_path, capsys):
    path = tmp_path / "model"
    shutil.copytree(directory, path)
    weights = load_file(path / "model.safetensors")
    save_file({name: np.full_like(value, np.nan) for name, value in weights.items()}, path / "model.safetensors")
    options = ["--model", str(path), "--quiet", "--max-tokens", "5", "--num-gpu-blocks-override", "600"]
    assert main(["generate", "A snail", *options]) == 1
    assert "logits are not finite" in capsys.readouterr().err
