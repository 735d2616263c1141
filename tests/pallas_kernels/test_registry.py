"""One place picks an op's implementation: by device and order, by name, and among backends from outside the package."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.api.errors import InvalidParameterError
from jpaged.executor.start import startup
from jpaged.pallas_kernels import decode_attention, devices, mixed_attention, ragged_attention, registry, write_kv
from jpaged.pallas_kernels.common.attention_arguments import Features, Operands
from jpaged.pallas_kernels.devices import Device
from tests.pallas_kernels.marks import needs_mosaic, needs_triton
from tests.pallas_kernels.paged import assert_close, assert_lse_close, expected_decode, make_world, random_queries
from tests.tiny_models import TINY_ENGINE, tiny_model, write_tiny_model

HOPPER, CPU = Device("gpu", (9, 0)), Device("cpu")


def toy_decode_attention(operands: Operands, features: Features) -> tuple[jax.Array, jax.Array]:
    """Decode attention the textbook way, over whole block tables."""
    q, kv_pool, block_tables, kv_lens, alibi_slopes = operands
    assert alibi_slopes is features.sliding_window is features.logit_softcap is None
    rows, heads, head_dim = q.shape
    kv = kv_pool[jnp.clip(block_tables, 0, kv_pool.shape[0] - 1)]  # [rows, M, 2, kv_heads, block_size, head_dim]
    kv = jnp.moveaxis(kv, 2, 0).swapaxes(3, 4).reshape(2, rows, -1, kv_pool.shape[2], head_dim)
    kv = jnp.repeat(kv.astype(jnp.float32), heads // kv_pool.shape[2], axis=3)
    seen = jnp.arange(kv.shape[2]) < kv_lens[:, None]
    keys, values = jnp.where(seen[..., None, None], kv, 0)
    scores = jnp.einsum("bhd,bthd->bht", q.astype(jnp.float32), keys, precision="highest") * features.scale
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=2)
    weights = jnp.where(seen[:, None], jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0, lse)[..., None]), 0)
    return jnp.einsum("bht,bthd->bhd", weights, values, precision="highest").astype(q.dtype), lse


def too_wide(q: jax.Array, kv_pool: jax.Array) -> str | None:
    return f"the toy has no head_dim {q.shape[2]}" if q.shape[2] > 64 else None


class Toy:
    """A backend "toy" with decode attention alone, chosen on `devices`; counts its calls."""

    def __init__(self) -> None:
        self.devices: list[Device] = []
        self.calls = 0

    def run(self, operands: Operands, features: Features) -> tuple[jax.Array, jax.Array]:
        self.calls += 1
        return toy_decode_attention(operands, features)


@pytest.fixture
def toy() -> Iterator[Toy]:
    toy = Toy()
    registry.register_backend("toy", runs_on=lambda device: device in toy.devices)
    registry.register_implementation("decode_attention", "toy", toy.run, unsupported=too_wide)
    yield toy
    if "toy" in registry.backends():
        registry.unregister_backend("toy")


def attend(head_dim: int = 16, **options: Any) -> None:
    """Decode attention, compared with float64 numpy."""
    world = make_world(1, [70, 0, 33], kv_heads=2, head_dim=head_dim, block_size=16)
    q = random_queries(1, 3, 4, head_dim, "float32")
    out, lse = decode_attention(q, world.pool, world.tables, world.lens, return_lse=True, **options)
    want, want_lse = expected_decode(world, np.asarray(q))
    assert_close(out, want, "float32")
    assert_lse_close(lse, want_lse, "float32")


def test_a_backend_from_outside_is_chosen_on_its_devices_for_what_it_supports(toy: Toy) -> None:
    assert registry.backends() == ("hopper", "triton", "cudnn", "toy", "xla")
    attend()
    assert toy.calls == 0
    toy.devices.append(devices.default_device())
    assert registry.runs_here("toy")
    attend()
    assert toy.calls == 1
    attend(head_dim=80)  # which it refuses: the next backend takes it
    assert toy.calls == 1


def test_a_backend_from_outside_can_be_forced_and_says_why_it_cannot(toy: Toy) -> None:
    attend(backend="toy")
    assert toy.calls == 1
    attend(backend="xla")
    assert toy.calls == 1
    with pytest.raises(ValueError, match="backend='toy' cannot do this decode_attention: the toy has no head_dim 80"):
        attend(head_dim=80, backend="toy")
    pool, new = jnp.zeros((3, 2, 1, 16, 16)), jnp.zeros((1, 1, 16))
    with pytest.raises(ValueError, match="backend='toy' cannot do this write_kv: there is no such kernel"):
        write_kv(pool, new, new, jnp.zeros(1, jnp.int32), backend="toy")


def test_an_op_that_a_backend_lacks_goes_to_the_next_and_so_does_what_needs_both(toy: Toy) -> None:
    toy.devices.append(devices.default_device())
    world = make_world(2, [40, 20], kv_heads=1, head_dim=16, block_size=16)
    q, starts = random_queries(2, 1024, 2, 16, "float32"), np.array([0, 1, 21], np.int32)
    arguments = (q, world.pool, world.tables, world.lens, starts)
    np.testing.assert_array_equal(mixed_attention(*arguments, jnp.int32(1)), ragged_attention(*arguments))
    assert toy.calls == 0


def test_what_is_not_worth_its_while_is_left_to_the_next_unless_forced(toy: Toy) -> None:
    registry.register_implementation("write_kv", "toy", lambda pool, *_: pool + 1, worthwhile=lambda pool: False)
    toy.devices.append(devices.default_device())
    pool, new = jnp.zeros((3, 2, 1, 16, 16)), jnp.zeros((1, 1, 16))
    assert not write_kv(pool, new, new, jnp.zeros(1, jnp.int32)).any()
    assert write_kv(pool, new, new, jnp.zeros(1, jnp.int32), backend="toy").all()


def test_a_backend_that_cannot_be_built_here_is_passed_over_and_says_why() -> None:
    registry.register_backend("absent", runs_on=lambda device: True, missing=lambda: "no such compiler")
    try:
        registry.register_implementation("decode_attention", "absent", toy_decode_attention)
        assert registry.missing("absent") == "no such compiler"
        attend()
        with pytest.raises(ValueError, match="backend='absent' cannot do this decode_attention: no such compiler"):
            attend(backend="absent")
    finally:
        registry.unregister_backend("absent")


def test_a_backend_may_be_preferred_to_the_package_s_own() -> None:
    registry.register_backend("first", runs_on=lambda device: True, before="mosaic")
    assert registry.backends() == ("first", "hopper", "triton", "cudnn", "xla")
    registry.unregister_backend("first")
    assert registry.backends() == ("hopper", "triton", "cudnn", "xla")


def test_an_unregistered_backend_leaves_nothing(toy: Toy) -> None:
    registry.unregister_backend("toy")
    with pytest.raises(ValueError, match="backend must be None or one of hopper, triton, cudnn, xla, got 'toy'"):
        attend(backend="toy")
    registry.register_backend("toy", runs_on=lambda device: True)
    attend()
    assert toy.calls == 0


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (lambda: registry.register_backend("toy", runs_on=bool), "there is a backend 'toy' already"),
        (lambda: registry.register_backend("mosaic", runs_on=bool), "there is a backend 'mosaic' already"),
        (lambda: registry.register_backend("new", runs_on=bool, before="cuda"), "got 'cuda'"),
        (lambda: registry.register_implementation("attention", "toy", print), "op must be one of .*decode_attention"),
        (lambda: registry.register_implementation("write_kv", "cuda", print), "got 'cuda'"),
        (lambda: registry.register_implementation("write_kv", "hopper", print), "one of the package's own backends"),
        (lambda: registry.register_implementation("decode_attention", "toy", print), "has an implementation of"),
        (lambda: registry.unregister_backend("xla"), "one of the package's own backends"),
    ],
)
def test_what_cannot_be_registered_is_refused(toy: Toy, register: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        register()


def test_an_engine_takes_a_backend_from_outside(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the other ops borrowed from the reference: its decode programs have the toy's attention, and its tokens are
    the reference's. Compiled programs of neither are kept, since their files' names do not tell the toy's source.
    """
    for name, op in registry._OPS.items():
        if name != "decode_attention":
            run = op._implementation(registry._backend(registry.REFERENCE)).run
            registry.register_implementation(name, "toy", run)
    asked: list[tuple[str, ...]] = []

    class Compiler(startup.Compiler):
        def __init__(self, *arguments: Any, kept_on: tuple[str, ...], **options: Any) -> None:
            asked.append(kept_on)
            super().__init__(*arguments, kept_on=kept_on, **options)

    monkeypatch.setattr(startup, "Compiler", Compiler)
    directory = write_tiny_model(tiny_model("llama-gqa-d64-tied"), tmp_path, use_torch=False)
    options = TINY_ENGINE | {"model": str(directory), "compile_programs": "on_first_use"}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[3, 4, 5], list(range(3, 40))]

    def tokens(backend: str) -> list[list[int]]:
        llm = LLM(**options, kernel_backend=backend)
        try:
            return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        finally:
            llm.engine.close()

    expected = tokens("xla")
    assert toy.calls == 0
    assert tokens("toy") == expected
    assert toy.calls > 0
    assert asked == [()] * 4
    registry.unregister_backend("toy")
    with pytest.raises(
        InvalidParameterError,
        match="kernel_backend must be None or one of 'hopper', 'triton', 'cudnn', 'xla', got 'toy'",
    ):
        LLM(**options, kernel_backend="toy")
    assert startup._kept_on() == startup.KEPT_PLATFORMS


POOL = jax.ShapeDtypeStruct((9, 2, 2, 16, 64), jnp.bfloat16)
SHAPES = (jax.ShapeDtypeStruct((3, 4, 64), jnp.bfloat16), POOL)


def gpu(major: int, minor: int) -> Device:
    return Device("gpu", (major, minor))


TRITON_S = [gpu(*capability) for capability in registry.TRITON_CAPABILITIES]


@needs_mosaic
@pytest.mark.parametrize(("device", "picked"), [(HOPPER, "hopper"), (gpu(7, 5), "xla"), (CPU, "xla")])
def test_the_device_decides(monkeypatch: pytest.MonkeyPatch, device: Device, picked: str) -> None:
    monkeypatch.setattr(devices, "default_device", lambda: device)
    assert registry.runs_here("hopper") == (device == HOPPER)
    assert registry._OPS["decode_attention"].pick(None, *SHAPES).backend == picked
    assert registry._OPS["decode_attention"].pick("hopper", *SHAPES).backend == "hopper"


@needs_triton
@pytest.mark.parametrize("device", TRITON_S, ids=str)
def test_gpus_since_ampere_but_hopper_take_triton_s_kernels(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    monkeypatch.setattr(devices, "default_device", lambda: device)
    assert [registry.runs_here(name) for name in ("hopper", "triton")] == [False, True]
    assert registry.kernels_here() == ("triton",)
    assert registry._OPS["write_kv"].pick(None, POOL).backend == "triton"
    assert registry._OPS["write_kv"].pick("xla", POOL).backend == "xla"
    assert registry.lost_here() is None
    assert registry.refuses_here("triton") is None
    assert str(device) in str(registry.refuses_here("hopper"))


@needs_triton
@needs_mosaic
def test_on_hopper_4_bit_integers_have_a_kernel_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "default_device", lambda: HOPPER)
    op = registry._OPS["int4_product"]

    def picked(rows: int, group: int = 128, form: str = "int4", inputs: int = 4096, forced: str | None = None) -> str:
        x, w = ((rows, inputs), jnp.bfloat16), ((512, inputs // 2), jnp.uint8)
        return op.pick(forced, *(jax.ShapeDtypeStruct(*one) for one in (x, w)), group, form).backend

    assert [picked(rows) for rows in (1, 2048, 2049)] == ["hopper", "hopper", "xla"]
    assert [picked(rows, group=64) for rows in (512, 513)] == ["hopper", "xla"]
    assert [picked(rows, group=32) for rows in (32, 33, 512, 513)] == ["hopper", "triton", "triton", "xla"]
    assert picked(1, group=16, form="nvfp4") == "triton"
    assert picked(1, inputs=128) == "triton"
    assert [picked(rows, forced="hopper,xla") for rows in (2048, 2049)] == ["hopper", "xla"]


@needs_triton
@needs_mosaic
def test_on_hopper_triton_s_kernels_stand_in_where_it_has_none_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "default_device", lambda: HOPPER)
    latents = jax.ShapeDtypeStruct((9, 1, 1, 16, 576), jnp.bfloat16)
    of_latents = (jax.ShapeDtypeStruct((3, 16, 576), jnp.bfloat16), latents, 512)
    wide, large = (
        (jax.ShapeDtypeStruct((3, 4, dim), jnp.bfloat16), jax.ShapeDtypeStruct((9, 2, 2, 16, dim), jnp.bfloat16))
        for dim in (160, 512)
    )
    for name in ("decode_attention", "ragged_attention"):
        op = registry._OPS[name]
        assert op.pick(None, *large).backend == "triton"
        assert op.pick(None, *SHAPES).backend == "hopper"
    decode, ragged = registry._OPS["decode_attention"], registry._OPS["ragged_attention"]
    assert decode.pick(None, *of_latents).backend == "hopper"
    assert ragged.pick(None, *of_latents).backend == "triton"
    with pytest.raises(ValueError, match="it takes keys and values apart"):
        ragged.pick("hopper", *of_latents)
    odd = (jax.ShapeDtypeStruct((3, 16, 144), jnp.bfloat16), jax.ShapeDtypeStruct((9, 1, 1, 16, 144), jnp.bfloat16))
    with pytest.raises(ValueError, match="head_dim 144 and value_dim 128 of latents are not multiples of 64"):
        decode.pick("hopper", *odd, 128)
    assert decode.pick(None, *odd, 128).backend == "triton"
    assert decode.pick(None, *wide).backend == "xla", "as before there was such a thing"
    for name in ("write_kv", "copy_blocks", "gather_blocks", "scatter_blocks"):
        assert registry._OPS[name].pick(None, latents).backend == "triton"
        assert registry._OPS[name].pick(None, POOL).backend == "hopper"
    assert registry.kernels_here() == ("hopper",)


@pytest.mark.parametrize("device", TRITON_S, ids=str)
def test_a_gpu_that_would_take_triton_s_kernels_takes_xla_without_and_says_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    monkeypatch.setattr(devices, "default_device", lambda: device)
    monkeypatch.setattr(registry, "find_spec", lambda name: None if name in ("jax_triton", "triton") else object())
    asked = [
        ((3, 12, 1), (0, 11), "jax_triton and triton cannot be imported"),
        ((3, 12, 1), (0, 12), f"jax-triton 0.4 calls kernels under JAX 0.11, this is {jax.__version__}"),
        ((3, 11, 7), (0, 10), "jax-triton needs Python 3.12 or newer, this is 3.11"),
    ]
    try:
        for python, version, reason in asked:
            monkeypatch.setattr(registry.sys, "version_info", python)
            monkeypatch.setattr(registry, "_jax_version", lambda version=version: version)
            registry._triton_missing.cache_clear()
            assert registry._OPS["write_kv"].pick(None, POOL).backend == registry.preferred_here() == "xla"
            lost = str(registry.lost_here())
            assert f"{device}: it runs plain XLA, whose attention gathers each sequence's whole context" in lost
            assert f'triton ({reason}; install "jpaged[cuda13]" or "jpaged[cuda12]" on Python 3.12 or newer)' in lost
            with pytest.raises(ValueError, match=f"cannot do this write_kv: {re.escape(reason)}"):
                registry._OPS["write_kv"].pick("triton", POOL)
    finally:
        registry._triton_missing.cache_clear()


@pytest.mark.parametrize("device", [CPU, gpu(7, 5), Device("gpu")], ids=str)
def test_nothing_is_lost_where_there_are_no_kernels_and_a_forced_backend_says_why_not(
    monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    monkeypatch.setattr(devices, "default_device", lambda: device)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(registry, "_BACKENDS", [replace(one, missing=lambda: None) for one in registry._BACKENDS])
    assert registry.lost_here() is None
    assert registry.refuses_here("xla") is None
    assert "compute capability 9.x (Hopper)" in str(registry.refuses_here("hopper"))
    assert ("TRITON_INTERPRET=1" if device == CPU else "8.0 (Ampere)") in str(registry.refuses_here("triton"))


def test_one_of_several_named_backends_is_taken_by_arguments(toy: Toy) -> None:
    op = registry._OPS["decode_attention"]
    assert op.pick("toy,xla", *SHAPES).backend == "toy"
    wide = jax.ShapeDtypeStruct((3, 4, 80), jnp.bfloat16)  # which it refuses
    assert op.pick("toy,xla", wide, POOL).backend == "xla"
    with pytest.raises(ValueError, match="no backend of toy, toy can do this decode_attention; add 'xla'"):
        op.pick("toy,toy", wide, POOL)
    with pytest.raises(ValueError, match="got 'cuda'"):
        op.pick("toy,cuda", *SHAPES)
    registry.register_implementation("write_kv", "toy", print, worthwhile=lambda pool: False)
    assert registry._OPS["write_kv"].pick("toy,xla", POOL).backend == "xla"


def test_what_need_not_be_a_kernel_follows_a_forced_backend_of_the_package_s_own(toy: Toy) -> None:
    assert [registry.or_reference(name) for name in (None, "toy", "xla")] == [None, None, "xla"]
    assert [registry.or_reference(name) for name in ("mosaic", "triton")] == ["hopper,xla", "triton,xla"]


@needs_mosaic
def test_mosaic_is_another_name_of_hopper() -> None:
    assert registry.canonical("mosaic") == "hopper"
    picked = [registry._OPS["decode_attention"].pick(name, *SHAPES) for name in ("mosaic", "hopper")]
    assert picked[0] == picked[1]


def test_every_op_has_a_reference() -> None:
    for op in registry._OPS.values():
        assert callable(op._implementation(registry._backend(registry.REFERENCE)).run), op.name


@needs_triton
def test_triton_has_every_op_but_those_that_the_docs_name() -> None:
    triton = registry._backend("triton")
    lacks = {op.name for op in registry._OPS.values() if not (op.may_have("triton") and op._has(triton))}
    lacks -= {"all_reduce_peers", "all_reduce_add_norm"}  # NCCL's
    assert lacks == {"gated_product", "short_convolution", "state_space_chunks", "contiguous_attention"}


def test_using_every_op_s_reference_imports_no_kernels() -> None:
    code = """
import sys
import jax.numpy as jnp
from jpaged import pallas_kernels as ops
pool, new, ids = jnp.zeros((3, 2, 1, 16, 16)), jnp.zeros((1, 1, 16)), jnp.zeros(1, jnp.int32)
ops.write_kv(pool, new, new, ids)
ops.copy_blocks((pool,), ids, ids)
ops.decode_attention(new, pool, jnp.zeros((1, 1), jnp.int32), ids)
ops.gated_product(jnp.zeros((128, 8)), jnp.zeros((8, 2, 8)))
ops.sample_tokens(jnp.zeros((1, 9)), jnp.zeros(1), None, None, None, jnp.zeros((1, 2), jnp.uint32), ids)
loaded = [name for name in sys.modules if "mosaic_gpu" in name and "pallas" in name or ".hopper" in name]
loaded += [name for name in sys.modules if "triton" in name.split(".") or name in ("jax_triton", "torch")]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
