"""Products in FP8 read rows that norms and activations round: what comes out is what they round themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import models
from jpaged.models import linear
from jpaged.models.quantization import fp8
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
