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

over_backends = pytest.mark.parametrize(
    "backend",
    ["xla", pytest.param("triton", marks=needs_triton), pytest.param("hopper", marks=on_gpu)],
)
"""One test for all implementations: on a CPU, Triton's run in its interpreter."""
