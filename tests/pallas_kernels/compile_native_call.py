"""Compiles one Triton kernel for an H200 and prints a JSON line each: by jaxlib, natively, and with clusters.

    python tests/pallas_kernels/compile_native_call.py DIRECTORY            DIRECTORY: for XLA's dumps

A program of its own: the CUDA compiler must be found before JAX starts. `test_native_calls.py` runs it.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["XLA_FLAGS"] = f"--xla_dump_to={sys.argv[1]} --xla_dump_hlo_as_text"

from tests.support.h200_compile import compile_for_h200  # isort: skip

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jpaged.pallas_kernels import devices
from jpaged.pallas_kernels.common import native_calls, triton_call
from jpaged.pallas_kernels.common.triton_call import Launch, call
from jpaged.pallas_kernels.common.triton_code import bare_ptx, kernel_of
from tests.support.triton_compile import assembled, disassembled

_SIZE = 128


@triton.jit
def _product(a, b, counts, sums, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton evaluates annotations
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(a + at), tl.load(b + at))
    tl.store(out + at, product)
    tl.atomic_add(counts + tl.arange(0, SIZE), 1)
    tl.atomic_add(sums + tl.arange(0, SIZE), tl.sum(product, 0))


def main() -> None:
    devices.default_device = lambda: devices.Device("gpu", (9, 0))
    kernels = []

    def remember(opaque: bytes) -> Any:
        kernels.append(kernel_of(opaque))
        return kernels[-1]

    triton_call.triton_code.kernel_of = remember
    for calls in ("ffi", "native"):
        os.environ[native_calls.VARIABLE] = calls
        compiled = compile_with(f"by_{calls}", 1)
        if calls == "native":
            (kernel,) = kernels
            compiled |= code_of(kernel, compiled["buffers"])
        print(json.dumps(compiled))
    print(json.dumps(compile_with("in_clusters", 2)))


def compile_with(name: str, ctas: int) -> dict[str, Any]:
    """What XLA makes of the kernel in clusters of as many CTAs."""
    original = triton_call.options
    triton_call.options = lambda launch, arch: original(launch, arch) | {"num_ctas": ctas}

    def run(a: jax.Array, b: jax.Array, counts: jax.Array, sums: jax.Array) -> tuple[jax.Array, ...]:
        out = jax.ShapeDtypeStruct((_SIZE, _SIZE), jnp.float32)
        return call(_product, Launch((2, 3), warps=8), a, b, out=[out], updated=[counts, sums], SIZE=_SIZE)

    run.__name__ = name
    matrix = jax.ShapeDtypeStruct((_SIZE, _SIZE), jnp.bfloat16)
    counts, sums = (jax.ShapeDtypeStruct((_SIZE,), dtype) for dtype in (jnp.int32, jnp.float32))
    compiled = compile_for_h200(run, matrix, matrix, counts, sums, donate_argnums=(2, 3))
    triton_call.options = original
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    call_line = re.search(r"= \((.*?)\) custom-call\((.*?)\)", hlo)
    thunks = next(Path(sys.argv[1]).glob(f"*.jit_{name}.thunk_sequence.txt")).read_text()
    return {
        "targets": re.findall(r'custom_call_target="(.*?)"', hlo),
        "buffers": len(re.findall(r"\w+\[", call_line[1])) + call_line[2].count("%"),
        "thunks": re.findall(r"(kCustomKernel .*)", re.sub(r"\[(?:prev|next|source).*?\] |(?<= ) +", "", thunks)),
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }


def code_of(kernel: Any, buffers: int) -> dict[str, Any]:
    """The entry's parameters, and the instructions that ptxas makes of the code before and after they are changed."""
    code = kernel.ptx_with(buffers)
    parameters = re.findall(r"\w+(?=\s*[,)])", re.search(r"\.entry \w+\((.*?\))", code, re.DOTALL)[1])
    listings = [disassembled(assembled(one, 90)[0]) for one in (code, bare_ptx(kernel.ptx))]
    sass = [re.findall(r"/\*[0-9a-f]{4}\*/ +(.*?;)", one) for one in listings]
    return {
        "parameters": parameters,
        "kept": [name for name in parameters if name.startswith(f"{kernel.name}_param_")],
        "unread": [name for name in parameters if name.startswith(f"{kernel.name}_unread_")],
        "instructions": sass[0],
        "of_triton": sass[1],
    }


if __name__ == "__main__":
    main()
