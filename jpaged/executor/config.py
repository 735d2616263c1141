"""The data plane's configuration: shapes, fixed before anything is compiled."""

from dataclasses import dataclass

from jpaged.engine.interface import SamplingVariant
from jpaged.executor.buckets import bucket_for, doublings, geometric_buckets


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """Shapes of the device state and of the programs.

    max_num_seqs: slots. Device arrays have one row more, the null slot, which padded rows use.
    max_model_len: the longest sequence, in tokens; with block_size it gives the block tables' width.
    num_blocks: blocks in the pool, the null block included.
    decode_buckets: ascending batch sizes that decode programs exist for; the last is max_num_seqs.
    token_buckets: ascending token counts that mixed programs exist for; the last is the step's token budget.
    kernel_backend: which implementation of the attention and cache ops; None picks by device.
    """

    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: int
    decode_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    kernel_backend: str | None = None

    @property
    def null_slot(self) -> int:
        return self.max_num_seqs

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def copy_buckets(self) -> tuple[int, ...]:
        """Sizes that the programs for copied blocks and for beams exist for: at most one of each for a slot."""
        return geometric_buckets(8, self.max_num_seqs, 8)

    def sample_buckets(self, variant: SamplingVariant) -> tuple[int, ...]:
        """Rows that the variant's sampling programs exist for."""
        is_rare = variant in (SamplingVariant.FULL, SamplingVariant.BEAM)
        return doublings(self.decode_buckets) if is_rare else self.decode_buckets

    @property
    def scored_buckets(self) -> tuple[int, ...]:
        """Tokens that the programs exist for that score a mixed step's tokens."""
        return doublings(self.token_buckets)

    def mixed_rows(self, token_bucket: int) -> int:
        """Rows of a mixed program: it cannot have more than tokens, nor than slots."""
        return bucket_for(min(token_bucket, self.max_num_seqs), self.decode_buckets)
