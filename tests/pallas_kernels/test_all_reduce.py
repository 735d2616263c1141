"""What the one-shot all-reduce takes. That it compiles is in `test_mosaic_compile`; it runs on several GPUs only."""

import pytest

from jpaged.pallas_kernels.backends import mosaic_missing

if (reason := mosaic_missing()) is not None:
    pytest.skip(reason, allow_module_level=True)

from jpaged.pallas_kernels.all_reduce_mosaic import MAX_ROWS, initial_state, unsupported


@pytest.mark.parametrize("shape", [(1, 1024), (8, 4096), (64, 8192)])
def test_rows_of_few_requests_are_taken(shape):
    assert unsupported(shape, "bfloat16", 4) is None


@pytest.mark.parametrize(
    ("shape", "devices", "message"),
    [
        ((65, 4096), 2, "65 rows"),
        ((8, 4096), 1, "1 device"),
        ((8, 1536), 2, "rows of 1536 do not divide"),
        ((8, 16384), 2, "rows of 16384 do not fit"),
    ],
)
def test_what_is_not_taken_is_said(shape, devices, message):
    assert message in unsupported(shape, "bfloat16", devices)


def test_every_sender_has_two_slots_for_each_row():
    inbox, signals = initial_state(4, 4096, "bfloat16")
    assert inbox.shape == (2, 4, MAX_ROWS, 4096)
    assert signals.shape == (4 + 1, MAX_ROWS)
