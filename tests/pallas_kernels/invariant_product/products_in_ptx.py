"""Prints one JSON line a compute capability: the kinds of product instructions in the PTX of `invariant_product` for
several numbers of rows, in order.

    python tests/pallas_kernels/invariant_product/products_in_ptx.py 80 90 100

A program of its own: kernels that are defined under TRITON_INTERPRET=1 cannot be compiled. The tests run it.
"""

import json
import os
import re
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
os.environ.pop("TRITON_INTERPRET", None)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels import invariant_product
from tests.support.triton_compile import launches, ptx_of

PRODUCT = re.compile(r"\b((?:wgmma\.mma_async|mma\.sync|tcgen05\.mma|fma\.rn)\.\S*)")


def main(capabilities: list[int]) -> None:
    for capability in capabilities:
        found = {}
        for rows in (1, 65, 2048):
            shapes = {"x": (rows, 200), "w": (200, 88)}
            arguments = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
            (recorded,) = launches(partial(invariant_product, backend="triton"), arguments, capability)
            found[rows] = PRODUCT.findall(ptx_of(recorded, capability).asm["ptx"])
        print(json.dumps({"capability": capability, "products": found}), flush=True)


if __name__ == "__main__":
    main([int(one) for one in sys.argv[1:]])
