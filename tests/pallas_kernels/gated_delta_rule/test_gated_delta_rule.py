"""The gated delta rule against its definition in float64: steps, ragged chunks, whole sequences, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import gated_delta_rule
from jpaged.pallas_kernels.gated_delta_rule.reference import gated_delta_sequences
from tests.pallas_kernels.marks import WITH_TRITON, needs_triton

NUM_SLOTS, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 7, 2, 4, 16, 32
TOKENS = 160


def operands(tokens, rng, dtype=np.float32, repeated=None, key_dim=KEY_DIM):
    """Queries, keys, values, decays and betas of so many tokens. repeated: one key for all, no decay, and this beta."""
    q, k = (rng.standard_normal((tokens, KEY_HEADS, key_dim)) for _ in range(2))
    v = rng.standard_normal((tokens, HEADS, VALUE_DIM))
    log_decay, beta = -rng.exponential(0.3, (tokens, HEADS)), rng.uniform(0, 2, (tokens, HEADS))
    if repeated is not None:
        k[:], log_decay[:], beta[:] = k[:1], 0, repeated
    rounded = [jnp.asarray(x, dtype) for x in (q, k, v)]
    return (*rounded, jnp.asarray(log_decay, jnp.float32), jnp.asarray(beta, jnp.float32))


def exact(states, of_tokens, slots, fresh, lengths):
    """The definition, token by token, in float64. Returns outputs of all tokens, and states."""
    states = np.asarray(states, np.float64).copy()
    q, k, v, log_decay, beta = (np.asarray(x, np.float64) for x in of_tokens)
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    out, t = np.zeros_like(v), 0
    for slot, is_fresh, length in zip(slots, fresh, lengths, strict=True):
        live = 0 <= slot < NUM_SLOTS
        state = np.zeros(states.shape[1:]) if is_fresh or not live else states[slot].copy()
        for _ in range(length):
            for head in range(HEADS) if live else ():
                key, query = (x[t, head // (HEADS // KEY_HEADS)] for x in (k, q))
                kept = np.exp(log_decay[t, head]) * state[head]
                state[head] = kept + beta[t, head] * np.outer(key, v[t, head] - key @ kept)
                out[t, head] = query @ state[head] / np.sqrt(q.shape[2])
            t += 1
        if live and length:
            states[slot] = state
    return out, states


def states_of(rng, key_dim=KEY_DIM):
    states = rng.standard_normal((NUM_SLOTS, HEADS, key_dim, VALUE_DIM)).astype(np.float32)
    states[2] = np.nan  # what a former tenant may have left
    return states


def check(found, states, right, right_states, dtype=np.float32):
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if dtype == np.float32 else {"rtol": 2e-2, "atol": 2e-2}
    np.testing.assert_allclose(np.asarray(found, np.float64), right, **tolerance)
    # Of 16-bit inputs, GPUs multiply with the state in TF32.
    of_states = 2e-5 if dtype == np.float32 or jax.default_backend() == "cpu" else 2e-3
    np.testing.assert_allclose(np.asarray(states, np.float64), right_states, rtol=of_states, atol=of_states)


@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_a_step_is_that_of_the_definition(backend, dtype):
    rng = np.random.default_rng(0)
    slots, fresh = [4, NUM_SLOTS, 2, 0, -1], [False, False, True, False, True]
    states, of_tokens = states_of(rng), operands(5, rng, dtype)
    right = exact(states, of_tokens, slots, fresh, [1] * 5)
    found = gated_delta_rule(states, *of_tokens, np.array(slots, np.int32), np.array(fresh), backend=backend)
    assert found[0].dtype == dtype
    check(*found, *right, dtype)


@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize(
    "lengths", [[1, 1, 70, 0, 2, 64], [150, 0, 0, 0, 0, 0], [3, 0, 1, 5, 0, 0], [31, 3, 64, 1, 1, 60], [2] * 6]
)
def test_ragged_rows_are_those_of_the_definition(backend, lengths):
    rng = np.random.default_rng(sum(lengths))
    slots = rng.permutation(NUM_SLOTS)[: len(lengths)].astype(np.int32)
    fresh = (rng.random(len(lengths)) < 0.5) | (slots == 2)
    slots[3] = NUM_SLOTS  # a row that stopped
    states, of_tokens = states_of(rng), operands(TOKENS, rng)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    right = exact(states, of_tokens, slots, fresh, lengths)
    check(*gated_delta_rule(states, *of_tokens, slots, fresh, starts, backend=backend), *right)


@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize(("key_dim", "dtype"), [(96, jnp.bfloat16), (128, np.float32)])
def test_ragged_rows_of_wide_keys_are_those_of_the_definition(backend, key_dim, dtype):
    rng = np.random.default_rng(key_dim)
    slots, fresh = np.array([3, 2, 0], np.int32), np.array([False, True, False])
    states, of_tokens = states_of(rng, key_dim), operands(TOKENS, rng, dtype, key_dim=key_dim)
    right = exact(states, of_tokens, slots, fresh, [70, 1, 66])
    starts = np.array([0, 70, 71, 137], np.int32)
    check(*gated_delta_rule(states, *of_tokens, slots, fresh, starts, backend=backend), *right, dtype)


@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize("beta", [1, 1.7])  # nearer to 2, chunks round by more than `check` allows
def test_keys_that_repeat_lose_nothing(backend, beta):
    rng = np.random.default_rng(5)
    states, of_tokens = states_of(rng), operands(TOKENS, rng, repeated=beta)
    slots, fresh = np.array([1, 7, 7, 7, 7, 7], np.int32), np.zeros((6,), bool)
    starts = np.array([0] + [TOKENS] * 6, np.int32)
    right = exact(states, of_tokens, slots, fresh, starts[1:] - starts[:-1])
    check(*gated_delta_rule(states, *of_tokens, slots, fresh, starts, backend=backend), *right)


def test_whole_sequences_are_those_of_the_definition_and_pass_gradients():
    rng = np.random.default_rng(1)
    lengths = [5, 50, 1, 33, 71]
    of_tokens = operands(TOKENS, rng)
    rows = np.repeat(np.arange(5), lengths).astype(np.int32)
    right, _ = exact(states_of(rng), of_tokens, range(5), [True] * 5, lengths)
    np.testing.assert_allclose(jax.jit(gated_delta_sequences)(*of_tokens, rows), right, rtol=2e-5, atol=2e-5)

    direction = [rng.standard_normal(x.shape).astype(np.float32) for x in of_tokens]

    @jax.jit
    def along(step):
        moved = [x + step * d for x, d in zip(of_tokens, direction, strict=True)]
        return jnp.sum(jnp.sin(gated_delta_sequences(*moved, rows)))

    slope = jax.grad(along)(0.0)
    assert slope == pytest.approx((along(1e-2) - along(-1e-2)) / 2e-2, rel=2e-2)


@needs_triton
def test_what_the_kernel_does_not_take_is_refused_where_it_is_forced():
    rng = np.random.default_rng(0)
    states, slots, fresh = np.zeros((2, HEADS, 1024, 1), np.float32), np.arange(2, dtype=np.int32), np.zeros((2,), bool)
    q = np.zeros((2, KEY_HEADS, 1024), np.float32)
    _, _, _, *gates = operands(2, rng)
    with pytest.raises(ValueError, match="key_dim 1024 is above 512"):
        gated_delta_rule(states, q, q, np.zeros((2, HEADS, 1), np.float32), *gates, slots, fresh, backend="triton")
    of_tokens, starts = operands(2, rng, key_dim=160), np.array([0, 2, 2], np.int32)
    with pytest.raises(ValueError, match="key_dim 160 is above 128"):
        gated_delta_rule(states_of(rng, 160), *of_tokens, slots, fresh, starts, backend="triton")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"states": np.zeros((7, 4, 16, 32), np.float64)}, "states must be float32"),
        ({"q": np.zeros((5, 3, 16), np.float32)}, "key_heads a divisor of 4"),
        ({"k": np.zeros((5, 2, 8), np.float32)}, "k must be"),
        ({"beta": np.zeros((5, 2), np.float32)}, "beta .* must have heads = 4"),
        ({"slots": np.zeros((4,), np.int32)}, "slots .* must have R = 5"),
        ({"fresh": np.zeros((5,), np.int32)}, "fresh must be bool"),
        ({"query_starts": np.zeros((5,), np.int32)}, "query_starts .* must have R . 1 = 6"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, said):
    rng = np.random.default_rng(0)
    names = ("q", "k", "v", "log_decay", "beta")
    arguments = {"states": states_of(rng), "slots": np.arange(5, dtype=np.int32), "fresh": np.zeros((5,), bool)}
    arguments |= dict(zip(names, operands(5, rng), strict=True))
    with pytest.raises(ValueError, match=said):
        gated_delta_rule(**arguments | change)


@pytest.mark.parametrize("ragged", [False, True])
def test_states_are_updated_in_place(ragged):
    rng = np.random.default_rng(0)
    shape, tokens = jax.ShapeDtypeStruct((512, HEADS, KEY_DIM, VALUE_DIM), jnp.float32), operands(16, rng)
    slots, fresh = np.arange(16, dtype=np.int32), np.zeros((16,), bool)
    starts = (np.arange(17, dtype=np.int32),) if ragged else ()
    compiled = jax.jit(gated_delta_rule, donate_argnums=0).lower(shape, *tokens, slots, fresh, *starts).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 512 * HEADS * KEY_DIM * VALUE_DIM * 4
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 4


@pytest.mark.parametrize("backend", WITH_TRITON)
def test_tokens_of_no_row_may_be_anything(backend):
    """Attention leaves what it likes in the rows of padding, and the next layer reads it."""
    rng = np.random.default_rng(7)
    slots, fresh, starts = np.array([4, 0], np.int32), np.array([False, True]), np.array([0, 5, 30], np.int32)
    states, of_tokens = states_of(rng), operands(40, rng)
    right = exact(states, of_tokens, slots, fresh, [5, 25])
    poisoned = [jnp.asarray(x).at[30:].set(jnp.nan) for x in of_tokens]
    out, states = gated_delta_rule(states, *poisoned, slots, fresh, starts, backend=backend)
    check(out[:30], states, right[0][:30], right[1])
