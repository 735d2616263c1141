"""`jpaged bench steps --replay FILE --run`: runs steps of the recorded shapes again, to see which of them fails.

    recorded step --> starts: a slot for each row, with as many tokens computed --.
                                                                                  +--> the runner, alone, timed
                      plan: the same decode rows, chunks and sampling variant ----'

Tokens are made up, and the pool holds whatever it holds: the recorder keeps no prompts, and what a kernel does depends
on lengths. Left out are copies, swaps, masks, beams' moves and the reading of shared prefixes. Steps run one by one, so
their times are no measure of serving.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jpaged.api.config import EngineArgs
from jpaged.api.errors import InvalidParameterError
from jpaged.api.sampling_params import SamplingParams
from jpaged.bench.recorded_steps import tokens_of
from jpaged.engine.interface import Chunk, SamplingVariant, SlotStart, StepPlan
from jpaged.executor.start.started import Startup
from jpaged.frontend.llm_engine import LLMEngine

_SAMPLING = {
    SamplingVariant.GREEDY: SamplingParams(temperature=0.0),
    SamplingVariant.SAMPLING: SamplingParams(temperature=1.0),
    SamplingVariant.TRUNCATED: SamplingParams(temperature=1.0, top_p=0.9, top_k=50),
    SamplingVariant.TABLE: SamplingParams(temperature=1.0),
    SamplingVariant.MASKED: SamplingParams(temperature=1.0),
    SamplingVariant.FULL: SamplingParams(temperature=1.0, presence_penalty=0.5),
    SamplingVariant.BEAM: SamplingParams(temperature=0.0),
}
"""What makes rows need a variant's program."""


def run_again(recorded: Mapping[str, Any]) -> Iterator[str]:
    """Starts an engine with the recorded options and runs the recorded steps. Yields pieces of lines: what comes next
    before it runs, so that the last thing printed names the step that a crash or a hang is of.

    Raises:
        InvalidParameterError: the options cannot be used, or are of a virtual layout.
    """
    names = EngineArgs.__dataclass_fields__
    options = {name: value for name, value in recorded.get("args", {}).items() if name in names}
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    if options.get("kv_cache_layout") == "virtual":
        raise InvalidParameterError('--run takes no recording of kv_cache_layout="virtual".')
    options |= {"data_parallel_size": 1, "verbose": False, "compile_programs": "at_start"}
    startup = LLMEngine(EngineArgs(**options)).startup
    yield f"{'step':>9} {'recorded ms':>12} {'again ms':>9}  rows\n"
    used: np.ndarray = np.zeros((0,), np.int32)
    for step in recorded["steps"]:
        took = "not read" if step["read_s"] is None else f"{1e3 * (step['read_s'] - step['dispatched_s']):.2f}"
        yield f"{step['step']:>9} {took:>12} "
        starts, plan = plans_of(step, startup, used)
        used = np.arange(plan.num_rows, dtype=np.int32)
        startup.runner.execute(starts)
        jax.block_until_ready(startup.runner.pools)
        begun = time.perf_counter()
        handle = startup.runner.execute(plan)
        handle.result()
        jax.block_until_ready(startup.runner.pools)
        seconds = time.perf_counter() - begun
        chunks = f"{len(plan.chunks)} chunks, " if plan.chunks else ""
        yield f"{1e3 * seconds:>9.2f}  {len(plan.decode_slots)} decode, {chunks}{tokens_of(step)} tokens\n"


def plans_of(step: Mapping[str, Any], startup: Startup, used: np.ndarray) -> tuple[StepPlan, StepPlan]:
    """Plans that end the slots `used` and start those of a recorded step, and that run its rows.

    used: int32 [n]. Blocks are dealt out anew from the first on, and again when all are: rows then share some.
    """
    config, variant = startup.config, SamplingVariant[step["variant"].upper()]
    rng = np.random.default_rng(step["step"])
    num_groups, next_block = len(startup.cache_groups), 0

    def start(slot: int, num_known: int, num_computed: int) -> SlotStart:
        nonlocal next_block
        num_blocks = -(-num_known // config.block_size)
        numbers = next_block + np.arange(num_groups * num_blocks)
        next_block += num_groups * num_blocks
        return SlotStart(
            slot=slot,
            token_ids=rng.integers(0, startup.model.config.vocab_size, num_known, np.int32),
            prompt_len=num_known,
            block_ids=(1 + numbers % (startup.num_blocks - 1)).astype(np.int32).reshape(num_groups, num_blocks),
            num_computed_tokens=num_computed,
            max_len=config.max_model_len + 1,
            sampling=_SAMPLING[variant],
            seed=slot,
            stop_token_ids=(),
        )

    starts = [start(slot, context, context - 1) for slot, context in enumerate(step["contexts"])]
    chunks = []
    for slot, (_, first, count, samples) in enumerate(step["chunks"], start=len(starts)):
        starts.append(start(slot, first + max(1, count), first))
        chunks.append(Chunk(slot, first, starts[-1].token_ids[first : first + count], samples))
    decode_slots = np.arange(len(step["contexts"]), dtype=np.int32)
    return (
        StepPlan(step_id=step["step"], variant=variant, ends=used, starts=tuple(starts)),
        StepPlan(step_id=step["step"], variant=variant, decode_slots=decode_slots, chunks=tuple(chunks)),
    )
