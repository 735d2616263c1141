"""What tests of kernels need, as marks."""

import pytest

from jpaged.pallas_kernels.devices import default_device
from jpaged.pallas_kernels.registry import missing, runs_here

needs_mosaic = pytest.mark.skipif(missing("hopper") is not None, reason=str(missing("hopper")))
on_gpu = pytest.mark.skipif(not runs_here("hopper"), reason="needs a Hopper GPU")
needs_triton = pytest.mark.skipif(missing("triton") is not None, reason=str(missing("triton")))
on_gpu_with_triton = pytest.mark.skipif(
    missing("triton") is not None or default_device().capability is None, reason="needs a GPU and jax-triton"
)

WITH_TRITON = ["xla", pytest.param("triton", marks=needs_triton)]
"""Backends whose ops run wherever the tests do: Triton's on a CPU in its interpreter."""

ON_GPU = [pytest.param("hopper", marks=on_gpu), pytest.param("triton", marks=on_gpu_with_triton)]
"""Backends whose kernels run on a GPU."""

over_backends = pytest.mark.parametrize("backend", [*WITH_TRITON, pytest.param("hopper", marks=on_gpu)])
"""One test for all backends that run here."""
