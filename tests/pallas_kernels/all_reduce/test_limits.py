"""Over which GPUs the one-shot all-reduce runs, with GPUs that are not there."""

from types import SimpleNamespace

import pytest

from jpaged.pallas_kernels.all_reduce import limits


@pytest.mark.parametrize("lacks", [None, "access", "atomics"])
def test_gpus_are_linked_if_each_two_reach_each_other_over_nvlink(monkeypatch, lacks):
    """With a driver of four GPUs, the last two of which lack something between them."""
    attributes = {"access": 2, "atomics": 3}

    def attribute(found, which, one, other):
        found._obj.value = not ({one.value, other.value} == {2, 3} and which == attributes.get(lacks))
        return 0

    def device(handle, gpu):
        handle._obj.value = gpu
        return 0

    driver = SimpleNamespace(cuDeviceGet=device, cuDeviceGetP2PAttribute=attribute)
    monkeypatch.setattr(limits.ctypes, "CDLL", lambda name: driver)
    assert limits._are_linked([0, 1, 2])
    assert limits._are_linked([3, 2, 0]) == (lacks is None)
