"""Keys and values in FP8: engines with them keep twice the tokens, near the same log-probabilities at any length."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpaged import EngineArgs, LLMEngine, SamplingParams
from jpaged.api.errors import CheckpointError, InvalidParameterError
from jpaged.executor.cache.paged import PagedCache
from jpaged.executor.cache.spec import FP8, LayerCache
from jpaged.executor.config import ExecutorConfig
from jpaged.models.loading.kv_scales import read_kv_scales
from tests.tiny_models import TINY_ENGINE, VOCAB_SIZE, tiny_model, write_tiny_model

pytestmark = pytest.mark.xdist_group("FP8 cache")  # one worker, which compiles once


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_model(tiny_model("llama-gqa-d64-tied"), tmp_path_factory.mktemp("model"), use_torch=False)


def prompt_logprobs(directory, prompts, **options):
    """Of each prompt's own tokens, and the greedy tokens behind it."""
    engine = LLMEngine(EngineArgs(**(TINY_ENGINE | options), model=str(directory)))
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[int(output.request_id)] = output
    engine.core.check_integrity()
    own = [
        np.array([one[token].logprob for one, token in zip(found[i].prompt_logprobs[1:], prompt[1:], strict=True)])
        for i, prompt in enumerate(prompts)
    ]
    return own, engine.startup


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCAB_SIZE, n).tolist() for n in (20, 110)]


@pytest.fixture(scope="module")
def errors(directory, prompts):
    """How far log-probabilities are from those of the model's dtype, for each prompt."""
    plain, _ = prompt_logprobs(directory, prompts)

    def of(directory, **options):
        near, startup = prompt_logprobs(directory, prompts, **options)
        return [np.abs(a - b) for a, b in zip(near, plain, strict=True)], startup

    return of


def test_log_probabilities_stay_near_those_of_the_model_s_dtype_at_any_length(directory, errors):
    found, startup = errors(directory, kv_cache_dtype="fp8_e4m3")
    assert {pool.dtype for pool in startup.setup.cache.pools} == {FP8}
    assert all(0 < one.mean() < 0.1 for one in found)
    assert found[1][-40:].mean() < 2 * found[1][10:50].mean(), "it drifts"


def test_a_pool_keeps_twice_the_tokens_of_16_bits_and_swaps_half_of_the_bytes():
    config = ExecutorConfig(
        max_num_seqs=4,
        max_model_len=256,
        block_size=16,
        num_blocks=9,
        decode_buckets=(4,),
        token_buckets=(16,),
    )
    wide, narrow = (PagedCache((LayerCache(2, 64, dtype),) * 3, config) for dtype in (np.dtype(jnp.bfloat16), FP8))
    assert wide.block_bytes == 2 * narrow.block_bytes == 3 * 2 * 2 * 16 * 64 * 2
    assert narrow.staging.dtype == FP8
    assert narrow.staging.shape == wide.staging.shape


def test_scales_of_the_checkpoint_divide_what_is_written_and_multiply_what_is_read(directory, errors, tmp_path):
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    names = ("model.layers.{}.self_attn.k_scale", "model.layers.{}.self_attn.v_proj.v_scale")
    scales = {name.format(i): np.array([3.0 / (4 + i)], np.float32) for i in range(2) for name in names}
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | scales, path)
    assert read_kv_scales("auto", tmp_path, [True, True]) == ((0.75, 0.75), (np.float32(0.6), np.float32(0.6)))
    found, startup = errors(tmp_path, kv_cache_dtype="fp8")
    assert [layer.scales for layer in startup.setup.cache.spec] == [(0.75, 0.75), (np.float32(0.6), np.float32(0.6))]
    assert all(0 < one.mean() < 0.1 for one in found)
    ignored, _ = errors(tmp_path)  # in the model's dtype, nobody reads them
    assert not any(one.any() for one in ignored)


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        ({"model.layers.0.self_attn.k_scale": 1.0}, "none of the values of layer 0"),
        ({"model.layers.0.self_attn.k_scale": 0.0}, "is 0, which must be above 0 and finite"),
        ({"model.layers.0.self_attn.k_scale": np.nan}, "is nan, which must be above 0 and finite"),
        (
            {"model.layers.0.self_attn.k_scale": 1.0, "model.layers.0.self_attn.k_proj.k_scale": 1.0},
            "two scales of the keys of layer 0",
        ),
        ({"model.layers.0.self_attn.k_scale": [1.0, 2.0]}, "must be one number a layer"),
    ],
)
def test_scales_that_cannot_be_served_are_named(tmp_path, scales, said):
    save_file({name: np.array(value, np.float32) for name, value in scales.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        read_kv_scales("auto", tmp_path, [True])


def test_recurrent_layers_have_no_scales(tmp_path):
    scales = {f"model.layers.1.self_attn.{kind}_scale": np.float32(0.5) for kind in "kv"}
    save_file({name: np.array(value) for name, value in scales.items()}, tmp_path / "model.safetensors")
    assert read_kv_scales("auto", tmp_path, [False, True]) == ((1.0, 1.0), (0.5, 0.5))


def test_what_it_does_not_go_with_is_refused_by_name():
    args = EngineArgs(kv_cache_dtype="fp8_e4m3")
    assert args.kv_cache_dtype == "fp8"
    with pytest.raises(InvalidParameterError, match="kv_cache_dtype='fp8' needs kv_cache_layout='paged'"):
        replace(args, kv_cache_layout="virtual")
    with pytest.raises(InvalidParameterError, match="kv_cache_dtype must be one of 'auto', 'fp8', 'fp8_e4m3'"):
        EngineArgs(kv_cache_dtype="int8")
