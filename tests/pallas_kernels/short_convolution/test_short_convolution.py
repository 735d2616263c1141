"""The short convolution against its definition in float64, and what it refuses."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import short_convolution
from jpaged.pallas_kernels.short_convolution.reference import convolved_sequences

NUM_SLOTS, CHANNELS = 6, 10


def exact(history, x, kernel, slots, fresh, lengths, bias=0.0, activation="silu"):
    history, x, kernel = (np.array(a, np.float64) for a in (history, x, kernel))
    before, out, t = len(kernel) - 1, np.zeros_like(x), 0
    for slot, is_fresh, length in zip(slots, fresh, lengths, strict=True):
        live = 0 <= slot < NUM_SLOTS
        held = history[slot] if live and not is_fresh else np.zeros((before, x.shape[1]))
        inputs = np.concatenate([held, x[t : t + length]])
        for i in range(length):
            total = (inputs[i : i + before + 1] * kernel).sum(0) + bias
            out[t + i] = total / (1 + np.exp(-total)) if activation else total
        t += length
        if live and length:
            history[slot] = inputs[len(inputs) - before :]
    return out, history, t


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("lengths", [None, [1, 5, 0, 2, 3], [9], [1, 1, 1, 1]])
def test_rows_go_on_from_what_their_slots_hold(width, lengths, activation):
    rng = np.random.default_rng(width)
    rows = 4 if lengths is None else len(lengths)
    tokens = 4 if lengths is None else sum(lengths) + 3
    history = rng.standard_normal((NUM_SLOTS, width - 1, CHANNELS)).astype(np.float32)
    history[1] = np.nan
    x, kernel = (rng.standard_normal((n, CHANNELS)).astype(np.float32) for n in (tokens, width))
    slots = np.array([3, 1, 5, 0, NUM_SLOTS][:rows], np.int32)
    fresh = slots == 1
    starts = None if lengths is None else np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    bias = rng.standard_normal(CHANNELS).astype(np.float32) if width == 4 else None
    out, left = short_convolution(history, x, kernel, slots, fresh, starts, bias=bias, activation=activation)
    added = 0.0 if bias is None else bias
    right, right_left, count = exact(history, x, kernel, slots, fresh, lengths or [1] * rows, added, activation)
    np.testing.assert_allclose(out[:count], right[:count], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(left, right_left.astype(np.float32))


@pytest.mark.parametrize("activation", ["silu", None])
def test_whole_sequences_begin_with_zeros(activation):
    rng = np.random.default_rng(0)
    x, kernel = (rng.standard_normal((n, CHANNELS)).astype(np.float32) for n in (12, 4))
    lengths = [5, 1, 6]
    position = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    bias = rng.standard_normal(CHANNELS).astype(np.float32)
    right, _, _ = exact(np.zeros((NUM_SLOTS, 3, CHANNELS)), x, kernel, range(3), [True] * 3, lengths, bias, activation)
    found = convolved_sequences(x, kernel, position, bias, activation)
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)


def test_sums_of_16_bits_are_rounded_once():
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.standard_normal((n, CHANNELS)), jnp.bfloat16) for n in (4, 4))
    history = jnp.asarray(rng.standard_normal((NUM_SLOTS, 3, CHANNELS)), jnp.bfloat16)
    slots, fresh = np.arange(4, dtype=np.int32), np.zeros((4,), bool)
    out, _ = short_convolution(history, x, kernel, slots, fresh)
    right, _, _ = exact(history, x, kernel, slots, fresh, [1] * 4)
    np.testing.assert_allclose(np.asarray(out, np.float64), right, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": np.zeros((4, 9), np.float32)}, "x must be"),
        ({"history": np.zeros((NUM_SLOTS, 0, CHANNELS), np.float32)}, "history must keep one input"),
        ({"kernel": np.zeros((3, CHANNELS), np.float32)}, "kernel must be"),
        ({"bias": np.zeros((9,), np.float32)}, "bias must be"),
        ({"slots": np.zeros((4,), np.float32)}, "slots must be int32"),
        ({"fresh": np.zeros((5,), bool)}, "fresh .* must have R = 4"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, said):
    arguments = {"history": np.zeros((NUM_SLOTS, 3, CHANNELS), np.float32), "x": np.zeros((4, CHANNELS), np.float32)}
    arguments |= {"kernel": np.zeros((4, CHANNELS), np.float32), "slots": np.arange(4, dtype=np.int32)}
    with pytest.raises(ValueError, match=said):
        short_convolution(**arguments | {"fresh": np.zeros((4,), bool)} | change)
