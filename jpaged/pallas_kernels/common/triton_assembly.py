"""What the PTX in Triton kernels has in common: it computes with two numbers of 16 bits in a register.

Triton writes such a computation number by number, at two to six times as many instructions.
"""


def twice(bits: int) -> str:
    """A constant of 16 bits in both halves of a register."""
    return f"0x{(bits << 16) | bits:08X}"
