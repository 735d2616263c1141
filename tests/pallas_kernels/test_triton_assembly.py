"""The PTX of the Triton kernels that widen four bytes at a time, instruction by instruction, over every byte."""

import re

import ml_dtypes
import numpy as np
import pytest

from jpaged.pallas_kernels.registry import missing

if missing("triton") is not None:
    pytest.skip(str(missing("triton")), allow_module_level=True)

from jpaged.pallas_kernels.common import triton_fp8, triton_int4

BFLOAT16 = ml_dtypes.bfloat16


def pairs(word: int) -> np.ndarray:
    return np.array([word & 0xFFFF, word >> 16], np.uint16).view(BFLOAT16)


def run(assembly: str, outputs: int, word: int) -> list[np.ndarray]:
    """What the instructions that are used here make of a register: bfloat16 [2] of each output."""
    registers = {f"${outputs}": word}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in re.findall(r"^ *((?:mov|prmt|shr|and|lop3|fma)\S*) (.*);$", assembly, re.MULTILINE):
        name, (target, *operands) = line[0], line[1].split(", ")
        given = [value(operand) for operand in operands]
        match name:
            case "mov.b32":
                (found,) = given
            case "prmt.b32":
                of_bytes = [*given[0].to_bytes(4, "little"), *given[1].to_bytes(4, "little")]
                found = sum(of_bytes[given[2] >> 4 * i & 0xF] << 8 * i for i in range(4))
            case "shr.b32":
                found = given[0] >> given[1]
            case "and.b32":
                found = given[0] & given[1]
            case "lop3.b32":
                assert given[3] == 0xF0 & 0xCC | 0xAA
                found = given[0] & given[1] | given[2]
            case "fma.rn.bf16x2":
                a, b, c = (pairs(one).astype(np.float64) for one in given)
                low, high = (a * b + c).astype(BFLOAT16).view(np.uint16).tolist()
                found = low | high << 16
            case _:
                raise AssertionError(f"{name} is not known here")
        registers[target] = found
    return [pairs(registers[f"${i}"]) for i in range(outputs)]


WORDS = [(np.arange(4) * 64 + first) % 256 for first in range(256)]  # every byte in every place


def test_e4m3_is_widened_exactly():
    for given in WORDS:
        found = np.concatenate(
            run(triton_fp8._FOUR.value, 2, int.from_bytes(given.astype(np.uint8).tobytes(), "little"))
        )
        wanted = given.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        wanted = np.where(np.isnan(wanted), np.where(given == 0x7F, 480.0, -480.0), wanted)
        np.testing.assert_array_equal(found.astype(np.float32), wanted)


def test_both_halves_of_a_byte_are_widened_less_eight():
    for given in WORDS:
        found = run(triton_int4._EIGHT.value, 4, int.from_bytes(given.astype(np.uint8).tobytes(), "little"))
        lower, upper = np.concatenate(found[:2]), np.concatenate(found[2:])
        np.testing.assert_array_equal(lower.astype(int), (given & 15) - 8)
        np.testing.assert_array_equal(upper.astype(int), (given >> 4) - 8)
