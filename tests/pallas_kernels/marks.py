"""What tests of kernels need, as marks."""

import pytest

from jpaged.pallas_kernels.registry import missing, runs_here

needs_mosaic = pytest.mark.skipif(missing("hopper") is not None, reason=str(missing("hopper")))
on_gpu = pytest.mark.skipif(not runs_here("hopper"), reason="needs a Hopper GPU")
