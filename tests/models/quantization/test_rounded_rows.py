"""Products in FP8 read rows that norms and activations round: what comes out is what they round themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged import models
from jpaged.models import linear
from jpaged.models.quantization import fp8
from jpaged.pallas_kernels import fp8_product
from tests.tiny_models import VOCAB_SIZE, tiny_model, write_tiny_model


def hidden(directory: Path, count: int = 11) -> np.ndarray:
    model = models.build(models.ModelConfig.from_directory(directory, quantization="fp8"), "float32")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB_SIZE, count), jnp.int32)
    weights = models.load(model, directory)
    return np.asarray(model.forward(weights, tokens, jnp.arange(count, dtype=jnp.int32), models.dense_causal_attend))


@pytest.mark.parametrize(
    ("name", "residuals"),
    [  # of which sums wait for a norm: all but the last; none where sums are normed before they are added
        ("llama-gqa-d64-tied", lambda layers: 2 * layers - 1),
        ("gemma2", lambda layers: 0),
    ],
)
def test_a_model_computes_the_same_from_rows_that_are_rounded_before(
    name: str, residuals: Callable[[int], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny_model(tiny_model(name), tmp_path, use_torch=False)
    calls: list[dict[str, Any]] = []
    original = linear.round_rows

    def recorded(x: Any, **options: Any) -> Any:
        calls.append(options)
        return original(x, **options)

    monkeypatch.setattr(linear, "round_rows", recorded)
    found = hidden(directory)
    counts = {key: sum(key in call for call in calls) for key in ("norm", "residual", "activation")}
    counts["alone"] = sum(not {"norm", "residual", "activation"} & call.keys() for call in calls)
    layers = (sum(counts.values()) - counts["residual"]) // 4
    assert layers >= 2
    # QKV and gate-up read norms, down the activation, and attention's output is rounded as it is.
    expected = {"norm": 2 * layers, "activation": layers, "alone": layers, "residual": residuals(layers)}
    assert counts == expected
    calls.clear()
    monkeypatch.setattr(fp8, "takes_rounded_rows", lambda *arguments: False)
    apart = hidden(directory)
    assert not calls
    np.testing.assert_allclose(found, apart, rtol=0, atol=5e-3 * np.abs(apart).max())


@pytest.mark.parametrize(
    "rounds",
    [
        lambda rows, w: rows > 16,
        lambda rows, w: rows > 16 or w.shape[0] > w.shape[1],  # gate and up, and QKV
        lambda rows, w: rows > 16 or w.shape[0] <= w.shape[1],  # down, and attention's output
    ],
    ids=["few rows", "few rows of narrow layers", "few rows of wide layers"],
)
@pytest.mark.parametrize("name", ["llama-gqa-d64-tied", "gemma2"])
def test_few_rows_may_be_left_as_they_are_by_some_layers(
    name: str, rounds: Callable[[int, Any], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny_model(tiny_model(name), tmp_path, use_torch=False)
    all_rounded, counts = [hidden(directory, count) for count in (11, 17)], set[int]()

    def some(rows: int, w: jax.Array, *others: Any) -> bool:
        counts.add(rows)
        return rounds(rows, w)

    monkeypatch.setattr(fp8, "takes_rounded_rows", some)
    found = [hidden(directory, count) for count in (11, 17)]
    assert counts == {11, 17}
    np.testing.assert_allclose(found[0], all_rounded[0], rtol=0, atol=5e-3 * np.abs(all_rounded[0]).max())
    np.testing.assert_array_equal(found[1], all_rounded[1])


def test_a_layer_gives_sums_in_float32_to_who_asks_for_them() -> None:
    """As routers and heads do; to others it gives x's type, and keeps sums in that."""
    plain = linear.Linear((256,), (3, 32), 0.02, jnp.dtype(jnp.bfloat16), nnx.Rngs(0))
    layer = fp8.Fp8Linear(plain, fp8.Fp8(activations="dynamic"), nnx.Rngs(1))
    x = jax.random.normal(jax.random.key(2), (5, 256), jnp.bfloat16)
    right = np.asarray(fp8_product(x, *layer._weights(), activations="dynamic", dtype=jnp.dtype(jnp.float32)))
    rounding = layer.rounding(5, "xla")
    assert rounding is not None
    for rows in (x, rounding(x)[0]):
        wide = layer(rows, jnp.dtype(jnp.float32))
        assert wide.dtype == jnp.float32
        assert wide.shape == (5, 3, 32)
        assert np.abs(wide.reshape(5, 96) - right).max() < 1e-5 * np.abs(right).max()
        assert layer(rows).dtype == jnp.bfloat16
