"""`jpaged bench vattention --part calls`: the driver's calls that serving a workload takes, with no device.

The real scheduler, mapper and page manager serve it, over a driver that only counts. Steps take as long as the mapping
thread needs, so what is left `in the step` is what nobody foresaw. The page is that of the sliced layout of the model.
The first round begins with a pool that nobody has used; the next ones find places and cached prefixes of those before.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.bench.answered_step import AnsweredStep
from jpaged.bench.scheduler import InstantExecutor
from jpaged.bench.workloads import BenchRequest
from jpaged.engine.config import SchedulerConfig
from jpaged.engine.interface import StepPlan, StepResult
from jpaged.engine.loop import EngineCore
from jpaged.engine.scheduler.scheduler import Scheduler
from jpaged.engine.sequences.request import Request
from jpaged.executor.cache.virtual.mapper import PlanMapper
from jpaged.executor.cache.virtual.pages import PageManager


class CountingDriver:
    """A `Driver` of a device with all the memory that it is asked for. calls: how often each was made."""

    granularity = 1

    def __init__(self) -> None:
        self.calls = dict.fromkeys(("create", "release", "map", "allow", "unmap", "clear"), 0)

    def create(self, num_bytes: int) -> int:
        return self._count("create")

    def release(self, handle: int) -> None:
        self._count("release")

    def map(self, address: int, handle: int, num_bytes: int) -> None:
        self._count("map")

    def allow(self, address: int, num_bytes: int, read_only: bool) -> None:
        self._count("allow")

    def unmap(self, address: int, num_bytes: int) -> None:
        self._count("unmap")

    def clear(self, address: int, num_bytes: int) -> None:
        self._count("clear")

    def settle(self) -> None:
        """Nothing is on its way."""

    def begin_thread(self) -> None:
        """Nothing belongs to a thread."""

    def _count(self, call: str) -> int:
        self.calls[call] += 1
        return self.calls[call]


class MappingExecutor(InstantExecutor):
    """As `InstantExecutor`, with pages that are mapped for each plan."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        tables = (len(config.cache_groups), config.max_num_seqs, config.max_blocks_per_seq)
        self.driver = CountingDriver()
        self.manager = PageManager([(self.driver, 0)], 1, config.num_blocks, int(np.prod(tables)))
        self.manager.back(np.arange(config.num_blocks))
        self.mapper = PlanMapper(self.manager, [self.driver], tables, config.block_size)

    def execute(self, plan: StepPlan) -> AnsweredStep:
        self.mapper.prepare(plan, lambda: None)
        number = self.mapper.num_steps
        step = _ReadStep(super().execute(plan).result(), self.mapper, number)
        self.mapper.dispatched(plan)
        self.mapper.join()
        return step


class _ReadStep(AnsweredStep):
    """Tells the mapper when it is read."""

    def __init__(self, result: StepResult, mapper: PlanMapper, number: int) -> None:
        super().__init__(result)
        self._mapper, self._number = mapper, number

    def result(self) -> StepResult:
        self._mapper.has_run(self._number)
        return super().result()


def count_calls(config: SchedulerConfig, rounds: Sequence[Sequence[BenchRequest]]) -> list[dict[str, Any]]:
    """Serves rounds of requests, all of a round's at once, and counts for each round and 1,000 generated tokens.

    Keys of a figure: `tokens`, `steps`; for 1,000 tokens `maps`, of these `in_the_step`, `kept` (pages that were
    where they were needed), and calls: `set_access`, `unmap`.
    """
    executor = MappingExecutor(config)
    core = EngineCore(Scheduler(config), executor)
    figures = []
    for number, requests in enumerate(rounds):
        before = dict(executor.driver.calls)
        counts, mapper = executor.manager.counts, executor.mapper
        kept, in_steps, steps = counts.num_kept, mapper.num_in_steps, mapper.num_steps
        for i, request in enumerate(requests):
            params = SamplingParams(
                temperature=0, max_tokens=request.output_len, output_kind=RequestOutputKind.FINAL_ONLY
            )
            core.add_request(Request(f"{number}-{i}", np.array(request.prompt_token_ids, np.int32), params))
        while core.has_unfinished():
            core.step()
        tokens = sum(request.output_len for request in requests)
        calls = {name: count - before[name] for name, count in executor.driver.calls.items()}
        found = {
            "maps": calls["map"],
            "in_the_step": mapper.num_in_steps - in_steps,
            "kept": counts.num_kept - kept,
            "set_access": calls["allow"],
            "unmap": calls["unmap"],
        }
        figures.append(
            {"round": number + 1, "tokens": tokens, "steps": mapper.num_steps - steps}
            | {name: round(1000 * count / tokens, 1) for name, count in found.items()}
        )
    executor.mapper.check_integrity()
    executor.mapper.close()
    return figures
