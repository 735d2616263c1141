"""What tests of kernels need, as marks."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from jpaged.pallas_kernels.devices import default_device
from jpaged.pallas_kernels.registry import missing, runs_here

needs_mosaic = pytest.mark.skipif(missing("hopper") is not None, reason=str(missing("hopper")))
on_gpu = pytest.mark.skipif(not runs_here("hopper"), reason="needs a Hopper GPU")
needs_triton = pytest.mark.skipif(missing("triton") is not None, reason=str(missing("triton")))
on_gpu_with_triton = pytest.mark.skipif(
    missing("triton") is not None or default_device().capability is None, reason="needs a GPU and jax-triton"
)

runs_triton = (needs_triton, pytest.mark.gpu)
"""Of a parameter with which Triton's kernels run: on the GPU where there is one, else in Triton's interpreter."""

WITH_TRITON = ["xla", pytest.param("triton", marks=runs_triton)]
"""Backends whose ops run wherever the tests do: Triton's on a CPU in its interpreter."""

_HOPPER = pytest.param("hopper", marks=(on_gpu, pytest.mark.gpu))

ON_GPU = [_HOPPER, pytest.param("triton", marks=(on_gpu_with_triton, pytest.mark.gpu))]
"""Backends whose kernels run on a GPU."""


def on_gpus(names: str, cases: Iterable[tuple[Any, ...]], triton: Callable[..., bool]) -> pytest.MarkDecorator:
    """One test for the kernels of `ON_GPU`, by `names` and "backend": of all cases, and Triton's of those that `triton`
    takes, called with their values. Each is compiled for itself, Triton's for ten seconds and more.
    """
    params = (
        pytest.param(*case, *backend.values, marks=backend.marks)
        for case in cases
        for backend in ON_GPU
        if backend.values != ("triton",) or triton(*case)
    )
    return pytest.mark.parametrize(f"{names}, backend", list(params))


over_backends = pytest.mark.parametrize("backend", [*WITH_TRITON, _HOPPER])
"""One test for all backends that run here."""
