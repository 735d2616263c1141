"""State space duality against its definition in float64: steps, ragged chunks, whole sequences, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import state_space_dual
from jpaged.pallas_kernels.state_space_dual.reference import state_space_sequences
from tests.pallas_kernels.marks import WITH_TRITON, needs_triton

NUM_SLOTS, GROUPS, HEADS, HEAD_DIM, STATE_DIM = 7, 2, 6, 24, 16
TOKENS = 160


def operands(tokens, rng, dtype=np.float32):
    """x, dt, a, b, c and d."""
    x = rng.standard_normal((tokens, HEADS, HEAD_DIM))
    b, c = (rng.standard_normal((tokens, GROUPS, STATE_DIM)) for _ in range(2))
    dt, a, d = rng.exponential(0.5, (tokens, HEADS)), -rng.exponential(0.5, HEADS), rng.standard_normal(HEADS)
    x, b, c = (jnp.asarray(z, dtype) for z in (x, b, c))
    dt, a, d = (jnp.asarray(z, jnp.float32) for z in (dt, a, d))
    return x, dt, a, b, c, d


def exact(states, given, slots, fresh, lengths):
    """The definition, token by token, in float64. Returns outputs of all tokens, and states."""
    states = np.asarray(states, np.float64).copy()
    x, dt, a, b, c, d = (np.asarray(z, np.float64) for z in given)
    out, t = np.zeros_like(x), 0
    for slot, is_fresh, length in zip(slots, fresh, lengths, strict=True):
        live = 0 <= slot < NUM_SLOTS
        state = np.zeros(states.shape[1:]) if is_fresh or not live else states[slot].copy()
        for _ in range(length):
            for head in range(HEADS) if live else ():
                group = head // (HEADS // GROUPS)
                kept = np.exp(dt[t, head] * a[head]) * state[head]
                state[head] = kept + dt[t, head] * np.outer(x[t, head], b[t, group])
                out[t, head] = state[head] @ c[t, group] + d[head] * x[t, head]
            t += 1
        if live and length:
            states[slot] = state
    return out, states


def states_of(rng):
    states = rng.standard_normal((NUM_SLOTS, HEADS, HEAD_DIM, STATE_DIM)).astype(np.float32)
    states[2] = np.nan  # what a former tenant may have left
    return states


def check(found, states, right, right_states, dtype=np.float32):
    tolerance = {"rtol": 2e-5, "atol": 1e-4} if dtype == np.float32 else {"rtol": 2e-2, "atol": 4e-2}
    np.testing.assert_allclose(np.asarray(found, np.float64), right, **tolerance)
    np.testing.assert_allclose(np.asarray(states, np.float64), right_states, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_a_step_is_that_of_the_definition(backend, dtype):
    rng = np.random.default_rng(0)
    slots, fresh = [4, NUM_SLOTS, 2, 0, -1], [False, False, True, False, True]
    states, given = states_of(rng), operands(5, rng, dtype)
    right = exact(states, given, slots, fresh, [1] * 5)
    found = state_space_dual(states, *given, np.array(slots, np.int32), np.array(fresh), backend=backend)
    assert found[0].dtype == dtype
    check(*found, *right, dtype)


@pytest.mark.gpu
@needs_triton
def test_a_kernels_step_of_many_lines_and_columns_that_are_no_powers_of_two():
    rng = np.random.default_rng(3)
    x, dt, a, _, _, d = operands(2, rng)
    b, c = (jnp.asarray(rng.standard_normal((2, GROUPS, 600)), jnp.float32) for _ in range(2))
    states = rng.standard_normal((2, HEADS, HEAD_DIM, 600)).astype(np.float32)
    slots, fresh = np.array([1, 0], np.int32), np.array([False, True])
    found = [state_space_dual(states, x, dt, a, b, c, d, slots, fresh, backend=one) for one in ("triton", "xla")]
    for kernels, references in zip(*found, strict=True):
        np.testing.assert_allclose(kernels, references, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize(
    "lengths", [[1, 1, 70, 0, 2, 64], [150, 0, 0, 0, 0, 0], [3, 0, 1, 5, 0, 0], [31, 3, 64, 1, 1, 60]]
)
def test_ragged_rows_are_those_of_the_definition(backend, lengths):
    rng = np.random.default_rng(sum(lengths))
    slots = rng.permutation(NUM_SLOTS)[: len(lengths)].astype(np.int32)
    fresh = (rng.random(len(lengths)) < 0.5) | (slots == 2)
    slots[3] = NUM_SLOTS  # a row that stopped
    states, given = states_of(rng), operands(TOKENS, rng)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    right = exact(states, given, slots, fresh, lengths)
    check(*state_space_dual(states, *given, slots, fresh, starts, backend=f"{backend},xla"), *right)


def test_whole_sequences_are_those_of_the_definition_and_pass_gradients():
    rng = np.random.default_rng(1)
    lengths = [5, 50, 1, 33, 71]
    given = operands(TOKENS, rng)
    rows = np.repeat(np.arange(5), lengths).astype(np.int32)
    right, _ = exact(states_of(rng), given, range(5), [True] * 5, lengths)
    np.testing.assert_allclose(jax.jit(state_space_sequences)(*given, rows), right, rtol=2e-5, atol=1e-4)

    direction = [rng.standard_normal(z.shape).astype(np.float32) for z in given]

    @jax.jit
    def along(step):
        moved = [z + step * direct for z, direct in zip(given, direction, strict=True)]
        return jnp.mean(state_space_sequences(*moved, rows) ** 2)

    slope = jax.grad(along)(0.0)
    assert slope == pytest.approx((along(1e-3) - along(-1e-3)) / 2e-3, rel=2e-2)


@needs_triton
def test_what_the_kernel_does_not_take_is_refused_where_it_is_forced():
    rng = np.random.default_rng(0)
    states, slots, fresh = np.zeros((2, HEADS, 24, 2048), np.float32), np.arange(2, dtype=np.int32), np.zeros(2, bool)
    x, dt, a, _, _, d = operands(2, rng)
    b = np.zeros((2, GROUPS, 2048), np.float32)
    with pytest.raises(ValueError, match="state_dim 2048 is above 1024"):
        state_space_dual(states, x, dt, a, b, b, d, slots, fresh, backend="triton")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"states": np.zeros((7, 6, 24, 16), np.float64)}, "states must be float32"),
        ({"x": np.zeros((5, 6, 23), np.float32)}, "x must be"),
        ({"b": np.zeros((5, 4, 16), np.float32)}, "groups a divisor of 6"),
        ({"c": np.zeros((5, 1, 16), np.float32)}, "c must be"),
        ({"dt": np.zeros((5, 2), np.float32)}, "dt .* must have heads = 6"),
        ({"a": np.zeros((5,), np.float32)}, "a .* must have heads = 6"),
        ({"d": np.zeros((6,), np.float16)}, "d must be float32"),
        ({"slots": np.zeros((4,), np.int32)}, "slots .* must have R = 5"),
        ({"fresh": np.zeros((5,), np.int32)}, "fresh must be bool"),
        ({"query_starts": np.zeros((5,), np.int32)}, "query_starts .* must have R . 1 = 6"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, said):
    rng = np.random.default_rng(0)
    arguments = {"states": states_of(rng), "slots": np.arange(5, dtype=np.int32), "fresh": np.zeros((5,), bool)}
    arguments |= dict(zip(("x", "dt", "a", "b", "c", "d"), operands(5, rng), strict=True))
    with pytest.raises(ValueError, match=said):
        state_space_dual(**arguments | change)


@pytest.mark.parametrize("ragged", [False, True])
def test_states_are_updated_in_place(ragged):
    rng = np.random.default_rng(0)
    shape, given = jax.ShapeDtypeStruct((512, HEADS, HEAD_DIM, STATE_DIM), jnp.float32), operands(16, rng)
    slots, fresh = np.arange(16, dtype=np.int32), np.zeros((16,), bool)
    starts = (np.arange(17, dtype=np.int32),) if ragged else ()
    compiled = jax.jit(state_space_dual, donate_argnums=0).lower(shape, *given, slots, fresh, *starts).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 512 * HEADS * HEAD_DIM * STATE_DIM * 4
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 4


def test_tokens_of_no_row_may_be_anything():
    """Attention leaves what it likes in the rows of padding, and the next layer reads it."""
    rng = np.random.default_rng(7)
    slots, fresh, starts = np.array([4, 0], np.int32), np.array([False, True]), np.array([0, 5, 30], np.int32)
    states, (x, dt, a, b, c, d) = states_of(rng), operands(40, rng)
    right = exact(states, (x, dt, a, b, c, d), slots, fresh, [5, 25])
    x, dt, b, c = (jnp.asarray(z).at[30:].set(jnp.nan) for z in (x, dt, b, c))
    out, states = state_space_dual(states, x, dt, a, b, c, d, slots, fresh, starts)
    check(out[:30], states, right[0][:30], right[1])
