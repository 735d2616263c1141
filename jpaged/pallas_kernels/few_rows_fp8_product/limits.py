"""Up to how many rows FP8 products round their rows themselves: none, unless the environment asks for it.

On an H200 `round_rows` and XLA's products are faster (docs/kernels.md); on other GPUs neither is measured.
"""

import os

VARIABLE = "JPAGED_FEW_FP8_ROWS"


def most_rows() -> int:
    """The most rows to use the kernel for, of the environment variable; 0 if it is not set. It may be more than the
    kernel takes, which refuses them itself.

    Raises:
        ValueError: the variable is not a whole number from 0 up.
    """
    value = os.environ.get(VARIABLE, "").strip()
    if value and not value.isdecimal():
        raise ValueError(f"{VARIABLE} must be a number of rows, 0 for never, got {value!r}; unset it for never.")
    return int(value or 0)
