"""Linear layers: their products, and what of them tensor parallelism splits."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.models.collectives import ALONE
from jpaged.models.linear import Embedding, Linear, PartialSum

RNG = np.random.default_rng(3)


def make(inputs: tuple[int, ...], outputs: tuple[int, ...], **options: Any) -> Linear:
    linear = Linear(inputs, outputs, 0.1, jnp.dtype(jnp.float32), nnx.Rngs(0), **options)
    if linear.bias is not None:
        linear.bias[...] = RNG.standard_normal(linear.bias.shape)
    return linear


@pytest.mark.parametrize(
    ("inputs", "outputs", "options", "axes"),
    [
        ((6,), (4,), {}, (None, None)),
        ((6,), (4,), {"shard_axis": 1}, (1, 0)),
        ((6,), (2, 5, 3), {"shard_axis": 1, "kv_slots": 2}, (1, 0)),
        ((6,), (2, 5), {"shard_axis": 2}, (2, 1)),
        ((6,), (4,), {"shard_axis": 0, "outputs_first": True}, (0, 0)),
    ],
)
def test_a_product_whose_outputs_may_be_split(inputs: Any, outputs: Any, options: Any, axes: Any) -> None:
    linear = make(inputs, outputs, bias=True, **options)
    assert linear.bias is not None
    assert (linear.kernel.shard_axis, linear.bias.shard_axis) == axes
    assert linear.kernel.kv_slots == linear.bias.kv_slots == options.get("kv_slots", 0)
    x = RNG.standard_normal((7, *inputs), np.float32)
    kernel = np.asarray(linear.kernel[...]).T if options.get("outputs_first") else np.asarray(linear.kernel[...])
    want = np.tensordot(x, kernel, len(inputs)) + np.asarray(linear.bias[...])
    np.testing.assert_allclose(linear(x), want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="call it"):
        linear.partial_sum(x)


def test_terms_of_split_inputs_add_up_to_the_product_and_the_bias_counts_once() -> None:
    linear = make((4, 3), (5,), bias=True, shard_axis=0)
    assert linear.bias is not None
    assert (linear.kernel.shard_axis, linear.bias.shard_axis) == (0, None)
    x = RNG.standard_normal((7, 4, 3), np.float32)
    whole = linear.partial_sum(x)
    want = np.tensordot(x, np.asarray(linear.kernel[...]), 2)
    np.testing.assert_allclose(whole.term, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(whole.bias, linear.bias[...])
    with pytest.raises(ValueError, match="call partial_sum"):
        linear(x)


def test_two_partial_sums_are_one() -> None:
    one, other = PartialSum(jnp.ones((2, 3)), jnp.full(3, 2.0)), PartialSum(jnp.full((2, 3), 4.0))
    for both in (one + other, other + one):
        assert (both.term == 5).all()
        assert (both.bias == 2).all()
    assert ((one + one).bias == 4).all()
    assert (other + other).bias is None


def test_an_embedding_gives_its_rows_and_in_16_bits_logits_of_float32() -> None:
    table = Embedding(11, 6, 1.0, jnp.dtype(jnp.bfloat16), nnx.Rngs(0))
    rows = table.lookup(jnp.array([3, 0, 3]), ALONE)
    np.testing.assert_array_equal(rows, table.kernel[...][jnp.array([3, 0, 3])])
    logits = table.logits(rows)
    assert logits.dtype == jnp.float32
    want = np.asarray(rows, np.float32) @ np.asarray(table.kernel[...], np.float32).T
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-5)
    assert table(rows).dtype == jnp.bfloat16
