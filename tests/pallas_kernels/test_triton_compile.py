"""Every Triton kernel compiles, in every configuration of its table, for each family of GPUs, with none of them here:
it fits, and nothing spills in its innermost loops, but for what is measured to be faster so."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jpaged.pallas_kernels.registry import missing

if missing("triton") is not None:
    pytest.skip(str(missing("triton")), allow_module_level=True)

from jpaged.pallas_kernels.common import triton_call

_REGISTERS = 65_536
"""Of a multiprocessor, on all of these GPUs."""

_RESERVED_BYTES = 1 << 10
"""Shared memory that the system keeps of each CTA; a multiprocessor has as much more than one CTA may use."""


_MEASURED = {
    (90, "ragged D 128 bfloat16 group 4 block 16 over e4m3"): 20,
    (90, "ragged D 128 bfloat16 group 32 block 16 over e4m3"): 20,
}
"""What spills in a loop and is measured to be faster so, by GPU and program: how many of the loop's instructions, some
700, may store registers to memory or load them."""


_SCALES_BY_BYTE = 8
"""Loads of a byte, of scales and zero points, where there are any."""


def launched() -> set[str]:
    """The names of all kernels that the package launches: what its `triton*.py` hand to `triton_call.call`."""
    package = Path(triton_call.__file__).parents[1]
    trees = (ast.parse(file.read_text()) for file in package.glob("*/triton*.py") if file.parent.name != "common")
    calls = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {ast.unparse(one.args[0]) for one in calls if isinstance(one.func, ast.Name) and one.func.id == "call"}


@pytest.mark.parametrize("capabilities", [(80,), (86, 89), (90,), (100,), (120,)])
def test_the_kernels_fit_and_spill_nothing_in_a_loop_unless_that_is_faster(capabilities: tuple[int, ...]) -> None:
    script = Path(__file__).with_name("compile_triton.py")
    command = [sys.executable, str(script), *map(str, capabilities)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {kernel["capability"] for kernel in kernels} == set(capabilities)
    for capability in capabilities:
        compiled = {kernel["kernel"] for kernel in kernels if kernel["capability"] == capability}
        assert len(compiled) > 20
        assert launched() == compiled
    for kernel in kernels:
        assert kernel["shared"] <= kernel["limit"], kernel
        if kernel["name"].startswith("quantized_grouped_product"):
            assert kernel["by_byte"] <= _SCALES_BY_BYTE, kernel  # and no weights
        assert kernel["in_loops"] <= _MEASURED.get((kernel["capability"], kernel["name"]), 0), kernel
        if (ctas := kernel["resident"]) is not None:  # a persistent grid, all of which must run at once
            registers = ctas * kernel["warps"] * 32 * (-(-kernel["registers"] // 8) * 8)
            assert registers <= _REGISTERS, kernel
            assert ctas * (kernel["shared"] + _RESERVED_BYTES) <= kernel["limit"] + _RESERVED_BYTES, kernel
