"""Programs of tests that compile quickly do not outlive the setting that they were compiled under."""

import jax
import jax.numpy as jnp
import pytest

from tests.support.quick_compilation import _set_to


@pytest.mark.parametrize("before", [False, True])
def test_a_program_is_compiled_again_where_the_setting_changes_and_kept_where_it_does_not(before):
    program = jax.jit(lambda x: x + 1)
    with _set_to(before):
        program(jnp.zeros(3))
        with _set_to(before):
            assert program._cache_size() == 1
        assert program._cache_size() == 1
        with _set_to(not before):
            assert program._cache_size() == 0
            program(jnp.zeros(3))
        assert program._cache_size() == 0
