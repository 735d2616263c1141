"""Logits of every family against transformers, in float32."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from jpaged import models
from tests.tiny_models import (
    MAX_LENGTH,
    VOCAB_SIZE,
    WINDOW,
    TinyModel,
    tiny_model,
    tiny_models,
    torch_model,
    write_tiny_model,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
torch.set_num_threads(1)  # the models are tiny, and threads that wait for each other are slower than one
pytestmark = pytest.mark.transformers

LENGTHS = (41, 3, 17)
"""Of the sequences in one flat row of tokens; the first is longer than any sliding window of the cases."""


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def our_logits(
    directory: Path, prompts: list[np.ndarray], dtype: str = "float32", max_model_len: int | None = None
) -> np.ndarray:
    """Logits [tokens, vocab] of all prompts, computed in one flat row."""
    model = models.build(models.ModelConfig.from_directory(directory, max_model_len), dtype)
    weights = models.load(model, directory)
    segments = np.repeat(np.arange(len(prompts)), [len(p) for p in prompts]).astype(np.int32)
    positions = np.concatenate([np.arange(len(p)) for p in prompts]).astype(np.int32)

    @jax.jit
    def run(weights: models.Weights, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        attend = partial(models.dense_causal_attend, segment_ids=segments)
        return model.logits(weights, model.forward(weights, tokens, positions, attend))

    return np.asarray(run(weights, np.concatenate(prompts), positions))


def their_logits(model: object, prompts: list[np.ndarray]) -> np.ndarray:
    with torch.no_grad():
        rows = [model(torch.from_numpy(prompt)[None].long()).logits[0].float().numpy() for prompt in prompts]
    return np.concatenate(rows)


def vary(name: str, **changes: object) -> TinyModel:
    case = tiny_model(name)
    return replace(case, config=case.config | changes)


def random_prompts(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng()
    return [rng.integers(3, VOCAB_SIZE, n).astype(np.int32) for n in lengths]


@pytest.mark.parametrize("case", tiny_models(), ids=lambda case: case.name)
def test_logits_equal_those_of_transformers(case: TinyModel, tmp_path: Path) -> None:
    write_tiny_model(case, tmp_path)
    prompts = random_prompts(*LENGTHS)
    theirs = their_logits(torch_model(case), prompts)
    assert relative_error(our_logits(tmp_path, prompts), theirs) < 1e-4


def test_logits_of_a_mistral_with_windows_in_some_layers_equal_those_of_transformers(tmp_path: Path) -> None:
    ministral = {"architectures": ["MinistralForCausalLM"], "model_type": "ministral"}
    case = vary("mistral-window", **ministral, head_dim=16, layer_types=["full_attention", "sliding_attention"])
    write_tiny_model(case, tmp_path)
    prompts = random_prompts(*LENGTHS)
    assert relative_error(our_logits(tmp_path, prompts), their_logits(torch_model(case), prompts)) < 1e-4


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama-mqa-d80", "bfloat16"), ("opt-350m-style", "float16"), ("gpt2", "bfloat16")]
)
def test_half_precision_logits_are_close_to_float32_logits_of_the_same_weights(
    name: str, dtype: str, tmp_path: Path
) -> None:
    case = tiny_model(name)
    write_tiny_model(case, tmp_path, dtype=dtype)
    model = torch_model(case)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(getattr(torch, dtype)))
    prompts = random_prompts(20)
    theirs = their_logits(model, prompts)
    error = relative_error(our_logits(tmp_path, prompts, "auto"), theirs)
    assert error < (0.1 if dtype == "bfloat16" else 0.02)
    assert relative_error(our_logits(tmp_path, prompts, "float32"), theirs) < 1e-4


@pytest.mark.parametrize(
    "name", ["llama-biases", "qwen3-tied-d64", "opt-350m-style", "gpt2", "phi4-mini", "stablelm-12b-style", "gptj"]
)
def test_transformers_reads_what_jpaged_saves(name: str, tmp_path: Path) -> None:
    import transformers

    case = tiny_model(name)
    write_tiny_model(case, tmp_path, use_torch=False)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    prompts = random_prompts(*LENGTHS)
    expected = their_logits(torch_model(case), prompts)
    assert relative_error(their_logits(model.eval(), prompts), expected) < 1e-5
    assert relative_error(our_logits(tmp_path, prompts), expected) < 1e-4


@pytest.mark.parametrize(
    ("name", "length"), [("phi4-mini", 300), ("llama-rope-longrope", 300), ("llama-rope-dynamic", 280)]
)
def test_past_the_original_length_logits_equal_those_of_transformers(name: str, length: int, tmp_path: Path) -> None:
    """Of a sequence that is longer (LongRoPE), or as long as the model is built for (dynamic NTK)."""
    original = {"original_max_position_embeddings": MAX_LENGTH, "max_position_embeddings": 4 * MAX_LENGTH}
    longrope = tiny_model("llama-rope-longrope").config["rope_scaling"] | original
    case = vary(name, rope_scaling=longrope, **original) if name == "llama-rope-longrope" else tiny_model(name)
    write_tiny_model(case, tmp_path)
    prompts = random_prompts(length)
    theirs = their_logits(torch_model(case), prompts)
    assert relative_error(our_logits(tmp_path, prompts, max_model_len=length), theirs) < 1e-4
    assert relative_error(our_logits(tmp_path, prompts), theirs) > 1e-3, "another rotation would be seen"
    config = models.ModelConfig.from_directory(tmp_path, length)
    assert config.max_position_embeddings == (length if name == "llama-rope-dynamic" else 4 * MAX_LENGTH)


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "case",
    [
        *(case for case in tiny_models() if "rope" in case.name),
        vary("llama-mqa-d80", rope_theta=1e6, rope_scaling=YARN),
        vary("llama-mqa-d80", rope_scaling=YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}),
        vary("llama-mqa-d80", rope_scaling=YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}),
        vary("llama-mqa-d80", rope_scaling=YARN | {"attention_factor": 0.8}),
    ],
    ids=lambda case: case.name,
)
def test_rope_frequencies_are_those_of_transformers_to_the_last_bit_but_one(case: TinyModel) -> None:
    rotary = torch_model(case).model.rotary_emb
    rope = models.ModelConfig.from_dict(case.config).rope
    np.testing.assert_allclose(np.float32(rope.frequencies), rotary.inv_freq.numpy(), rtol=1.2e-7)
    assert rope.attention_scale == pytest.approx(rotary.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("name", ["llama-mqa-d80", "qwen2-tied", "opt-350m-style", "gpt2-scaled-by-layer"])
def test_greedy_decoding_of_a_tiny_model_wanders_and_is_not_near_ties(name: str) -> None:
    model = torch_model(tiny_model(name))
    prompt = torch.from_numpy(np.random.default_rng(0).integers(3, VOCAB_SIZE, WINDOW))[None]
    out = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        logits = model(out).logits[0, WINDOW - 1 : -1]
    first, second = logits.topk(2).values.T
    assert len(set(out[0, WINDOW:].tolist())) >= 6
    assert float((first - second).min() / logits.abs().max()) > 1e-4
