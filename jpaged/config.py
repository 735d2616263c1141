"""The control plane's configuration: plain numbers, fixed once the model and its pool are known."""

from dataclasses import dataclass
from typing import Literal

from jpaged.errors import InvalidParameterError


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler may use.

    block_size: tokens a block holds.
    num_blocks: blocks in the pool, the null block included; so num_blocks - 1 can be allocated.
    max_num_seqs: slots, which is the most sequences that run at once.
    max_num_batched_tokens: the token budget of one step.
    max_model_len: the longest a sequence may grow, prompt and output, in tokens.
    enable_prefix_caching: reuse the blocks of equal prefixes.
    policy: "fcfs" runs the earliest arrival first; "priority" the lowest priority value, then the earliest.
    watermark: the fraction of the pool that admitting a new request must leave free, against thrashing.
    pipeline_depth: steps dispatched before the first one's tokens are read; 0 is the plain synchronous loop.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    watermark: float = 0.01
    pipeline_depth: int = 2

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise InvalidParameterError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.num_blocks < 2:
            raise InvalidParameterError(
                f"num_blocks must be at least 2 (one is the null block), got {self.num_blocks}."
            )
        if self.policy not in ("fcfs", "priority"):
            raise InvalidParameterError(f'policy must be "fcfs" or "priority", got {self.policy!r}.')
        if not 0.0 <= self.watermark < 1.0:
            raise InvalidParameterError(f"watermark must be in [0, 1), got {self.watermark}.")
        if self.pipeline_depth < 0:
            raise InvalidParameterError(f"pipeline_depth must be at least 0, got {self.pipeline_depth}.")

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)
