"""Contiguous attention by cuDNN, through JAX's calls of it; nothing of the kernel is ours.

dense     `jax.nn.dot_product_attention(implementation="cudnn")`: 3,808 GB/s on an H200, 64 sequences of 4,096
          tokens, 32 query and 8 key-value heads of 128 in 16 bits
packed    offsets are not in that function's arguments, so it takes the one below it, `fused_attention_stablehlo`
"""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.arguments import ArrayLike
from jpaged.pallas_kernels.contiguous_attention import attend
from jpaged.pallas_kernels.contiguous_attention.addresses import Addresses
from jpaged.pallas_kernels.contiguous_attention.attend import Keys, Operands
from jpaged.pallas_kernels.contiguous_attention.calls import DenseCall, PackedCall
from jpaged.pallas_kernels.devices import default_device

MOST_ELEMENTS = 2**31 - 1
"""Of an array of keys or values: cuDNN's offsets count elements in 32 bits."""


def contiguous_attention(operands: Operands, addresses: Addresses, scale: float) -> jax.Array:
    """`contiguous_attention` of the package, checked."""
    return attend.attend(Cudnn(), operands, addresses, scale)


def unsupported(q: ArrayLike, keys: ArrayLike, addresses: Addresses, is_mixed: bool) -> str | None:
    """Why cuDNN does not take these arguments, on a device that it serves."""
    head_dim, capability = q.shape[2], _capability()
    most = 256 if capability is None or capability >= (9, 0) else 128
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN's attention takes bfloat16 and float16, not {q.dtype}"
    if head_dim > most or head_dim % 8:
        return f"cuDNN's attention takes head_dim up to {most} in steps of 8, not {head_dim}"
    if addresses.has_gaps or keys.shape[0] != addresses.num_entries:
        return "its arrays must hold stretches without gaps, and nothing else"
    if keys.shape[0] * keys.shape[1] * keys.shape[2] > MOST_ELEMENTS:
        return f"its offsets are in 32 bits, and keys have {keys.shape[0] * keys.shape[1] * keys.shape[2]:,} elements"
    if is_mixed and capability is not None and capability < (9, 0):
        return "cuDNN attends to packed sequences from compute capability 9.0 (Hopper) on, and chunks are packed"
    return None


def _capability() -> tuple[int, int] | None:
    """Compute capability of JAX's default device; None where it is not a GPU."""
    return default_device().capability


class Cudnn:
    """`attend.Kernel`."""

    def dense(self, call: DenseCall, kv: Keys) -> jax.Array:
        addresses = kv.addresses
        k, v = (x.reshape(addresses.num_stretches, addresses.stretch, *x.shape[1:]) for x in (kv.keys, kv.values))
        return jax.nn.dot_product_attention(
            call.q, k, v, scale=kv.scale, key_value_seq_lengths=call.kv_lens, implementation="cudnn"
        )

    def packed(self, q: jax.Array, call: PackedCall, kv: Keys) -> tuple[jax.Array, jax.Array]:
        from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

        if call.q_lens.shape[1] == 1:  # JAX takes one segment for a batch without offsets
            call = _with_an_empty_row(call)
        out, lse = dot_product_attention(
            q,
            kv.keys[None],
            kv.values[None],
            q_seqlen=call.q_lens,
            kv_seqlen=call.kv_lens,
            q_offsets=call.q_offsets,
            kv_offsets=call.kv_offsets,
            scale=kv.scale,
            mask_type=MaskType.PADDING_CAUSAL if call.is_causal else MaskType.PADDING,
            return_residual=True,
        )
        return out, lse


def _with_an_empty_row(call: PackedCall) -> PackedCall:
    none = jnp.zeros((1, 1), jnp.int32)

    def twice_the_end(offsets: jax.Array) -> jax.Array:
        return jnp.concatenate((offsets, offsets[:, -1:]), axis=1)

    return PackedCall(
        jnp.concatenate((call.q_lens, none), axis=1),
        jnp.concatenate((call.kv_lens, none), axis=1),
        twice_the_end(call.q_offsets),
        twice_the_end(call.kv_offsets),
        call.is_causal,
    )
