"""What the PTX in Triton kernels has in common: it computes with two numbers of 16 bits in a register.

Triton writes such a computation number by number, at two to six times as many instructions.
"""

import triton


def runs_assembly() -> bool:
    """Whether kernels may have PTX of their own: GPUs run it, and Triton's interpreter does not."""
    return not triton.knobs.runtime.interpret


def twice(bits: int) -> str:
    """A constant of 16 bits in both halves of a register."""
    return f"0x{(bits << 16) | bits:08X}"
