"""Serving a trace with the real scheduler and no device: virtual time passes, step by step.

    trace ---> Scheduler(pool) ---> plan ---> SimulatedDevice ---> result ---> Scheduler
     arrivals    paged or reserved    |        step_time(plan)                    finished requests
                                      v
                             what the memory holds during the step, weighted with the step's time

The scheduler is the engine's own, the pool its block pool or a `ReservationPool`. The device samples made-up tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jpaged.api.errors import EngineDeadError
from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.bench.answered_step import AnsweredStep, DeviceSequences
from jpaged.bench.memory.reservation import ReservationPool
from jpaged.bench.memory.setups import Setup, StepTime
from jpaged.bench.memory.traces import TraceRequest
from jpaged.engine.config import SchedulerConfig
from jpaged.engine.interface import StepPlan
from jpaged.engine.scheduler.scheduler import Scheduler
from jpaged.engine.sequences.request import Request

SYSTEMS = ("orca-max", "orca-pow2", "orca-oracle", "paged")
_VOCAB_SIZE = 2**30
_MAX_PROMPT_LEN = 4096
_CHECK_EVERY = 256


@dataclass(frozen=True)
class Serving:
    """What serves: a system of `SYSTEMS` and its limits, as in the paper's own code where it set them.

    block_size: tokens, of the paged system.
    watermark: as in `SchedulerConfig`, for the paged system; a reservation needs none.
    share_prompts: the samples of a request share its prompt's blocks, and equal prompt prefixes are found in the prefix
        cache; otherwise each sample is a request of its own.
    """

    system: str
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2560
    watermark: float = 0.01
    share_prompts: bool = False


@dataclass(frozen=True)
class MemoryUse:
    """Shares of the memory for the cache; they add up to 1.

    token_states: keys and values of tokens. reserved: empty now, to be used later by the sequence that holds it.
    internal: held by a sequence that will never use it. external: held by none, or lost to rounding.
    """

    token_states: float
    reserved: float
    internal: float
    external: float


@dataclass(frozen=True)
class Means:
    """What the memory held on average.

    memory: None where prompts are shared: what sequences see as their own would then count several times.
    batch: running sequences.
    saved_blocks: of the blocks that the running sequences would take if each had its own; 0 where nothing is shared.
    """

    memory: MemoryUse | None
    batch: float
    saved_blocks: float


@dataclass(frozen=True)
class Outcome:
    """What serving a trace came to.

    over_time: each step counts with its time. over_steps: each step counts once, so that the short steps of small
        batches weigh more.
    normalized_latency_s: mean over requests of (finish - arrival) / output length, or, where `saturated`, what it is
        at least.
    saturated: the run was ended because the latency limit was exceeded for sure.
    """

    over_time: Means
    over_steps: Means
    normalized_latency_s: float
    saturated: bool
    num_requests: int
    num_steps: int
    num_preemptions: int
    simulated_s: float


class SimulatedDevice:
    """Answers each plan at once, and says how much time passed.

    clock_s: virtual time. step_s: of the last step.

    Sampled tokens are all different, so that no output is ever found in the prefix cache.
    """

    def __init__(self, config: SchedulerConfig, step_time: StepTime) -> None:
        self.clock_s = 0.0
        self.step_s = 0.0
        self._step_time = step_time
        self._sequences = DeviceSequences(config.max_num_seqs)
        self._num_sampled = 0

    def execute(self, plan: StepPlan) -> AnsweredStep:
        rows, samples = self._sequences.begin(plan)
        prompt_tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
        context = int(self._sequences.lengths[plan.decode_slots].sum())
        self.step_s = self._step_time(plan.num_rows, context, prompt_tokens)
        self.clock_s += self.step_s
        tokens = np.arange(self._num_sampled, self._num_sampled + len(rows)) % _VOCAB_SIZE
        self._num_sampled += len(rows)
        return self._sequences.answer(rows, samples, tokens)


def make_scheduler(setup: Setup, serving: Serving) -> Scheduler:
    """The engine's scheduler over the setup's memory, run by one of the `SYSTEMS`."""
    paged = serving.system == "paged"
    block_size = serving.block_size if paged else 1
    pool = None if paged else ReservationPool(setup.kv_slots, serving.system, setup.max_model_len)
    config = SchedulerConfig(
        block_size=block_size,
        num_blocks=setup.kv_slots // block_size + 1,
        max_num_seqs=serving.max_num_seqs,
        max_num_batched_tokens=serving.max_num_batched_tokens,
        max_model_len=setup.max_model_len,
        enable_prefix_caching=paged and serving.share_prompts,
        watermark=serving.watermark if paged else 0.0,
        pipeline_depth=0,
    )
    return Scheduler(config, pool=pool)


def simulate(
    trace: Sequence[TraceRequest],
    setup: Setup,
    serving: Serving,
    step_time: StepTime,
    latency_limit_s: float | None = None,
    drain: bool = True,
    window_s: tuple[float, float] | None = None,
) -> Outcome:
    """Serves a trace to its end.

    Args:
        trace: by arrival.
        latency_limit_s: end the run once the normalized latency is sure to exceed this.
        drain: go on after the last arrival until all are served; without, requests that are unfinished then count
            with what their latency is at least.
        window_s: the steps that begin between these times count in the means; None: all up to the last arrival.
    """
    scheduler = make_scheduler(setup, serving)
    device = SimulatedDevice(scheduler.config, step_time)
    meter = _Meter(scheduler, setup)
    latencies = _Latencies(trace)
    unfinished: dict[int, int] = {}  # request of the trace -> outputs that it waits for
    num_arrived, num_steps, saturated = 0, 0, False
    while num_arrived < len(trace) or (drain and unfinished):
        while num_arrived < len(trace) and trace[num_arrived].arrival_s <= device.clock_s:
            for request in _engine_requests(num_arrived, trace[num_arrived], serving.share_prompts):
                scheduler.add(request)
            unfinished[num_arrived] = trace[num_arrived].samples
            num_arrived += 1
        if not unfinished:
            device.clock_s = trace[num_arrived].arrival_s
            continue
        plan = scheduler.schedule()
        if not isinstance(plan, StepPlan):
            raise EngineDeadError(f"{scheduler.num_unfinished} requests are left, but none can run.")
        begin_s = device.clock_s
        handle = device.execute(plan)
        counts = num_arrived < len(trace) if window_s is None else window_s[0] <= begin_s <= window_s[1]
        meter.record(plan, device.step_s, counts)
        num_steps += 1
        for update in scheduler.update(plan, handle.result()):
            index = int(update.request.request_id.split("-")[0])
            unfinished[index] -= 1
            if not unfinished[index]:
                del unfinished[index]
                latencies.finish(index, device.clock_s)
        if latency_limit_s is not None and num_steps % _CHECK_EVERY == 0:
            saturated = latencies.at_least(device.clock_s) > latency_limit_s
            if saturated:
                break
    return Outcome(
        over_time=meter.over_time.means(serving.share_prompts),
        over_steps=meter.over_steps.means(serving.share_prompts),
        normalized_latency_s=latencies.at_least(device.clock_s),
        saturated=saturated,
        num_requests=len(trace),
        num_steps=num_steps,
        num_preemptions=scheduler.stats().num_preemptions,
        simulated_s=device.clock_s,
    )


class _Meter:
    """Averages, over time and over steps, of what the slots hold."""

    def __init__(self, scheduler: Scheduler, setup: Setup) -> None:
        self._slots = scheduler.slots
        self._pool = scheduler.pool
        self._block_size = scheduler.config.block_size
        self._final_len = np.zeros((scheduler.config.max_num_seqs,), np.int64)
        self.over_time, self.over_steps = _Average(setup.kv_slots), _Average(setup.kv_slots)

    def record(self, plan: StepPlan, seconds: float, counts: bool) -> None:
        """Takes note of a step, planned and not yet read, and adds it to the averages if it counts."""
        slots = self._slots
        for start in plan.starts:
            self._final_len[start.slot] = start.max_len - 1  # the last token is never computed
        if not counts:
            return
        held = slots.capacity
        useful = np.minimum(held, self._final_len)
        saved = 1 - self._pool.num_used * self._block_size / max(int(held.sum()), 1)
        state = np.array([held.sum(), useful.sum(), slots.num_computed.sum(), slots.num_used, saved])
        self.over_time.add(state, seconds)
        self.over_steps.add(state, 1.0)


class _Average:
    """Weighted sums of states: slots allocated, to be used, used now; sequences; share of blocks saved."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._sums = np.zeros((5,), np.float64)
        self._weight = 0.0

    def add(self, state: np.ndarray, weight: float) -> None:
        self._sums += weight * state
        self._weight += weight

    def means(self, shared: bool) -> Means:
        *slots, batch, saved = (self._sums / max(self._weight, 1e-12)).tolist()
        if shared:
            return Means(None, batch, saved)
        held, useful, used = (count / self._num_slots for count in slots)
        return Means(MemoryUse(used, useful - used, held - useful, 1 - held), batch, 0.0)


class _Latencies:
    """Normalized latencies of a trace's requests, those unfinished counted up to now."""

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        self._arrival_s = np.array([request.arrival_s for request in trace])
        self._output_len = np.array([request.output_len for request in trace])
        self._finish_s = np.full((len(trace),), np.inf)

    def finish(self, index: int, clock_s: float) -> None:
        self._finish_s[index] = clock_s

    def at_least(self, clock_s: float) -> float:
        """The mean, if all that is unfinished ended now; exact when nothing is."""
        waited_s = np.maximum(np.minimum(self._finish_s, clock_s) - self._arrival_s, 0.0)
        return float((waited_s / self._output_len).mean())


def _engine_requests(index: int, request: TraceRequest, shared: bool) -> list[Request]:
    """One request of the engine, whose samples share the prompt, or, where nothing is shared, one for each sample.

    Token ids matter only where prompts are shared. A prompt's own tokens are then unlike those of other prompts (and
    unlike sampled ones, which are below).
    """
    tokens = np.ones((request.prompt_len,), np.int32)
    if shared:
        own = _VOCAB_SIZE + index * _MAX_PROMPT_LEN % (_VOCAB_SIZE - _MAX_PROMPT_LEN)
        tokens[request.prefix_len :] = own + np.arange(request.prompt_len - request.prefix_len)
        return [Request(f"{index}-0", tokens, _sampling(request.output_len, request.samples))]
    sampling = _sampling(request.output_len, 1)
    return [Request(f"{index}-{sample}", tokens, sampling) for sample in range(request.samples)]


@lru_cache(maxsize=4096)
def _sampling(output_len: int, samples: int) -> SamplingParams:
    return SamplingParams(
        n=samples,
        max_tokens=output_len,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
