"""What the kernels for Hopper call on a GPU and what stands in for it in Pallas' interpreter fit each other."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from jpaged import pallas_kernels
from jpaged.pallas_kernels.registry import missing

if missing("hopper") is not None:
    pytest.skip(str(missing("hopper")), allow_module_level=True)

PACKAGE = Path(pallas_kernels.__file__).parent
KERNELS = [
    path
    for path in sorted(PACKAGE.glob("*/hopper*.py"))
    if "hopper_primitives if interpret is None" in path.read_text()
]


def test_the_kernels_that_have_primitives_are_found():
    names = [f"{path.parent.name}/{path.stem}" for path in KERNELS]
    assert {"decode_attention/hopper", "ragged_attention/hopper", "sample_tokens/hopper", "gated_product/hopper"} <= {
        *names
    }


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_primitive_that_a_kernel_calls_takes_the_same_in_the_interpreter(kernel):
    module = import_module(f"jpaged.pallas_kernels.{kernel.parent.name}.{kernel.stem}")
    called = set(re.findall(r"\bgpu\.(\w+)\(", kernel.read_text()))
    assert called
    for name in called:
        gpu, interpreted = (getattr(twin, name) for twin in (module.hopper_primitives, module.hopper_interpreted))
        assert gpu is not interpreted, name
        assert list(inspect.signature(gpu).parameters) == list(inspect.signature(interpreted).parameters), name
