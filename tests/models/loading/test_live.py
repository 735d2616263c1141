"""Arrays on their way into a model's parameters: which are written together, and in what order they come."""

import random
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models import ModelConfig, build
from jpaged.models.loading import layouts, live
from jpaged.models.loading.layouts import brought
from jpaged.models.loading.live import WeightUpdater
from tests.tiny_models import models_of_blocks, tiny_model, tiny_models

HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def mixture(num_experts: int) -> WeightUpdater:
    config = tiny_model("qwen3-moe").config | {"num_experts": num_experts}
    model = build(ModelConfig.from_dict(config), "float32")
    return WeightUpdater(model, model, None)


def test_a_layers_experts_are_written_a_few_at_a_time_whatever_the_order_they_are_given_in():
    updater = mixture(9)
    weights = updater._model.init(0)
    tensors = updater.read(weights, "huggingface")
    shuffled = list(tensors.items())
    random.Random(0).shuffle(shuffled)
    targets = [HERE] * len(weights)
    groups = updater.match(tensors).groups(targets, [None] * len(weights))
    assert [(group.index, group.places) for group in groups] == [
        (group.index, group.places) for group in updater.match(dict(shuffled)).groups(targets, [None] * len(weights))
    ]
    sizes = [len(group.arrays) for group in groups]
    assert max(sizes) == 16
    assert sum(sizes) == len(updater.match(tensors).writes)
    # 18 arrays of gate and up, in two programs.
    written = updater.apply(jax.tree.map(jnp.zeros_like, weights), updater.match(dict(shuffled)))
    assert all((one == other).all() for one, other in zip(written, weights, strict=True))


def test_every_family_gives_its_weights_by_a_checkpoints_names_and_takes_them_back():
    """Written by numpy, which compiles nothing."""
    rng = np.random.default_rng(5)
    cases = [*tiny_models(), *models_of_blocks()]
    assert len(cases) > 70
    for case in cases:
        model = build(ModelConfig.from_dict(case.config), "float32")
        updater = WeightUpdater(model, model, None)
        weights = tuple(rng.normal(size=leaf.shape).astype(np.float32) for leaf in model.abstract_weights)
        for form in ("huggingface", "state"):
            update = updater.match(updater.read(weights, form))
            assert update.is_complete, (case.name, form)
            found = [np.full(array.shape, np.nan, np.float32) for array in weights]
            for group in update.groups([HERE] * len(weights), [None] * len(weights)):
                write_by_numpy(found[group.index], group.arrays, group.places)
            for name, one, other in zip(model.parameter_names, found, weights, strict=True):
                # Norms of whole rows of queries and keys stand side by side: keys, which are fewer, leave a rest.
                assert not np.isnan(one).any() or "head_norms" in name, (case.name, form, name)
                assert np.array_equal(one, np.where(np.isnan(one), one, other), equal_nan=True), (case.name, name)


def write_by_numpy(parameter: np.ndarray, tensors: list[jax.Array], places: layouts.Places) -> None:
    for tensor, layout, start in zip(tensors, places.layouts, places.offsets, strict=True):
        piece = np.asarray(layout.apply(np.asarray(tensor)))
        parameter[tuple(slice(first, first + size) for first, size in zip(start, piece.shape, strict=True))] = piece


def test_arrays_from_the_host_come_in_order_and_those_that_are_there_as_they_are():
    rng = np.random.default_rng(0)
    there = jnp.ones(3, device=HERE)
    groups = [[rng.normal(size=rng.integers(1, 2000)).astype(np.float32), there] for _ in range(40)]
    found = list(brought(groups, [HERE] * 40))
    for given, (copied, same) in zip(groups, found, strict=True):
        assert same is there
        assert copied.sharding == HERE
        np.testing.assert_array_equal(copied, given[0])


@pytest.mark.parametrize(
    ("form", "most"),
    [
        ("huggingface", 1 << 10),  # less than the largest array has that must come whole
        ("huggingface", 60 << 10),
        ("parameters", 60 << 10),  # all of which can be cut
    ],
)
def test_only_so_many_bytes_of_copies_from_the_host_are_there_at_a_time(form, most, monkeypatch):
    updater = mixture(9)
    weights = updater._model.init(0)
    tensors = {name: np.asarray(array) for name, array in updater.read(weights, form).items()}
    sizes = sorted(array.nbytes for array in tensors.values())
    largest = 0 if form == "parameters" else sizes[-1]
    assert max(most, largest) < (sum(sizes) / 4 if largest else sizes[-1])
    lock, now, peak, copied = threading.RLock(), 0, 0, layouts._copied

    def count(size: int) -> None:
        nonlocal now, peak
        with lock:
            now += size
            peak = max(peak, now)

    def counted(tensor, target):
        count(tensor.nbytes)
        copy = copied(tensor, target)
        weakref.finalize(copy, count, -tensor.nbytes)
        return copy

    monkeypatch.setattr(layouts, "_copied", counted)
    monkeypatch.setattr(layouts, "COPIED_BYTES", most)
    monkeypatch.setattr(live, "_COPIED_AT_ONCE", most // 4)
    written = updater.apply(jax.tree.map(jnp.zeros_like, weights), updater.match(tensors))
    assert peak <= max(most, largest)
    assert now == 0
    assert all((one == other).all() for one, other in zip(written, weights, strict=True))
