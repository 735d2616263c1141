"""Constraints on models that are split over devices, and in processes of their own."""

from tests.parallel.eight_devices import call_with_eight_devices


def test_answers_are_those_of_one_device_on_replicas_of_shards():
    found = call_with_eight_devices("tests.parallel.structured_runs:answers_by_layout")
    assert found["two replicas"] == found["one"]
    assert all(found["one"])
