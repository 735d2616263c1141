"""`benchmarks/engine_parts` times an engine process's loop, and does nothing anywhere else."""

import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "benchmarks/engine_parts"
LOOP = """
import os, signal, sys, time
from types import SimpleNamespace
from jpaged.engine.pace import Pace
pace = Pace()
for rows in (3, 5):
    plan = SimpleNamespace(decode_slots=[0] * rows, chunks=())
    pace.has_enough()
    pace.begins()
    pace.dispatched(plan, was_late=rows == 5)
path = os.environ["ENGINE_PARTS"]
if os.path.exists(path + ".pid"):
    os.kill(int(open(path + ".pid").read()), signal.SIGUSR2)
    for _ in range(500):
        if os.path.exists(path):
            break
        time.sleep(0.01)
"""


def run_loop(path: Path, *arguments: str) -> None:
    folders = os.pathsep.join([str(FOLDER), str(FOLDER.parents[1])])
    environment = os.environ | {"PYTHONPATH": folders, "ENGINE_PARTS": str(path)}
    subprocess.run([sys.executable, "-c", LOOP, *arguments], env=environment, check=True, timeout=60)


def test_parts_of_an_engine_process(tmp_path: Path) -> None:
    path = tmp_path / "parts.json"
    run_loop(path, "jpaged.processes.engine_process")
    figures = json.loads(path.read_text())
    assert figures["shares"] == {"late": 0.5, "rows": 4.0}
    part = figures["parts"]["Pace.has_enough"]
    assert part["number"] == 2
    assert 0 < part["p50_us"] <= 2 * part["mean_us"]

    table = [sys.executable, str(FOLDER / "table.py"), str(path), str(path)]
    printed = subprocess.run(table, check=True, capture_output=True, text=True, timeout=60).stdout
    line = next(line for line in printed.splitlines() if line.startswith("Pace.has_enough"))
    assert line.split().count("2") == 2


def test_other_processes_are_left_alone(tmp_path: Path) -> None:
    run_loop(tmp_path / "parts.json", "something.else")
    assert not list(tmp_path.iterdir())
