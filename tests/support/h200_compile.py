"""Compiles JAX functions for an NVIDIA H200 on a machine that has no GPU.

Gives what the compiler knows: input/output aliasing, temporary memory, shared-memory overflows, spills. Needs JAX
>= 0.11 (Python >= 3.12), ptxas of CUDA 13 on PATH, and JAX's CUDA plugin in a folder of its own:

    pip install --no-deps --target CUDA_DIR jax-cuda13-pjrt==0.11.2 jax-cuda13-plugin==0.11.2
    export H200_CUDA_DIR=CUDA_DIR

    from tests.support.h200_compile import compile_for_h200
    compiled = compile_for_h200(step, *shape_dtype_structs, donate_argnums=(1,))
"""

import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

if "H200_CUDA_DIR" in os.environ:
    sys.path.insert(0, os.environ["H200_CUDA_DIR"])
os.environ["JAX_PLATFORMS"] = "cpu"  # there is no device; the CUDA compiler is reached through a topology

import jax
from jax.experimental import topologies

_TARGET = pathlib.Path(__file__).with_name("h200_target.txtpb").read_text()


def h200_mesh(num_devices: int = 1, axis: str = "model") -> jax.sharding.Mesh:
    """A mesh of `num_devices` H200s that exists for the compiler only."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=_TARGET, topology=f"1x1x{num_devices}")
    return topologies.make_mesh(topology, (num_devices,), (axis,))


def compile_for_h200(
    fn: Callable[..., Any], *args: Any, donate_argnums: Sequence[int] = (), mesh: jax.sharding.Mesh | None = None
) -> Any:
    """The compiled program of `fn` for the mesh, one H200 by default.

    args: trees of ShapeDtypeStructs; those without a sharding are replicated.
    """
    mesh = mesh or h200_mesh()
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return x if getattr(x, "sharding", None) else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(fn, donate_argnums=donate_argnums).lower(*jax.tree.map(place, args)).compile()
