"""Llama 4's attention within chunks of the context, by paths of the engine that `test_families.py` does not take."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import EngineArgs, LLMEngine
from jpaged.models import dense_causal_attend
from tests.parallel.family_runs import ARGS, greedy_tokens
from tests.support.quick_compilation import quick_compilation_of_module as quick_compilation_of_module
from tests.tiny_models import tiny_model, write_tiny_model


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineArgs, list[list[int]]]:
    """Arguments of an engine of chunks of 16 tokens, and the tokens that it gives."""
    directory = write_tiny_model(tiny_model("llama4-scout-style"), tmp_path_factory.mktemp("chunks"), use_torch=False)
    args = replace(ARGS, model=str(directory))
    return args, greedy_tokens(LLMEngine(args))


@pytest.mark.parametrize(
    "options",
    [
        {"batch_invariant": True},
        {"kv_cache_layout": "virtual"},
        {"shared_prefix_attention": True},
        {"max_num_batched_tokens": 8, "token_buckets": (8,)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_paths_give_the_same_tokens(options: dict[str, Any], plain: tuple[EngineArgs, list[list[int]]]) -> None:
    args, tokens = plain
    assert greedy_tokens(LLMEngine(replace(args, **options))) == tokens


def test_sequences_in_one_row_of_tokens_have_chunks_of_their_own() -> None:
    rng = np.random.default_rng(3)
    qkv = jnp.asarray(rng.standard_normal((17, 2, 4, 8)), jnp.float32)
    attend = partial(dense_causal_attend, scale=0.3, sliding_window=4, chunked=True)
    both = attend(qkv, segment_ids=jnp.repeat(jnp.array([5, 7]), jnp.array([7, 10]), total_repeat_length=17))
    apart = jnp.concatenate([attend(qkv[:7]), attend(qkv[7:])])
    np.testing.assert_allclose(both, apart, rtol=1e-5, atol=1e-5)
    first_of_a_chunk = qkv[11, :, 3, :]
    np.testing.assert_allclose(both[11], jnp.repeat(first_of_a_chunk, 2, axis=0), rtol=1e-5, atol=1e-5)
