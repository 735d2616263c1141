"""New weights for models over several devices, from trainers on the same devices and on others."""

from tests.parallel.eight_devices import call_with_eight_devices

RUNS = "tests.parallel.weights_runs"


def test_weights_from_any_devices_give_every_degree_the_tokens_of_one():
    """With key-value heads that two shards hold each, and a vocabulary that is padded."""
    found = call_with_eight_devices(f"{RUNS}:updates", "llama-biases", [1, 2, 4], 2)
    tokens = found["1"]["tokens"]
    assert len({str(one) for one in tokens}) == len(tokens) == 12
    assert set(found) == {"1", "2", "4"}
    for of_degree in found.values():
        assert of_degree == {"tokens": tokens, "same": True, "late": 0}


def test_arrays_are_placed_as_the_loader_places_a_checkpoints():
    """With padding, copies of key-value heads, joined tensors, experts, and what Mamba-2 layers share; and rounded to
    FP8."""
    names = ["gpt2", "qwen2-moe", "granite4-h-all-options", "llama-biases/fp8"]
    assert call_with_eight_devices(f"{RUNS}:differences", names, [8]) == []
