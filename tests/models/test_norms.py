"""Norms that are not Llama's give what they compute, also where a kernel would compute the norm with something else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged import models
from jpaged.models.collectives import ALONE
from jpaged.models.layers import Attention
from jpaged.models.linear import PartialSum
from jpaged.models.norms import LayerNorm, Norm, RMSNorm
from jpaged.models.residual import Stream
from jpaged.pallas_kernels.common.numerics import rms_norm
from tests.parallel.eight_devices import call_with_eight_devices
from tests.parallel.norm_runs import OnePlus, OnePlusByCall
from tests.tiny_models import tiny_model

WIDTH, EPS = 16, 1e-5


class Kernel:
    """An `Exchange` of one device. calls: the scales that its kernel was given."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def add(self, x: Any, term: Any, bias: Any = None, scale: Any = None, norm_eps: float = 0.0) -> Any:
        self.calls.append(scale)
        x = x + term if bias is None else x + term + bias
        return x, None if scale is None else rms_norm(x, scale, norm_eps)


def make(kind: type[Any], size: int = WIDTH) -> Norm:
    norm = kind(size, EPS, jnp.float32, nnx.Rngs(0))
    norm.scale[...] = jax.random.normal(jax.random.key(7), (size,))
    return norm


def expected(norm: Norm, x: jax.Array) -> np.ndarray:
    """In float64, by the definition."""
    wide, scale = np.asarray(x, np.float64), np.asarray(norm.scale[...], np.float64)
    if isinstance(norm, LayerNorm):
        wide = wide - wide.mean(-1, keepdims=True)
    wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS)
    return wide * (1 + scale if isinstance(norm, OnePlus | OnePlusByCall) else scale)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm, OnePlus, OnePlusByCall])
def test_a_stream_gives_the_norm_of_its_sum_with_a_kernel_and_without(kind: type[Any]) -> None:
    norm = make(kind)
    x, term, bias = jax.random.normal(jax.random.key(1), (3, 5, WIDTH))
    for exchange in (None, Kernel()):
        stream = Stream(x, None, exchange, ALONE, "xla")  # type: ignore[arg-type]
        stream.add(PartialSum(term, bias[0]))
        np.testing.assert_allclose(stream.normed(norm), expected(norm, x + term + bias[0]), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(stream.value(), x + term + bias[0], rtol=1e-5, atol=1e-6)
    assert isinstance(exchange, Kernel)
    assert [scale is not None for scale in exchange.calls] == [kind in (RMSNorm, OnePlus)]


@pytest.mark.parametrize("kinds", [(RMSNorm, RMSNorm), (OnePlus, OnePlus), (OnePlusByCall, RMSNorm)])
def test_norms_of_queries_and_keys_are_right_with_the_kernel_that_rotates_and_without(kinds: Any) -> None:
    config = models.ModelConfig.from_dict(tiny_model("qwen3-tied-d64").config)
    dim = config.head_dim
    attention = Attention(config, 0, jnp.dtype(jnp.float32), nnx.Rngs(0))
    norms = make(kinds[0], dim), make(kinds[1], dim)
    seen = {}

    def attend(qkv: jax.Array, *, norms: Any, norm_eps: float, **_: Any) -> jax.Array:
        seen["kernel"] = norms is not None
        seen["q"], seen["k"] = qkv[:, :, :-2], qkv[:, :, -2]
        if norms is not None:
            seen["q"], seen["k"] = (rms_norm(seen[x], scale, norm_eps) for x, scale in zip("qk", norms, strict=True))
        seen["v"] = qkv[:, :, -1]
        return jnp.zeros((len(qkv), config.num_heads, dim))

    x = jax.random.normal(jax.random.key(2), (4, config.hidden_size))
    attention(x, attend, norms=norms)
    qkv = attention.qkv(x)
    assert seen["kernel"] == (OnePlusByCall not in kinds)
    np.testing.assert_allclose(seen["q"], expected(norms[0], qkv[:, :, :-2]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(seen["k"], expected(norms[1], qkv[:, :, -2]), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(seen["v"], qkv[:, :, -1])


def test_the_kernel_that_rotates_is_not_given_norms_of_two_epsilons() -> None:
    config = models.ModelConfig.from_dict(tiny_model("qwen3-tied-d64").config)
    attention = Attention(config, 0, jnp.dtype(jnp.float32), nnx.Rngs(0))
    norms = make(RMSNorm, config.head_dim), make(RMSNorm, config.head_dim)
    norms[1].eps = 0.5
    given = []

    def attend(qkv: jax.Array, *, norms: Any, **_: Any) -> jax.Array:
        given.append(norms)
        return jnp.zeros((len(qkv), config.num_heads, config.head_dim))

    attention(jnp.ones((2, config.hidden_size)), attend, norms=norms)
    assert given == [None]


def test_a_model_with_other_norms_is_right_on_one_device_and_on_two_whose_kernel_adds_and_norms() -> None:
    """Of attention, MLP, queries, keys and the end; beside a Llama whose weights are greater by one."""
    found = call_with_eight_devices("tests.parallel.norm_runs:hidden_states")
    assert max(found["OnePlus"] + found["OnePlusByCall"]) < 1e-5
    assert min(found["RMSNorm"]) > 0.01, "a norm that took the weights as they are would be seen"
