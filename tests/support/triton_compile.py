"""Compiles Triton kernels for any GPU on a machine that has none: shared memory, registers, and what spills where.

    for launch in launches(op, {"q": ShapeDtypeStruct(..), ..}, capability=86):
        print(compiled(launch, capability=86))

`launches` traces a call as if JAX's default device were that GPU, and gives each Triton kernel that it would launch.
Triton's own compiler and ptxas do the rest; they need no CUDA. Not under TRITON_INTERPRET=1.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jpaged.pallas_kernels import devices
from jpaged.pallas_kernels.common import triton_call
from jpaged.pallas_kernels.common.triton_code import bare_ptx
from jpaged.pallas_kernels.devices import Device

_POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32", "uint32": "*u32"}
_POINTERS |= {"uint8": "*u8", "int8": "*i8", "float8_e4m3fn": "*fp8e4nv", "bool": "*i1"}
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Recorded:
    """A kernel as it would be launched: its pointers' types in order, its constants."""

    kernel: Any
    launch: triton_call.Launch
    pointers: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Compiled:
    """shared: bytes of a CTA. registers: of a thread. spilled: bytes that a thread stores to local memory. in_loops:
    instructions of innermost loops that store to or load from it. by_byte: loads of a single byte."""

    shared: int
    registers: int
    spilled: int
    in_loops: int
    by_byte: int


def launches(op: Callable[..., Any], arguments: dict[str, Any], capability: int) -> list[Recorded]:
    """The kernels that a call of ops launches on a GPU of this compute capability (10 * major + minor)."""
    found: list[Recorded] = []

    def record(kernel: Any, launch: Any, arrays: Any, updated: Any, out: Any, constants: dict[str, Any]) -> Any:
        pointers = tuple(_POINTERS[x.dtype.name] for x in (*arrays, *updated, *out))
        found.append(Recorded(kernel, launch, pointers, tuple(sorted(constants.items()))))
        return tuple(jax.numpy.zeros(x.shape, x.dtype) for x in (*out, *updated))

    device = Device("gpu", divmod(capability, 10))
    jax.clear_caches()  # ops are jitted: a trace for another GPU would be taken again
    with (
        mock.patch.object(devices, "default_device", return_value=device),
        mock.patch.object(triton_call, "_call_compiled", record),
    ):
        jax.eval_shape(lambda arguments: op(**arguments), arguments)
    return found


def compiled(recorded: Recorded, capability: int, older: int | None = None) -> Compiled:
    """The kernel, compiled by Triton and ptxas. older: a GPU for which Triton writes the same PTX."""
    built = ptx_of(recorded, older or capability)
    ptx = bare_ptx(built.asm["ptx"])
    cubin, log = assembled(ptx.replace(f".target sm_{older}", f".target sm_{capability}"), capability)
    spilled = int(re.search(r"(\d+) bytes spill stores", log)[1])
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    in_loops = _in_loops(disassembled(cubin)) if spilled else 0
    by_byte = len(re.findall(r"ld\.global\S*\.b8", ptx))
    return Compiled(built.metadata.shared, registers, spilled, in_loops, by_byte)


def ptx_of(recorded: Recorded, capability: int) -> Any:
    """What Triton makes of the kernel: `.asm["ptx"]`, `.metadata`. Triton has ptxas assemble nothing."""
    names = [p.name for p in recorded.kernel.params if not p.is_constexpr]
    constants = dict(recorded.constants)
    defaults = {p.name: p.default for p in recorded.kernel.params if p.is_constexpr and p.has_default}
    constants = {**defaults, **constants}
    signature = dict(zip(names, recorded.pointers, strict=True)) | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(names))}
    source = ASTSource(fn=recorded.kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = triton_call.options(recorded.launch, capability)
    with mock.patch.object(triton.knobs.runtime, "add_stages_inspection_hook", _without_assembling):
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _without_assembling(*compilation: Any) -> tuple[str, str] | None:
    """Triton's hook: called with (backend, stages, ..) it changes stages, with nothing it names what it changes, for
    Triton's cache."""
    if not compilation:
        return "no cubin", "no cubin"
    compilation[1]["cubin"] = lambda ptx, metadata: b""
    return None


def assembled(ptx: str, capability: int) -> tuple[bytes, str]:
    """ptxas' code for a GPU, and what it says of registers and spills."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        arch = re.search(r"\.target (\w+)", ptx)[1]
        ptxas = _TOOLS / ("ptxas-blackwell" if capability >= 90 else "ptxas")
        command = [str(ptxas), "-v", f"--gpu-name={arch}", str(source), "-o", str(cubin)]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        return cubin.read_bytes(), log


def disassembled(cubin: bytes) -> str:
    """The instructions, as text; of a large kernel that takes longer than to compile it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / "nvdisasm"), file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _in_loops(sass: str) -> int:
    """How many instructions of innermost loops move data to or from local memory."""
    lines = sass.splitlines()
    labels = {line.strip().rstrip(":"): i for i, line in enumerate(lines) if re.match(r"\s*\.L_x_\d+:", line)}
    loops = set()
    for end, line in enumerate(lines):
        target = re.search(r"\bBRA\b.*?`\((\.L_x_\d+)\)", line)
        if target and labels.get(target[1], end) < end:
            loops.add((labels[target[1]], end))
    innermost = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    inside = {i for begin, end in innermost for i in range(begin, end)}
    return sum(bool(re.search(r"\b(LDL|STL)\b", lines[i])) for i in inside)
