"""Attention over a paged KV cache, what moves tokens and blocks in and out of it, the first half of a gated MLP, the
draw of tokens, and sums over devices, on GPUs.

One function a job, each a pure function to be called under `jax.jit`; the package depends on JAX alone. The pool
of one layer, and how a sequence finds its tokens in it:

    kv_pool [num_blocks, 2, kv_heads, block_size, head_dim]     [block, 0] holds keys, [block, 1] values
    block_tables int32 [rows, M]                                token p of row r is in block block_tables[r, p // BS],
                                                                at offset p % BS
    slot = block * block_size + offset                          where `write_kv` puts a token

Block 0 is the null block: padded rows write there and no live token is in it. Slots that no live token owns may
hold anything, NaN included; table entries past a row's last token may be anything too.

Functions that return pools update them in place when the caller's jit donates them.
`docs/kernels.md` describes the kernels, their sources and their measured speed.
"""

from jpaged.pallas_kernels.all_reduce import (
    all_reduce_add_norm,
    all_reduce_peers,
    all_reduce_unsupported,
    initial_all_reduce_state,
)
from jpaged.pallas_kernels.gated_product import gated_product
from jpaged.pallas_kernels.mixed_attention import mixed_attention
from jpaged.pallas_kernels.ops import (
    copy_blocks,
    decode_attention,
    gather_blocks,
    ragged_attention,
    rope_and_write,
    sample_tokens,
    sample_tokens_backend,
    scatter_blocks,
    split_qkv,
    write_kv,
)
from jpaged.pallas_kernels.shared_prefix import merge_attention, shared_prefix_attention

__all__ = [
    "all_reduce_add_norm",
    "all_reduce_peers",
    "all_reduce_unsupported",
    "copy_blocks",
    "decode_attention",
    "gated_product",
    "gather_blocks",
    "initial_all_reduce_state",
    "merge_attention",
    "mixed_attention",
    "ragged_attention",
    "rope_and_write",
    "sample_tokens",
    "sample_tokens_backend",
    "scatter_blocks",
    "shared_prefix_attention",
    "split_qkv",
    "write_kv",
]
