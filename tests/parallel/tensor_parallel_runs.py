"""What `test_tensor_parallel` and the drill of all families (`tests/drills`) do in a process of eight devices."""

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jpaged import BeamSearchParams, EngineArgs, LLMEngine, PoolingParams, RequestOutputKind, SamplingParams
from jpaged.engine.interface import SamplingVariant
from jpaged.executor import config as executor_config
from jpaged.executor.mesh import DeviceMesh
from jpaged.executor.sampling.logprobs import logprobs_of
from jpaged.executor.sampling.sampler import drawn_from, sample
from jpaged.executor.sampling.state import init_full_state, init_state
from jpaged.executor.start import startup
from jpaged.executor.start.compilation import Compiler
from jpaged.executor.step.bodies import Decode
from jpaged.executor.step.one_call import DecodeAndSample
from jpaged.executor.step.program import Setup
from jpaged.executor.step.runner import Runner
from jpaged.models.collectives import ALONE, Collectives
from jpaged.models.sharding import MODEL_AXIS
from tests.parallel.models import VOCAB_SIZE, eight_heads
from tests.tiny_models import write_tiny_model

NUM_REQUESTS, NUM_TOKENS = 8, 10
MASKS = (SamplingVariant.TABLE, SamplingVariant.MASKED, SamplingVariant.FULL)
FEW_BLOCKS = 44
"""Blocks of 4 tokens: the requests need about 90."""

ONE_SHOT = "2, one-shot"
"""Two devices whose bodies sum by the one-shot all-reduce; on a CPU that is the op's XLA implementation."""

ARGS = EngineArgs(
    dtype="float32",
    block_size=4,
    num_gpu_blocks_override=256,
    max_model_len=128,
    max_num_seqs=NUM_REQUESTS,
    max_num_batched_tokens=32,
    decode_buckets=(NUM_REQUESTS,),
    token_buckets=(32,),
    skip_tokenizer_init=True,
    verbose=False,
    watermark=0.0,
)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    lengths = (1, 4, 5, 60, *rng.integers(2, 60, NUM_REQUESTS - 4))
    return [rng.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]


def run(engine: LLMEngine, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    """The tokens of each prompt, greedy unless params say otherwise."""
    for i, prompt in enumerate(prompts):
        sampling = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": i} | params
        engine.add_request(str(i), prompt, SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **sampling))
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    return tokens


def score(engine: LLMEngine, prompts: list[list[int]]) -> dict[str, list]:
    """Log-probabilities of the prompts' tokens from the third on, and which of them are greedy."""
    for i, prompt in enumerate(prompts):
        engine.add_score_request(str(i), prompt, 2)
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[int(output.request_id)] = output.scores
    scores = [found[i] for i in range(len(prompts))]
    logprobs = np.concatenate([one.logprobs for one in scores if one is not None])
    greedy = np.concatenate([one.greedy for one in scores if one is not None])
    return {"logprobs": logprobs.tolist(), "greedy": greedy.tolist()}


def embed(engine: LLMEngine, prompts: list[list[int]]) -> list[list[float]]:
    """Embeddings of the prompts: of every other one the mean."""
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, PoolingParams(pooling="mean" if i % 2 else "last"))
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[int(output.request_id)] = output.embedding
    return [found[i].tolist() for i in range(len(prompts))]


DEGREES = (1, 2, 4, 8)


def tokens_by_degree(name: str, degrees: Sequence[int] = DEGREES) -> dict[str, Any]:
    """For each degree, 1 among them: the greedy tokens of the same prompts, in one go, through preemptions, and after
    prefix hits."""
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(eight_heads(name), directory, use_torch=False)
        args = replace(ARGS, model=directory)
        found = {str(degree): _tokens(replace(args, tensor_parallel_size=degree)) for degree in degrees}
        return found | {ONE_SHOT: _tokens(replace(args, tensor_parallel_size=2, one_shot_rows=32))}


def tokens_of_experts(name: str) -> dict[str, Any]:
    """Greedy tokens of one device, and of several that have parts of each expert, or some experts whole."""
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(eight_heads(name), directory, use_torch=False)
        found = {}
        for degree, whole in ((1, False), (2, True), (4, False)):
            engine = LLMEngine(
                replace(ARGS, model=directory, tensor_parallel_size=degree, enable_expert_parallel=whole)
            )
            collectives = _collectives(engine.startup.runner._programs[Decode(NUM_REQUESTS)].executable)
            found[f"{degree}, {'whole' if whole else 'parts'}"] = run(engine, prompts()), collectives
        return found


def tokens_of_one_call(name: str) -> list[tuple[list[list[list[int]]], Any]]:
    """Of two devices with the one-shot all-reduce, for decode steps of two calls and of one: greedy tokens and sampled
    ones, and the tokens that each expert has had.
    """
    found = []
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(eight_heads(name), directory, use_torch=False)
        args = replace(ARGS, model=directory, tensor_parallel_size=2, one_shot_rows=32, expert_load=True)
        for rows in (0, NUM_REQUESTS):
            with mock.patch.object(startup, "one_call_rows", return_value=rows):
                engine = LLMEngine(args)
            tokens = [run(engine, prompts()), run(engine, prompts(), temperature=1.0)]
            is_whole = any(isinstance(program, DecodeAndSample) for program in engine.startup.runner._programs)
            assert is_whole == bool(rows)
            load = engine.get_metrics().expert_load
            found.append((tokens, load and load.tokens))
    return found


def _tokens(args: EngineArgs) -> dict[str, Any]:
    engine = LLMEngine(args)
    plain = run(engine, prompts())
    few = LLMEngine(replace(args, num_gpu_blocks_override=FEW_BLOCKS, host_prefix_cache=True), engine.startup)
    preempted = run(few, prompts())
    from_host = run(few, prompts())
    cached = LLMEngine(args, engine.startup)
    run(cached, [prompts()[3]])
    hits = run(cached, [prompts()[3][:40] + prompt for prompt in prompts()])
    again = LLMEngine(replace(args, enable_prefix_caching=False), engine.startup)
    computed = run(again, [prompts()[3][:40] + prompt for prompt in prompts()])
    return {
        "plain": plain,
        "preempted": preempted,
        "num_preemptions": few.get_metrics().num_preemptions,
        "from_host": from_host,
        "prefix_cache_host_hits": few.get_metrics().prefix_cache_host_hits,
        "hits": hits,
        "computed": computed,
        "prefix_cache_hits": cached.get_metrics().prefix_cache_hits,
        "compiled": {"layers": engine.startup.model.config.num_layers, **_compiled(engine)},
    }


def check_tokens(by_degree: dict[str, Any], degrees: Sequence[int] = DEGREES) -> None:
    """That what `tokens_by_degree` found is what tensor parallelism promises."""
    compiled = {degree: found.pop("compiled") for degree, found in by_degree.items()}
    one = by_degree["1"]
    assert set(by_degree) == {*map(str, degrees), ONE_SHOT}
    assert all(found == one for found in by_degree.values())
    assert one["num_preemptions"] > 0
    assert one["preempted"] == one["from_host"] == one["plain"]
    assert one["prefix_cache_host_hits"] > 0
    assert one["prefix_cache_hits"] >= 40 * len(one["hits"])
    assert one["hits"] == one["computed"]
    assert not any(compiled.pop("1")["collectives"].values())
    for degree, found in compiled.items():
        collectives = found["collectives"]
        sums = 2 * found["layers"] + 1  # two a layer and the embedding's
        assert collectives["decode_8"] == collectives["mixed_32"] == {"all-reduce": sums}
        assert collectives["sample_8_0"] == {"all-gather": 1}
        assert found["gathered"]["sample_8_0"] == int(degree[0]) * NUM_REQUESTS * 2  # a logit and a token of each shard
        counts = found["one_shot_counts"]
        assert len(counts) == (2 if degree == ONE_SHOT else 0)
        for calls in counts:  # of each device: a step of 8 or 32 rows is 8 or 32 blocks' work
            assert calls == counts[0]
            assert calls[0] == calls[7] > calls[8] == calls[31] > 0
            assert calls[0] % sums == calls[8] % sums == 0


SAMPLED = {
    "temperature": {"temperature": 0.8},
    "truncated": {"temperature": 0.8, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    "everything": {
        "temperature": 0.7,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "logit_bias": {5: 3.0, 150: 4.0},
        "allowed_token_ids": list(range(3, 156)),
        "min_tokens": 3,
        "logprobs": 5,
    },
}


def everything_by_degree(name: str) -> dict[str, Any]:
    """For one device and for four: tokens of each sampling variant, and what is known of programs and memory."""
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(eight_heads(name), directory, use_torch=False)
        args = replace(ARGS, model=directory, shared_prefix_attention=True, compile_programs="at_start")
        one, four = args, replace(args, tensor_parallel_size=4, one_shot_rows=NUM_REQUESTS)  # not for mixed steps
        engines = {1: LLMEngine(one), 4: LLMEngine(four)}
        return {
            degree: {
                "tokens": {variant: run(engine, prompts(), **params) for variant, params in SAMPLED.items()},
                "scores": score(engine, [[3, 4, *prompt] for prompt in prompts()]),
                "embeddings": embed(engine, prompts()),
                "odd_rows": {rows: _drawn(rows, degree) for rows in (1, 3, 8)},
                "finite": {int(variant): _known_to_be_finite(variant, degree) for variant in SamplingVariant},
                "masked": {int(variant): _drawn_under_masks(variant, degree) for variant in MASKS},
                **_forked_and_swapped(engine),
                **_shared_prefix(engine),
                **_compiled(engine),
            }
            for degree, engine in engines.items()
        }


def _drawn(rows: int, shards: int) -> list[list[float]]:
    """Tokens of truncating rows, of which there may be fewer than shards, from logits that are split over these; their
    log-probabilities among the tokens that are left, their ranks, and log-probabilities of the likeliest.
    """
    logits = np.random.default_rng(rows).normal(0, 2, (rows, 160)).astype(np.float32)
    state = init_state(rows)._replace(
        temperature=jnp.full(rows + 1, 0.9),
        top_k=jnp.arange(rows + 1, dtype=jnp.int32),
        top_p=jnp.linspace(0.2, 1, rows + 1),
        seed=jnp.arange(2 * rows + 2, dtype=jnp.uint32).reshape(-1, 2),
    )
    numbers = jnp.arange(rows, dtype=jnp.int32)
    collectives = ALONE if shards == 1 else Collectives(shards, MODEL_AXIS)

    def draw(logits: jax.Array) -> jax.Array:
        variant = SamplingVariant.TRUNCATED
        token_ids = sample(logits, numbers, numbers, state, variant=variant, collectives=collectives).token_ids
        left = drawn_from(logits, token_ids, numbers, state, collectives)
        found = logprobs_of(left, token_ids, 5, collectives)
        columns = (token_ids[:, None], found.token_logprobs[:, None], found.token_ranks[:, None], found.top_logprobs)
        return jnp.maximum(jnp.concatenate([x.astype(jnp.float32) for x in columns], axis=1), -1e9)

    if shards == 1:
        return np.asarray(draw(jnp.asarray(logits))).tolist()
    mesh = DeviceMesh(jax.devices()[:shards]).mesh
    columns, whole = PartitionSpec(None, MODEL_AXIS), PartitionSpec()
    split = jax.jit(jax.shard_map(draw, mesh=mesh, in_specs=columns, out_specs=whole, check_vma=False))
    return np.asarray(split(logits)).tolist()


def _drawn_under_masks(variant: SamplingVariant, shards: int) -> list[list[int]]:
    """Tokens of eight rows, every second one under a mask, from logits that are split over shards; and those that they
    rank, if the variant does.
    """
    rows, vocab_size = 8, 256
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (rows, vocab_size)).astype(np.float32)
    state = init_state(rows)._replace(
        temperature=jnp.linspace(0, 1.5, rows + 1),
        seed=jnp.arange(2 * rows + 2, dtype=jnp.uint32).reshape(-1, 2),
        uses_mask=jnp.arange(rows + 1) % 2 == 1,
    )
    masks = rng.integers(0, 2**32, (rows + 1, vocab_size // 32), np.uint32) & rng.integers(0, 2**32, 8, np.uint32)
    masks[3] = np.eye(vocab_size // 32, dtype=np.uint32)[6]  # token 192 alone, of the last of four shards
    numbers = jnp.arange(rows, dtype=jnp.int32)
    collectives = ALONE if shards == 1 else Collectives(shards, MODEL_AXIS)

    def draw(logits: jax.Array, counts: jax.Array) -> jax.Array:
        full = init_full_state(rows, vocab_size)._replace(token_counts=counts)
        options: dict[str, Any] = {"variant": variant, "collectives": collectives}
        if variant == SamplingVariant.TABLE:
            options["allowed"] = jnp.where(state.uses_mask[:rows, None], masks[:rows], np.uint32(0xFFFFFFFF))
        drawn = sample(logits, numbers, numbers, state, full, jnp.asarray(masks), **options)
        columns = [drawn.token_ids[:, None], *([] if drawn.ranked is None else [drawn.ranked])]
        return jnp.concatenate(columns, axis=1)

    counts = np.zeros((rows + 1, vocab_size), np.int32)
    if shards == 1:
        return np.asarray(draw(jnp.asarray(logits), counts)).tolist()
    mesh = DeviceMesh(jax.devices()[:shards]).mesh
    columns, whole = PartitionSpec(None, MODEL_AXIS), PartitionSpec()
    split = jax.jit(jax.shard_map(draw, mesh=mesh, in_specs=columns, out_specs=whole, check_vma=False))
    return np.asarray(split(logits, counts)).tolist()


def _known_to_be_finite(variant: SamplingVariant, shards: int) -> list[bool]:
    """Of six rows, whether their tokens are said to mean something. No logit of the first two rows is finite, one of
    the third is infinite, and some of the fourth, all of one shard's among them, are NaN.
    """
    rows, vocab_size = 6, 128
    logits = np.random.default_rng(6).normal(0, 2, (rows, vocab_size)).astype(np.float32)
    logits[0], logits[1], logits[2, 70], logits[3, 32:96] = np.nan, -np.inf, np.inf, np.nan
    state = init_state(rows)._replace(temperature=jnp.linspace(0, 1.5, rows + 1))
    masks = np.full((rows + 1, vocab_size // 32), 2**32 - 1, np.uint32)
    numbers = jnp.arange(rows, dtype=jnp.int32)
    collectives = ALONE if shards == 1 else Collectives(shards, MODEL_AXIS)

    def draw(logits: jax.Array, counts: jax.Array) -> jax.Array:
        full = init_full_state(rows, vocab_size)._replace(token_counts=counts)
        options: dict[str, Any] = {"variant": variant, "collectives": collectives}
        options |= {"allowed": jnp.asarray(masks[:rows])} if variant == SamplingVariant.TABLE else {}
        return sample(logits, numbers, numbers, state, full, jnp.asarray(masks), **options).is_finite

    counts = np.zeros((rows + 1, vocab_size), np.int32)
    if shards == 1:
        return np.asarray(draw(jnp.asarray(logits), counts)).tolist()
    mesh = DeviceMesh(jax.devices()[:shards]).mesh
    columns, whole = PartitionSpec(None, MODEL_AXIS), PartitionSpec()
    split = jax.jit(jax.shard_map(draw, mesh=mesh, in_specs=columns, out_specs=whole, check_vma=False))
    return np.asarray(split(logits, counts)).tolist()


def _forked_and_swapped(engine: LLMEngine) -> dict[str, Any]:
    """Samples and beams through copied blocks, in a pool so small that they are swapped out and in."""
    few = replace(engine.args, num_gpu_blocks_override=30, preemption_mode="swap")
    engine = LLMEngine(few, engine.startup)
    kind = RequestOutputKind.FINAL_ONLY
    for i, prompt in enumerate(prompts()):
        engine.add_request(f"samples {i}", prompt, SamplingParams(n=3, seed=i, max_tokens=NUM_TOKENS, output_kind=kind))
        engine.add_request(f"beams {i}", prompt[:40], BeamSearchParams(beam_width=3, max_tokens=NUM_TOKENS))
    sequences = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            sequences[output.request_id] = [completion.token_ids for completion in output.outputs]
    return {"sequences": sequences, "num_swapped_in": engine.get_metrics().num_swapped_in}


def _shared_prefix(engine: LLMEngine) -> dict[str, Any]:
    """Greedy tokens of prompts that begin alike, with and without reading that once a step."""
    alike = [prompts()[3][:41] + prompt for prompt in prompts()]
    found: dict[str, Any] = {}
    with mock.patch.object(executor_config, "LEAST_SAVED_TOKENS", 1):
        for name, shares in (("shared", True), ("each for itself", False)):
            one = LLMEngine(replace(engine.args, shared_prefix_attention=shares), engine.startup)
            found[name] = run(one, alike)
            found[f"{name}, steps"] = one.get_metrics().num_shared_prefix_steps
    return found


def _compiled(engine: LLMEngine) -> dict[str, Any]:
    runner, memory = engine.startup.runner, engine.startup.memory
    executables = {program.name: compiled.executable for program, compiled in runner._programs.items()}
    return {
        "collectives": {key: _collectives(executable) for key, executable in executables.items()},
        "gathered": {key: _gathered(executable) for key, executable in executables.items()},
        "partitions": {key: "num_partitions" in executable.as_text() for key, executable in executables.items()},
        "pool_bytes_by_device": [[shard.data.nbytes for shard in pool.addressable_shards] for pool in runner.pools],
        "planned_pool_bytes": memory.pool,
        "one_shot_counts": _one_shot_counts(runner),
        "inbox_words": _inbox_words(runner),
        "exchange_bytes": sum(
            leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(runner._held.get("exchange"))
        ),
        "planned_exchange_bytes": _planned_state(engine) - _planned_state(engine, one_shot_rows=0),
        "aliased_bytes": runner._programs[Decode(NUM_REQUESTS)].alias_bytes,
    }


def _planned_state(engine: LLMEngine, **changes: Any) -> int:
    """Bytes of a device's state as memory is planned with."""
    startup = engine.startup
    mesh = DeviceMesh(jax.devices()[: startup.args.tensor_parallel_size])
    model = mesh.shard_of(startup.model)
    return Compiler(Setup.of(model, replace(startup.config, **changes)), mesh).state_bytes


def _one_shot_counts(runner: Runner) -> list[list[int]]:
    """For each device that has a one-shot all-reduce's state, the calls that each block of threads took part in."""
    if "exchange" not in runner._held:
        return []
    return [np.asarray(shard.data).tolist() for shard in runner._held["exchange"].generations.addressable_shards]


def _inbox_words(runner: Runner) -> list[int]:
    """What is in the inboxes, which the XLA implementation leaves as they began."""
    if "exchange" not in runner._held:
        return []
    return np.unique([np.asarray(shard.data) for shard in runner._held["exchange"].inbox.addressable_shards]).tolist()


def _collectives(executable: Any) -> dict[str, int]:
    pattern = r"\b(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
    return Counter(re.findall(pattern, executable.as_text()))


def _gathered(executable: Any) -> int:
    """Elements of the largest result of an all-gather; 0 if there is none."""
    results = re.findall(r"\w+\[([\d,]*)\][^=]* all-gather(?:-start)?\(", executable.as_text())
    return max((int(np.prod([int(n) for n in shape.split(",") if n])) for shape in results), default=0)
