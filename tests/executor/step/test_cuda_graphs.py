"""A step is two CUDA graphs, its body and its head, or one: XLA leaves no kernel, copy or loop of them out."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from jpaged.pallas_kernels.gated_product.hopper_tiling import LEAST_ROWS
from jpaged.pallas_kernels.registry import missing
from tests.pallas_kernels.test_hopper_compile import missing_compiler


def compiled_by(script: str, dumps: Path, *arguments: str, **variables: str) -> list[dict[str, Any]]:
    """The records that a script beside this file prints. variables: of its environment, in which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    command = [sys.executable, str(Path(__file__).with_name(script)), str(dumps), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
def test_every_program_of_a_step_is_one_cuda_graph_on_an_h200(tmp_path):
    programs = {record["name"]: record for record in compiled_by("compile_steps_for_h200.py", tmp_path)}
    smaller, larger = f"mixed_{LEAST_ROWS - 8}", f"mixed_{LEAST_ROWS}"
    bodies = {"decode_8", "decode_64", "decode_16", "shared_decode_64", smaller, larger}
    heads = {name for name in programs if name.startswith("sample_64_")}
    whole = {"decode_and_sample_64_0", "decode_and_sample_64_2"}
    for name in ("sample_16_0", "decode_and_sample_16_0"):  # not one graph: they gather the candidates of all devices
        over_two = programs.pop(name)
        assert over_two["parts"]["kAllGather"] == 1
    assert over_two["alias"] == over_two["held"]
    assert programs.keys() == bodies | heads | whole
    # Greedy, truncated (which draws for untruncated requests too), by tables, masked, full, beams.
    assert len(heads) == 6
    for name, program in programs.items():
        assert program["parts"] == {"kCommandBuffer": 1}, name
        # Of three layers: two norms, QKV, RoPE and write, attention, output, gate-up and down each.
        assert program["commands"] > (4 if name in heads else 3 * 7), name
        assert program["apart"] == (name not in heads), name  # the seven norms by one kernel
    assert programs[smaller]["commands"] - programs[larger]["commands"] == 3  # the activation of each layer
    for variant in (0, 2):
        both = programs["decode_64"]["commands"] + programs[f"sample_64_{variant}"]["commands"]
        assert programs[f"decode_and_sample_64_{variant}"]["commands"] <= both
    # On one GPU and on two, where the all-reduce's state is held as well.
    for name in ("decode_64", "decode_16", *whole):
        assert programs[name]["alias"] == programs[name]["held"], name


@pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
def test_an_invariant_step_of_two_tiles_is_one_graph_with_the_kernels_of_one_tile_twice(tmp_path):
    programs = {record["name"]: record for record in compiled_by("compile_invariant_steps_for_h200.py", tmp_path)}
    one, two = programs["decode_512"], programs["mixed_1024"]
    assert one["parts"] == two["parts"] == {"kCommandBuffer": 1}
    assert len(one["arithmetic"]) > 5
    assert two["arithmetic"] == {kernel: 2 * count for kernel, count in one["arithmetic"].items()}


@pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
@pytest.mark.skipif(missing("triton") is not None, reason=str(missing("triton")))
def test_no_step_joins_or_transposes_weights(tmp_path):
    records = compiled_by("compile_weights_in_place_for_h200.py", tmp_path)
    programs = {(record["model"], record["name"]) for record in records}
    assert programs == set(product(("deepseek-v2-lite", "qwen3.5-9b"), ("decode_32", "mixed_2048")))
    assert [record for record in records if record["moved"]] == []


@pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
def test_a_layer_in_fp8_is_ten_launches_in_a_decode_step(tmp_path):
    """Four products, three times rows rounded with what comes before, attention's output rounded, RoPE and write with
    the scales of QKV, and attention."""
    two, three = compiled_by("compile_fp8_steps_for_h200.py", tmp_path, "2,3", "32")
    assert (two["layers"], three["layers"]) == (2, 3)
    assert two["parts"] == three["parts"] == {"kCommandBuffer": 1}
    assert three["commands"] - two["commands"] <= 10


@pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
def test_a_layer_in_fp8_is_twelve_launches_in_a_decode_step_of_few_rows(tmp_path):
    """Four products, of which those of QKV, attention's output and down are in parts that another adds up, with the
    residual or without; two norms, the activation, RoPE and write, and attention."""
    records = compiled_by("compile_fp8_steps_for_h200.py", tmp_path, "2,3", "8,16", "8b")
    assert all(record["parts"] == {"kCommandBuffer": 1} for record in records)
    launches = {(record["layers"], record["name"]): record["commands"] for record in records}
    for name in ("decode_8", "decode_16"):
        assert launches[3, name] - launches[2, name] == 12, name


@pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
def test_a_step_of_native_triton_calls_is_the_graph_it_was_and_leaves_no_call_to_jaxlib(tmp_path):
    def compiled(calls):
        records = compiled_by("compile_triton_steps_for_h200.py", tmp_path / calls, JPAGED_TRITON_CALLS=calls)
        return {record["name"]: record for record in records}

    by_jaxlib, native = compiled("ffi"), compiled("native")
    assert native.keys() == by_jaxlib.keys() == {"decode_8", "mixed_256", "sample_8_0", "sample_8_2"}
    for name, program in native.items():
        before = by_jaxlib[name]
        assert (before["native"], program["ffi"]) == ([], 0), name
        assert len(program["native"]) == before["ffi"], name
        assert program["parts"] == before["parts"] == {"kCommandBuffer": 1}, name
        assert (program["commands"], program["alias"]) == (before["commands"], before["alias"]), name
        for kernel in program["native"]:
            assert kernel["parameters"] == kernel["buffers"], kernel
        if name in ("decode_8", "mixed_256"):
            assert program["alias"] == program["held"], name
            assert sum(kernel["updated"] for kernel in program["native"]) >= 2, name  # the pool of both layers
    called = {kernel["name"] for program in native.values() for kernel in program["native"]}
    assert {"_rope_and_write", "_decode", "_attend", "_scan", "_choose"} <= called
    assert max(kernel["shared"] for program in native.values() for kernel in program["native"]) > 48 << 10
