"""Whether a program was compiled, or came out of JAX's own cache, and which of them are kept."""

import secrets

import jax
import jax.numpy as jnp
import pytest

from jpaged.executor.config import ExecutorConfig
from jpaged.executor.mesh import DeviceMesh
from jpaged.executor.start.compilation import Compiler, _cache_hits
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


def test_a_cpus_program_is_kept_when_it_was_compiled_and_not_when_jaxs_cache_had_it(cache, tmp_path, monkeypatch):
    """What XLA's CPU client has read back and writes again lacks its functions."""
    monkeypatch.setenv("JPAGED_CACHE_DIR", str(tmp_path / "ours"))
    config = ExecutorConfig(
        max_num_seqs=2, max_model_len=64, block_size=16, num_blocks=8, decode_buckets=(2,), token_buckets=(8,)
    )
    setup = Setup.of(build(ModelConfig.from_dict(tiny_model("llama-gqa-d64-tied").config), "float32"), config)
    program = next(one for one in step_programs(setup) if one.kind == "update")

    def found():
        jax.clear_caches()
        return Compiler(setup, DeviceMesh(jax.devices()[:1])).compile_now(program)

    compiled, kept = found(), found()
    assert (compiled.origin, kept.origin) == ("compiled", "kept")
    assert kept.alias_bytes == compiled.alias_bytes > 0
    files = [*(tmp_path / "ours" / "programs").iterdir()]
    assert len(files) == 1
    files[0].unlink()
    assert [found().origin for _ in range(2)] == ["jax", "jax"]
    assert not any((tmp_path / "ours" / "programs").iterdir())
