"""How a Triton kernel is called from a jitted function.

    on a GPU   jax-triton compiles the kernel while the function is lowered: a custom call, which CUDA graphs take;
               `native_calls` has XLA launch it itself, by default where that is checked
    on a CPU   Triton's interpreter runs it, if TRITON_INTERPRET=1 was set before Python started (`triton_interpreted`)

A kernel is a function under `triton.jit`. Its parameters are, in this order: pointers to the arrays that it reads, to
those that it updates in place, to those that it writes; then its constants (`tl.constexpr`).
"""

import sys
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax
import jax_triton
import triton
from jax.interpreters import mlir
from jax_triton import triton_lib
from jaxlib.mlir import ir

from jpaged.pallas_kernels.common import native_calls, triton_code, triton_interpreted
from jpaged.pallas_kernels.common.triton_targets import capability

if sys.modules.get("torch", sys) is None:  # hidden, as in our own processes: Triton would look for a Tensor there
    del sys.modules["torch"]

_PTX_VERSIONS = {100: 87, 120: 87, 103: 88, 121: 88}
"""Of the code for a compute capability: the first that knows it, so that any CUDA which drives the GPU takes it."""

_OLDEST_PTX_VERSION = 84  # CUDA 12.4

_DESCRIPTION, _OPAQUE = "mhlo.backend_config", "opaque"  # of a custom call, and in it jaxlib's of the kernel


@dataclass(frozen=True)
class Launch:
    """How a kernel is compiled and launched.

    Attributes:
        grid: CTAs along up to three axes.
        warps: of a CTA.
        stages: iterations of a loop whose loads are in flight together.
        registers: the most of a thread; None leaves it to the compiler.
        resident: CTAs of a persistent grid that a multiprocessor is to hold at once, for tests to check that it can;
            None if the grid is not persistent.
    """

    grid: tuple[int, ...]
    warps: int = 4
    stages: int = 2
    registers: int | None = None
    resident: int | None = None


def call(
    kernel: Any,
    launch: Launch,
    *arrays: jax.Array,
    out: Sequence[jax.ShapeDtypeStruct] = (),
    updated: Sequence[jax.Array] = (),
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Calls a Triton kernel. To be called while a jitted function is traced.

    Args:
        kernel: function under `triton.jit`.
        launch: its grid and how it is compiled.
        arrays: that it reads.
        out: shapes and dtypes of the arrays that it writes.
        updated: arrays that it updates in place, where the caller's jit lets it.
        constants: the kernel's `tl.constexpr` parameters.
    Returns:
        The arrays that it wrote, then those that it updated.
    """
    if triton.knobs.runtime.interpret:
        return triton_interpreted.call(kernel, launch.grid, arrays, tuple(updated), tuple(out), constants)
    return _call_compiled(kernel, launch, arrays, tuple(updated), tuple(out), constants)


def options(launch: Launch, arch: int) -> dict[str, Any]:
    """Triton's compiler options for a compute capability."""
    return {
        "num_warps": launch.warps,
        "num_stages": launch.stages,
        "maxnreg": launch.registers,
        "enable_fp_fusion": True,
        "ptx_version": _PTX_VERSIONS.get(arch, _OLDEST_PTX_VERSION),
    }


def _call_compiled(
    kernel: Any,
    launch: Launch,
    arrays: tuple[jax.Array, ...],
    updated: tuple[jax.Array, ...],
    out: tuple[jax.ShapeDtypeStruct, ...],
    constants: dict[str, Any],
) -> tuple[jax.Array, ...]:
    refs = [jax.new_ref(array) for array in updated]
    arch = capability()
    written = jax_triton.triton_call(
        *arrays,
        *refs,
        kernel=kernel,
        out_type=out,
        grid=launch.grid,
        name=kernel.fn.__name__,
        compute_capability=arch,
        backend_options=options(launch, arch),
        **constants,
    )
    return (*written, *(ref[...] for ref in refs))


def _refuse_cpu(*arguments: Any, **parameters: Any) -> Any:
    raise ValueError(
        "Triton kernels run on a CPU in Triton's interpreter only: set TRITON_INTERPRET=1 before Python starts, or "
        "take another backend"
    )


def _lower_small(*arguments: Any, **parameters: Any) -> Any:
    """jax-triton's lowering; the custom call that it makes has the kernel without what no GPU needs, or as it is where
    another jax-triton describes kernels otherwise. Kernels of others in this process are lowered by it, too. Where
    native calls are wanted, the call becomes one, unless `kernel_of` or `make_native` refuses its kernel."""
    native = native_calls.wanted()
    results = triton_lib.triton_kernel_call_lowering(triton_lib.make_cuda_target, *arguments, **parameters)
    if results:
        call = results[0].owner
        with suppress(ValueError, LookupError, zlib.error):
            described = {one.name: one.attr for one in call.attributes[_DESCRIPTION]}
            opaque = triton_code.shrunk(described[_OPAQUE].value_bytes)
            described[_OPAQUE] = ir.StringAttr.get(opaque)
            call.attributes[_DESCRIPTION] = ir.DictAttr.get(described)
            if native:
                native_calls.make_native(call, triton_code.kernel_of(opaque))
    return results


mlir.register_lowering(triton_lib.triton_kernel_call_p, _refuse_cpu, platform="cpu")
mlir.register_lowering(triton_lib.triton_kernel_call_p, _lower_small, platform="cuda")
