"""What parameters start from."""

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.models.parameters import Bits
from jpaged.models.quantization import int4
from jpaged.pallas_kernels.int4_product.api import MIDDLE


def test_random_weights_in_4_bits_are_0_on_average_and_deviate_as_layers_expect():
    """Others would add the same to all outputs, by which a router sends all tokens to few experts."""
    packed = np.asarray(Bits(halves_around_8=True).draw(jax.random.key(0), (1000, 1000), jnp.dtype(jnp.uint8)))
    for halves in (packed & 15, packed >> 4):
        weights = halves.astype(np.int32) - MIDDLE
        assert abs(weights.mean()) < 0.02
        assert abs(weights.std() - int4._RANDOM_STD) < 0.02
        assert set(np.unique(weights)) == set(range(-7, 8))
