"""Contiguous attention in plain XLA: the same calls, by JAX's own attention over gathered keys and values.

It reads no entry that a row's tokens do not have, so it serves addresses of which only some have memory, with gaps or
without. It gathers each row's whole stretch: made for tests and small sizes.
"""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.contiguous_attention import attend
from jpaged.pallas_kernels.contiguous_attention.addresses import Addresses
from jpaged.pallas_kernels.contiguous_attention.attend import Keys, Operands
from jpaged.pallas_kernels.contiguous_attention.calls import DenseCall, PackedCall


def contiguous_attention(operands: Operands, addresses: Addresses, scale: float) -> jax.Array:
    """`contiguous_attention` of the package, checked."""
    return attend.attend(Xla(), operands, addresses, scale)


class Xla:
    """`attend.Kernel`."""

    def dense(self, call: DenseCall, kv: Keys) -> jax.Array:
        addresses, first = kv.addresses, jnp.zeros_like(call.kv_lens)
        stretches = jnp.arange(addresses.num_stretches, dtype=jnp.int32)
        k, v = (_tokens(x, stretches, first, call.kv_lens, addresses.longest, addresses) for x in (kv.keys, kv.values))
        return jax.nn.dot_product_attention(
            call.q, k, v, scale=kv.scale, key_value_seq_lengths=call.kv_lens, implementation="xla"
        )

    def packed(self, q: jax.Array, call: PackedCall, kv: Keys) -> tuple[jax.Array, jax.Array]:
        tokens, addresses = q.shape[1], kv.addresses
        q_lens, kv_lens = call.q_lens[0], call.kv_lens[0]
        begins, firsts = call.q_offsets[0, :-1], call.kv_offsets[0, :-1]
        stretches, inside = firsts // addresses.stretch, firsts % addresses.stretch
        longest = min(tokens, addresses.longest) if call.is_causal else addresses.longest
        k, v = (_tokens(x, stretches, inside, kv_lens, longest, addresses) for x in (kv.keys, kv.values))
        token = jnp.arange(tokens, dtype=jnp.int32)
        queries = q[0].at[begins[:, None] + token].get(mode="clip")
        out, lse = jax.nn.dot_product_attention(
            queries,
            k,
            v,
            scale=kv.scale,
            is_causal=call.is_causal,
            query_seq_lengths=q_lens,
            key_value_seq_lengths=kv_lens,
            implementation="xla",
            return_residual=True,
        )
        place = jnp.where(token < q_lens[:, None], begins[:, None] + token, tokens)
        flat = jnp.zeros_like(q[0]).at[place].set(out, mode="drop")
        return flat[None], lse.astype(jnp.float32).swapaxes(1, 2)


def _tokens(
    x: jax.Array, stretches: jax.Array, first: jax.Array, lens: jax.Array, most: int, addresses: Addresses
) -> jax.Array:
    """[rows, most, kv_heads, head_dim]: each stretch's tokens from position `first` on, and 0 behind `lens` of them."""
    position = jnp.arange(most, dtype=jnp.int32)
    is_token = position < lens[:, None]
    entries = addresses.entries(stretches[:, None], first[:, None] + position)
    found = x.at[jnp.where(is_token, entries, 0)].get(mode="clip")
    return jnp.where(is_token[..., None, None], found, 0)
