"""Compiled as usual: with hardly any optimisation XLA's tanh in float32 is too far from -1 for gelu's small values."""

from tests.support.quick_compilation import usual_compilation as usual_compilation
