"""Attention over a paged KV cache, what moves tokens and blocks in and out of it, the first half of a gated MLP, the
draw of tokens, products with weights in few bits, and sums over devices, on GPUs.

One function a job, each a pure function to be called under `jax.jit`; the package depends on JAX alone. The pool
of one layer, and how a sequence finds its tokens in it:

    kv_pool [num_blocks, 2, kv_heads, block_size, head_dim]     [block, 0] holds keys, [block, 1] values
            [num_blocks, 1, kv_heads, block_size, head_dim]     latents: keys whose first columns are the values
    block_tables int32 [rows, M]                                token p of row r is in block block_tables[r, p // BS],
                                                                at offset p % BS
    slot = block * block_size + offset                          where `write_kv` puts a token

Block 0 is the null block: padded rows write there and no live token is in it. Slots that no live token owns may
hold anything, NaN included; table entries past a row's last token may be anything too.

Functions that return pools update them in place when the caller's jit donates them. Each op has a folder here, with its
contract, its implementations and what they need; `registry` picks, and `register_backend` and `register_implementation`
add to what it picks from. `docs/kernels.md` describes the kernels, their sources and their measured speed.
"""

from jpaged.pallas_kernels.all_reduce.api import (
    all_reduce_add_norm,
    all_reduce_peers,
    all_reduce_unsupported,
)
from jpaged.pallas_kernels.all_reduce.inbox import initial_all_reduce_state
from jpaged.pallas_kernels.contiguous_attention.addresses import Addresses
from jpaged.pallas_kernels.contiguous_attention.api import contiguous_attention
from jpaged.pallas_kernels.decode_attention.api import decode_attention
from jpaged.pallas_kernels.expanded_attention.api import Expansion, expanded_attention
from jpaged.pallas_kernels.fp8_product.api import fp8_product
from jpaged.pallas_kernels.gated_delta_rule.api import gated_delta_rule
from jpaged.pallas_kernels.gated_product.api import gated_product
from jpaged.pallas_kernels.grouped_product.api import gated_grouped_product, weighted_grouped_product
from jpaged.pallas_kernels.grouped_product.sorting import sort_by_expert
from jpaged.pallas_kernels.int4_product.api import int4_product
from jpaged.pallas_kernels.int8_product.api import int8_product
from jpaged.pallas_kernels.invariant_attention.api import invariant_attention
from jpaged.pallas_kernels.invariant_product.api import invariant_product, invariant_product_backend
from jpaged.pallas_kernels.mixed_attention.api import mixed_attention
from jpaged.pallas_kernels.move_blocks.api import copy_blocks, gather_blocks, scatter_blocks
from jpaged.pallas_kernels.quantized_grouped_product.api import quantized_grouped_product
from jpaged.pallas_kernels.ragged_attention.api import ragged_attention
from jpaged.pallas_kernels.registry import register_backend, register_implementation, unregister_backend
from jpaged.pallas_kernels.rope_and_write.api import rope_and_write, split_latents, split_qkv, split_queries
from jpaged.pallas_kernels.round_rows.api import round_rows
from jpaged.pallas_kernels.round_rows.operands import RoundedRows, Sums
from jpaged.pallas_kernels.route_tokens.api import route_tokens, route_tokens_backend
from jpaged.pallas_kernels.route_tokens.choice import ExpertChoice
from jpaged.pallas_kernels.route_tokens.rows import RoutedTokens, SortedRows
from jpaged.pallas_kernels.sample_tokens.api import sample_tokens, sample_tokens_backend
from jpaged.pallas_kernels.shared_prefix_attention.api import shared_prefix_attention
from jpaged.pallas_kernels.shared_prefix_attention.merge import merge_attention
from jpaged.pallas_kernels.short_convolution.api import short_convolution
from jpaged.pallas_kernels.state_space_dual.api import state_space_dual
from jpaged.pallas_kernels.write_kv.api import write_kv

__all__ = [
    "Addresses",
    "Expansion",
    "ExpertChoice",
    "RoundedRows",
    "RoutedTokens",
    "SortedRows",
    "Sums",
    "all_reduce_add_norm",
    "all_reduce_peers",
    "all_reduce_unsupported",
    "contiguous_attention",
    "copy_blocks",
    "decode_attention",
    "expanded_attention",
    "fp8_product",
    "gated_delta_rule",
    "gated_grouped_product",
    "gated_product",
    "gather_blocks",
    "initial_all_reduce_state",
    "int4_product",
    "int8_product",
    "invariant_attention",
    "invariant_product",
    "invariant_product_backend",
    "merge_attention",
    "mixed_attention",
    "quantized_grouped_product",
    "ragged_attention",
    "register_backend",
    "register_implementation",
    "rope_and_write",
    "round_rows",
    "route_tokens",
    "route_tokens_backend",
    "sample_tokens",
    "sample_tokens_backend",
    "scatter_blocks",
    "shared_prefix_attention",
    "short_convolution",
    "sort_by_expert",
    "split_latents",
    "split_qkv",
    "split_queries",
    "state_space_dual",
    "unregister_backend",
    "weighted_grouped_product",
    "write_kv",
]
