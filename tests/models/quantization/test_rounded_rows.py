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
from jpaged.pallas_kernels import Sums, fp8_product
from jpaged.pallas_kernels.few_rows_fp8_product import api as few_rows
from jpaged.pallas_kernels.few_rows_fp8_product.operands import UnroundedRows
from tests.tiny_models import VOCAB_SIZE, tiny_model, write_tiny_model


def hidden(directory: Path) -> np.ndarray:
    model = models.build(models.ModelConfig.from_directory(directory, quantization="fp8"), "float32")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB_SIZE, 11), jnp.int32)
    weights = models.load(model, directory)
    return np.asarray(model.forward(weights, tokens, jnp.arange(11, dtype=jnp.int32), models.dense_causal_attend))


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


def test_a_model_computes_the_same_where_products_round_their_rows_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny_model(tiny_model("llama-gqa-d64-tied"), tmp_path, use_torch=False)
    apart = hidden(directory)
    counts = dict.fromkeys(("sums_of", "added_to", "activated"), 0)

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(few_rows, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return original(*arguments, **options)

        return counted

    for name in counts:
        monkeypatch.setattr(few_rows, name, counting(name))
    monkeypatch.setattr(few_rows, "takes_rows", lambda count, *others, **options: count == 11)
    monkeypatch.setattr(linear, "round_rows", None)
    found = hidden(directory)
    layers = counts["sums_of"]
    assert layers >= 2
    assert counts == {"sums_of": layers, "added_to": 2 * layers, "activated": layers}
    np.testing.assert_allclose(found, apart, rtol=0, atol=1e-4 * np.abs(apart).max())


def test_a_product_that_others_than_the_stream_ask_for_is_computed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = linear.Linear((4, 64), (96,), 0.02, jnp.dtype(jnp.bfloat16), nnx.Rngs(0), shard_axis=0)
    layer = fp8.Fp8Linear(plain, fp8.Fp8(activations="dynamic"), nnx.Rngs(1))
    x, residual = (
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in ((2, (5, 4, 64)), (3, (5, 96)))
    )
    apart = layer.partial_sum(x)
    monkeypatch.setattr(few_rows, "takes_rows", lambda *arguments, **options: True)
    part = layer.partial_sum(x)
    assert isinstance(part.term, linear.FewRowsProduct)
    np.testing.assert_array_equal(part.array, apart.array)
    assert isinstance(apart.term, Sums)
    np.testing.assert_array_equal(part.term.added_to(residual), apart.term.added_to(residual))


def test_a_layer_gives_sums_in_float32_to_who_asks_for_them() -> None:
    """As routers and heads do; to others it gives x's type, and keeps sums in that."""
    plain = linear.Linear((256,), (3, 32), 0.02, jnp.dtype(jnp.bfloat16), nnx.Rngs(0))
    layer = fp8.Fp8Linear(plain, fp8.Fp8(activations="dynamic"), nnx.Rngs(1))
    x = jax.random.normal(jax.random.key(2), (5, 256), jnp.bfloat16)
    right = np.asarray(fp8_product(x, *layer._weights(), activations="dynamic", dtype=jnp.dtype(jnp.float32)))
    rounding = layer.rounding(5, "xla")
    assert rounding is not None
    by_product = UnroundedRows(x, None, None, None, 0.0, None, x.dtype)
    for rows in (x, rounding(x)[0], by_product):
        wide = layer(rows, jnp.dtype(jnp.float32))
        assert wide.dtype == jnp.float32
        assert wide.shape == (5, 3, 32)
        assert np.abs(wide.reshape(5, 96) - right).max() < 1e-5 * np.abs(right).max()
        assert layer(rows).dtype == jnp.bfloat16
