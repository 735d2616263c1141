"""What the scheduler is given: sizes, policies, and the groups of layers that share block tables."""

from dataclasses import dataclass

from jpaged.api.checks import check_choice, check_integer
from jpaged.api.config import Policy, SchedulingOptions
from jpaged.api.errors import InvalidParameterError
from jpaged.engine.footprint import Footprint
from jpaged.engine.interface import CacheGroup


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(SchedulingOptions):
    """What the scheduler may use, and the options that it takes as the user gave them (`EngineArgs` has their meaning).

    block_size: tokens a block holds.
    num_blocks: blocks in the pool, the null block included; so num_blocks - 1 can be allocated.
    max_num_seqs: slots, which is the most sequences that run at once.
    max_num_batched_tokens: the token budget of one step.
    max_model_len: the longest a sequence may grow, prompt and output, in tokens.
    policy: "fcfs" runs the earliest arrival first; "priority" the lowest priority value, then the earliest.
    num_swap_chunks: chunks of `SWAP_CHUNK_BLOCKS` blocks in host memory.
    tokens_per_row: the most tokens that a step brings for a decoding sequence, where it has no prompts to compute.
    cache_groups: layers that keep the same of a token, each with block tables of its own (`CacheGroup`); one at least.
    plans_ahead: the executor maps blocks at places of slots: say in each plan what later ones will probably bring
        (`StepPlan.ahead`), and give a slot the blocks again that it had, where few prefixes are lost by it
        (`scheduler/foresight.py`).
    kv_idle_release_s: as of `EngineArgs`.
    keeps_states: some layers keep a state of each sequence, which lives with its slot. So a sequence's tokens are
        computed in order, each once, in its own slot, from the first on, or from where it was forked, or from a
        snapshot; and what is preempted is computed again.
    num_state_snapshots: copies of states that can be kept for the prefix cache (`kv/snapshots.py`). Without any,
        sequences with states share no prefix.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: Policy = "fcfs"
    num_swap_chunks: int = 0
    tokens_per_row: int = 1
    cache_groups: tuple[CacheGroup, ...] = (CacheGroup(),)
    plans_ahead: bool = False
    kv_idle_release_s: float | None = None
    keeps_states: bool = False
    num_state_snapshots: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "tokens_per_row"):
            if getattr(self, name) < 1:
                raise InvalidParameterError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.num_blocks < 2:
            raise InvalidParameterError(
                f"num_blocks must be at least 2 (one is the null block), got {self.num_blocks}."
            )
        check_choice("policy", self.policy, Policy)
        if not self.cache_groups:
            raise InvalidParameterError("cache_groups must name one group of layers at least, got none.")
        for group in self.cache_groups:
            if group.window is not None and group.window < 1:
                raise InvalidParameterError(f"A cache group's window must be at least 1, got {group.window}.")
        check_integer("num_swap_chunks", self.num_swap_chunks, 0)
        check_integer("num_state_snapshots", self.num_state_snapshots, 0)
        if self.num_state_snapshots and not (self.keeps_states and self.enable_prefix_caching):
            raise InvalidParameterError(
                f"num_state_snapshots={self.num_state_snapshots} needs keeps_states=True and"
                " enable_prefix_caching=True: snapshots are for prefixes of sequences that have states."
            )
        if self.keeps_states and self.enable_prefix_caching and not self.num_state_snapshots:
            raise InvalidParameterError(
                "keeps_states=True needs num_state_snapshots above 0, or enable_prefix_caching=False: a prefix is of no"
                " use without the state after it."
            )
        for name, refused in (
            ("preemption_mode", "swap"),
            ("host_prefix_cache", True),
            ("shared_prefix_attention", True),
        ):
            if self.keeps_states and getattr(self, name) == refused:
                raise InvalidParameterError(
                    f"keeps_states=True needs another {name} than {refused!r}: states stay on the device."
                )
        if self.host_prefix_cache and not (self.enable_prefix_caching and self.num_swap_chunks):
            raise InvalidParameterError(
                "host_prefix_cache=True keeps blocks of the prefix cache in the swap space: it needs "
                "enable_prefix_caching=True, and a swap_space that holds a chunk of 16 blocks at least."
            )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each cache group, as `CacheGroup.window`."""
        return tuple(group.window for group in self.cache_groups)

    @property
    def footprint(self) -> Footprint:
        """What sequences need of the pool."""
        return Footprint(self.block_size, self.windows, self.max_num_batched_tokens, self.tokens_per_row)

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)
