"""Small weights go to bodies in bundles, and come out of them as they were."""

import jax
import numpy as np
import pytest

from jpaged.executor.mesh import DeviceMesh
from jpaged.executor.step import bundles
from jpaged.executor.step.bundles import Bundles
from jpaged.executor.step.held import held_shapes, held_weights
from jpaged.executor.step.program import Setup
from jpaged.models import ModelConfig, build
from jpaged.models.sharding import shard_of
from tests.executor.step.test_programs import CONFIG
from tests.tiny_models import tiny_model

QWEN3 = tiny_model("qwen3-tied-d64").config | {"head_dim": 32}


@pytest.fixture(scope="module")
def model():
    """Two layers of four norms, and a norm behind them."""
    return build(ModelConfig.from_dict(QWEN3), "bfloat16")


def bundled_names(model):
    return [{model.parameter_names[index] for index in group} for group in Bundles(model).groups]


def test_vectors_of_one_length_are_bundled_where_there_are_enough_of_them(model):
    hidden, head_dim = bundled_names(model)
    assert hidden == {"norm.scale", *(f"layers.{i}.{name}_norm.scale" for i in (0, 1) for name in ("attention", "mlp"))}
    assert head_dim == {f"layers.{i}.{name}_norm.scale" for i in (0, 1) for name in ("query", "key")}
    one_layer = build(ModelConfig.from_dict(QWEN3 | {"num_hidden_layers": 1}), "bfloat16")
    assert bundled_names(one_layer) == []  # three and two


def test_longer_vectors_and_those_of_which_a_device_has_a_part_are_not(model, monkeypatch):
    with_sinks = tiny_model("gpt-oss-20b-style").config
    gpt_oss = build(ModelConfig.from_dict(with_sinks | {"num_hidden_layers": 4, "layer_types": None}), "float32")
    sinks = {f"layers.{layer}.attention.sinks" for layer in range(4)}
    assert sinks in bundled_names(gpt_oss)
    assert not sinks & set().union(*bundled_names(shard_of(gpt_oss, 2)))
    hidden_bytes = 2 * model.config.hidden_size
    monkeypatch.setattr(bundles, "MOST_BYTES", hidden_bytes - 1)
    assert len(bundled_names(model)) == 1  # the norms of heads, which are narrower


def test_a_body_gets_all_weights_as_they_are(model):
    setup = Setup.of(model, CONFIG)
    weights = model.init(3)
    held = held_weights(setup, weights)
    assert len(held["large"]) + 9 == len(weights)
    shapes = held_shapes(setup, DeviceMesh(jax.devices()[:1]))
    for name in ("large", "small"):
        assert [(x.shape, x.dtype) for x in held[name]] == [(x.shape, x.dtype) for x in shapes[name].shapes]
    apart = jax.jit(setup.bundles.taken_apart)(held["large"], held["small"])
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(apart, weights, strict=True))
