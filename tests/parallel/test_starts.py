"""Starts of engines over several devices."""

from tests.parallel.eight_devices import call_with_eight_devices


def test_weights_that_are_moved_together_give_the_same_tokens():
    found = call_with_eight_devices("tests.parallel.start_runs:moved_together", "llama-biases", [1, 2])
    assert set(found) == {"1", "2"}
    for of_degree in found.values():
        plain, moved = of_degree["tokens"]
        assert plain == moved
        assert of_degree["moved"]
