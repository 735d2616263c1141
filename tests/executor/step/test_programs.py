"""Step programs and runner, without a scheduler."""

import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.api.errors import InvalidParameterError
from jpaged.api.sampling_params import SamplingParams
from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.engine.interface import (
    NO_TOKEN,
    Chunk,
    FinishCode,
    HostCopy,
    SamplingVariant,
    SlotStart,
    StepPlan,
    TablePart,
)
from jpaged.executor.buckets import bucket_for, doublings, fine_buckets, geometric_buckets
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.mesh import DeviceMesh
from jpaged.executor.start.compilation import Compiler
from jpaged.executor.step.blocks import CopyBlocks, GatherBlocks, ScatterBlocks
from jpaged.executor.step.bodies import Decode, Mixed
from jpaged.executor.step.changes import Update
from jpaged.executor.step.compiled import CompiledProgram
from jpaged.executor.step.held import held_shapes, initial_held
from jpaged.executor.step.kinds import KINDS, step_programs
from jpaged.executor.step.packing import Field, PackedLayout
from jpaged.executor.step.program import Setup, Signature, StepProgram
from jpaged.executor.step.runner import Runner
from jpaged.executor.step.state import initial_slot_state
from jpaged.models import Model, ModelConfig, build
from jpaged.pallas_kernels import devices, registry
from jpaged.pallas_kernels.gated_product.hopper_tiling import LEAST_ROWS
from tests.executor.step import dense
from tests.tiny_models import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.xdist_group("programs")  # one worker, which compiles once

CONFIG = ExecutorConfig(
    max_num_seqs=4, max_model_len=64, block_size=4, num_blocks=8192, decode_buckets=(4,), token_buckets=(16,)
)
MESH = DeviceMesh(jax.devices()[:1])
GREEDY = SamplingParams(temperature=0, max_tokens=8)
MOST_TOKENS = 16
"""Of a prompt and what follows it in any of these tests."""


@pytest.fixture(scope="module")
def model() -> Model:
    return build(ModelConfig.from_dict(tiny_model("llama-gqa-d64-tied").config), "float32")


@pytest.fixture(scope="module")
def weights(model):
    return model.init(0)


@pytest.fixture(scope="module")
def setup(model) -> Setup:
    return Setup.of(model, CONFIG)


@pytest.fixture(scope="module")
def programs(setup):
    compiler = Compiler(setup, MESH)
    compiler.submit(step_programs(setup))
    return compiler.results()


@pytest.fixture
def runner(setup, weights, programs):
    return runner_without_tokens(setup, weights, programs)


def runner_without_tokens(setup: Setup, weights, programs) -> Runner:
    """Its pool is NaN everywhere but in the null block."""
    held = initial_held(setup, MESH, weights)
    held["pools"] = tuple(pool.at[1:].set(jnp.nan) for pool in held["pools"])
    return Runner(setup, programs, held)


def pool_bytes(setup: Setup) -> int:
    return setup.cache.block_bytes * CONFIG.num_blocks


def start_of(slot: int, tokens: np.ndarray, blocks: list[int], *, max_len: int = 40, **changes) -> SlotStart:
    fields = {"num_computed_tokens": 0, "sampling": GREEDY, "seed": 0, "stop_token_ids": (), **changes}
    return SlotStart(
        slot=slot,
        token_ids=tokens,
        prompt_len=len(tokens),
        block_ids=np.array([blocks], np.int32),
        max_len=max_len,
        **fields,
    )


def plan(step: int = 0, **fields) -> StepPlan:
    return StepPlan(step_id=step, variant=SamplingVariant.GREEDY, **fields)


greedy = partial(dense.greedy, length=MOST_TOKENS)


@pytest.mark.parametrize("program", [Decode(4), Mixed(16), CopyBlocks(4), ScatterBlocks()])
def test_a_step_updates_the_pool_in_place(setup, programs, program):
    pool, one_layer = pool_bytes(setup), pool_bytes(setup) // setup.model.config.num_layers
    assert programs[program].alias_bytes >= pool
    assert programs[program].temp_bytes < one_layer / 4


def test_no_program_but_the_steps_touches_the_pool(setup, programs):
    for program, compiled in programs.items():
        if not isinstance(program, Decode | Mixed | CopyBlocks | ScatterBlocks):
            assert compiled.output_bytes < pool_bytes(setup) // setup.model.config.num_layers, program


def test_everything_that_is_updated_is_donated_and_only_programs_of_the_pool_depend_on_its_size(setup, programs):
    assert programs.keys() == set(step_programs(setup))
    for program, compiled in programs.items():
        assert set(program.updates(setup)) <= set(compiled.signature.takes)
        assert compiled.signature.updates == (*program.updates(setup), *program.creates)
        uses_pool = isinstance(program, Decode | Mixed | CopyBlocks | GatherBlocks | ScatterBlocks)
        assert program.uses_pool(setup) == uses_pool


def test_names_in_profiles_are_of_one_program_each(setup):
    names = [program.name for program in step_programs(setup)]
    assert len(set(names)) == len(names)
    assert {"decode_4", "mixed_16", "sample_4_0", "update"} <= set(names)
    assert len({kind.kind for kind in KINDS}) == len(KINDS)


def test_chunks_and_decode_steps_continue_the_prompt_greedily(model, weights, runner):
    prompt = np.random.default_rng(0).integers(0, VOCAB_SIZE, 10).astype(np.int32)
    started = start_of(2, prompt, [9, 4, 700, 33], max_len=15)
    runner.execute(plan(0, starts=(started,), chunks=(Chunk(2, 0, prompt[:6], samples=False),)))
    steps = [runner.execute(plan(1, chunks=(Chunk(2, 6, prompt[6:], samples=True),)))]
    steps += [runner.execute(plan(2 + i, decode_slots=np.array([2], np.int32))) for i in range(6)]
    results = [step.result() for step in steps]
    tokens = [int(result.token_ids[0, 0]) for result in results]
    assert tokens == [*greedy(model, weights, prompt, 5), NO_TOKEN, NO_TOKEN]
    codes = [FinishCode(int(result.finish_codes[0])) for result in results]
    assert codes == [FinishCode.RUNNING] * 4 + [FinishCode.LENGTH] + [FinishCode.RUNNING] * 2
    assert all(step.is_ready() for step in steps)


def test_a_plan_for_several_tokens_a_row_is_refused_by_name(runner):
    with pytest.raises(InvalidParameterError, match="tokens_per_row=2 is not supported"):
        runner.execute(plan(0, decode_slots=np.array([2], np.int32), tokens_per_row=2))


def test_a_slot_may_end_and_start_anew_in_one_plan(model, weights, runner):
    old, new = np.random.default_rng(1).integers(0, VOCAB_SIZE, (2, 7)).astype(np.int32)
    runner.execute(plan(0, starts=(start_of(0, old, [1, 2]),), chunks=(Chunk(0, 0, old, samples=True),)))
    step = runner.execute(
        plan(
            1,
            ends=np.array([0], np.int32),
            starts=(start_of(0, new, [3, 4, 5]),),
            chunks=(Chunk(0, 0, new, samples=True),),
        )
    )
    then = runner.execute(plan(2, decode_slots=np.array([0], np.int32)))
    assert [int(s.result().token_ids[0, 0]) for s in (step, then)] == greedy(model, weights, new, 2)


def test_a_slot_that_ended_writes_to_the_null_block_only(runner):
    prompt = np.arange(5, dtype=np.int32)
    runner.execute(plan(0, starts=(start_of(1, prompt, [6, 7]),), chunks=(Chunk(1, 0, prompt, samples=True),)))
    before = [np.asarray(pool) for pool in runner.pools]
    runner.execute(plan(1, ends=np.array([1], np.int32)))
    step = runner.execute(plan(2, decode_slots=np.array([1], np.int32)))
    assert step.result().token_ids.tolist() == [[NO_TOKEN]]
    for old, new in zip(before, runner.pools, strict=True):
        np.testing.assert_array_equal(old[1:], np.asarray(new)[1:])


def test_a_stop_token_ends_the_slot_on_the_device(model, weights, runner):
    prompt = np.random.default_rng(2).integers(0, VOCAB_SIZE, 9).astype(np.int32)
    expected = greedy(model, weights, prompt, 3)
    stop = expected[1] if expected[1] != expected[0] else expected[2]
    started = start_of(3, prompt, [11, 12, 13, 14], stop_token_ids=(stop,))
    steps = [runner.execute(plan(0, starts=(started,), chunks=(Chunk(3, 0, prompt, samples=True),)))]
    steps += [runner.execute(plan(1 + i, decode_slots=np.array([3], np.int32))) for i in range(4)]
    results = [step.result() for step in steps]
    tokens = [int(r.token_ids[0, 0]) for r in results if r.token_ids[0, 0] != NO_TOKEN]
    assert tokens == expected[: expected.index(stop) + 1]
    assert [int(r.finish_codes[0]) for r in results].count(FinishCode.STOP) == 1


@pytest.mark.parametrize("form", ["few", "whole", "again", "later"])
def test_a_slot_whose_guess_was_refused_samples_again_as_if_it_had_had_its_mask(setup, weights, programs, form):
    """What it guessed had ended it; the slot beside it goes on unmoved, and guesses afterwards. Later: another token of
    what it ranked is allowed, and nothing is sampled again.
    """
    prompts = [np.arange(3, 9, dtype=np.int32), np.arange(20, 25, dtype=np.int32)]
    sampling = replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="unused"))
    ranked: list[int] = []
    few = allowed = np.array([5, 31, 32, 63, VOCAB_SIZE - 1], np.int32)

    def run(runner, step, masked, open_slots, slots, chunks=(), starts=(), back=NO_TOKEN, without=(), is_back=True):
        masks = (allowed,) * len(masked) + (np.array([NO_TOKEN, *without], np.int32),) * len(open_slots)
        changed = np.array([*masked, *open_slots], np.int32)
        fields = {"mask_slots": changed, "masks": masks, "mask_tokens": np.full(len(changed), back, np.int32)}
        fields["mask_backs"] = (fields["mask_tokens"] != NO_TOKEN) & is_back
        decode_slots = np.array(slots, np.int32)
        made = StepPlan(step, SamplingVariant.MASKED, starts=starts, chunks=chunks, decode_slots=decode_slots, **fields)
        result = runner.execute(made).result()
        ranked[:] = result.ranked[0].tolist()
        return result.token_ids[:, 0].tolist(), result.finish_codes.tolist()

    def begun(stop, masked):
        runner = runner_without_tokens(setup, weights, programs)
        starts = tuple(
            start_of(slot, prompt, [4 * slot + 1, 4 * slot + 2], sampling=sampling, stop_token_ids=(stop,))
            for slot, prompt in enumerate(prompts)
        )
        chunks = tuple(Chunk(slot, 0, prompt, samples=True) for slot, prompt in enumerate(prompts))
        return runner, run(runner, 0, masked, [slot for slot in (0, 1) if slot not in masked], [], chunks, starts)

    runner, ((guess, beside), _) = begun(-2, [])
    mask = np.zeros((32 * -(-VOCAB_SIZE // 32),), np.bool_)
    mask[few] = True
    if form in ("again", "later"):  # all but what was guessed
        mask = np.arange(len(mask)) != guess
    if form != "few":
        allowed = np.packbits(mask, bitorder="little").view(np.uint32)
    expected_runner, (expected, _) = begun(-2, [0])
    assert mask[expected[0]]
    assert (expected[1], mask[guess]) == (beside, False)
    runner, (_, codes) = begun(guess, [])
    assert codes[0] == FinishCode.STOP
    if form == "later":
        assert ranked[:2] == [guess, expected[0]]
        then = run(runner, 1, [], [0], [0, 1], back=expected[0], is_back=False)
        assert then == run(expected_runner, 1, [], [0], [0, 1])
        return
    masked, open_slots = ([], [0]) if form == "again" else ([0], [])
    again, codes = run(runner, 1, masked, open_slots, [0], back=int(prompts[0][-1]), without=[guess])
    assert (again, codes) == ([expected[0]], [FinishCode.RUNNING])
    then = run(runner, 2, [], [0], [0, 1])
    assert then == run(expected_runner, 1, [], [0], [0, 1])


def test_a_slot_that_follows_a_table_samples_what_its_masks_would_have_led_to(setup, weights, programs):
    """The slot beside it has no constraint; a later tenant of the slot has none either."""
    prompts = [np.arange(3, 9, dtype=np.int32), np.arange(20, 25, dtype=np.int32)]
    sampling = replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="unused"))
    rng, words, both = np.random.default_rng(4), -(-VOCAB_SIZE // 32), np.arange(2, dtype=np.int32)
    masks = rng.integers(0, 2**32, (3, words), np.uint32) & rng.integers(0, 2**32, (3, words), np.uint32)
    masks[:, -1] &= np.uint32((1 << (VOCAB_SIZE - 1) % 32 + 1) - 1)
    classes, first = rng.integers(0, 2, VOCAB_SIZE).astype(np.int32), 100
    entries = np.array([[1, 2], [2, 0], [0, 1]], np.int32)
    of_places = np.array([7, 8, 9], np.int32), np.array([40, 42, 44], np.int32)
    flat = entries.astype(np.int16).reshape(-1)
    parts = (
        TablePart(3, first, classes, 7, masks[:2], first, of_places[0][:1], of_places[1][:1], 40, flat[:5]),
        TablePart(3, first, None, 9, masks[2:], first + 1, of_places[0][1:], of_places[1][1:], 45, flat[5:]),
    )

    def run(variant, starts, step, **fields):
        fields |= {"chunks": tuple(Chunk(s.slot, 0, s.token_ids, samples=True) for s in starts), "starts": starts}
        return runner.execute(StepPlan(step, variant, **fields)).result().token_ids[:, 0].tolist()

    def start(slot, **fields):
        return start_of(slot, prompts[slot], [4 * slot + 1, 4 * slot + 2, 4 * slot + 3], **fields)

    runner, expected, state = runner_without_tokens(setup, weights, programs), [], 1
    for step in range(4):
        own = {"mask_slots": both[:1], "masks": (masks[state],)}
        own |= {"mask_tokens": np.full(1, NO_TOKEN, np.int32), "mask_backs": np.zeros(1, np.int32)}
        starts = () if step else (start(0, sampling=sampling), start(1))
        expected.append(run(SamplingVariant.MASKED, starts, step, decode_slots=both if step else both[:0], **own))
        state = entries[state, classes[expected[-1][0]]]
    for variant in (SamplingVariant.TABLE, SamplingVariant.MASKED, SamplingVariant.FULL):
        runner = runner_without_tokens(setup, weights, programs)
        starts = start(0, sampling=sampling, place=first + 1), start(1)
        found = [run(variant, starts, 0, table_parts=parts)]
        found += [run(variant, (), step, decode_slots=both) for step in range(1, 4)]
        assert found == expected
    again = run(SamplingVariant.TABLE, (start(0),), 4, ends=both[:1])
    assert again == greedy(setup.model, weights, prompts[0], 1)


def test_what_is_computed_behind_a_step_is_sampled_by_the_next_or_taken_back(setup, weights, programs):
    """One slot is sampled, in another order than it was computed in; the other one's token is another, and is computed
    again behind the next step.
    """
    prompts = [np.arange(3, 9, dtype=np.int32), np.arange(20, 25, dtype=np.int32)]
    sampling = replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="unused"))
    some = np.array([5, 31, 32, 63, VOCAB_SIZE - 1], np.int32)
    slots = [np.array(listed, np.int32) for listed in ([], [0], [1], [0, 1], [1, 0])]
    none, first, second, both, reversed_ = slots

    def begun():
        runner = runner_without_tokens(setup, weights, programs)
        starts = tuple(
            start_of(slot, prompt, [4 * slot + 1, 4 * slot + 2], sampling=sampling)
            for slot, prompt in enumerate(prompts)
        )
        return runner, starts, tuple(Chunk(slot, 0, prompt, samples=True) for slot, prompt in enumerate(prompts))

    def run(runner, step, **fields):
        result = runner.execute(StepPlan(step, SamplingVariant.MASKED, **fields)).result()
        return result.token_ids[:, 0].tolist()

    def masks(of, tokens, backs):
        given = {"mask_slots": of, "masks": (some,) * len(of), "mask_tokens": np.array(tokens, np.int32)}
        return given | {"mask_backs": np.array(backs, np.int32)}

    more = np.array([(slot, 0, 2, 4 * slot + 3) for slot in (0, 1)], np.int32)
    unchanged = masks(both, [NO_TOKEN] * 2, [0] * 2)
    runner, starts, chunks = begun()
    expected = [run(runner, 0, starts=starts, chunks=chunks, **unchanged)]
    other = next(token for token in some.tolist() if token != expected[0][1])
    replaced = masks(second, [other], [0])
    expected += [run(runner, 1, decode_slots=first, table_updates=more[:1])]
    expected += [run(runner, 2, decode_slots=both, table_updates=more[1:], **replaced)]
    expected += [run(runner, 3, decode_slots=both)]

    runner, starts, chunks = begun()
    found = [run(runner, 0, starts=starts, chunks=chunks, run_ahead=reversed_, **unchanged)]
    taken_back = masks(second, [other], [1])
    ahead = {"has_run_ahead": True, "table_updates": more}
    found += [run(runner, 1, decode_slots=first, run_ahead=both, **ahead, **taken_back)]
    found += [run(runner, 2, decode_slots=both, has_run_ahead=True, run_ahead=none)]
    found += [run(runner, 3, decode_slots=both)]
    assert found == expected


def test_more_changes_than_one_buffer_holds_are_all_applied(model, weights, programs, runner):
    """Seven hundred block-table entries and every slot at once, through buffers that hold fewer."""
    prompt = np.random.default_rng(3).integers(0, VOCAB_SIZE, 4).astype(np.int32)
    starts = tuple(start_of(slot, prompt, [slot + 1]) for slot in range(4))
    updates = np.array([(slot, 0, 1 + i, 100 + 20 * slot + i) for slot in range(4) for i in range(15)], np.int32)
    chunks = tuple(Chunk(slot, 0, prompt, samples=True) for slot in range(4))
    runner.execute(plan(0, starts=starts, chunks=chunks))
    step = runner.execute(plan(1, decode_slots=np.arange(4, dtype=np.int32), table_updates=updates))
    assert step.result().token_ids.tolist() == [greedy(model, weights, prompt, 2)[1:]] * 4


def test_blocks_survive_host_memory_and_come_back_elsewhere(model, weights, runner):
    """Two sequences fork, one is swapped out and in to other blocks, and both go on as if nothing had happened."""
    prompt = np.random.default_rng(5).integers(0, VOCAB_SIZE, 6).astype(np.int32)
    expected = greedy(model, weights, prompt, 4)
    first, second = start_of(0, prompt, [1, 2]), start_of(1, prompt, [1, 2], num_computed_tokens=6)
    chunks = (Chunk(0, 0, prompt, samples=True), Chunk(1, 6, prompt[:0], samples=True))
    steps = [runner.execute(plan(0, starts=(first, second), chunks=chunks))]
    both = np.array([0, 1], np.int32)
    copied = {"copies": np.array([[2, 3]], np.int32), "table_updates": np.array([[0, 0, 1, 3]], np.int32)}
    steps.append(runner.execute(plan(1, decode_slots=both, **copied)))
    out = HostCopy(7, np.array([1, 2], np.int32))
    steps.append(runner.execute(plan(2, ends=both[1:], swap_outs=(out,), decode_slots=both[:1])))
    known = np.array([*prompt, *expected[:2]], np.int32)
    again = start_of(1, known, [8, 9], num_computed_tokens=7)
    back = HostCopy(7, np.array([8, 9], np.int32))
    chunk = Chunk(1, 7, known[7:], samples=True)
    steps.append(runner.execute(plan(3, starts=(again,), swap_ins=(back,), chunks=(chunk,), decode_slots=both[:1])))
    tokens = [step.result().token_ids[:, 0].tolist() for step in steps]
    assert tokens == [[expected[0]] * 2, [expected[1]] * 2, [expected[2]], [expected[3], expected[2]]]


def test_a_beam_goes_on_from_another_slot_with_the_token_it_is_given(model, weights, runner):
    prompt = np.random.default_rng(6).integers(0, VOCAB_SIZE, 5).astype(np.int32)
    chunk = Chunk(2, 0, prompt, samples=True)
    step = runner.execute(
        StepPlan(step_id=0, variant=SamplingVariant.BEAM, starts=(start_of(2, prompt, [4, 5]),), chunks=(chunk,))
    )
    result = step.result()
    best, second = result.logprobs.top_ids[0, 0, :2].tolist()
    assert best == int(result.token_ids[0, 0])
    moves = np.array([[0, 2, second], [2, 2, best]], np.int32)
    step = runner.execute(
        plan(
            1,
            starts=(start_of(0, prompt, []),),
            beams=moves,
            copies=np.array([[5, 6]], np.int32),
            table_updates=np.array([[0, 0, 1, 6]], np.int32),
            decode_slots=np.array([0, 2], np.int32),
        )
    )
    followed = [greedy(model, weights, np.array([*prompt, token]), 1)[0] for token in (second, best)]
    assert step.result().token_ids[:, 0].tolist() == followed


def test_padding_never_reaches_a_real_block_or_a_result(runner):
    """The pool is NaN wherever no token was written, and stays so."""
    prompt = np.arange(3, dtype=np.int32)
    step = runner.execute(plan(0, starts=(start_of(0, prompt, [5]),), chunks=(Chunk(0, 0, prompt, samples=True),)))
    assert step.result().token_ids[0, 0] != NO_TOKEN
    for pool in runner.pools:
        pool = np.asarray(pool)
        assert np.isfinite(pool[5, :, :, :3]).all()
        assert np.isnan(pool[5, :, :, 3:]).all()
        assert np.isnan(np.delete(pool, [0, 5], axis=0)).all()


def test_an_executable_refuses_another_shape_instead_of_compiling(runner):
    with pytest.raises(TypeError):
        runner._run(Update(), packed=np.zeros((3,), np.int32))


@pytest.mark.skipif(registry.missing("hopper") is not None, reason=str(registry.missing("hopper")))
@pytest.mark.parametrize(("kernel_backend", "has_kernel"), [(None, True), ("hopper", True), ("xla", False)])
def test_bodies_of_many_rows_have_the_kernel_of_gate_and_up_unless_the_backend_is_xla(
    monkeypatch, kernel_backend, has_kernel
):
    monkeypatch.setattr(devices, "default_device", lambda: devices.Device("gpu", (9, 0)))
    model = build(ModelConfig.from_dict(tiny_model("llama-gqa-d64-tied").config), "bfloat16")
    shapes = {"block_size": 16, "decode_buckets": (4, LEAST_ROWS), "max_num_seqs": LEAST_ROWS}
    config = replace(CONFIG, **shapes, token_buckets=(LEAST_ROWS,), kernel_backend=kernel_backend)
    setup = Setup.of(model, config)
    state = jax.eval_shape(partial(initial_slot_state, setup.cache))

    def kernels(program: StepProgram) -> int:
        packed = jax.ShapeDtypeStruct((program.layout(setup).size,), jnp.int32)
        weights = {name: held_shapes(setup, MESH)[name].shapes for name in ("large", "small")}
        arrays = weights | {"pools": setup.cache.pools, "state": state, "packed": packed}
        return str(jax.make_jaxpr(lambda arrays: program.body(setup, **arrays))(arrays)).count("name=gated_product")

    assert not kernels(Decode(4))
    assert bool(kernels(Decode(LEAST_ROWS))) == has_kernel
    assert bool(kernels(Mixed(LEAST_ROWS))) == has_kernel


def test_warm_up_leaves_no_trace(model, weights, runner):
    runner.warm_up()
    prompt = np.random.default_rng(4).integers(0, VOCAB_SIZE, 6).astype(np.int32)
    step = runner.execute(plan(0, starts=(start_of(0, prompt, [1, 2]),), chunks=(Chunk(0, 0, prompt, samples=True),)))
    assert step.result().token_ids.tolist() == [greedy(model, weights, prompt, 1)]
    assert all(np.isnan(np.asarray(pool)[3:]).all() for pool in runner.pools)


def test_programs_of_several_devices_are_dispatched_one_after_the_other_whichever_runner_they_are_of(setup):
    started, running, together = threading.Barrier(2), [], []

    def executable(*arguments: object) -> tuple[None]:
        running.append(arguments)
        together.append(len(running))
        time.sleep(0.02)
        running.pop()
        return (None,)

    def run() -> None:
        pool = SimpleNamespace(sharding=SimpleNamespace(device_set={0, 1}))
        program = CompiledProgram(executable, Signature((), (), None))
        one = Runner(setup, {Update(): program}, {"pools": (pool,)})
        started.wait()
        for _ in range(5):
            one._run(Update())

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(together) == 1


def test_buckets_end_exactly_at_the_largest_size():
    assert geometric_buckets(1, 64, 4) == (1, 4, 16, 64)
    assert geometric_buckets(16, 100) == (16, 32, 64, 100)
    assert geometric_buckets(16, 8) == (8,)
    assert fine_buckets(8, 320) == (8, 16, 32, 64, 96, 128, 192, 256, 320)
    assert fine_buckets(8, 100) == (8, 16, 32, 64, 96, 100)
    assert fine_buckets(8, 5) == (5,)
    assert doublings((8, 16, 32, 64, 96, 128, 192, 256, 320)) == (8, 16, 32, 64, 128, 320)
    assert doublings((32,)) == (32,)
    assert bucket_for(16, (16, 32)) == 16
    assert bucket_for(17, (16, 32)) == 32
    with pytest.raises(ValueError, match="33"):
        bucket_for(33, (16, 32))


def test_a_packed_buffer_reads_back_on_host_and_device():
    layout = PackedLayout(scalar=Field((), 7), rows=Field((3,), -1), table=Field((2, 2), (8, 9)))
    buffer, host = layout.new()
    host["table"][1] = [3, 4]
    assert buffer.size == layout.size == 8
    fields = jax.jit(layout.unpack)(buffer)
    assert int(fields["scalar"]) == 7
    assert fields["rows"].tolist() == [-1, -1, -1]
    assert fields["table"].tolist() == [[8, 9], [3, 4]]
    assert layout.new()[1]["table"].tolist() == [[8, 9]] * 2
