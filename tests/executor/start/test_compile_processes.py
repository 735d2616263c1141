"""Programs compiled by other processes: the same programs, and nothing lost when those processes fail."""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jpaged.api.errors import InvalidParameterError
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.mesh import DeviceMesh
from jpaged.executor.start import compile_processes, executable_cache, startup
from jpaged.executor.start.compilation import Compiler
from jpaged.executor.start.compile_processes import (
    COUNT_VARIABLE,
    DEVICE_BYTES,
    LEAST_SHARED,
    CompileProcesses,
    Setting,
    chosen_processes,
    helpful_processes,
)
from jpaged.executor.start.executable_cache import ExecutableCache
from jpaged.executor.start.jax_settings import jax_settings
from jpaged.executor.start.turns import Turns
from jpaged.executor.step import blocks, kinds
from jpaged.executor.step.bodies import Decode, Mixed
from jpaged.executor.step.compiled import CompiledProgram
from jpaged.executor.step.held import initial_held
from jpaged.executor.step.program import Setup, StepProgram
from jpaged.executor.step.runner import Runner
from jpaged.models import ModelConfig, build
from tests.support.jax_cache import jax_cache
from tests.tiny_models import tiny_model

CONFIG = ExecutorConfig(
    max_num_seqs=32, max_model_len=64, block_size=16, num_blocks=64, decode_buckets=(32,), token_buckets=(8, 64)
)
MODEL = build(ModelConfig.from_dict(tiny_model("llama-gqa-d64-tied").config), "float32")
SETTING = Setting(MODEL.config, "float32", 1, kept_on=("cpu",))
SETUP = Setup.of(MODEL, CONFIG)
MESH = DeviceMesh(jax.devices()[:1])
BODIES = {*map(Mixed, CONFIG.token_buckets), *map(Decode, CONFIG.decode_buckets)}


@pytest.fixture
def loaded(tmp_path, monkeypatch) -> Iterator[list[Path]]:
    """The programs that were found in an executable cache that is empty at first.

    JAX's settings are not its defaults: a process that kept to these would leave its programs under other names.
    """
    monkeypatch.setenv("JPAGED_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)  # it would hand out what it cannot serialise again
    monkeypatch.setattr(compile_processes, "LEAST_SHARED", 2)
    without_blocks = tuple(kind for kind in kinds.KINDS if kind not in blocks.KINDS)
    monkeypatch.setattr(kinds, "KINDS", without_blocks)  # small programs, which are not shared out
    found: list[Path] = []
    load = ExecutableCache.load

    def recorded(path: Path, devices: Sequence[jax.Device]):
        program = load(path, devices)
        if program is not None:
            found.append(path)
        return program

    monkeypatch.setattr(ExecutableCache, "load", staticmethod(recorded))
    with jax_cache(None), jax.default_matmul_precision("float32"):
        yield found


def compiler(helpers: CompileProcesses | None = None) -> Compiler:
    return Compiler(SETUP, MESH, helpers=helpers, kept_on=SETTING.kept_on)


def bodies(helpers: CompileProcesses | None) -> dict[StepProgram, CompiledProgram]:
    shared = compiler(helpers)
    shared.submit_pool_programs()
    return shared.results()


def refuse(*_):
    raise AssertionError("a process was started")


def hidden_states(compiled: CompiledProgram) -> np.ndarray:
    """What mixed[64] makes of some tokens."""
    runner = Runner(SETUP, {Mixed(64): compiled}, initial_held(SETUP, MESH, MODEL.init(0)))
    buffer, host = runner._packed(Mixed(64))
    host["tokens"][...] = np.arange(64)
    return np.asarray(runner._run(Mixed(64), packed=buffer)[-1])


def test_programs_of_another_process_compute_the_same_and_the_next_start_finds_all(loaded, tmp_path, monkeypatch):
    other = tmp_path / "other" / "jpaged"  # what a process finds that looks anywhere but where this one did
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('another package')")
    monkeypatch.chdir(other.parent)
    monkeypatch.setenv("PYTHONPATH", str(other.parent))
    with CompileProcesses(1, replace(SETTING, jax_settings=jax_settings())) as helpers:
        programs = bodies(helpers)
    assert programs.keys() >= BODIES
    assert len(loaded) == 1  # mixed[64]: one of the two that are not autotuned; the other one was this process's share
    shared = programs[Mixed(64)]
    assert [program for program in programs.values() if program.origin not in ("compiled", "jax")] == [shared]
    assert (shared.origin, shared.compiling_s) == ("shared", 0.0)
    assert programs[Decode(32)].compiling_s > 0.0
    loaded.clear()

    monkeypatch.setattr(compile_processes, "_Helper", refuse)
    with CompileProcesses(7, SETTING) as helpers:
        found = bodies(helpers)
    assert len(loaded) == len(found) == len(programs)
    assert {program.origin for program in found.values()} == {"kept"}

    monkeypatch.setenv("JPAGED_CACHE_DIR", "")
    alone = compiler()
    alone.submit([Mixed(64)])
    expected = hidden_states(alone.result(Mixed(64)))
    assert np.abs(expected).max() > 0.1
    np.testing.assert_array_equal(hidden_states(programs[Mixed(64)]), expected)


def test_what_a_process_fails_to_compile_is_compiled_here(loaded, capfd):
    with CompileProcesses(1, replace(SETTING, dtype="float12")) as helpers:
        assert bodies(helpers).keys() >= BODIES
    assert not loaded
    assert "float12" in capfd.readouterr().err


def test_a_process_ends_at_the_first_program_that_it_cannot_keep(loaded, monkeypatch):
    monkeypatch.setattr(ExecutableCache, "save", staticmethod(lambda path, program: None))  # the disk is full
    assert list(compiler().compile_for_cache([Decode(32)])) == []


def test_processes_are_started_at_once_when_nothing_is_kept_and_not_for_a_few_programs(loaded, monkeypatch):
    started: list[Setting] = []
    monkeypatch.setattr(compile_processes, "_Helper", started.append)
    monkeypatch.setattr(compile_processes, "LEAST_SHARED", LEAST_SHARED)
    cold = compiler(CompileProcesses(3, SETTING))
    heads = {cold._task(head).path for head in cold._heads()}
    for path in sorted(heads)[LEAST_SHARED - 1 :]:
        path.touch()
    cold.call_helpers()
    assert started == []

    for path in sorted(heads)[LEAST_SHARED - 1 :]:
        path.unlink()
    cold.call_helpers()
    cold.call_helpers()
    assert started == [SETTING] * 3


def test_a_start_waits_for_another_that_compiles_the_same_and_takes_what_it_leaves(loaded, monkeypatch):
    monkeypatch.setattr(compile_processes, "_Helper", refuse)
    with CompileProcesses(3, SETTING) as helpers:
        second = compiler(helpers)
        claim = second._cache.claim
        first, asked = Turns(), threading.Event()
        first.take(claim)
        take = helpers.turns.take
        monkeypatch.setattr(helpers.turns, "take", lambda file: asked.set() or take(file))
        calling = threading.Thread(target=second.call_helpers)
        calling.start()
        assert asked.wait(60)
        for head in second._heads():
            second._task(head).path.touch()
        calling.join(0.2)
        assert calling.is_alive()
        first.end_all()
        calling.join(60)
        assert not calling.is_alive()
        first.take(claim)  # nobody has it: there is nothing to compile
        first.end_all()
    assert not claim.exists()


def test_processes_are_wanted_only_where_many_programs_can_be_kept(tmp_path, monkeypatch):
    def wanted(config: ExecutorConfig) -> int:
        with startup._helpers(DeviceMesh(jax.devices()[:1]), MODEL, config) as helpers:
            return 0 if helpers is None else helpers.count

    many = replace(CONFIG, token_buckets=tuple(range(8, 8 + LEAST_SHARED)))
    monkeypatch.setenv("JPAGED_CACHE_DIR", str(tmp_path))
    assert wanted(many) == 0  # on a CPU
    monkeypatch.setenv(COUNT_VARIABLE, "3")
    assert wanted(many) == 3
    assert wanted(CONFIG) == 0
    monkeypatch.setenv(COUNT_VARIABLE, "0")
    assert wanted(many) == 0

    monkeypatch.setenv(COUNT_VARIABLE, "3")
    monkeypatch.setenv("JPAGED_CACHE_DIR", "")
    assert wanted(many) == 0
    monkeypatch.setenv("JPAGED_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(executable_cache, "LEAST_FREE_BYTES", 2**80)
    assert wanted(many) == 0


def test_their_number_can_be_chosen():
    assert chosen_processes({}) is None
    assert chosen_processes({COUNT_VARIABLE: ""}) is None
    assert chosen_processes({COUNT_VARIABLE: "0"}) == 0
    assert chosen_processes({COUNT_VARIABLE: "12"}) == 12


@pytest.mark.parametrize("value", ["-1", "many", "1.5", "257", "9" * 5000])
def test_a_number_that_cannot_be_is_refused(value):
    with pytest.raises(InvalidParameterError, match=COUNT_VARIABLE):
        chosen_processes({COUNT_VARIABLE: value})


def test_without_a_cache_to_leave_programs_in_nothing_is_shared_out(monkeypatch):
    monkeypatch.setenv("JPAGED_CACHE_DIR", "")
    monkeypatch.setattr(compile_processes, "LEAST_SHARED", 0)
    monkeypatch.setattr(compile_processes, "_Helper", refuse)
    with CompileProcesses(7, SETTING) as helpers:
        alone = compiler(helpers)
        alone.submit([Decode(32)])
        assert alone.result(Decode(32)).temp_bytes > 0


def test_few_programs_are_not_shared_out():
    with CompileProcesses(7, SETTING) as helpers:
        assert helpers.share_out(CONFIG, list(BODIES)) == {}


def test_a_process_that_cannot_be_started_or_dies_at_once_is_done_without(monkeypatch):
    monkeypatch.setattr(compile_processes.sys, "executable", "/no/such/program")
    with CompileProcesses(2, SETTING) as none:
        assert none.share_out(CONFIG, [*map(Mixed, range(20, 40))]) == {}
    monkeypatch.setattr(compile_processes.sys, "executable", "/bin/false")
    with CompileProcesses(1, SETTING) as dead:
        shared = dead.share_out(CONFIG, [*map(Mixed, range(20, 40))])
        assert len(shared) == 10
        assert [future.result(60) for future in shared.values()] == [None] * 10


@pytest.mark.parametrize(
    ("cores", "spare", "expected"), [(16, 14, 7), (128, 14, 7), (16, 2.5, 2), (8, 14, 3), (2, 14, 0), (16, 0, 0)]
)
def test_there_are_as_many_processes_as_cores_and_memory_allow(cores, spare, expected):
    assert helpful_processes(cores, int(spare * DEVICE_BYTES)) == expected


def test_a_process_does_not_outlive_its_parent():
    script = (
        "import time; from jpaged.executor.start.compile_processes import CompileProcesses, Setting;"
        "helpers = CompileProcesses(1, Setting(None, 'float32', 1, ('cpu',))); helpers.start();"
        "print(helpers._helpers[0]._process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    with suppress(ProcessLookupError):  # it has ended
        ended, _, _ = select.select([os.pidfd_open(child)], [], [], 60)  # it may be in the middle of importing JAX
        assert ended


def test_ctrl_c_in_a_cold_start_ends_the_process_and_all_that_help_it(tmp_path):
    """Its programs would take both processes more than the time it gets to end."""
    script = """
import logging, sys
from jax.stages import Lowered
from jpaged import LLM
from jpaged.executor.start import compilation
from jpaged.executor.start import compile_processes
from jpaged.executor.start import startup
logging.basicConfig(level=logging.INFO)
startup.KEPT_PLATFORMS = ("cpu",)
compilation.Compiler.__init__.__kwdefaults__["kept_on"] = ("cpu",)
compile = Lowered.compile
def announced(*args, **options):
    print("compiles a program", file=sys.stderr, flush=True)
    return compile(*args, **options)
Lowered.compile = announced
LLM(token_buckets=tuple(range(17, 257)), decode_buckets=(64,), max_num_batched_tokens=256, compile_programs="at_start")
"""
    own = {"JPAGED_CACHE_DIR": str(tmp_path), COUNT_VARIABLE: "1"}
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"} | own
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            wait_for_line(process, "processes started")
            helpers = children(process.pid)
            wait_for_line(process, "compiles a program")
            process.send_signal(signal.SIGINT)
            errors = process.communicate(timeout=300)[1]
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert len(helpers) == 1
    assert not any(map(is_alive, helpers))


def wait_for_line(process: subprocess.Popen, text: str) -> None:
    """Until the process writes a line with this text to stderr."""
    assert process.stderr is not None
    while text not in (line := process.stderr.readline()):
        assert line, f"it ended without {text!r}"


def children(pid: int) -> list[int]:
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


def is_alive(pid: int) -> bool:
    """Whether it runs; one that nobody has waited for yet has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
