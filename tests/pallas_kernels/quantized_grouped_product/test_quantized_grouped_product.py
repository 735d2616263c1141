"""Grouped products in few bits against float64, in XLA and in Triton's interpreter, and what they refuse."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jpaged.pallas_kernels import devices, quantized_grouped_product
from jpaged.pallas_kernels.devices import Device
from jpaged.pallas_kernels.grouped_product import tiles
from jpaged.pallas_kernels.grouped_product.tiles import RowGroups, RowTiles, plan_tiles
from jpaged.pallas_kernels.int4_product.reference import pack
from jpaged.pallas_kernels.quantized_grouped_product.api import OP, tile_height
from jpaged.pallas_kernels.quantized_grouped_product.operands import Experts, Operands, Options
from jpaged.pallas_kernels.quantized_grouped_product.reference import dequantized
from tests.pallas_kernels.marks import WITH_TRITON, needs_triton, runs_triton

SIZES = (3, 0, 18, 1)
"""Rows of each group: none, few, and more than a tile's."""
BEHIND = 2
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


@dataclass(frozen=True)
class Case:
    """form, group: as of the op. inputs, outputs: of a matrix. zeros: whether groups have zero points."""

    form: str
    group: int | None
    inputs: int
    outputs: int
    zeros: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"form": self.form, "group": self.group}


CASES = [
    Case("fp8", None, 72, 40),
    Case("fp8", 128, 160, 72),
    Case("int8", None, 72, 40),
    Case("int8", 32, 96, 40),
    Case("int4", 32, 96, 40),
    Case("int4", 64, 128, 72, zeros=True),
    Case("mxfp4", 32, 96, 40),
    Case("nvfp4", 16, 160, 40),
]
BACKENDS = [("xla", jnp.float32, 23), ("xla", jnp.bfloat16, 8)]
BACKENDS += [
    pytest.param("triton", dtype, bits, marks=runs_triton) for dtype, bits in ((jnp.bfloat16, 8), (jnp.float16, 11))
]


def matrices(case: Case, seed: int = 0) -> tuple[dict[str, Any], np.ndarray]:
    """The op's w, scale and zero, and what they stand for in float64 [E, N, K]."""
    rng = np.random.default_rng(seed)
    shape = (len(SIZES), case.outputs, case.inputs)
    number = 1 if case.group is None else -(-case.inputs // case.group)
    shared = case.group or case.inputs
    scale = rng.uniform(0.01, 0.1, (*shape[:2], number)).astype(np.float32)
    if case.form == "fp8":
        w = (rng.standard_normal(shape) * 64).astype(ml_dtypes.float8_e4m3fn)
        values = w.astype(np.float64)
        return {"w": w, "scale": scale}, values * np.repeat(scale, shared, axis=2)[..., : case.inputs]
    if case.form == "int8":
        w = rng.integers(-128, 128, shape, np.int8)
        return {"w": w, "scale": scale}, w * np.repeat(scale.astype(np.float64), shared, axis=2)[..., : case.inputs]
    bits = rng.integers(0, 16, shape, np.uint8)
    w = pack(bits.reshape(-1, case.inputs), max(shared, 32)).reshape(*shape[:2], -1)
    if case.form == "mxfp4":
        exponents = rng.integers(118, 126, scale.shape).astype(np.uint8)
        exponents[0, :2, 0] = (2, 127)  # what is below 2^-126 may become zero
        values = np.array([*E2M1, *(-one for one in E2M1)])[bits]
        powers = np.exp2(exponents.astype(np.float64) - 127)
        return {"w": w, "scale": exponents}, values * np.repeat(powers, shared, axis=2)
    if case.form == "nvfp4":
        scale = (scale * 1000).astype(ml_dtypes.float8_e4m3fn)
        outer = rng.uniform(500, 2000, shape[:2]).astype(np.float32)
        wide = (scale.astype(np.float32) / outer[..., None]).astype(np.float64)
        values = np.array([*E2M1, *(-one for one in E2M1)])[bits]
        outer[0, 1] = wide[0, 1] = 0
        return {"w": w, "scale": scale, "outer": outer}, values * np.repeat(wide, shared, axis=2)
    zero = rng.integers(0, 17, scale.shape).astype(np.uint8) if case.zeros else None
    middle = 8 if zero is None else np.repeat(zero, shared, axis=2).astype(np.float64)
    return {"w": w, "scale": scale, "zero": zero}, (bits.astype(np.float64) - middle) * np.repeat(scale, shared, axis=2)


def rows(case: Case, dtype: Any) -> tuple[jax.Array, np.ndarray]:
    """x, and each row's group; those behind have none."""
    x = np.random.default_rng(1).standard_normal((sum(SIZES) + BEHIND, case.inputs))
    return jnp.asarray(x, dtype), np.repeat(np.arange(len(SIZES) + 1), [*SIZES, BEHIND])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.form}-{case.group}")
def test_what_is_dequantized_is_what_the_form_says(case):
    given, exact = matrices(case)
    for expert, right in enumerate(exact):
        zero = None if given.get("zero") is None else given["zero"][expert]
        outer = None if case.form != "nvfp4" else given["outer"][expert]
        found = dequantized(given["w"][expert], given["scale"][expert], zero, outer, **case.options)
        np.testing.assert_array_equal(np.asarray(found), right.astype(np.float32))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.form}-{case.group}")
@pytest.mark.parametrize(("backend", "dtype", "bits"), BACKENDS)
def test_products_are_those_of_float64_within_rounding(case, backend, dtype, bits):
    given, exact = matrices(case)
    x, owner = rows(case, dtype)
    live, wide = owner < len(SIZES), np.asarray(x, np.float64)
    right = np.zeros((len(owner), case.outputs))
    terms = np.zeros_like(right)
    for row in np.flatnonzero(live):
        right[row] = exact[owner[row]] @ wide[row]
        terms[row] = np.abs(exact[owner[row]]) @ np.abs(wide[row])
    bound = terms * (2.0**-bits + case.inputs * 2.0**-24)
    sizes = jnp.asarray(SIZES, jnp.int32)
    options = case.options | {"backend": backend, "zero": given.get("zero"), "outer": given.get("outer")}

    plain = quantized_grouped_product(x, given["w"], given["scale"], sizes, **options)
    assert plain.dtype == dtype
    check(plain, right, bound + np.abs(right) * 2.0**-bits, live)

    weights = np.random.default_rng(2).random(len(owner)).astype(np.float32)
    shuffled = np.random.default_rng(3).permutation(len(owner))
    alone = quantized_grouped_product(
        x[shuffled],
        given["w"],
        given["scale"],
        None,
        groups=jnp.asarray(owner[shuffled], jnp.int32),
        weights=jnp.asarray(weights[shuffled]),
        **options,
    )
    by_row = weights[:, None]
    found = np.empty_like(right)
    found[shuffled] = np.asarray(alone, np.float64)
    check(found, right * by_row, (bound + np.abs(right) * 2.0**-bits) * by_row, live)

    if case.form == "nvfp4":
        options["outer"] = given["outer"] * 16  # gates of about 1
    small = (
        given["scale"] if case.form == "nvfp4" else given["scale"] - 4 if case.form == "mxfp4" else given["scale"] / 16
    )
    small = np.where(given["scale"] < 4, 0, small).astype(np.uint8) if case.form == "mxfp4" else small
    if case.form == "mxfp4":
        exact = exact * np.exp2(small.astype(np.float64) - given["scale"]).repeat(32, axis=2)
    else:
        exact = exact / 16
    inner = quantized_grouped_product(x, given["w"], small, sizes, activation="silu", **options)
    half = case.outputs // 2
    for row in np.flatnonzero(live):
        both = exact[owner[row]] @ wide[row]
        error = np.abs(exact[owner[row]]) @ np.abs(wide[row]) * (2.0**-bits + case.inputs * 2.0**-24)
        gate, up = both[:half], both[half:]
        want = gate / (1 + np.exp(-gate)) * up
        most = (np.abs(gate) + error[:half]) * error[half:] + 1.1 * error[:half] * np.abs(up)
        assert np.all(np.abs(np.asarray(inner[row], np.float64) - want) <= most + np.abs(want) * 2.0**-bits)


FEW = (2, 0, 9, 1)
"""Rows of each group, so few that tiles have 8."""


LONG = [
    Case("fp8", None, 512, 40),
    Case("fp8", 128, 512, 40),
    Case("int8", 32, 128, 40),
    Case("int4", 128, 512, 40),
    Case("int4", 32, 192, 72, zeros=True),
    Case("mxfp4", 32, 512, 40),
    Case("nvfp4", 16, 512, 40),
]
"""With so many inputs that tiles of 8 rows take several steps at a time."""


def check_sums(case, sizes, dtype, gated, run):
    """Compares what `run` makes of operands and options with float64."""
    given, exact = matrices(case)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    x = np.random.default_rng(5).standard_normal((len(owner), case.inputs)) / 8
    x = jnp.asarray(x, dtype)
    wide, bits = np.asarray(x, np.float64), 8 if dtype == jnp.bfloat16 else 11
    right = np.einsum("anc,ac->an", exact[owner], wide)
    # Zero points of few rows are taken from sums, which are 17 times as large before.
    error = np.einsum("anc,ac->an", np.abs(exact[owner]), np.abs(wide)) * (2.0**-bits + 17 * case.inputs * 2.0**-24)
    if gated:
        gate, up = np.split(right, 2, axis=1)
        of_gate, of_up = np.split(error, 2, axis=1)
        right = gate / (1 + np.exp(-gate)) * up
        error = (np.abs(gate) + of_gate) * of_up + 1.1 * of_gate * np.abs(up)
    experts = Experts(*(None if one is None else jnp.asarray(one) for one in map(given.get, Experts._fields)))
    operands = Operands(x, experts, RowGroups(jnp.asarray(sizes, jnp.int32), None), None)
    found = np.asarray(run(operands, Options(**case.options, activation="silu" if gated else None)), np.float64)
    assert np.all(np.abs(found - right) <= error + np.abs(right) * 2.0**-bits)


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", [*CASES, *LONG], ids=lambda case: f"{case.form}-{case.group}-{case.inputs}")
def test_products_of_few_rows_are_those_of_float64_within_rounding(case, dtype, gated):
    """Tiles of 8 rows, and several steps at a time where inputs allow for it."""
    from jpaged.pallas_kernels.quantized_grouped_product import triton

    assert tile_height(sum(FEW), len(FEW), has_groups=case.group is not None) == 8
    check_sums(case, FEW, dtype, gated, triton.quantized_grouped_product)


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("case", [case for case in CASES if case.group], ids=lambda case: f"{case.form}-{case.group}")
def test_products_of_high_tiles_with_groups_are_those_of_float64_within_rounding(case, gated):
    """Their scales are read behind the products. The last tile has few rows."""
    from jpaged.pallas_kernels.quantized_grouped_product import triton

    config = triton.Config(64, 32, 64, 4, 3)
    check_sums(case, (2, 0, 69, 1), jnp.bfloat16, gated, partial(triton.quantized_grouped_product, config=config))


@pytest.mark.parametrize("backend", WITH_TRITON)
@pytest.mark.parametrize("sizes", [SIZES, FEW], ids=["many", "few"])
@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[6]], ids=lambda case: case.form)
def test_rows_that_are_named_need_not_be_gathered(case, sizes, backend):
    """Behind those of groups are numbers of no row."""
    given, _ = matrices(case)
    rng = np.random.default_rng(6)
    count = sum(sizes)
    x = jnp.asarray(rng.standard_normal((7, case.inputs)), jnp.bfloat16)
    indices = jnp.asarray([*rng.integers(0, 7, count), -1, 2**31 - 1], jnp.int32)
    product = partial(
        quantized_grouped_product,
        w=given["w"],
        scale=given["scale"],
        group_sizes=jnp.asarray(sizes, jnp.int32),
        zero=given.get("zero"),
        **case.options,
        backend=backend,
    )
    for ending in ({}, {"activation": "silu"}, {"weights": jnp.asarray(rng.random(count + 2), jnp.float32)}):
        gathered = product(x[jnp.clip(indices, 0, 6)], **ending)
        found = product(x, row_indices=indices, **ending)
        np.testing.assert_array_equal(np.asarray(found)[:count], np.asarray(gathered)[:count])


@needs_triton
def test_the_kernels_tiles_are_as_high_as_said():
    """Routing lists tiles of this height, and others would be listed once more."""
    from jpaged.pallas_kernels.quantized_grouped_product import triton

    for rows_of_all in (1, 16, 64, 65, 512, 2048, 4096, 8192, 65_536):
        for experts in (1, 4, 32, 128):
            for has_groups in (False, True):
                for form in ("fp8", "int4"):
                    config = triton.default_config(rows_of_all, experts, form, has_groups=has_groups)
                    assert config.rows == tile_height(rows_of_all, experts, has_groups=has_groups)


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[6]], ids=lambda case: case.form)
def test_tiles_that_are_known_are_taken(case, monkeypatch):
    given, _ = matrices(case)
    x, owner = rows(case, jnp.bfloat16)
    sizes = jnp.asarray(SIZES, jnp.int32)
    height = tile_height(len(owner), len(SIZES), has_groups=case.group is not None)
    known = RowTiles(*plan_tiles(sizes, rows=len(owner), height=height), height)
    product = partial(quantized_grouped_product, x, given["w"], given["scale"], sizes, **case.options, backend="triton")
    right = np.asarray(product())
    jax.clear_caches()
    monkeypatch.setattr(tiles, "plan_tiles", lambda *_, **__: pytest.fail("tiles are listed again"))
    np.testing.assert_array_equal(np.asarray(product(tiles=known))[: sum(SIZES)], right[: sum(SIZES)])


def check(found, right, bound, live):
    assert np.all(np.abs(np.asarray(found, np.float64) - right)[live] <= bound[live])


def test_experts_without_rows_are_not_read():
    """NaN of theirs would be seen: XLA's own grouped product multiplies every row with every matrix."""
    case = CASES[0]
    given, _ = matrices(case)
    x, _ = rows(case, jnp.float32)
    bad = given["scale"].copy()
    bad[1] = np.nan
    sizes = jnp.asarray(SIZES, jnp.int32)
    for scale in (given["scale"], bad):
        found = quantized_grouped_product(x, given["w"], scale, sizes, **case.options, backend="xla")
        assert np.isfinite(np.asarray(found)).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"form": "nf4"}, "form must be one of fp8, int8, int4, mxfp4, nvfp4"),
        ({"group": 0, "form": "fp8"}, "group must be at least 1, or None"),
        ({"group": 7}, "group must be even and divide K=96"),
        ({"group": 48, "form": "mxfp4"}, "group of form='mxfp4' must be 32"),
        ({"w": np.zeros((4, 40, 96), np.uint8)}, "w .* must have K / 2 = 48"),
        ({"scale": np.ones((4, 40, 1), np.float32)}, "scale .* must have G = 3"),
        ({"zero": np.ones((4, 40, 3), np.int32)}, "zero must be uint8"),
        ({"outer": np.ones((4, 40), np.float32)}, "outer goes with form='nvfp4', and with no other, got form='int4'"),
        ({"form": "nvfp4"}, "group of form='nvfp4' must be 16, and K a multiple of 32, got 32, 96"),
        ({"weights": np.ones(24, np.float32), "activation": "silu"}, "weights do not go with an activation"),
        ({"activation": "tanh"}, "activation must be one of"),
        ({"groups": np.zeros(24, np.int32)}, "one of group_sizes and groups"),
        ({"row_indices": np.zeros(24, np.int64)}, "row_indices must be int32"),
        (
            {"row_indices": np.zeros(30, np.int32), "weights": np.ones(24, np.float32)},
            "weights must be one for each of 30 rows",
        ),
        ({"tiles": RowTiles(jnp.zeros((3, 3), jnp.int32), jnp.zeros(4, jnp.int32), 16)}, "tiles.listed"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, said):
    case = CASES[4]
    given, _ = matrices(case)
    x, _ = rows(case, jnp.float32)
    arguments = given | case.options | {"x": x, "group_sizes": jnp.asarray(SIZES, jnp.int32)} | change
    with pytest.raises(ValueError, match=said):
        quantized_grouped_product(**arguments)


@needs_triton
def test_hopper_takes_triton_where_it_can_and_refusals_are_named(monkeypatch):
    case = CASES[0]
    given, _ = matrices(case)
    x, _ = rows(case, jnp.float32)
    with pytest.raises(ValueError, match="dtype float32 is not bfloat16 or float16"):
        quantized_grouped_product(
            x, given["w"], given["scale"], jnp.asarray(SIZES, jnp.int32), **case.options, backend="triton"
        )
    monkeypatch.setattr(devices, "default_device", lambda: Device("gpu", (9, 0)))
    chosen = OP.pick(None, x.astype(jnp.bfloat16), given["w"], given["scale"], "fp8", None)
    assert chosen.backend == "triton"
    assert OP.pick(None, x, given["w"], given["scale"], "fp8", None).backend == "xla"
