"""From a router's logits to rows sorted by expert, which the grouped products take: the contract.

    logits [T, E] --> the k best experts of each token and their weights
                  --> rows [A], A = T * k, sorted by expert     | expert 0 | expert 2 | expert 3 .. | of none here |
                      tokens, weights [A]                       whose each row is, and what its result is multiplied by
                      places [T, k]                             where the rows of each token are
                      group_sizes, tiles                        which rows an expert has

Everything stays on the device, and nothing is sorted: a token has an expert once at most, so the rank of a row among
those of its expert is a sum over a column of zeros and ones. "triton" does it in one kernel while tokens are few, and
in two else; it is taken on Hopper, too.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common import arguments as check
from jpaged.pallas_kernels.registry import REFERENCE, Op, canonical, is_hopper
from jpaged.pallas_kernels.route_tokens.choice import ExpertChoice
from jpaged.pallas_kernels.route_tokens.operands import Operands
from jpaged.pallas_kernels.route_tokens.rows import RoutedTokens

OP = Op("route_tokens", __package__, also={"triton": is_hopper})


def route_tokens(
    logits: jax.Array,
    choice: ExpertChoice,
    *,
    correction: jax.Array | None = None,
    live: jax.Array | None = None,
    first: jax.Array | None = None,
    held: int | None = None,
    tile_height: int = 64,
    backend: str | None = None,
) -> RoutedTokens:
    """The experts of each token, their weights, and the rows of the experts that are here, sorted.

    Of equal scores the expert of the lower number wins; NaN is less than everything. A token whose logits are NaN gets
    k experts too. Backends compute scores, by which "softmax" that is not renormalized picks, to within rounding.

    Args:
        logits: float32 [T, E].
        choice: how experts are picked.
        correction: float32 [E], added to the scores when experts are picked, not to the weights; or None.
        live: bool [T]; other tokens have no rows. None where all are live.
        first, held: experts first .. first + held - 1 are here (int32 scalar, and a number); None for all.
        tile_height: rows of a tile, at most.
        backend: "triton" or "xla"; None picks by device and shapes.
    Returns:
        The experts and weights of all tokens, whether these experts are here or not, and always the sorted rows of
        those that are.
    Raises:
        ValueError: an argument does not fit; it is named.
    """
    tokens, experts = _check_logits(logits)
    if not 1 <= choice.per_token <= experts:
        raise ValueError(f"choice.per_token must be 1 .. {experts}, the number of experts, got {choice.per_token}")
    if experts % choice.groups or choice.per_token > choice.kept_groups * (experts // choice.groups):
        raise ValueError(
            f"choice must have groups that divide {experts} experts, and kept ones that have {choice.per_token}, got"
            f" groups={choice.groups}, kept_groups={choice.kept_groups}"
        )
    if correction is not None:
        check.check_array("correction", correction, jnp.float32, "E", (experts,))
    if live is not None:
        check.check_array("live", live, jnp.bool_, "T", (tokens,))
    if (first is None) != (held is None):
        raise ValueError("first and held must be given together, or both left out")
    if first is not None:
        check.check_scalar("first", first)
    if held is not None and not 1 <= held <= experts:
        raise ValueError(f"held must be 1 .. {experts}, the number of experts, got {held}")
    if tile_height < 1:
        raise ValueError(f"tile_height must be at least 1, got {tile_height}")
    if tokens == 0:
        raise ValueError("logits must have a token, got shape " + str(tuple(logits.shape)))
    run = OP.pick(backend, logits, choice).run
    return run(Operands(logits, correction, live, first), choice=choice, held=held or experts, tile_height=tile_height)


def route_tokens_backend(logits: Any, choice: ExpertChoice, backend: str | None = None) -> str:
    """The backend to route with where the grouped products have `backend`: that one if it can, else "xla".

    logits, choice: as of `route_tokens`; of logits shape and dtype are enough.
    """
    _check_logits(logits)
    if backend is not None and "," not in backend and OP.unsupported(canonical(backend), logits, choice) is not None:
        return REFERENCE
    return OP.pick(backend, logits, choice).backend


def _check_logits(logits: Any) -> tuple[int, int]:
    check.check_array("logits", logits, jnp.float32, "T, E", (None, None))
    return logits.shape
