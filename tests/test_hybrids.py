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
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.start.shapes import most_sequences, with_snapshots
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
    "state_snapshot_tokens": 4,
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


@pytest.fixture(scope="module")
def convolutions(tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    """Some layers keep the last inputs of a convolution alone."""
    case = tiny_model("lfm2-1.2b-style")
    directory = write_tiny_model(case, tmp_path_factory.mktemp("convolutions"), use_torch=False)
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
    held["recurrent"] = jax.tree.map(lambda x: x.at[: ARGS["max_num_seqs"]].set(value), held["recurrent"])


@pytest.mark.parametrize("kind", ["engine", "mamba", "convolutions"])
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


@pytest.mark.parametrize("kind", ["engine", "convolutions"])
def test_states_are_given_back_while_the_engine_sleeps(kind: str, request: pytest.FixtureRequest) -> None:
    engine: LLMEngine = request.getfixturevalue(kind)
    requests = prompts(4)
    expected = run(engine, requests)
    assert engine.sleep(1)
    assert "recurrent" not in engine.startup.runner._held
    engine.wake_up()
    assert run(engine, requests) == expected


def without_cache(engine: LLMEngine) -> LLMEngine:
    """On the same programs. The two may take turns, and each forgets its prefixes then."""
    return LLMEngine(replace(engine.args, enable_prefix_caching=False), engine.startup)


def generate(engine: LLMEngine, prompt: list[int], params: SamplingParams = GREEDY) -> tuple[list[int], int, int]:
    """Tokens, how many of the prompt were cached, and how many tokens steps computed without sampling each."""
    before = engine.get_metrics().prefilled_tokens
    engine.add_request("one", prompt, params)
    output: Any = None
    while engine.has_unfinished_requests():
        output = (engine.step() or [output])[-1]
    return list(output.outputs[0].token_ids), output.num_cached_tokens, engine.get_metrics().prefilled_tokens - before


@pytest.mark.parametrize("kind", ["engine", "mamba"])
def test_a_prompt_that_comes_again_computes_its_last_tokens_alone(kind: str, request: pytest.FixtureRequest) -> None:
    engine: LLMEngine = request.getfixturevalue(kind)
    plain, rng = without_cache(engine), np.random.default_rng(11)
    some = [rng.integers(3, VOCAB_SIZE, length).tolist() for length in (29, 32, 33)]
    expected = [generate(plain, prompt)[0] for prompt in some]
    for prompt, tokens in zip(some, expected, strict=True):
        assert generate(engine, prompt) == (tokens, 0, len(prompt))
    for prompt, tokens in zip(some, expected, strict=True):
        cached = (len(prompt) - 1) // 4 * 4
        assert generate(engine, prompt) == (tokens, cached, len(prompt) - cached)
    assert engine.reset_prefix_cache()
    assert generate(engine, some[0]) == (expected[0], 0, len(some[0]))


@pytest.mark.parametrize("kind", ["engine", "mamba"])
def test_a_conversation_computes_what_is_new_in_each_turn(kind: str, request: pytest.FixtureRequest) -> None:
    engine: LLMEngine = request.getfixturevalue(kind)
    rng, conversation, turns = np.random.default_rng(12), list[int](), list[tuple[list[int], list[int]]]()
    seen = 0
    for _ in range(4):
        prompt = conversation + rng.integers(3, VOCAB_SIZE, rng.integers(3, 8)).tolist()
        tokens, cached, computed = generate(engine, prompt)
        assert cached == seen
        assert computed == len(prompt) - cached
        turns.append((prompt, tokens))
        conversation = prompt + tokens
        seen = (len(conversation) - 1) // 4 * 4  # the last token was never computed
    plain = without_cache(engine)
    assert [generate(plain, prompt)[0] for prompt, _ in turns] == [tokens for _, tokens in turns]


def test_where_two_prompts_part_the_third_goes_on(engine: LLMEngine) -> None:
    rng = np.random.default_rng(13)
    system = rng.integers(3, VOCAB_SIZE, 22).tolist()
    some = [[*system, first, *rng.integers(3, VOCAB_SIZE, 13).tolist()] for first in (4, 5, 6)]
    found = [generate(engine, prompt) for prompt in some]
    assert [cached for _, cached, _ in found] == [0, 0, 20]
    plain = without_cache(engine)
    assert [generate(plain, prompt)[0] for prompt in some] == [tokens for tokens, _, _ in found]


@pytest.mark.parametrize("kind", ["engine", "mamba"])
def test_few_snapshots_and_blocks_bring_the_tokens_of_none(kind: str, request: pytest.FixtureRequest) -> None:
    """Of requests that share beginnings, for several sequences too, where sequences are preempted."""
    engine: LLMEngine = request.getfixturevalue(kind)
    rng, base = np.random.default_rng(14), np.random.default_rng(15).integers(3, VOCAB_SIZE, 40).tolist()
    some = [[*base[: rng.integers(1, 40)], int(rng.integers(3, VOCAB_SIZE))] for _ in range(12)]
    params = [SamplingParams(temperature=0.8, seed=i, n=1 + i % 3, max_tokens=20, ignore_eos=True) for i in range(12)]

    def outputs(engine: LLMEngine) -> dict[str, list[list[int]]]:
        for i, (prompt, how) in enumerate(zip(some, params, strict=True)):
            engine.add_request(str(i), prompt, how)
        found = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[output.request_id] = [list(one.token_ids) for one in output.outputs]
            engine.core.check_integrity()
        return found

    # 19 blocks of 4 tokens for four sequences of up to 60 tokens.
    cached = LLMEngine(replace(engine.args, num_gpu_blocks_override=20, num_state_snapshots=3), engine.startup)
    expected = outputs(without_cache(engine))
    assert outputs(cached) == expected
    assert outputs(cached) == expected
    stats = cached.get_metrics()
    assert stats.prefix_cache_hits > 0
    assert stats.num_preemptions > 0


def test_other_weights_forget_the_states_of_the_former(mamba: LLMEngine) -> None:
    prompt, model = prompts(1, seed=7)[0] + [5] * 20, mamba.startup.model
    before = mamba.weights_as("huggingface")
    first = generate(mamba, prompt)
    mamba.update_weights(model.module(model.init(6)))
    assert generate(mamba, prompt)[1] == 0
    mamba.update_weights(before)
    assert generate(mamba, prompt) == first


def test_an_engine_has_no_more_snapshots_than_its_programs(engine: LLMEngine) -> None:
    assert not LLMEngine(replace(engine.args, num_state_snapshots=0), engine.startup).has_prefix_cache
    with pytest.raises(InvalidParameterError, match="num_state_snapshots=17 exceeds the 16"):
        LLMEngine(replace(engine.args, num_state_snapshots=17), engine.startup)


def test_prefixes_of_models_with_states_cannot_be_pinned(engine: LLMEngine) -> None:
    with pytest.raises(InvalidParameterError, match="recurrent layers cannot be pinned"):
        engine.pin_prefix([7] * 30)


def test_the_memory_table_tells_of_snapshots(engine: LLMEngine) -> None:
    each, count = engine.startup.setup.states.slot_bytes, engine.startup.config.num_state_snapshots
    assert count == 4 * ARGS["max_num_seqs"]  # of tiny states, which an eighth of a GiB has room for
    assert engine.startup.memory.state > (4 + count) * each
    assert f"{count * each / 1024:,.1f} KiB: {count} of them for the prefix cache" in engine.startup.table("tiny")


@pytest.mark.parametrize(("asked", "count"), [(None, 16), (5, 5), (0, 0)])
@pytest.mark.parametrize("caches", [True, False])
def test_snapshots_are_as_many_as_are_asked_for_and_of_use(
    engine: LLMEngine, asked: int | None, count: int, caches: bool
) -> None:
    args = replace(engine.args, enable_prefix_caching=caches, num_state_snapshots=asked)
    config = replace(engine.startup.config, num_state_snapshots=0)
    assert with_snapshots(config, args, engine.startup.setup.model, None).num_state_snapshots == count * caches


def test_a_gpu_keeps_snapshots_in_an_eighth_of_what_weights_leave(engine: LLMEngine) -> None:
    shard = engine.startup.setup.model
    limit = shard.num_bytes + 8 * 7 * engine.startup.setup.states.slot_bytes + 5
    config = replace(engine.startup.config, num_state_snapshots=0)
    assert with_snapshots(config, engine.args, shard, limit).num_state_snapshots == 7


def test_snapshots_are_for_models_with_recurrent_layers() -> None:
    dense = models.build(ModelConfig.from_dict(tiny_model("qwen2-tied").config))
    config = ExecutorConfig(
        max_num_seqs=1, max_model_len=8, block_size=4, num_blocks=2, decode_buckets=(1,), token_buckets=(8,)
    )
    assert with_snapshots(config, EngineArgs(), dense, None) == config
    with pytest.raises(InvalidParameterError, match="num_state_snapshots=3 is for models with recurrent layers"):
        with_snapshots(config, EngineArgs(num_state_snapshots=3), dense, None)


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
    page, prompt = virtual.startup.config.block_size, prompts(1, seed=8)[0] + [9] * 24
    found = [generate(virtual, prompt)[:2] for _ in range(2)]
    assert page < len(prompt)
    assert found == [(found[0][0], 0), (found[0][0], (len(prompt) - 1) // page * page)]
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
