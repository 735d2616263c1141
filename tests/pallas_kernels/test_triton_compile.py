"""Every Triton kernel compiles, in every configuration of its table, for each family of GPUs, with none of them here:
it fits, and nothing spills in its innermost loops."""

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
from jpaged.pallas_kernels.common.triton_targets import FAMILY

_REGISTERS = 65_536
"""Of a multiprocessor, on all of these GPUs."""

_RESERVED_BYTES = 1 << 10
"""Shared memory that the system keeps of each CTA; a multiprocessor has as much more than one CTA may use."""


def launched() -> set[str]:
    """The names of all kernels that the package launches: what its `triton*.py` hand to `triton_call.call`."""
    package = Path(triton_call.__file__).parents[1]
    trees = (ast.parse(file.read_text()) for file in package.glob("*/triton*.py") if file.parent.name != "common")
    calls = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {ast.unparse(one.args[0]) for one in calls if isinstance(one.func, ast.Name) and one.func.id == "call"}


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_the_kernels_fit_and_spill_nothing_in_a_loop(capability: int) -> None:
    script = Path(__file__).with_name("compile_triton.py")
    done = subprocess.run(
        [sys.executable, str(script), str(capability)], capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    compiled = {kernel["kernel"] for kernel in kernels}
    if capability == FAMILY[capability]:
        assert len(compiled) > 20
        assert launched() == compiled
    else:  # as its family's first, but for products of FP8 operands
        assert compiled == {"_fp8_product", "_few_rows_fp8_product"}
    for kernel in kernels:
        assert kernel["capability"] == capability
        assert kernel["shared"] <= kernel["limit"], kernel
        assert kernel["in_loops"] == 0, kernel
        if (ctas := kernel["resident"]) is not None:  # a persistent grid, all of which must run at once
            registers = ctas * kernel["warps"] * 32 * (-(-kernel["registers"] // 8) * 8)
            assert registers <= _REGISTERS, kernel
            assert ctas * (kernel["shared"] + _RESERVED_BYTES) <= kernel["limit"] + _RESERVED_BYTES, kernel
