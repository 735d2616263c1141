"""The PTX that widens numbers of 8 and of 4 bits in Triton kernels, instruction by instruction, over every byte."""

import re

import ml_dtypes
import numpy as np
import pytest

from jpaged.pallas_kernels.registry import missing

if missing("triton") is not None:
    pytest.skip(str(missing("triton")), allow_module_level=True)

from jpaged.pallas_kernels.common import triton_fp4, triton_fp8, triton_int4, triton_int8
from jpaged.pallas_kernels.int4_product.reference import E2M1

BFLOAT16 = ml_dtypes.bfloat16


def pairs(word: int, dtype: type = BFLOAT16) -> np.ndarray:
    return np.array([word & 0xFFFF, word >> 16], np.uint16).view(dtype)


def run(assembly: str, outputs: int, *words: int, dtype: type = BFLOAT16) -> list[np.ndarray]:
    """What the instructions that are used here make of registers: dtype [2] of each output."""
    registers = {f"${outputs + i}": word for i, word in enumerate(words)}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in re.findall(r"^ *((?:mov|prmt|shl|shr|and|or|xor|lop3|mul|fma)\S*) (.*);$", assembly, re.MULTILINE):
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
            case "shl.b32":
                found = given[0] << given[1] & 0xFFFFFFFF
            case "and.b32":
                found = given[0] & given[1]
            case "or.b32":
                found = given[0] | given[1]
            case "xor.b32":
                found = given[0] ^ given[1]
            case "mul.lo.u32":
                found = given[0] * given[1] & 0xFFFFFFFF
            case "lop3.b32":
                assert given[3] == 0xF0 & 0xCC | 0xAA
                found = given[0] & given[1] | given[2]
            case "fma.rn.bf16x2" | "fma.rn.f16x2":
                a, b, c = (pairs(one, dtype).astype(np.float64) for one in given)
                low, high = (a * b + c).astype(dtype).view(np.uint16).tolist()
                found = low | high << 16
            case _:
                raise AssertionError(f"{name} is not known here")
        registers[target] = found
    return [pairs(registers[f"${i}"], dtype) for i in range(outputs)]


WORDS = [(np.arange(4) * 64 + first) % 256 for first in range(256)]  # every byte in every place


def test_both_halves_of_a_byte_are_widened_less_eight():
    for given in WORDS:
        found = run(triton_int4._EIGHT.value, 4, int.from_bytes(given.astype(np.uint8).tobytes(), "little"))
        lower, upper = np.concatenate(found[:2]), np.concatenate(found[2:])
        np.testing.assert_array_equal(lower.astype(int), (given & 15) - 8)
        np.testing.assert_array_equal(upper.astype(int), (given >> 4) - 8)


def test_both_halves_of_a_byte_are_widened_with_128():
    for given in WORDS:
        found = run(triton_int4._EIGHT_RAISED.value, 4, int.from_bytes(given.astype(np.uint8).tobytes(), "little"))
        lower, upper = np.concatenate(found[:2]), np.concatenate(found[2:])
        np.testing.assert_array_equal(lower.astype(int), (given & 15) + 128)
        np.testing.assert_array_equal(upper.astype(int), (given >> 4) + 128)


def test_there_is_a_one_for_each_byte():
    np.testing.assert_array_equal(np.concatenate(run(triton_int4._ONES.value, 2, 0)), np.ones(4))


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    """Equal, zeros by their signs, too."""
    np.testing.assert_array_equal(found.astype(np.float64), wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


def e4m3(of_bytes: np.ndarray) -> np.ndarray:
    """float64; 480 for NaN."""
    found = of_bytes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return np.where(np.isnan(found), np.copysign(480.0, found), found)


@pytest.mark.parametrize(
    ("assembly", "dtype"), [(triton_fp8._BFLOAT16_PAIRS, BFLOAT16), (triton_fp8._FLOAT16_PAIRS, np.float16)]
)
def test_both_numbers_of_a_word_in_e4m3_are_widened_exactly(assembly, dtype):
    for given in WORDS:
        of_bytes = given.astype(np.uint8)
        lower, upper = run(assembly.value, 2, int.from_bytes(of_bytes.tobytes(), "little"), dtype=dtype)
        same(lower, e4m3(of_bytes)[::2])
        same(upper, e4m3(of_bytes)[1::2])


@pytest.mark.parametrize(
    ("assembly", "dtype", "right"),
    [
        (triton_fp8._BFLOAT16_FOURS, BFLOAT16, e4m3),
        (triton_fp8._FLOAT16_FOURS, np.float16, e4m3),
        (triton_int8._BFLOAT16_FOURS, BFLOAT16, lambda of_bytes: of_bytes.view(np.int8).astype(np.float64)),
        (triton_int8._FLOAT16_FOURS, np.float16, lambda of_bytes: of_bytes.view(np.int8).astype(np.float64)),
    ],
)
def test_four_bytes_are_widened_exactly(assembly, dtype, right):
    for given in WORDS:
        of_bytes = given.astype(np.uint8)
        found = run(assembly.value, 2, int.from_bytes(of_bytes.tobytes(), "little"), dtype=dtype)
        same(np.concatenate(found), right(of_bytes))


def test_both_halves_of_a_byte_in_e2m1_are_widened_exactly():
    for given in WORDS:
        word = int.from_bytes(given.astype(np.uint8).tobytes(), "little")
        found = run(triton_fp4._FLOAT16_FOURS.value, 4, word, dtype=np.float16)
        same(np.concatenate(found[:2]), np.array(E2M1)[given & 15])
        same(np.concatenate(found[2:]), np.array(E2M1)[given >> 4])


@pytest.mark.parametrize("scales", [[1.0] * 8, [2.0**-125, 2.0**125, 0.5, 8.0, 448.0, 2.0**-9, 1.125, 0.0]])
def test_both_halves_of_a_byte_in_e2m1_are_scaled_exactly(scales):
    """Each by its own number, whichever bytes a thread has beside each other."""
    words = np.array(scales).astype(BFLOAT16).view(np.uint32).tolist()
    for given in WORDS:
        word = int.from_bytes(given.astype(np.uint8).tobytes(), "little")
        found = run(triton_fp4._BFLOAT16_FOURS.value, 4, word, *words)
        same(np.concatenate(found[:2]), np.array(E2M1)[given & 15] * scales[:4])
        same(np.concatenate(found[2:]), np.array(E2M1)[given >> 4] * scales[4:])
