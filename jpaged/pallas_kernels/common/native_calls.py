"""Triton's kernels as kernels that XLA itself launches.

    JPAGED_TRITON_CALLS=native    a custom call that XLA knows, with the kernel's PTX and its launch: an ordinary kernel
                                  of a CUDA graph, which asks nothing of jaxlib when a program runs
    JPAGED_TRITON_CALLS=ffi       jax-triton's custom call. jaxlib's handler looks the kernel up by its whole
                                  description at each run of a program, and launches it; a CUDA graph holds each call as
                                  a graph of its own, recorded while that handler runs

The default is native, unless `why_not_default` says otherwise: the GPU's driver compiles the PTX of every call when a
program first runs, so it must take that PTX and find what it compiled before on its disk.

XLA passes a kernel pointers to the call's operands, then to its results; an operand that is updated in place comes
twice, as its result too. Triton's kernels have a parameter for each array, that operand but once, and pointers to
scratch memory that they do not use. So the entry gets as many parameters as XLA passes: those of the arrays come first
in both lists, and no instruction reads the others. That holds where the results that are updated in place come last;
other calls stay jax-triton's.

The call is XLA's own affair and may change with any release, so only the releases in `CHECKED_JAXLIB` get it.
"""

import os
import warnings

import jaxlib
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from jpaged.pallas_kernels.common import cuda_driver
from jpaged.pallas_kernels.common.triton_code import Kernel

VARIABLE = "JPAGED_TRITON_CALLS"

CHECKED_JAXLIB = ((0, 11),)
"""Releases whose XLA takes these calls as described above."""

_TARGET = "__gpu$xla.gpu.ptx"
_TARGET_NAME, _DESCRIPTION = "call_target_name", "mhlo.backend_config"  # attributes of a custom call
_ALIASES = "output_operand_aliases"


def asked_for() -> str | None:
    """What the environment variable says: "ffi" or "native"; None if nothing.

    Raises:
        ValueError: it says something else.
    """
    value = os.environ.get(VARIABLE, "").strip() or None
    if value not in (None, "ffi", "native"):
        raise ValueError(f"{VARIABLE} must be ffi or native, got {value!r}; unset it to choose by machine.")
    return value


def wanted() -> bool:
    """Whether programs that are lowered from now on call Triton's kernels natively.

    A jaxlib that was not checked keeps jax-triton's calls, with a warning if others were asked for.

    Raises:
        ValueError: as `asked_for`.
    """
    value = asked_for()
    if value == "native" and (reason := _unchecked()) is not None:
        warnings.warn(f"Triton's kernels are called as with {VARIABLE}=ffi: {reason}", stacklevel=2)
        return False
    return value == "native" or (value is None and why_not_default() is None)


def why_not_default() -> str | None:
    """Why native calls are not the default in this process; None if they are."""
    return _unchecked() or cuda_driver.why_not_compiler()


def make_native(call: ir.Operation, kernel: Kernel) -> None:
    """Turns jax-triton's custom call into one that XLA launches itself. It keeps its operands and its results, and the
    same operands are updated in place.

    Args:
        call: the custom call.
        kernel: what it launches.
    Raises:
        ValueError: the kernel's arrays are not the first buffers that XLA would pass: a result that is updated in place
            comes before one that is not, or the kernel has another number of arrays. The call is left as it was.
    """
    updated, results = _updated_in_place(call), len(call.results)
    if updated != set(range(results - len(updated), results)):
        raise ValueError(f"{kernel.name} updates results {sorted(updated)} of {results} in place, not the last ones")
    if (arrays := len(call.operands) + results - len(updated)) != kernel.arrays:
        raise ValueError(f"the kernel {kernel.name} has {kernel.arrays} arrays, its call {arrays}")
    integer = ir.IntegerType.get_signless(32)
    launch = dict(zip(("grid_x", "grid_y", "grid_z"), kernel.grid, strict=True))
    launch |= {"block_x": kernel.threads, "block_y": 1, "block_z": 1, "shared_mem_bytes": kernel.shared_bytes}
    described: dict[str, ir.Attribute] = {
        "name": ir.StringAttr.get(kernel.name),
        "kernel_type": ir.StringAttr.get("ptx"),
        "kernel_data": ir.StringAttr.get(kernel.ptx_with(len(call.operands) + len(call.results))),
    }
    described |= {name: ir.IntegerAttr.get(integer, value) for name, value in launch.items()}
    call.attributes[_TARGET_NAME] = ir.StringAttr.get(_TARGET)
    call.attributes[_DESCRIPTION] = ir.DictAttr.get(described)


def _updated_in_place(call: ir.Operation) -> set[int]:
    """Positions of the results that are operands, too."""
    if _ALIASES not in call.attributes:
        return set()
    aliases = map(stablehlo.OutputOperandAlias, ir.ArrayAttr(call.attributes[_ALIASES]))
    return {next(iter(alias.output_tuple_indices), 0) for alias in aliases}  # a single result has no position


def _unchecked() -> str | None:
    """Why this jaxlib is not trusted with native calls; None if it is."""
    release = tuple(int(part) for part in jaxlib.__version__.split(".")[:2])
    if release in CHECKED_JAXLIB:
        return None
    checked = ", ".join(".".join(map(str, release)) for release in CHECKED_JAXLIB)
    return f"native calls were checked with jaxlib {checked} only, and this is {jaxlib.__version__}"
