"""What the kernels for Hopper call on a GPU and what stands in for it in Pallas' interpreter fit each other."""

import inspect
from importlib import import_module

import pytest

from jpaged.pallas_kernels.registry import missing

if missing("hopper") is not None:
    pytest.skip(str(missing("hopper")), allow_module_level=True)


@pytest.mark.parametrize("folder", ["common", "decode_attention", "ragged_attention", "sample_tokens", "gated_product"])
def test_the_interpreter_has_every_primitive_of_the_gpu_with_the_same_parameters(folder):
    gpu, interpreted = (
        import_module(f"jpaged.pallas_kernels.{folder}.hopper_{which}") for which in ("primitives", "interpreted")
    )
    assert gpu.__all__ == interpreted.__all__
    for name in gpu.__all__:
        parameters = [list(inspect.signature(getattr(module, name)).parameters) for module in (gpu, interpreted)]
        assert parameters[0] == parameters[1], name
