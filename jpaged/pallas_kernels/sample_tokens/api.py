"""The draw of tokens from logits: the contract."""

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.registry import Op
from jpaged.pallas_kernels.sample_tokens.operands import Operands

OP = Op("sample_tokens", __package__)


def sample_tokens(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array | None,
    top_p: jax.Array | None,
    min_p: jax.Array | None,
    seeds: jax.Array,
    positions: jax.Array,
    *,
    backend: str | None = None,
) -> jax.Array:
    """Draws a token for every row: temperature, min_p, top_k and top_p, in this order, and one draw with keyed noise.

    min_p keeps the tokens with p >= min_p * p_max. top_k keeps the k most likely, and those tied with the k-th. top_p
    keeps the fewest most likely of what is left whose probabilities reach the share top_p, and those tied with the last
    of them; the most likely token always. The token is the argmax of logit / temperature + Gumbel noise over what is
    kept, and the noise a hash of (seed, position, token id): a row's token does not depend on the other rows. Backends
    draw the same token save where two scores, or a sum and its share, are within float32 rounding of each other (about
    1e-6).

    Args:
        logits: float32 [R, V]. NaN counts as minus infinity, and plus infinity as the largest float.
        temperature: float32 [R]; 0 takes the most likely token, the lowest id on ties, and heeds nothing else.
        top_k: int32 [R], 0 or less for all; None where no row has one.
        top_p: float32 [R], 1 for all; None where no row has one.
        min_p: float32 [R], 0 for all; None where no row has one.
        seeds: uint32 [R, 2]; the low and the high half of a 64-bit seed.
        positions: int32 [R]; the position that the new token will have.
        backend: None (by device), "hopper", "triton" or "xla".
    Returns:
        int32 [R], each in 0 .. V - 1. A row whose logits are all minus infinity gets token 0.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    check.check_rank("logits", logits, "R, V")
    rows = logits.shape[0]
    if logits.dtype != jnp.float32 or logits.shape[1] < 1:
        raise ValueError(f"logits must be float32 [R, V] with V > 0, got {logits.dtype}{tuple(logits.shape)}")
    check.check_array("temperature", temperature, jnp.float32, "R", (rows,))
    for name, x, dtype in (("top_k", top_k, jnp.int32), ("top_p", top_p, jnp.float32), ("min_p", min_p, jnp.float32)):
        if x is not None:
            check.check_array(name, x, dtype, "R", (rows,))
    check.check_array("seeds", seeds, jnp.uint32, "R, 2", (rows, 2))
    check.check_int32("positions", positions, "R", (rows,))
    kernel = OP.pick(backend, logits).run
    if rows == 0:
        return jnp.zeros(0, jnp.int32)
    return kernel(Operands(logits, temperature, top_k, top_p, min_p, seeds, positions))


def sample_tokens_backend(vocab_size: int, backend: str | None = None) -> str:
    """The backend that `sample_tokens` takes on this device for this many tokens: "hopper", "triton" or "xla".

    backend: as of `sample_tokens`.
    """
    logits = jax.ShapeDtypeStruct((1, vocab_size), jnp.float32)
    return OP.pick(backend, logits).backend
