"""Whether a program was compiled, or came out of JAX's own cache, and which of them are kept."""

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.executor.config import ExecutorConfig
from jpaged.executor.mesh import DeviceMesh
from jpaged.executor.start.compilation import Compiler, _cache_hits
from jpaged.executor.start.executable_cache import KEPT_PLATFORMS
from jpaged.executor.start.past_jax_cache import calls_python, past_jax_cache
from jpaged.executor.step.compiled import CompiledProgram
from jpaged.executor.step.kinds import step_programs
from jpaged.executor.step.program import Setup
from jpaged.models import ModelConfig, build
from tests.support.jax_cache import jax_cache
from tests.tiny_models import tiny_model


@pytest.fixture
def cache(tmp_path):
    """JAX's persistent cache, empty, which keeps every program."""
    everything = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}
    with jax_cache(tmp_path, **everything):
        yield


def test_a_program_from_jaxs_cache_is_told_from_one_that_was_compiled(cache):
    addend = secrets.randbelow(1 << 20)

    def compiled_anew():
        """Whether compiling the program hit the cache."""
        jax.clear_caches()
        before = _cache_hits()
        jax.jit(lambda x: x * 2 + addend).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()
        return _cache_hits() == before

    assert compiled_anew()
    assert not compiled_anew()


@pytest.fixture
def setup(tmp_path, monkeypatch) -> Setup:
    """Its programs are kept in a directory of the test's own."""
    monkeypatch.setenv("JPAGED_CACHE_DIR", str(tmp_path / "ours"))
    config = ExecutorConfig(
        max_num_seqs=2, max_model_len=64, block_size=16, num_blocks=8, decode_buckets=(2,), token_buckets=(8,)
    )
    return Setup.of(build(ModelConfig.from_dict(tiny_model("llama-gqa-d64-tied").config), "float32"), config)


def found(setup: Setup, *, kept: bool = True) -> CompiledProgram:
    """A program, as a process that has none in memory finds it."""
    jax.clear_caches()
    program = next(one for one in step_programs(setup) if one.kind == "update")
    kept_on = KEPT_PLATFORMS if kept else ()
    return Compiler(setup, DeviceMesh(jax.devices()[:1]), kept_on=kept_on).compile_now(program)


def test_a_cpus_program_is_kept_by_us_alone(cache, setup, tmp_path):
    """What XLA's CPU client has read back and writes again lacks its functions, so JAX's cache must not have it."""
    compiled, kept = found(setup), found(setup)
    assert (compiled.origin, kept.origin) == ("compiled", "kept")
    assert kept.alias_bytes == compiled.alias_bytes > 0
    files = [*(tmp_path / "ours" / "programs").iterdir()]
    assert len(files) == 1
    assert not in_jaxs_cache(tmp_path)
    files[0].unlink()
    assert [found(setup).origin for _ in range(2)] == ["compiled", "kept"]
    assert not in_jaxs_cache(tmp_path)


def test_a_program_that_jaxs_cache_has_is_kept_all_the_same(cache, setup, tmp_path):
    """After an upgrade ours has other names for the same programs, and JAX's has the names of before."""
    assert [found(setup, kept=False).origin for _ in range(2)] == ["compiled", "jax"]
    assert in_jaxs_cache(tmp_path)
    assert [found(setup).origin for _ in range(2)] == ["compiled", "kept"]


def test_only_programs_that_call_python_are_left_to_jaxs_cache():
    def lowered(function):
        return jax.jit(function).lower(jax.ShapeDtypeStruct((3,), jnp.float32))

    assert calls_python(lowered(lambda x: jax.pure_callback(np.cos, x, x) + 1))
    assert not calls_python(lowered(lambda x: jnp.cos(x) + 1))


def test_one_thread_compiles_past_jaxs_cache_while_another_uses_it(cache, tmp_path):
    """Each compiles while the other is in the midst of it."""
    addends = {name: secrets.randbelow(1 << 20) for name in ("past", "usual")}
    together = threading.Barrier(2)

    def compile_one(name: str) -> None:
        together.wait(60)
        with past_jax_cache() if name == "past" else nullcontext():
            together.wait(60)
            lowered = jax.jit(lambda x: x * 3 + addends[name]).lower(jax.ShapeDtypeStruct((3,), jnp.float32))
            lowered.compile()
            together.wait(60)

    with ThreadPoolExecutor(2) as threads:
        assert len([*threads.map(compile_one, addends)]) == 2
    assert len(in_jaxs_cache(tmp_path)) == 1


def in_jaxs_cache(directory: Path) -> list[Path]:
    return [*directory.glob("*-cache")]
