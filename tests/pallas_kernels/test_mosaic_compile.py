"""Every Mosaic kernel compiles for an H200 without a GPU: it fits, spills nothing and copies no pool."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jpaged.pallas_kernels.backends import mosaic_missing


def missing_compiler() -> str | None:
    """Why nothing can be compiled for an H200 here; None if it can."""
    if (reason := mosaic_missing()) is not None:
        return reason
    if "H200_CUDA_DIR" not in os.environ:
        return "H200_CUDA_DIR does not name a folder with JAX's CUDA plugin (tools/h200_compile.py)"
    return None if shutil.which("ptxas") else "ptxas is not on PATH"


@pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
def test_the_kernels_compile_for_an_h200_without_spills_or_pool_copies():
    script = Path(__file__).with_name("compile_for_h200.py")
    environment = {**os.environ, "MOSAIC_GPU_DUMP_PTXAS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = done.stdout.splitlines() + done.stderr.splitlines()
    programs = [json.loads(line) for line in printed if line.startswith("{")]
    assert len(programs) == 35
    for program in programs:
        assert program["alias"] == program["pool"], program
        assert program["temp"] < min(64 << 20, program["pool"] or 64 << 20), program  # less than a copy of the pool
    spills = [line for line in printed if "spill stores" in line]
    assert spills, "the compiler's report is missing"
    for line in spills:
        assert " 0 bytes spill stores, 0 bytes spill loads" in line, line
    serialised = [line for line in printed if "(C75" in line]  # what the assembler says when it makes wgmmas wait
    assert not serialised, serialised[0]
