"""Triton's kernels as calls that XLA launches itself: what is read of jax-triton's description, and what XLA gets."""

import json
import os
import re
import subprocess
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir

from jpaged.pallas_kernels import registry
from jpaged.pallas_kernels.common import cuda_driver, native_calls
from jpaged.pallas_kernels.common.native_calls import make_native
from jpaged.pallas_kernels.common.triton_code import Kernel, kernel_of
from tests.pallas_kernels.test_hopper_compile import missing_compiler
from tests.pallas_kernels.test_triton_code import field

PTX = """.version 8.4
.target sm_90a
.extern .shared .align 16 .b8 global_smem[];
.visible .entry twice(
.param .u64 .ptr .global .align 1 twice_param_0,
.param .u64 .ptr .global .align 1 twice_param_1,
.param .u64 .ptr .global .align 1 twice_param_2,
.param .u64 .ptr .global .align 1 twice_param_3
)
.reqntid 128
.maxnreg 96
{
ld.param.b64 %rd1, [twice_param_0];
ld.param.b64 %rd2, [twice_param_1];
ret;
}
"""
ARRAY = field(1, field(2, 16))
"""A parameter: an array on a multiple of 16 bytes."""


def described(
    ptx: str = PTX, kernel: bytes = b"", parameters: tuple[bytes, ...] = (ARRAY, ARRAY), grid: bytes = b""
) -> bytes:
    """A kernel as jax-triton describes it, of four warps; `kernel` and `grid` are further fields."""
    message = field(1, b"twice") + field(2, 4) + field(3, 96) + field(4, ptx.encode()) + field(6, 90) + kernel
    call = field(1, message) + field(2, 7) + field(3, 1) + field(4, 1) + grid
    call += b"".join(field(5, one) for one in parameters)
    return zlib.compress(field(1, call) + field(4, b"its name"))


def test_a_kernel_is_read_with_its_launch():
    assert kernel_of(described()) == Kernel("twice", PTX, 2, 2, (7, 1, 1), 128, 96)


@pytest.mark.parametrize(("buffers", "unread"), [(2, 0), (3, 1), (5, 3)])
def test_an_entry_has_as_many_parameters_as_xla_passes_buffers(buffers, unread):
    code = kernel_of(described()).ptx_with(buffers)
    entry = re.search(r"\.entry twice\((.*?)\)", code, re.DOTALL)[1]
    names = re.findall(r"(\w+)\s*(?:,|$)", entry.strip())
    assert names == ["twice_param_0", "twice_param_1", *(f"twice_unread_{i}" for i in range(unread))]
    assert code.replace(entry, "") == PTX.replace(re.search(r"twice\((.*?)\)", PTX, re.DOTALL)[1], "")


def test_fewer_buffers_than_arrays_are_refused():
    with pytest.raises(ValueError, match="twice has 2 arrays, the call passes 1 buffers"):
        kernel_of(described()).ptx_with(1)


@pytest.mark.parametrize(
    ("opaque", "message"),
    [
        (zlib.compress(field(2, b"configurations") + field(4, b"twice")), "several configurations"),
        (zlib.compress(field(1, field(2, 7))), "without a kernel"),
        (described(kernel=field(10, 2)), "clusters of 2"),
        (described(kernel=field(11, 64)), r"unknown fields \[11\]"),
        (described(parameters=(ARRAY, field(3, 5))), r"no array \(kinds \[3\]\)"),
        (described(parameters=(field(1, field(1, 64)), ARRAY)), "zeros"),
        (described(parameters=(ARRAY,) * 5), "4 parameters for 5 arrays"),
        (described(parameters=(ARRAY,)), r"scratch memory \(twice_param_1\)"),
        (described(PTX.replace("entry twice", "entry thrice")), r"\['thrice'\], not twice"),
        (described(PTX + PTX), r"\['twice', 'twice'\]"),
        (
            described(PTX.replace(".u64 .ptr .global .align 1 twice_param_3", ".align 64 .b8 twice_param_3[128]")),
            "no p",
        ),
        (described(PTX.replace(".reqntid 128", ".reqntid 256")), "CTAs of 128 threads"),
        (described(PTX.replace(".reqntid 128\n", "")), "CTAs of 128 threads"),
    ],
)
def test_a_kernel_that_needs_more_than_pointers_is_refused_by_what_it_needs(opaque, message):
    with pytest.raises(ValueError, match=message):
        kernel_of(opaque)


def test_a_long_header_that_is_none_is_refused_after_one_look():
    """A pattern that tries every way to part these words would take hours."""
    header = ".reqntid 128\n" + " .maxnreg 96 , 1 " * 200
    assert kernel_of(described(PTX.replace(".reqntid 128\n.maxnreg 96", header))).threads == 128
    with pytest.raises(ValueError, match=r"entries are \[\], not twice"):
        kernel_of(described(PTX.replace(".reqntid 128\n.maxnreg 96", header + "!")))


def made_up_call(operands: int, results: int, updated: dict[int, int]) -> tuple[ir.Module, ir.Operation]:
    """A custom call of equal arrays, in a module that keeps it. updated: a result for each operand in place."""
    out = [jax.ShapeDtypeStruct((8,), jnp.float32)] * results
    call = jax.ffi.ffi_call("made_up", out if results > 1 else out[0], input_output_aliases=updated)
    module = jax.jit(call).lower(*[jnp.zeros(8)] * operands).compiler_ir("stablehlo")
    found: list[ir.Operation] = []

    def collect(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == "stablehlo.custom_call":
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(collect)
    (operation,) = found
    return module, operation


@pytest.mark.parametrize(
    ("operands", "results", "updated"), [(1, 1, {}), (2, 1, {1: 0}), (2, 2, {0: 0, 1: 1}), (1, 2, {0: 1})]
)
def test_a_call_whose_last_results_are_updated_in_place_becomes_native(operands, results, updated):
    module, call = made_up_call(operands, results, updated)
    with module.context, ir.Location.unknown():
        make_native(call, kernel_of(described()))
        code = ir.DictAttr(call.attributes["mhlo.backend_config"])["kernel_data"]
    assert call.attributes["call_target_name"].value == "__gpu$xla.gpu.ptx"
    entry = re.search(r"\.entry twice\((.*?)\)", ir.StringAttr(code).value, re.DOTALL)[1]
    assert entry.count(".param") == operands + results


@pytest.mark.parametrize(
    ("operands", "results", "updated", "message"),
    [
        (1, 2, {0: 0}, r"twice updates results \[0\] of 2 in place, not the last"),
        (2, 1, {}, "twice has 2 arrays, its call 3"),
        (1, 1, {0: 0}, "twice has 2 arrays, its call 1"),
    ],
)
def test_a_call_whose_arrays_do_not_come_first_is_refused_and_left_as_it_was(operands, results, updated, message):
    module, call = made_up_call(operands, results, updated)
    before = str(module)
    with module.context, ir.Location.unknown(), pytest.raises(ValueError, match=message):
        make_native(call, kernel_of(described()))
    assert str(module) == before


@pytest.fixture
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def checked_jaxlib(monkeypatch):
    monkeypatch.setattr(native_calls, "jaxlib", SimpleNamespace(__version__="0.11.2"))
    monkeypatch.delenv(native_calls.VARIABLE, raising=False)


@pytest.mark.parametrize("refused", [None, "the driver's cache is off"])
@pytest.mark.parametrize("value", [None, "", "ffi", "native"])
@pytest.mark.usefixtures("silent", "checked_jaxlib")
def test_calls_are_native_unless_the_driver_speaks_against_it_or_the_environment_says(monkeypatch, value, refused):
    monkeypatch.setattr(cuda_driver, "why_not_compiler", lambda: refused)
    if value is not None:
        monkeypatch.setenv(native_calls.VARIABLE, value)
    assert native_calls.why_not_default() == refused
    assert native_calls.wanted() is (value == "native" if value else refused is None)


@pytest.mark.usefixtures("checked_jaxlib")
def test_programs_of_the_two_ways_have_different_names(monkeypatch):
    def compilers(way):
        monkeypatch.setenv(native_calls.VARIABLE, way)
        return registry.compilers()

    assert compilers("native") != compilers("ffi")
    for refused, way in ((None, "native"), ("the driver's cache is off", "ffi")):
        monkeypatch.setattr(cuda_driver, "why_not_compiler", lambda refused=refused: refused)
        assert compilers("") == compilers(way)


def test_another_word_is_refused(monkeypatch):
    monkeypatch.setenv(native_calls.VARIABLE, "fast")
    with pytest.raises(ValueError, match="JPAGED_TRITON_CALLS must be ffi or native, got 'fast'; unset it"):
        native_calls.wanted()


@pytest.mark.parametrize("version", ["0.10.2", "0.12.0", "1.0.0.dev20270101"])
def test_a_jaxlib_that_was_not_checked_keeps_its_own_calls_and_says_so(monkeypatch, version):
    monkeypatch.setattr(native_calls, "jaxlib", SimpleNamespace(__version__=version))
    monkeypatch.setattr(cuda_driver, "why_not_compiler", lambda: None)
    monkeypatch.delenv(native_calls.VARIABLE, raising=False)
    assert native_calls.wanted() is False
    assert f"this is {version}" in native_calls.why_not_default()
    monkeypatch.setenv(native_calls.VARIABLE, "native")
    with pytest.warns(UserWarning, match=rf"checked with jaxlib 0\.11 only, and this is {re.escape(version)}"):
        assert native_calls.wanted() is False


@pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
def test_xla_gets_the_kernel_its_launch_and_a_parameter_for_each_buffer(tmp_path):
    """The kernel updates two arrays in place and asks for more than 48 KiB of shared memory; ptxas makes the same
    instructions of its code as of Triton's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compile_native_call.py")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ffi, native, clusters = map(json.loads, done.stdout.splitlines())
    assert (ffi["targets"], clusters["targets"]) == (["triton_kernel_call_ffi"], ["triton_kernel_call_ffi"])
    assert native["targets"] == ["__gpu$xla.gpu.ptx"]
    assert native["thunks"] == [
        "kCustomKernel _product grid: [2, 3, 1] threads: [256, 1, 1] shared_memory: 65536 bytes"
    ]
    assert native["alias_bytes"] == ffi["alias_bytes"] == 2 * 4 * 128
    assert native["temp_bytes"] == ffi["temp_bytes"]
    assert native["buffers"] == 7  # four operands and three results, of which two are operands
    assert [len(native[name]) for name in ("parameters", "kept", "unread")] == [7, 5, 2]
    assert native["instructions"] == native["of_triton"]
    assert len(native["instructions"]) > 50
