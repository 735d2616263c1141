"""Programs compiled by other processes: the same programs, and nothing lost when those processes fail."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.executor import compile_processes
from jpaged.executor.compilation import Compiler, Program, abstract_pools
from jpaged.executor.compile_processes import DEVICE_BYTES, CompileProcesses, Key, Setting, helpful_processes
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.executable_cache import ExecutableCache
from jpaged.executor.mesh import DeviceMesh
from jpaged.executor.programs import mixed_layout
from jpaged.executor.state import initial_slot_state
from jpaged.models import ModelConfig, build
from tests.tiny_models import tiny_model

CONFIG = ExecutorConfig(
    max_num_seqs=32, max_model_len=64, block_size=16, num_blocks=64, decode_buckets=(32,), token_buckets=(8, 64)
)
MODEL = build(ModelConfig.from_dict(tiny_model("llama-gqa-d64-tied").config), "float32")
SETTING = Setting(MODEL.config, "float32", 1, kept_on=("cpu",))
BODIES = {*(("mixed", tokens) for tokens in CONFIG.token_buckets), *(("decode", n) for n in CONFIG.decode_buckets)}


@pytest.fixture
def loaded(tmp_path, monkeypatch) -> list[Path]:
    """The programs that were found in an executable cache that is empty at first."""
    monkeypatch.setenv("JPAGED_CACHE_DIR", str(tmp_path))  # JAX's own cache would hand out what it cannot serialise
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(compile_processes, "LEAST_SHARED", 2)
    monkeypatch.setattr(Compiler, "submit_forks", lambda self: None)  # small programs, which are not shared out
    monkeypatch.setattr(Compiler, "submit_swaps", lambda self: None)
    found: list[Path] = []
    load = ExecutableCache.load

    def recorded(path: Path):
        program = load(path)
        if program is not None:
            found.append(path)
        return program

    monkeypatch.setattr(ExecutableCache, "load", staticmethod(recorded))
    return found


def compiler(helpers: CompileProcesses | None = None) -> Compiler:
    return Compiler(MODEL, CONFIG, MODEL.dtype, DeviceMesh(jax.devices()[:1]), helpers=helpers, kept_on=SETTING.kept_on)


def bodies(helpers: CompileProcesses | None) -> dict[Key, Program]:
    shared = compiler(helpers)
    shared.submit_bodies()
    return shared.results()


def refuse(*_):
    raise AssertionError("a process was started")


def hidden_states(program: Program) -> np.ndarray:
    """What mixed[64] makes of some tokens."""
    buffer, host = mixed_layout(CONFIG, 64).new(slots=CONFIG.null_slot, query_lens=0, kinds=0, tokens=0)
    host["tokens"][...] = np.arange(64)
    pools = tuple(jnp.zeros(pool.shape, pool.dtype) for pool in abstract_pools(CONFIG, MODEL, MODEL.dtype))
    return np.asarray(program.executable(MODEL.init(0), pools, initial_slot_state(CONFIG), None, buffer)[-1])


def test_programs_of_another_process_compute_the_same_and_the_next_start_finds_all(loaded, monkeypatch):
    with CompileProcesses(1, SETTING) as helpers:
        programs = bodies(helpers)
    assert programs.keys() >= BODIES
    assert len(loaded) == 1  # mixed[64]: one of the two that are not autotuned; the other one was this process's share
    loaded.clear()

    monkeypatch.setattr(compile_processes, "_Helper", refuse)
    with CompileProcesses(7, SETTING) as helpers:
        found = bodies(helpers)
    assert len(loaded) == len(found) == len(programs)

    monkeypatch.setenv("JPAGED_CACHE_DIR", "")
    alone = compiler()
    alone.submit_mixed(64)
    expected = hidden_states(alone.result(("mixed", 64)))
    assert np.abs(expected).max() > 0.1
    np.testing.assert_array_equal(hidden_states(programs["mixed", 64]), expected)


def test_what_a_process_fails_to_compile_is_compiled_here(loaded, capfd):
    with CompileProcesses(1, replace(SETTING, dtype="float12")) as helpers:
        assert bodies(helpers).keys() >= BODIES
    assert not loaded
    assert "float12" in capfd.readouterr().err


def test_without_a_cache_to_leave_programs_in_nothing_is_shared_out(monkeypatch):
    monkeypatch.setenv("JPAGED_CACHE_DIR", "")
    monkeypatch.setattr(compile_processes, "LEAST_SHARED", 0)
    monkeypatch.setattr(compile_processes, "_Helper", refuse)
    with CompileProcesses(7, SETTING) as helpers:
        alone = compiler(helpers)
        alone.submit_decode(32)
        assert alone.result(("decode", 32)).temp_bytes > 0


def test_few_programs_are_not_shared_out():
    with CompileProcesses(7, SETTING) as helpers:
        assert helpers.share_out(CONFIG, sorted(BODIES)) == {}


def test_a_process_that_cannot_be_started_or_dies_at_once_is_done_without(monkeypatch):
    monkeypatch.setattr(compile_processes.sys, "executable", "/no/such/program")
    with CompileProcesses(2, SETTING) as none:
        assert none.share_out(CONFIG, [("mixed", tokens) for tokens in range(20, 40)]) == {}
    monkeypatch.setattr(compile_processes.sys, "executable", "/bin/false")
    with CompileProcesses(1, SETTING) as dead:
        shared = dead.share_out(CONFIG, [("mixed", tokens) for tokens in range(20, 40)])
        assert len(shared) == 10
        assert [future.result(60) for future in shared.values()] == [None] * 10


@pytest.mark.parametrize(
    ("cores", "spare", "expected"), [(16, 14, 7), (128, 14, 7), (16, 2.5, 2), (8, 14, 3), (2, 14, 0), (16, 0, 0)]
)
def test_there_are_as_many_processes_as_cores_and_memory_allow(cores, spare, expected):
    assert helpful_processes(cores, int(spare * DEVICE_BYTES)) == expected


def test_a_process_does_not_outlive_its_parent():
    script = (
        "import time; from jpaged.executor.compile_processes import CompileProcesses, Setting;"
        "helpers = CompileProcesses(1, Setting(None, 'float32', 1, ('cpu',))); helpers.start();"
        "print(helpers._helpers[0]._process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    until = time.monotonic() + 60  # it may be in the middle of importing JAX
    while time.monotonic() < until and is_alive(child):
        time.sleep(0.1)
    assert not is_alive(child)


def is_alive(pid: int) -> bool:
    """Whether it runs; one that nobody has waited for yet has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
