"""How the kernel of products with narrow weights is cut; its results are tested with the ops that it serves."""

import pytest

from jpaged.pallas_kernels.registry import missing

if missing("hopper") is not None:
    pytest.skip(str(missing("hopper")), allow_module_level=True)

from jpaged.pallas_kernels.int4_product.hopper import pick_tiling
from jpaged.pallas_kernels.narrow_product.hopper_kernel import Tiling, splits_of


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((24,), "rows must be 8, 16, 32, 64 or 128, got 24"),
        ((8, 2, 3), "blocks x consumers x 64 must be at most 256 outputs, got 384"),
        ((32, 2, 1), "consumers must be at least 2 with 32 rows, got 1"),
        ((64, 2, 2, 4), "4 stages of 65536 bytes do not fit into 231424"),
    ],
)
def test_what_no_tiling_can_be_is_named(sizes, said):
    with pytest.raises(ValueError, match=said):
        Tiling(*sizes)


@pytest.mark.parametrize(
    ("rows", "ctas", "steps", "splits"),
    [
        (8, 224, 16, 1),
        (8, 64, 16, 4),
        (8, 32, 56, 8),
        (8, 48, 16, 5),
        (8, 8, 3, 1),
        (32, 112, 16, 1),
        (64, 32, 56, 4),
        (64, 48, 16, 2),
    ],
)
def test_few_outputs_are_computed_by_as_many_parts_of_their_inputs_as_run_at_once(rows, ctas, steps, splits):
    assert splits_of(pick_tiling(rows, 128, zeros=False), ctas, steps) == splits
