"""The data plane's configuration: shapes, fixed before anything is compiled."""

from dataclasses import dataclass

from jpaged.api.config import LogprobsMode
from jpaged.engine.interface import SamplingVariant
from jpaged.executor.buckets import bucket_for, doublings, geometric_buckets
from jpaged.executor.cache.virtual.geometry import Geometry
from jpaged.pallas_kernels.registry import or_reference

LEAST_SAVED_TOKENS = 16_384
"""Tokens that a shared prefix must keep a step from reading in every layer, to be read by kernels of its own. With 8
KV heads of 128 in 16 bits these are 67 MB, 15 us at 4.4 TB/s: about what those kernels and their merge cost at least
(estimated, not measured)."""

SAVED_TOKENS_A_PADDED_ROW = 512
"""The same for each row of padding that the fewer sizes of their programs cost: a row of Llama-3.1-8B is 15 GFLOP, 23
us at 670 TFLOP/s, in which 760 tokens of all layers are read; a row of Qwen3-0.6B is worth 50 (computed, not measured).
"""


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """Shapes of the device state and of the programs.

    max_num_seqs: slots. Device arrays have one row more, the null slot, which padded rows use.
    max_model_len: the longest sequence, in tokens.
    num_blocks: blocks in the pool, the null block included.
    decode_buckets: ascending batch sizes that decode programs exist for; the last is max_num_seqs.
    token_buckets: ascending token counts that mixed programs exist for; the last is the step's token budget.
    kernel_backend: which implementation of the attention and cache ops, and by `optional_backend` of products and of
        sampling; None picks by device.
    shared_prefix_attention: have decode programs that read a prefix once for all rows that share it.
    one_shot_rows: bodies of at most this many rows use the one-shot all-reduce; larger ones use XLA's. Equals the size
        of the largest such body (`largest_body`), or 0.
    one_call_rows: decode steps of at most so many rows may be one program (`is_one_call`); 0: none is.
    logprobs_mode: as of `EngineArgs`.
    batch_invariant: rows are computed in tiles (`models.row_tiles`), and attention by `invariant_attention`.
    kv_scales: of each layer, what keys and what values are divided by before they are rounded to e4m3; None where they
        are kept in the model's dtype.
    geometry: of the virtual layout's arrays, whose pages are the blocks; None for the paged layout.
    contiguous_backend: which implementation of `contiguous_attention`, where the virtual layout's keys and values are
        kept for it; kernel_backend is then None.
    expert_load: bodies count the tokens of each expert (`step/expert_load.py`).
    num_state_snapshots: of sequences' states, kept beside those of the slots (`cache/states.py`).
    """

    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: int
    decode_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    kernel_backend: str | None = None
    shared_prefix_attention: bool = False
    one_shot_rows: int = 0
    one_call_rows: int = 0
    logprobs_mode: LogprobsMode = "raw_logprobs"
    batch_invariant: bool = False
    kv_scales: tuple[tuple[float, float], ...] | None = None
    geometry: Geometry | None = None
    contiguous_backend: str | None = None
    expert_load: bool = False
    num_state_snapshots: int = 0

    @property
    def null_slot(self) -> int:
        return self.max_num_seqs

    @property
    def optional_backend(self) -> str | None:
        """Which implementation of products and of sampling. Even where a kernel backend is forced, few rows are XLA's,
        and so is what its kernels cannot do.
        """
        return or_reference(self.kernel_backend)

    @property
    def max_blocks_per_seq(self) -> int:
        """A block table's width. Sequences leave the entries empty that are for what kernels read behind the longest of
        them."""
        read_behind = 0 if self.geometry is None else self.geometry.read_behind
        return -(-(self.max_model_len + read_behind) // self.block_size)

    def largest_body(self, rows: int) -> int:
        """Rows of the largest body that has no more than so many; 0 if there is none."""
        return max((size for size in (*self.decode_buckets, *self.token_buckets) if size <= rows), default=0)

    @property
    def copy_buckets(self) -> tuple[int, ...]:
        """Sizes that the programs for copied blocks and for beams exist for. A step moves at most one beam a slot; more
        copies than the largest size take several calls.
        """
        return geometric_buckets(8, self.max_num_seqs, 8)

    @property
    def state_copy_buckets(self) -> tuple[int, ...]:
        """Sizes that the program for copied states exists for; more copies take several calls. They are few, since a
        row of padding reads and writes a state, and the largest needs as many beside the arrays.
        """
        return tuple(sorted({min(size, self.max_num_seqs) for size in (4, 16)}))

    @property
    def whole_mask_buckets(self) -> tuple[int, ...]:
        """How many whole masks (a bit for each token) the programs `set_masks` take; more take several calls."""
        return (0, *sorted({min(size, self.max_num_seqs) for size in (8, 64)}))

    def whole_masks(self, batch: int) -> int:
        """How many whole masks the sampling program of `batch` rows takes. Enough for most steps, but no more, since
        unused places are sent with each step, too.
        """
        return min(batch, max(4, batch // 8), 24)

    def sample_buckets(self, variant: SamplingVariant) -> tuple[int, ...]:
        """Rows that the variant's sampling programs exist for."""
        return doublings(self.decode_buckets) if _is_rare(variant) else self.decode_buckets

    def is_one_call(self, batch: int, variant: SamplingVariant) -> bool:
        """Whether there is a `decode_and_sample` of this batch size and variant."""
        return batch <= self.one_call_rows and not _is_rare(variant)

    @property
    def shared_prefix_buckets(self) -> tuple[int, ...]:
        """Batch sizes that decode programs with a shared prefix exist for: few, since each is a body of its own. None
        below 64 rows, up to which padding costs next to nothing.
        """
        if not self.shared_prefix_attention:
            return ()
        least = min(64, self.decode_buckets[-1])
        return tuple(size for size in doublings(self.decode_buckets) if size >= least)

    def shared_prefix_bucket(self, rows: int, num_sharing: int, shared_len: int) -> int | None:
        """The size in which to run so many decode rows so that what some share is read once; None if it does not pay.

        num_sharing, shared_len: as in `StepPlan`.
        """
        buckets = self.shared_prefix_buckets
        if not buckets or num_sharing < 2:
            return None
        bucket = bucket_for(rows, buckets)
        padding = bucket - bucket_for(rows, self.decode_buckets) if bucket > buckets[0] else 0
        least = LEAST_SAVED_TOKENS + SAVED_TOKENS_A_PADDED_ROW * padding
        return bucket if (num_sharing - 1) * shared_len >= least else None

    @property
    def scored_buckets(self) -> tuple[int, ...]:
        """Tokens that the programs exist for that score a mixed step's tokens."""
        return doublings(self.token_buckets)

    def mixed_rows(self, token_bucket: int) -> int:
        """Rows of a mixed program: it cannot have more than tokens, nor than slots."""
        return bucket_for(min(token_bucket, self.max_num_seqs), self.decode_buckets)


def _is_rare(variant: SamplingVariant) -> bool:
    """Whether few requests need the variant, so that there are programs of it for few sizes only."""
    return variant >= SamplingVariant.TABLE
