"""How Triton kernels are called inside of jit, in Triton's interpreter on a CPU, or on a GPU."""

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import devices
from jpaged.pallas_kernels.devices import Device
from jpaged.pallas_kernels.registry import missing

if missing("triton") is not None:
    pytest.skip(str(missing("triton")), allow_module_level=True)

import triton
import triton.language as tl

from jpaged.pallas_kernels.common import triton_targets
from jpaged.pallas_kernels.common.triton_call import Launch, call


@triton.jit
def _twice(x: Any) -> Any:
    return x + x


@triton.jit
def _product(a: Any, b: Any, counts: Any, out: Any, SIZE: tl.constexpr, DTYPE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee")
    tl.store(out + tl.program_id(0) * SIZE * SIZE + at, _twice(product).to(DTYPE))
    tl.atomic_add(counts + 1, 1)


@pytest.mark.parametrize(
    ("dtype", "name"), [("bfloat16", tl.bfloat16), ("float16", tl.float16), ("float32", tl.float32)]
)
def test_a_kernel_multiplies_rounds_to_the_nearest_and_counts_in_place(dtype: str, name: Any) -> None:
    a, b = (jax.random.normal(jax.random.key(i), (16, 16)).astype(dtype) for i in range(2))

    @jax.jit
    def run(a: jax.Array, b: jax.Array, counts: jax.Array) -> tuple[jax.Array, ...]:
        shape = jax.ShapeDtypeStruct((3, 16, 16), dtype)
        return call(_product, Launch((3,)), a, b, out=[shape], updated=[counts], SIZE=16, DTYPE=name)

    out, counts = run(a, b, jnp.array([7, 7], jnp.int32))
    wide = np.asarray(a, np.float64) @ np.asarray(b, np.float64) * 2
    bound = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}[dtype]
    np.testing.assert_allclose(np.asarray(out[2], np.float64), wide, rtol=bound, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(out[0], np.float32), np.asarray(out[2], np.float32))
    np.testing.assert_array_equal(counts, [7, 10])


def test_a_table_is_read_for_the_device_s_family(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {family: family for family in triton_targets.SHARED_BYTES}
    for capability, family in (((8, 7), 80), ((8, 9), 86), ((9, 0), 90), ((10, 3), 100), ((12, 1), 120)):
        monkeypatch.setattr(devices, "default_device", lambda capability=capability: Device("gpu", capability))
        assert triton_targets.for_family(table) == family
    monkeypatch.setattr(devices, "default_device", lambda: Device("gpu", (7, 5)))
    with pytest.raises(ValueError, match=r"no Triton kernels for compute capability 7\.5"):
        triton_targets.for_family(table)


def test_on_a_cpu_without_the_interpreter_the_error_names_it() -> None:
    code = f"""
import jax, jax.numpy as jnp, pytest
jax.config.update("jax_platforms", "cpu")
from {__name__} import _product, Launch, call, tl
a = jnp.zeros((16, 16))
run = jax.jit(lambda a: call(_product, Launch((1,)), a, a, out=[a], updated=[jnp.zeros(2, jnp.int32)],
                             SIZE=16, DTYPE=tl.float32))
with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
    run(a)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=environment)


@pytest.mark.parametrize("hidden_first", [True, False])
def test_triton_takes_arguments_where_pytorch_was_hidden(hidden_first):
    """On a GPU jax-triton asks Triton about every argument, and Triton asks whether it is a tensor of what stands for
    PyTorch among the imported modules.
    """
    steps = ["from jpaged.host.imports import keep_torch_out; keep_torch_out()"]
    steps.insert(hidden_first, "from jpaged.pallas_kernels.common import triton_call")
    steps += [
        "from triton._C.libtriton import native_specialize_impl",
        "from triton.backends.nvidia.compiler import CUDABackend",
        "print(*[native_specialize_impl(CUDABackend, x, False, True, True)[0] for x in (1, 2.0)])",
    ]
    program = "\n".join(steps)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.split()) == (0, ["constexpr", "fp32"]), done.stderr
