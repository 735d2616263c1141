"""Words for the bodies of `plgpu.inline_mgpu`, in which a kernel says in MLIR or PTX what Pallas has no word for.

Such a body is what one thread does. A scalar comes to it as an array of one register, the same in all threads
(`scalar`); an array as the registers that hold this thread's part of it, dealt out as its layout says.
"""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm


def scalar(x: Any) -> Any:
    """The MLIR value of a scalar that `inline_mgpu` passes."""
    return x.registers.item()


def constant(value: int, bits: int = 32) -> Any:
    """An integer of so many bits."""
    kind = ir.IntegerType.get_signless(bits)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value))


def warp_and_lane() -> tuple[Any, Any]:
    """Which warp of its warpgroup the thread is in, and which lane of the warp it is."""
    thread = arith.remui(mgpu.utils.thread_idx(), constant(128))
    return arith.divui(thread, constant(32)), arith.remui(thread, constant(32))


def offset(base: Any, elements: Any, dtype: Any) -> Any:
    """The address so many elements of an MLIR type behind a pointer."""
    return mgpu.utils.getelementptr(base, [elements], dtype)


def instruction(ptx: str, *operands: Any, result: Any = None) -> Any:
    """A PTX instruction that is neither moved nor left out; $0 and up are its results, if any, and its operands.

    Operands are integers of 32 bits or pointers to global memory; result, an MLIR type of 32 bits, or a list of two or
    more, for which it gives a list.
    """
    i32 = ir.IntegerType.get_signless(32)
    kinds = result if isinstance(result, list) else [] if result is None else [result]
    constraints = ["=r"] * len(kinds) + ["r" if operand.type == i32 else "l" for operand in operands]
    names = ", ".join(map(str, kinds))
    kind = ir.Type.parse(f"!llvm.struct<({names})>" if len(kinds) > 1 else names or "!llvm.void")
    found = llvm.inline_asm(kind, list(operands), ptx, ",".join(constraints), has_side_effects=True)
    return [llvm.extractvalue(one, found, [i]) for i, one in enumerate(kinds)] if len(kinds) > 1 else found
