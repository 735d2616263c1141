"""Attention's temperature by position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged import models
from jpaged.models import Attention, RMSNorm, Temperature, dense_causal_attend
from jpaged.pallas_kernels import split_qkv
from tests.tiny_models import tiny_model


@pytest.mark.parametrize(("length", "shift"), [(8192, 1), (100, 0), (3, 1)])
def test_it_grows_by_steps_of_whole_lengths(length: int, shift: int) -> None:
    edges = np.arange(0, 1_000_000, length) - shift
    edges = np.concatenate([edges[1:100], edges[-20:]])
    positions = np.concatenate([edges - 1, edges])
    found = Temperature(0.1, length, shift).of(jnp.asarray(positions, jnp.int32))
    wanted = 1 + 0.1 * np.log(1 + (positions.astype(np.int64) + shift) // length)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("with_norms", [False, True])
def test_queries_are_multiplied_behind_their_norm_and_nothing_else_is(with_norms: bool) -> None:
    config = models.ModelConfig.from_dict(tiny_model("llama-gqa-d64-tied").config)
    rngs, dtype = nnx.Rngs(0), jnp.dtype(jnp.float32)
    attention = Attention(config, 0, dtype, rngs)
    norms = (RMSNorm(64, 1e-5, dtype, rngs), RMSNorm(64, 1e-5, dtype, rngs)) if with_norms else None
    x = jax.random.normal(jax.random.key(1), (9, config.hidden_size))
    rotation = config.rope.table(jnp.arange(9))
    temperature = jnp.linspace(1.0, 3.0, 9)

    def attend(qkv, *, rotation, norms, norm_eps, **options):
        """Multiplies the queries that a kernel has normed and rotated."""
        q, k, v = split_qkv(qkv, rotation=rotation, norms=norms, norm_eps=norm_eps)
        grouped = (q * temperature[:, None, None]).reshape(9, config.num_kv_heads, -1, 64)
        again = jnp.concatenate([grouped, k[:, :, None], v[:, :, None]], axis=2)
        return dense_causal_attend(again, **options)

    found = attention(x, dense_causal_attend, rotation, norms, temperature=temperature)
    wanted = attention(x, attend, rotation, norms)
    np.testing.assert_allclose(found.array, wanted.array, rtol=1e-5, atol=1e-5)
