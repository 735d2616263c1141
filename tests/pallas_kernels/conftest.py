"""More threads for the kernels' interpreter.

Each warpgroup that waits at a barrier holds one of XLA's threads. Of those there are as many as the machine has cores;
where that is two, none is left to run the warpgroup that the others wait for.
"""

import os

from jpaged.pallas_kernels.backends import mosaic_missing

if mosaic_missing() is None:
    os.environ.setdefault("PJRT_NPROC", "8")  # read when JAX makes its CPU client
