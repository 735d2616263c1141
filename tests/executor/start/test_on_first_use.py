"""Programs that are compiled when a step first needs them: which, how often, under which settings, and where at all."""

import logging
import socket
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jpaged import LLM, EngineArgs, SamplingParams
from jpaged.api.errors import InvalidParameterError
from jpaged.executor.start.compilation import Compiler
from jpaged.executor.start.jax_settings import jax_settings, settings_as
from jpaged.executor.start.on_first_use import compiles_on_first_use
from jpaged.executor.start.started import whence
from jpaged.executor.step.bodies import Decode, Mixed
from jpaged.executor.step.kinds import first_programs, step_programs
from jpaged.processes import engine_process, wire
from jpaged.processes import pulse as pulses
from jpaged.processes.pulse import Pulse
from tests.tiny_models import TINY_ENGINE, VOCAB_SIZE, tiny_model, write_tiny_model

pytestmark = pytest.mark.xdist_group("on first use")  # one worker, which compiles once

SIZES = {"token_buckets": (16, 128), "decode_buckets": (2, 32)}
KINDS = (
    SamplingParams(temperature=0, max_tokens=6),
    SamplingParams(seed=1, max_tokens=6, top_p=0.9),
    SamplingParams(seed=2, max_tokens=6, presence_penalty=1.0, logprobs=2, prompt_logprobs=1),
)


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> dict:
    directory = write_tiny_model(tiny_model("llama-gqa-d64-tied"), tmp_path_factory.mktemp("model"), use_torch=False)
    return TINY_ENGINE | SIZES | {"model": str(directory)}


@pytest.fixture(scope="module")
def at_start(options) -> LLM:
    return LLM(**options, compile_programs="at_start")


@pytest.fixture(scope="module")
def late(options) -> LLM:
    with jax.default_matmul_precision("highest"):
        return LLM(**options)


def generated(llm: LLM, count: int) -> list[tuple]:
    prompts = np.random.default_rng(0).integers(3, VOCAB_SIZE, (count, 9)).tolist()
    outputs = llm.generate(prompts, [KINDS[i % len(KINDS)] for i in range(count)], use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def test_a_start_compiles_what_nearly_every_request_runs_and_says_how_many_are_to_come(late):
    startup, programs = late.engine.startup, late.engine.startup.runner._programs
    assert {Mixed(16), Decode(2)} < set(programs) == set(first_programs(startup.setup))
    everything = step_programs(startup.setup)
    assert startup.on_first_use is not None
    assert startup.on_first_use.missing == set(everything) - set(programs)
    here, to_come = whence(startup.origins), len(everything) - len(programs)
    assert f"{here}, {to_come} more when they are first needed\n" in startup.table("tiny")


def test_tokens_are_those_of_programs_compiled_at_start_and_each_is_compiled_once(at_start, late, caplog):
    with caplog.at_level(logging.INFO, "jpaged.startup"):
        first = generated(late, 6)
        compiled = [record.args[0] for record in caplog.records if "on its first use" in record.message]
        assert generated(late, 6) == first
    assert len(compiled) == len(set(compiled)) > 4
    assert compiled == [record.args[0] for record in caplog.records if "on its first use" in record.message]
    startup = late.engine.startup
    names = {program.name for program in startup.runner._programs}
    assert names == {*compiled, *(program.name for program in first_programs(startup.setup))}
    assert not set(startup.runner._programs) & startup.on_first_use.missing
    expected = generated(at_start, 6)
    assert [token_ids for token_ids, _ in first] == [token_ids for token_ids, _ in expected]
    assert set(startup.runner._programs) < set(at_start.engine.startup.runner._programs)
    assert "first needed" not in at_start.engine.startup.table("tiny")


def test_a_program_is_compiled_under_the_jax_settings_of_the_start(late, monkeypatch):
    noted = []
    compile_now = Compiler.compile_now

    def with_settings(compiler, program):
        noted.append(jax_settings()["jax_default_matmul_precision"])
        return compile_now(compiler, program)

    monkeypatch.setattr(Compiler, "compile_now", with_settings)
    assert jax_settings()["jax_default_matmul_precision"] is None
    late.embed([[3, 4, 5]], use_tqdm=False)
    assert noted == ["highest"]
    assert jax_settings()["jax_default_matmul_precision"] is None


# The second one is no attribute of `jax.config` either.
@pytest.mark.parametrize("name", ["jax_compiler_enable_remat_pass", "jax_disable_most_optimizations"])
def test_settings_without_a_context_manager_are_set_and_put_back(name):
    assert not hasattr(jax, name.removeprefix("jax_"))
    before = jax.config.values[name]
    with settings_as({name: not before}):
        assert jax.config.values[name] is not before
    assert jax.config.values[name] is before


def test_a_program_that_there_is_not_is_not_compiled(late):
    with pytest.raises(KeyError):
        late.engine.startup.runner._programs[Mixed(64)]


def test_on_a_cpu_alone_programs_wait_for_their_first_use():
    cpu, gpu = (SimpleNamespace(devices=[SimpleNamespace(platform=one, device_kind=one)]) for one in ("cpu", "gpu"))
    for backend in (None, "xla"):
        assert compiles_on_first_use("auto", cpu, backend)
        assert not compiles_on_first_use("at_start", cpu, backend)
        assert not compiles_on_first_use("auto", gpu, backend)
    assert not compiles_on_first_use("auto", cpu, "triton")  # what it cannot do is to be found at start
    assert compiles_on_first_use("on_first_use", cpu, "triton")
    assert not compiles_on_first_use("at_start", gpu, None)
    with pytest.raises(InvalidParameterError, match="compile_programs='on_first_use' is for CPUs"):
        compiles_on_first_use("on_first_use", gpu, None)
    with pytest.raises(InvalidParameterError, match="compile_programs must be"):
        EngineArgs(compile_programs="lazily")


def test_a_step_that_compiles_does_not_count_as_hung(options, monkeypatch):
    """A thread beats while an engine process compiles, and the loop after it."""
    monkeypatch.setattr(pulses, "IDLE_BEAT_S", 0.001)
    pulse = Pulse.create()
    beats, stood_still = [], []
    compile_now = Compiler.compile_now

    def noted(compiler, program):
        beats.append(pulse.beat_at)
        latest = time.monotonic() + 60
        while pulse.beat_at == beats[-1] and time.monotonic() < latest:
            time.sleep(0.001)
        stood_still.append(pulse.beat_at == beats[-1])
        return compile_now(compiler, program)

    monkeypatch.setattr(Compiler, "compile_now", noted)
    ours, its = socket.socketpair()
    ours.settimeout(120.0)
    thread = threading.Thread(target=engine_process.serve, args=([its], pulse))
    thread.start()
    reader, come = wire.FrameReader(wire.FromEngine), []

    def wait_for(kind: type) -> None:
        while not any(isinstance(message, kind) for message in come):
            come.extend(reader.feed(ours.recv(1 << 16)))

    try:
        ours.sendall(wire.frame(wire.Start(EngineArgs(**options), "steps")))
        wait_for(wire.Ready)
        prompt = np.arange(3, 40, dtype=np.int32).tobytes()
        ours.sendall(wire.frame(wire.Add(0, prompt, KINDS[0], None, (), 0, None, 0.0)))
        wait_for(wire.Step)
        ours.sendall(wire.frame(wire.Shutdown()))
    finally:
        ours.shutdown(socket.SHUT_WR)
        thread.join()
        ours.close()
    assert beats
    assert not any(stood_still)
    assert pulse.silence_s() > 0
    pulse.close()
