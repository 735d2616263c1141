"""Gate and up of a model's MLP through the kernel: where it is taken, and where it must not be."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged import models
from jpaged.executor.mesh import WHOLE
from jpaged.models.residual import Kernels
from jpaged.models.sharding import MODEL_AXIS, shard_of
from jpaged.pallas_kernels import devices
from jpaged.pallas_kernels.gated_product import hopper
from jpaged.pallas_kernels.gated_product.hopper_tiling import LEAST_ROWS as ROWS
from tests.pallas_kernels.marks import needs_mosaic, on_gpu
from tests.tiny_models import tiny_model


def build(dtype: str = "bfloat16", **changes: object) -> models.Model:
    return models.build(models.ModelConfig.from_dict(tiny_model("llama-biases").config | changes), dtype)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ops see it that pick by device."""
    monkeypatch.setattr(devices, "default_device", lambda: devices.Device("gpu", (9, 0)))


def hidden_states(model: models.Model, rows: int, weights: models.Weights, **options: Any) -> jax.Array:
    """options: of `Kernels`."""
    tokens = jnp.arange(rows) % model.config.vocab_size
    return model.forward(weights, tokens, jnp.arange(rows), models.dense_causal_attend, Kernels(**options))


def is_kernel_in(program: Any) -> bool:
    return "name=gated_product" in str(program)


def takes_the_kernel(model: models.Model, rows: int, **options: Any) -> bool:
    program = jax.make_jaxpr(partial(hidden_states, model, rows, **options))(model.abstract_weights)
    return is_kernel_in(program)


@needs_mosaic
def test_only_16_bits_in_many_rows_take_the_kernel(on_hopper: None) -> None:
    assert takes_the_kernel(build(), ROWS, backend=None)
    assert takes_the_kernel(build("float16"), ROWS, backend=None)
    assert not takes_the_kernel(build(), ROWS - 1, backend=None)
    assert not takes_the_kernel(build("float32"), ROWS, backend=None)


@needs_mosaic
def test_columns_that_the_kernel_cannot_take_go_to_xla(on_hopper: None) -> None:
    assert not takes_the_kernel(build(intermediate_size=100), ROWS, backend=None)


@needs_mosaic
def test_shards_have_their_columns_through_the_kernel(on_hopper: None) -> None:
    shard = shard_of(build(intermediate_size=101), 2)
    assert shard.config.intermediate_size == 56
    mesh = jax.sharding.AbstractMesh((shard.collectives.size,), (MODEL_AXIS,))
    run = partial(hidden_states, shard, ROWS, backend=None)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=WHOLE, out_specs=WHOLE, check_vma=False)
    assert is_kernel_in(jax.make_jaxpr(mapped)(shard.abstract_weights))


def test_trainers_get_gradients_on_any_device(on_hopper: None) -> None:
    model = build(num_hidden_layers=1)
    tokens = jnp.arange(2 * ROWS).reshape(2, ROWS) % model.config.vocab_size

    def loss_of(module: models.CausalLM) -> jax.Array:
        run = jax.vmap(lambda row: module(row, jnp.arange(ROWS), models.dense_causal_attend))
        return jnp.square(run(tokens).astype(jnp.float32)).mean()

    gradients = nnx.jit(nnx.grad(loss_of))(model.module(model.init(0)))
    mlp = gradients["layers"][0]["mlp"]
    for gradient in (mlp["gate_up"]["kernel"][...], mlp["gate_up"]["bias"][...]):
        assert jnp.isfinite(gradient).all()
        assert (gradient != 0).any()


def test_norms_may_be_float32_beside_other_weights_in_16_bits() -> None:
    model = build(num_hidden_layers=1)
    named = zip(model.parameter_names, model.init(0), strict=True)
    mixed = tuple(leaf.astype(jnp.float32) if name.endswith("norm.scale") else leaf for name, leaf in named)
    hidden = hidden_states(model, 8, mixed)
    assert hidden.dtype == jnp.bfloat16  # the norms' results are rounded to the stream's type
    found, expected = (one.astype(jnp.float32) for one in (hidden, hidden_states(model, 8, model.init(0))))
    np.testing.assert_allclose(found, expected, atol=0.1)


def difference_of_backends(model: models.Model, rows: int) -> float:
    """Of hidden states, beside their size."""
    weights = model.init(0)
    got, want = (
        np.asarray(jax.jit(partial(hidden_states, model, rows, backend=backend))(weights), np.float32)
        for backend in (None, "xla")
    )
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@needs_mosaic
def test_a_model_gives_the_same_through_the_kernel(monkeypatch: pytest.MonkeyPatch, on_hopper: None) -> None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    interpreted = partial(hopper.gated_product, interpret=plgpu.InterpretGPUParams(), ctas=2)
    monkeypatch.setattr(hopper, "gated_product", interpreted)
    assert 0 < difference_of_backends(build(), ROWS) < 2e-2  # 0 would be the same implementation


@pytest.mark.gpu
@on_gpu
@needs_mosaic
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_the_gpu_a_model_gives_the_same_through_the_kernel(dtype: str) -> None:
    model = build(dtype, hidden_size=512, intermediate_size=1416)
    assert 0 < difference_of_backends(model, ROWS + 77) < 2e-2
