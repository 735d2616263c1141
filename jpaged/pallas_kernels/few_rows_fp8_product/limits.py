"""Up to how many rows FP8 products round their rows themselves."""

import os

from jpaged.pallas_kernels.common.triton_targets import FAMILY, capability

VARIABLE = "JPAGED_FEW_FP8_ROWS"

_MOST_ROWS = dict.fromkeys(FAMILY.values(), 0)
"""By family of GPUs. 0 where it was not measured that this is faster than `round_rows` and XLA's product."""


def asked_for() -> int | None:
    """What the environment variable says; None if nothing.

    Raises:
        ValueError: that is no number of rows.
    """
    value = os.environ.get(VARIABLE, "").strip()
    if not value:
        return None
    if not value.isdecimal():
        raise ValueError(f"{VARIABLE} must be a number of rows, 0 for never, got {value!r}; unset it to choose by GPU.")
    return int(value)


def most_rows() -> int:
    """For the device that kernels are compiled for; more than a kernel takes go elsewhere anyway.

    Raises:
        ValueError: as `asked_for`.
    """
    asked = asked_for()
    return _MOST_ROWS.get(FAMILY.get(capability(), 0), 0) if asked is None else asked
