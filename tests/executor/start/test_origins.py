"""Whether a program was compiled, or came out of JAX's own cache."""

import secrets

import jax
import jax.numpy as jnp
import pytest

from jpaged.executor.start.compilation import _cache_hits


@pytest.fixture
def cache(tmp_path):
    """JAX's persistent cache, empty; afterwards it is where it was."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    names += ("jax_persistent_cache_min_entry_size_bytes",)
    before = {name: jax.config.values[name] for name in names}
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()
    for name, value in zip(names, (str(tmp_path), 0.0, -1), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


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
