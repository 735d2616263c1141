"""Models with recurrent layers: states that live with slots, and what such models do without.

Their tokens by every path of the engine are in `test_families.py`.
"""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import BeamSearchParams, EngineArgs, LLMEngine, SamplingParams, models
from jpaged.api.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from jpaged.engine.constraints.grammars import ConstrainedRows
from jpaged.executor.start.startup import most_sequences
from jpaged.models import MambaState, ModelConfig
from jpaged.training import token_logprobs
from tests.tiny_models import VOCAB_SIZE, TinyModel, tiny_model, torch_model, write_tiny_model

pytestmark = pytest.mark.xdist_group("hybrids")  # one worker, which compiles once

CASE, MAMBA = tiny_model("qwen3.5"), tiny_model("granite4-h-all-options")
del MAMBA.config["time_step_limit"]  # of which transformers' decode steps know nothing
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ARGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "num_gpu_blocks_override": 128,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "decode_buckets": (4,),
    "token_buckets": (16,),
    "skip_tokenizer_init": True,
    "verbose": False,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(CASE, tmp_path_factory.mktemp("hybrid"), use_torch=False)


@pytest.fixture(scope="module")
def engine(directory: Path) -> LLMEngine:
    return LLMEngine(EngineArgs(model=str(directory), **ARGS))


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    directory = write_tiny_model(MAMBA, tmp_path_factory.mktemp("mamba"), use_torch=False)
    return LLMEngine(EngineArgs(model=str(directory), **ARGS))


def test_constrained_rows_do_not_guess_since_states_cannot_go_back_by_a_token(engine: LLMEngine):
    (constrained,) = [k for k in engine._core.scheduler._dependents._kinds.values() if isinstance(k, ConstrainedRows)]
    assert not constrained._guesses


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, rng.integers(1, 30)).tolist() for _ in range(count)]


def run(engine: LLMEngine, requests: list[list[int]]) -> list[list[int]]:
    for i, prompt in enumerate(requests):
        engine.add_request(str(i), prompt, GREEDY)
    return finish(engine, len(requests))


def finish(engine: LLMEngine, count: int) -> list[list[int]]:
    found: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step()}
    return [list(found[str(i)].outputs[0].token_ids) for i in range(count)]


def fill_states(engine: LLMEngine, value: float) -> None:
    held = engine.startup.runner._held
    held["recurrent"] = jax.tree.map(lambda x: jnp.full_like(x, value), held["recurrent"])


@pytest.mark.parametrize("kind", ["engine", "mamba"])
def test_a_sequence_takes_nothing_from_the_slots_former_tenants(kind: str, request: pytest.FixtureRequest) -> None:
    engine: LLMEngine = request.getfixturevalue(kind)
    requests = prompts(12)
    expected = run(engine, requests)
    assert len({token for tokens in expected for token in tokens}) > 10
    fill_states(engine, np.nan)
    assert run(engine, requests) == expected
    fill_states(engine, 1e4)
    for i, prompt in enumerate(requests):  # aborted while their prompts are computed, while they decode, and in between
        engine.add_request(f"aborted {i}", prompt, GREEDY)
    for i in range(len(requests)):
        engine.step()
        engine.abort_request(f"aborted {(5 * i) % len(requests)}")
    assert not engine.has_unfinished_requests()
    assert run(engine, requests) == expected


@pytest.mark.transformers
@pytest.mark.parametrize(("kind", "case"), [("engine", CASE), ("mamba", MAMBA)], ids=["delta net", "mamba"])
def test_beams_take_their_parents_states_along(kind: str, case: TinyModel, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("torch")
    engine: LLMEngine = request.getfixturevalue(kind)
    from tests.test_beam_search import assert_same, transformers_search

    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True, stop_token_ids=[])
    prompt = prompts(1, seed=3)[0]
    engine.add_request("beams", prompt, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert_same(outputs[-1], transformers_search(torch_model(case), prompt, params))


def test_a_running_engine_takes_other_weights_and_gives_them_back_in_every_form(mamba: LLMEngine) -> None:
    requests, model = prompts(4), mamba.startup.model
    expected, before = run(mamba, requests), mamba.weights_as("huggingface")
    assert set(before) == {piece.tensor for piece in model.pieces}
    other = model.init(5)
    mamba.update_weights(model.module(other))
    found = mamba.weights_as("parameters")
    assert all(np.array_equal(found[name], one) for name, one in zip(model.parameter_names, other, strict=True))
    assert run(mamba, requests) != expected
    mamba.update_weights(before)
    assert run(mamba, requests) == expected


def test_states_are_given_back_while_the_engine_sleeps(engine: LLMEngine) -> None:
    requests = prompts(4)
    expected = run(engine, requests)
    assert engine.sleep(1)
    assert "recurrent" not in engine.startup.runner._held
    engine.wake_up()
    assert run(engine, requests) == expected


def test_there_is_no_prefix_cache(engine: LLMEngine) -> None:
    requests = [[7] * 30] * 3
    assert len({tuple(tokens) for tokens in run(engine, requests) + run(engine, requests)}) == 1
    assert engine.get_metrics().prefix_cache_hits == 0
    with pytest.raises(InvalidParameterError, match="recurrent layers have no prefix cache"):
        engine.pin_prefix([7] * 30)


def test_the_memory_table_counts_states(engine: LLMEngine) -> None:
    state = engine.startup.model.config.layer_states[0]
    assert state is not None
    matrices, history = 8 * 16 * 16 * 4, 3 * (2 * 4 * 16 + 8 * 16) * 4
    assert engine.startup.setup.states.slot_bytes == state.num_bytes(4) == matrices + history
    assert engine.startup.memory.state > 4 * (matrices + history)
    assert "4 sequences" in engine.startup.table("tiny")


def test_the_table_tells_how_fast_the_checkpoint_was_read(engine: LLMEngine, directory: Path) -> None:
    found = re.search(r"weights .*; ([\d.]+) KiB read in [\d.]+ s, [\d.]+ GB/s\n", engine.startup.table("tiny"))
    assert found
    size = (directory / "model.safetensors").stat().st_size / 1024
    assert size - 10 < float(found[1]) < size  # but for the header


def test_as_many_sequences_run_by_default_as_have_their_states_in_half_of_what_weights_leave() -> None:
    hybrid = models.build(ModelConfig.from_dict(CASE.config), "bfloat16")
    each = sum(state.num_bytes(2) for state in hybrid.config.layer_states if state is not None)
    assert most_sequences(hybrid, hybrid.num_bytes + 2 * 43 * each) == 40
    assert most_sequences(hybrid, hybrid.num_bytes + 2 * 5 * each) == 5
    assert most_sequences(hybrid, hybrid.num_bytes) == 1
    assert most_sequences(hybrid, None) is None
    assert most_sequences(models.build(ModelConfig.from_dict(tiny_model("qwen2-tied").config)), 10**9) is None


def test_the_virtual_layout_serves_them_alike(engine: LLMEngine, directory: Path) -> None:
    args = EngineArgs(model=str(directory), kv_cache_layout="virtual", **ARGS | {"num_gpu_blocks_override": 64})
    virtual = LLMEngine(args)
    assert run(virtual, prompts(5)) == run(engine, prompts(5))
    virtual.startup.close()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("preemption_mode", "swap"),
        ("shared_prefix_attention", True),
        ("host_prefix_cache", True),
        ("batch_invariant", True),
    ],
)
def test_options_that_they_do_without_are_refused_by_name(
    engine: LLMEngine, directory: Path, option: str, value: Any
) -> None:
    args = EngineArgs(model=str(directory), **ARGS | {"swap_space": 1.0, option: value})
    with pytest.raises(InvalidParameterError, match=f"{option}=.* is not supported for models with recurrent layers"):
        LLMEngine(args)
    if option != "shared_prefix_attention":
        with pytest.raises(InvalidParameterError, match=option):
            LLMEngine(replace(args, swap_space=engine.args.swap_space), engine.startup)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"linear_num_value_heads": 6}, CheckpointError, "linear_num_value_heads .6. must be a multiple"),
        ({"linear_conv_kernel_dim": 1}, CheckpointError, "linear_conv_kernel_dim .1. at least 2"),
        ({"layer_types": ["linear_attention"] * 2}, UnsupportedModelError, "without a full_attention layer"),
        ({"layer_types": ["linear_attention", "mamba"]}, UnsupportedModelError, "layer type 'mamba'"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "layer_types must list 2 layers"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act='gelu'"),
    ],
)
def test_configurations_that_are_not_implemented_are_named(changes: dict, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        ModelConfig.from_dict(CASE.config | changes)


def test_shards_that_do_not_divide_the_key_heads_are_refused() -> None:
    config = ModelConfig.from_dict(CASE.config | {"num_attention_heads": 8, "linear_num_key_heads": 2})
    with pytest.raises(InvalidParameterError, match=r"does not divide the 2 key heads.*one of 1, 2"):
        config.shard(4)


def test_shards_of_mamba_layers_have_whole_groups_or_parts_of_one() -> None:
    config = ModelConfig.from_dict(MAMBA.config | {"num_attention_heads": 8})
    states = [config.shard(shards).layer_states[0] for shards in (1, 2, 4, 8)]
    found = [(s.heads, s.groups, s.own_groups) for s in states if isinstance(s, MambaState)]
    assert found == [(8, 2, 2), (4, 2, 1), (2, 2, 1), (1, 2, 1)]
    uneven = MambaState(heads=12, groups=4, group_heads=3, head_dim=8, state_dim=8, width=4)
    with pytest.raises(InvalidParameterError, match=r"neither divides the 4 groups.*use one of 1, 2, 4, 12"):
        uneven.shard(6)
    with pytest.raises(InvalidParameterError, match=r"does not divide the 12 heads"):
        uneven.shard(5)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_of_multimodal_checkpoints_the_text_part_is_read(name: str) -> None:
    text = tiny_model(name).config
    architecture = text["architectures"][0]
    whole = {"architectures": [architecture.replace("CausalLM", "ConditionalGeneration")], "text_config": text}
    model = models.build(ModelConfig.from_dict(whole), "float32")
    assert model.config.architecture == architecture
    fused = [piece.shape for piece in model.pieces if piece.tensor.endswith("experts.gate_up_proj")]
    assert fused == ([(16, 80, 64)] * 2 if name == "qwen3.5-moe" else [])
    again = models.build(ModelConfig.from_dict(model.config.saved_as("float32")), "float32")  # what is saved is read
    assert again.pieces == model.pieces


@pytest.mark.parametrize("layer", [models.GatedDeltaNet, models.Mamba2])
@pytest.mark.parametrize("given", ["rotation", "norms"])
def test_a_recurrent_layer_refuses_what_attention_alone_takes(layer: type, given: str) -> None:
    unmade = layer.__new__(layer)
    with pytest.raises(ValueError, match=f"{layer.__name__} takes no rotation, and no norms"):
        unmade(jnp.zeros((1, 8)), models.dense_causal_attend, **{given: (jnp.zeros(1), jnp.zeros(1))})


@pytest.mark.parametrize("case", [CASE, MAMBA], ids=["delta net", "mamba"])
def test_sequences_side_by_side_are_computed_as_alone_when_training(case: TinyModel) -> None:
    model = models.build(ModelConfig.from_dict(case.config), "float32")
    weights = model.init(0)
    first, second = (jnp.asarray(prompt, jnp.int32) for prompt in ([5, 9, 70, 3, 31] * 4, [8, 100, 4] * 5))

    @jax.jit
    def forward(tokens: jax.Array, positions: jax.Array, ids: jax.Array) -> jax.Array:
        return model.forward(weights, tokens, positions, partial(models.dense_causal_attend, segment_ids=ids))

    alone = [forward(x, jnp.arange(len(x)), jnp.zeros((len(x),), int)) for x in (first, second)]
    ids = jnp.repeat(jnp.arange(2), jnp.array([len(first), len(second)]), total_repeat_length=35)
    positions = jnp.concatenate([jnp.arange(len(first)), jnp.arange(len(second))])
    both = forward(jnp.concatenate([first, second]), positions, ids)
    np.testing.assert_allclose(both, jnp.concatenate(alone), rtol=1e-4, atol=1e-5)


def test_a_trainer_scores_each_sequence_of_a_batch_as_alone() -> None:
    model = models.build(ModelConfig.from_dict(CASE.config), "float32")
    weights = model.init(0)
    tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, (3, 12))
    together = token_logprobs(model, weights, tokens)
    alone = [token_logprobs(model, weights, one[None])[0] for one in tokens]
    np.testing.assert_allclose(together, np.stack(alone), rtol=1e-4, atol=1e-5)
    with pytest.raises(InvalidParameterError, match="batch_invariant=True is not supported for models with recurrent"):
        token_logprobs(model, weights, tokens, batch_invariant=True)
