"""Keys and values in FP8: engines with them keep twice the tokens, near the same log-probabilities at any length."""

import shutil
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
from jpaged.models import ModelConfig, build
from jpaged.models.loading.kv_calibration import calibrated_scales, calibration_tokens, largest_of
from jpaged.models.loading.kv_scales import read_kv_scales
from tests.tiny_models import TINY_ENGINE, VOCAB_SIZE, tiny_model, write_tiny_model

pytestmark = pytest.mark.xdist_group("FP8 cache")  # one worker, which compiles once


TOKENS = [
    [31848, 13489, 2048],
    [13287, 1, 2131],
    [41635, 32617, 12427],
    [4364, 7, 23],
    [20901, 19623, 6765],
    [1448, 2137, 8],
    [15190, 45732, 9436],
    [18, 8984, 12],
]
"""With which each of the built-in sequences begins, of 50,000 tokens: scales of checkpoints depend on them."""


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


@pytest.fixture(scope="module")
def large_keys(directory, tmp_path_factory):
    """The same model, but that keys are 4,096 times as large and queries so much smaller, and values 64 times smaller
    than what follows them makes of them."""
    target = tmp_path_factory.mktemp("large") / "model"
    shutil.copytree(directory, target)
    tensors = load_file(target / "model.safetensors")
    for part, factor in {"q": 2**-12, "k": 2**12, "v": 2**-6, "o": 2**6}.items():
        for name in tensors:
            if f".{part}_proj." in name:
                tensors[name] = tensors[name] * np.float32(factor)
    save_file(tensors, target / "model.safetensors")
    return target


def test_scales_are_found_at_start_up_and_hold_keys_that_e4m3_does_not(large_keys, errors, tmp_path):
    found, startup = errors(large_keys, kv_cache_dtype="fp8", calculate_kv_scales=True)
    assert all(0 < one.mean() < 0.1 for one in found)
    assert "calibrate" in startup.seconds

    model, weights = startup.model, startup.runner.weights
    rows = calibration_tokens(model.vocab_size, model.config.max_position_embeddings)
    largest = np.max([largest_of(model, weights, jnp.asarray(row)) for row in rows], axis=0)
    scales = np.array([layer.scales for layer in startup.setup.cache.spec])
    assert np.all(np.log2(scales) % 1 == 0)
    assert np.all(2 * largest / scales <= 448)
    assert np.all(2 * largest / scales > 224), "no larger than they must be"
    assert largest[:, 0].min() > 448, "all of which become that without scales"
    assert scales[0, 0] > 1 > scales[0, 1]

    # What an engine that is started again finds, and one of the same weights whose checkpoint has scales of its own.
    shutil.copytree(large_keys, tmp_path / "scaled")
    path = tmp_path / "scaled" / "model.safetensors"
    names = [f"model.layers.{i}.self_attn.{kind}_scale" for i in range(2) for kind in "kv"]
    save_file(load_file(path) | dict.fromkeys(names, np.ones(1, np.float32)), path)
    again, restarted = errors(tmp_path / "scaled", kv_cache_dtype="fp8", calculate_kv_scales=True)
    assert restarted.setup.config.kv_scales == startup.setup.config.kv_scales
    for one, other in zip(again, found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_built_in_tokens_are_the_same_for_all_models_of_a_vocabulary():
    tokens = calibration_tokens(50_000, 4096)
    assert tokens.shape == (8, 256)
    assert tokens[:, :3].tolist() == TOKENS
    assert tokens.min() >= 0
    assert tokens.max() < 50_000
    assert np.mean(tokens[1::2] < 500) > 0.4 > 0.1 > np.mean(tokens[::2] < 500)
    assert calibration_tokens(3, 10).shape == (8, 10)
    assert set(calibration_tokens(3, 4096).ravel()) == {0, 1, 2}


def test_keys_that_are_not_finite_are_named(directory):
    model = build(ModelConfig.from_directory(directory), "float32")
    for value in (np.nan, np.inf):
        found = np.array([[1.0, 2.0], [3.0, value]])
        with pytest.raises(CheckpointError, match="makes values of infinity or NaN in layer 1"):
            calibrated_scales(model, lambda row, found=found: found)
    assert calibrated_scales(model, lambda row: np.array([[0.0, 7.0], [224.0, 225.0]])) == ((1, 2**-5), (1, 2))
    weights = [jnp.full_like(one, jnp.nan) if one.ndim == 4 else one for one in model.init()]
    assert np.isinf(largest_of(model, weights, jnp.zeros(4, jnp.int32))).all()


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
    with pytest.raises(InvalidParameterError, match="calculate_kv_scales=True needs kv_cache_dtype='fp8', got 'auto'"):
        EngineArgs(calculate_kv_scales=True)
    assert args.differs_from(replace(args, calculate_kv_scales=True)) == "calculate_kv_scales"
