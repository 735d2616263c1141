"""What the scheduler is given: sizes, policies, and the groups of layers that share block tables."""

from dataclasses import dataclass
from typing import get_args

from jpaged.api.config import Policy, PreemptionMode
from jpaged.api.errors import InvalidParameterError
from jpaged.engine.interface import CacheGroup
from jpaged.engine.kv.footprint import Footprint


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler may use.

    block_size: tokens a block holds.
    num_blocks: blocks in the pool, the null block included; so num_blocks - 1 can be allocated.
    max_num_seqs: slots, which is the most sequences that run at once.
    max_num_batched_tokens: the token budget of one step.
    max_model_len: the longest a sequence may grow, prompt and output, in tokens.
    enable_prefix_caching: reuse the blocks of equal prefixes.
    shared_prefix_attention: tell the executor, for each decode step, which rows begin with the same blocks.
    policy: "fcfs" runs the earliest arrival first; "priority" the lowest priority value, then the earliest.
    watermark: the fraction of the pool that admitting a new request must leave free, against thrashing.
    pipeline_depth: steps dispatched before the first one's tokens are read; 0 is the plain synchronous loop.
    num_swap_chunks: chunks of `SWAP_CHUNK_BLOCKS` blocks in host memory.
    preemption_mode: what becomes of preempted sequences. "swap": their blocks go to host memory, as long as there is
        room; "recompute": they are computed again; "auto": groups swap, single sequences are computed again.
    host_prefix_cache: prefix blocks that the pool reuses go to host memory, where they can be hit, as long as no
        preempted sequences need the room.
    tokens_per_row: the most tokens that a step brings for a decoding sequence, where it has no prompts to compute.
    cache_groups: layers that keep the same of a token, each with block tables of its own (`CacheGroup`); one at least.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True
    shared_prefix_attention: bool = False
    policy: Policy = "fcfs"
    watermark: float = 0.01
    pipeline_depth: int = 2
    num_swap_chunks: int = 0
    preemption_mode: PreemptionMode = "auto"
    host_prefix_cache: bool = False
    tokens_per_row: int = 1
    cache_groups: tuple[CacheGroup, ...] = (CacheGroup(),)

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "tokens_per_row"):
            if getattr(self, name) < 1:
                raise InvalidParameterError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.num_blocks < 2:
            raise InvalidParameterError(
                f"num_blocks must be at least 2 (one is the null block), got {self.num_blocks}."
            )
        if self.policy not in ("fcfs", "priority"):
            raise InvalidParameterError(f'policy must be "fcfs" or "priority", got {self.policy!r}.')
        if not self.cache_groups:
            raise InvalidParameterError("cache_groups must name one group of layers at least, got none.")
        for group in self.cache_groups:
            if group.window is not None and group.window < 1:
                raise InvalidParameterError(f"A cache group's window must be at least 1, got {group.window}.")
        if not 0.0 <= self.watermark < 1.0:
            raise InvalidParameterError(f"watermark must be in [0, 1), got {self.watermark}.")
        for name in ("pipeline_depth", "num_swap_chunks"):
            if getattr(self, name) < 0:
                raise InvalidParameterError(f"{name} must be at least 0, got {getattr(self, name)}.")
        if self.preemption_mode not in get_args(PreemptionMode):
            raise InvalidParameterError(
                f'preemption_mode must be "auto", "swap" or "recompute", got {self.preemption_mode!r}.'
            )
        if self.host_prefix_cache and not (self.enable_prefix_caching and self.num_swap_chunks):
            raise InvalidParameterError(
                "host_prefix_cache=True keeps blocks of the prefix cache in the swap space: it needs "
                "enable_prefix_caching=True, and a swap_space that holds a chunk of 16 blocks at least."
            )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each cache group, as `CacheGroup.window`."""
        return tuple(group.window for group in self.cache_groups)

    @property
    def footprint(self) -> Footprint:
        """What sequences need of the pool."""
        return Footprint(self.block_size, self.windows, self.max_num_batched_tokens, self.tokens_per_row)

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)
