"""What the engine counts, for `get_metrics()`."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from jpaged.engine.expert_load import ExpertLoad

STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets that steps are counted in. The last bucket counts steps above the largest bound."""


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    num_steps: int = 0
    num_shared_prefix_steps: int = 0
    step_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS_BOUNDS) + 1))
    num_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_finished: int = 0
    num_not_finite: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    num_guesses: int = 0
    num_kept_guesses: int = 0
    num_requests_by_table: int = 0

    def count_step(self, num_tokens: int, num_prefilled: int) -> None:
        """The host has read a step that computed so many tokens of prompts and returned so many new ones."""
        self.num_steps += 1
        self.prefilled_tokens += num_prefilled
        self.generated_tokens += num_tokens
        self.step_tokens[bisect_left(STEP_TOKENS_BOUNDS, num_tokens + num_prefilled)] += 1


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot.

    num_running, num_waiting: sequences now; preempted ones wait, and those that wait together count once.
    num_steps, num_preemptions, num_finished: totals; aborted requests count as finished.
    num_not_finite: requests that ended because their logits were not finite.
    num_swap_preemptions: of the preemptions, those whose blocks went to host memory.
    num_shared_prefix_steps: those of the steps that read a prefix once for all sequences that share it.
    prompt_tokens: of requests admitted, prefix hits included. generated_tokens: those the host has read.
    prefix_cache_queries, prefix_cache_hits: prompt tokens looked up and found, in tokens.
    prefix_cache_state_misses: prompt tokens that were in the cache, but had to be computed again, because no snapshot
        of recurrent layers' states stood behind them.
    prefix_cache_host_hits: of these hits, those in blocks that came back from host memory.
    num_blocks, num_used_blocks: blocks that can be allocated, and those referenced now.
    num_cached_blocks, num_host_cached_blocks: blocks that a prefix could hit, in the pool, free or not, and in host
        memory.
    num_swap_blocks, num_used_swap_blocks: blocks that the swap space can hold, and those in the chunks that sequences
        have there.
    num_swapped_out, num_swapped_in: totals, in blocks of preempted sequences.
    prefilled_tokens: tokens that steps computed without sampling each: of prompts, and of sequences computed again.
    num_guesses, num_kept_guesses: tokens of constrained sequences that were sampled before their masks were made, and
        those of them that the constraint allowed.
    num_requests_by_table: requests admitted whose constraint the device follows by itself.
    step_tokens: num_steps by the tokens that each prefilled and returned: those within each of `STEP_TOKENS_BOUNDS`,
        and above them.
    expert_load: tokens by expert, with `EngineArgs.expert_load`; None without.
    asleep: the level that the engine sleeps at; 0 awake.
    tokens_held, token_slots: tokens in the referenced blocks (a shared one counts once), and what they could hold.
    """

    num_running: int
    num_waiting: int
    num_steps: int
    num_preemptions: int
    num_swap_preemptions: int
    num_finished: int
    num_not_finite: int
    prompt_tokens: int
    prefilled_tokens: int
    generated_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    prefix_cache_host_hits: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_host_cached_blocks: int
    num_swap_blocks: int
    num_used_swap_blocks: int
    num_swapped_out: int
    num_swapped_in: int
    tokens_held: int
    token_slots: int
    num_shared_prefix_steps: int
    num_guesses: int
    num_kept_guesses: int
    num_requests_by_table: int
    step_tokens: tuple[int, ...]
    expert_load: ExpertLoad | None = None
    prefix_cache_state_misses: int = 0
    asleep: int = 0

    @property
    def kv_cache_usage(self) -> float:
        """The fraction of the pool's blocks in use."""
        return self.num_used_blocks / self.num_blocks

    @property
    def prefix_cache_hit_rate(self) -> float:
        """The fraction of queried prompt tokens that were found; 0 before the first query."""
        return self.prefix_cache_hits / self.prefix_cache_queries if self.prefix_cache_queries else 0.0

    @classmethod
    def total(cls, stats: "Iterable[EngineStats]") -> "EngineStats":
        """The sum over several engines."""
        every = list(stats)
        others = ("step_tokens", "expert_load", "asleep")
        names = [one.name for one in fields(cls) if one.name not in others]
        sums = {name: sum(getattr(one, name) for one in every) for name in names}
        step_tokens = tuple(map(sum, zip(*(one.step_tokens for one in every), strict=True)))
        expert_load = ExpertLoad.total(one.expert_load for one in every)
        asleep = max((one.asleep for one in every), default=0)
        return cls(**sums, step_tokens=step_tokens, expert_load=expert_load, asleep=asleep)
