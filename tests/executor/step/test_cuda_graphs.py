"""A step is two CUDA graphs, its body and its head: XLA leaves no kernel, copy or loop of them out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jpaged.pallas_kernels.gated_product.hopper_tiling import LEAST_ROWS
from tests.pallas_kernels.test_hopper_compile import missing_compiler


@pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
def test_every_program_of_a_step_is_one_cuda_graph_on_an_h200(tmp_path):
    script = Path(__file__).with_name("compile_steps_for_h200.py")
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    programs = {record["name"]: record for line in done.stdout.splitlines() if (record := json.loads(line))}
    smaller, larger = f"mixed_{LEAST_ROWS - 8}", f"mixed_{LEAST_ROWS}"
    bodies = {"decode_8", "decode_64", "decode_16", "shared_decode_64", smaller, larger}
    heads = {name for name in programs if name.startswith("sample_64_")}
    over_two = programs.pop("sample_16_0")  # not one graph: it gathers the candidates of all devices
    assert over_two["parts"]["kAllGather"] == 1
    assert programs.keys() == bodies | heads
    assert len(heads) == 5  # greedy, truncated (which draws for untruncated requests too), masked, full, beams
    for name, program in programs.items():
        assert program["parts"] == {"kCommandBuffer": 1}, name
        # Of three layers: two norms, QKV, RoPE and write, attention, output, gate-up and down each.
        assert program["commands"] > (3 * 7 if name in bodies else 4), name
    assert programs[smaller]["commands"] - programs[larger]["commands"] == 3  # the activation of each layer
    for name in ("decode_64", "decode_16"):  # on one GPU and on two, where the all-reduce's state is held as well
        assert programs[name]["alias"] == programs[name]["held"], name


@pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
def test_a_layer_in_fp8_is_ten_launches_in_a_decode_step(tmp_path):
    """Four products, three times rows rounded with what comes before, attention's output rounded, RoPE and write with
    the scales of QKV, and attention."""
    script = Path(__file__).with_name("compile_fp8_steps_for_h200.py")
    command = [sys.executable, str(script), str(tmp_path), "2,3", "32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    two, three = (json.loads(line) for line in done.stdout.splitlines())
    assert (two["layers"], three["layers"]) == (2, 3)
    assert two["parts"] == three["parts"] == {"kCommandBuffer": 1}
    assert three["commands"] - two["commands"] <= 10
