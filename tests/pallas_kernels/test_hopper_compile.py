"""Every Mosaic kernel compiles for an H200 without a GPU: it fits, spills nothing and copies no pool."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jpaged.pallas_kernels.registry import missing


def missing_compiler() -> str | None:
    """Why nothing can be compiled for an H200 here; None if it can."""
    if (reason := missing("hopper")) is not None:
        return reason
    if "H200_CUDA_DIR" not in os.environ:
        return "H200_CUDA_DIR does not name a folder with JAX's CUDA plugin (tests/support/h200_compile.py)"
    return None if shutil.which("ptxas") else "ptxas is not on PATH"


needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))


def compile_for_h200(*names: str, dump: str) -> list[str]:
    """What compiling all programs, or these, prints; dump: what Mosaic prints beside, by the end of its variable."""
    script = Path(__file__).with_name("compile_for_h200.py")
    environment = {**os.environ, f"MOSAIC_GPU_DUMP_{dump}": "1", "XLA_FLAGS": ""}  # GPU code is optimised
    done = subprocess.run(
        [sys.executable, str(script), *names], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines() + done.stderr.splitlines()


@needs_compiler
def test_the_kernels_compile_for_an_h200_without_spills_or_pool_copies():
    printed = compile_for_h200(dump="PTXAS")
    programs = [json.loads(line) for line in printed if line.startswith("{")]
    assert len(programs) == 76
    for program in programs:
        assert program["alias"] == program["pool"], program
        assert program["temp"] < min(64 << 20, program["pool"] or 64 << 20), program  # less than a copy of the pool
    spills = [line for line in printed if "spill stores" in line]
    assert spills, "the compiler's report is missing"
    for line in spills:
        assert " 0 bytes spill stores, 0 bytes spill loads" in line, line
    serialised = [line for line in printed if "(C75" in line]  # what the assembler says when it makes wgmmas wait
    assert not serialised, serialised[0]


@needs_compiler
def test_the_all_reduce_sends_no_empty_word_waits_for_every_word_and_leaves_each_empty():
    name, peers, vectors = "all_reduce 4 x 64 x 8192", 3, 8192 // (128 * 8)
    ptx = "\n".join(compile_for_h200(name, dump="PTX"))
    kernels = re.findall(r"\.entry all_reduce_add(?:_norm)?_mosaic_gpu_kernel\(.*?^}", ptx, re.DOTALL | re.MULTILINE)
    assert len(kernels) == 2
    for kernel in kernels:
        loops = re.findall(r"^(\$L\w+):((?:(?!^\$L).)*?)@%p\d+ bra\s+\1;", kernel, re.DOTALL | re.MULTILINE)
        loops = [body for _, body in loops if "ld.relaxed.sys" in body]
        loads = [re.findall(r"ld\.relaxed\.sys\.global\.v4\.b32 {(.*?)}, \[(%rd\d+)\];", body) for body in loops]
        addresses = [address for body in loads for _, address in body]
        assert len(addresses) == len(set(addresses)) == peers * vectors == kernel.count("ld.relaxed.sys")
        for body, loaded in zip(loops, loads, strict=True):
            compared = " ".join(re.findall(r"max\.u32 \t%r\d+, (.*?);", body)).replace(",", " ").split()
            assert {word for words, _ in loaded for word in words.split(", ")} <= set(compared)
            assert re.search(r"setp\.eq\.b32 \t%p\d+, %r\d+, -1;\s*$", body)
        stores = re.findall(r"st\.relaxed\.sys\.global\.v4\.b32 \[(%rd\d+)\], {(.*?)};", kernel)
        empty = re.findall(r"mov\.b32 \t(%r\d+), -1;", kernel)
        emptied = [address for address, words in stores if set(words.split(", ")) <= set(empty)]
        assert sorted(emptied) == sorted(addresses)
        sent = [words.split(", ") for address, words in stores if address not in addresses]
        assert len(sent) == peers * vectors
        assert {word for words in sent for word in words} <= set(re.findall(r"min\.u32 \t(%r\d+), %r\d+, -2;", kernel))
