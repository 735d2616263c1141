"""The virtual layout over several devices: the tokens of one, and the same pages on each of them."""

import pytest

from tests.parallel.eight_devices import call_with_eight_devices

RUNS = "tests.parallel.virtual_runs"


@pytest.mark.parametrize(("name", "page_layout"), [("llama-gqa-d64-tied", "sliced"), ("qwen2-window", "per-layer")])
def test_every_degree_gives_the_paged_layouts_tokens_by_every_path(name, page_layout):
    found = call_with_eight_devices(f"{RUNS}:tokens_by_layout", name, page_layout)
    expected, two = found["paged"], found["2"]
    assert found["4"]["plain"] == expected
    for path in ("plain", "swapped", "hits", "woken"):
        assert two[path] == expected, path
    assert min(two["num_swapped_in"], two["num_hits"]) > 0
    assert two["mapped"] > 100
    for pieces, degree in ((found["4"]["awake"], 4), (two["awake"], 2), (two["asleep"], 2)):
        assert len(pieces) == degree
        assert all(used == counted > 0 for used, counted in pieces)
    assert two["asleep"][0] < two["awake"][0]
    assert not any(two["left"])


def test_idle_memory_of_every_device_goes_back_and_comes_again():
    found = call_with_eight_devices(f"{RUNS}:idle_memory_goes_back")
    assert found["again"] == found["tokens"]
    for state in ("served", "rested"):
        assert len({tuple(of_device) for of_device in found[state]}) == 1
    assert found["served"][0][0] > found["rested"][0][0] == found["least"]
