"""Compiles the Triton kernels of this package for GPUs of some compute capabilities, with every configuration of their
tables, and prints one JSON line a kernel and GPU: shared memory, its limit, registers, spills. What does not read
numbers of 8 bits has the same PTX on all GPUs of a family, which Triton then writes once.

    python tests/pallas_kernels/compile_triton.py 80 86 [NAME ..]        # NAME: programs, all by default

A program of its own, which `test_triton_compile.py` runs: kernels that are defined under TRITON_INTERPRET=1 cannot be
compiled.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.pop("TRITON_INTERPRET", None)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # takes a sixth of the time, and the registers are the same

import jax
import jax.numpy as jnp

from jpaged import pallas_kernels as ops
from jpaged.pallas_kernels.common.triton_targets import FAMILY, SHARED_BYTES
from jpaged.pallas_kernels.round_rows.operands import type_of_sums
from tests.support.triton_compile import compiled, launches

Shape = jax.ShapeDtypeStruct


def ids(*shape: int) -> Shape:
    return Shape(shape, jnp.int32)


def attention() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Decode and ragged attention: every key size of their tables, and what options add."""
    plain: dict[str, Any] = {}
    every = {"sliding_window": 1500, "logit_softcap": 30.0, "alibi_slopes": jnp.ones(14), "sinks": jnp.ones(14)}
    sizes = [(64, jnp.bfloat16), (128, jnp.bfloat16), (256, jnp.bfloat16), (512, jnp.bfloat16)]
    sizes += [(64, jnp.float32), (128, jnp.float32), (256, jnp.float32)]
    cases = [(head_dim, dtype, 4, 16, plain) for head_dim, dtype in sizes]
    cases += [(128, jnp.float16, 32, 64, plain), (80, jnp.float16, 7, 128, every), (256, jnp.bfloat16, 7, 16, every)]
    for head_dim, dtype, share, block_size, options in cases:
        yield from attention_of("", dtype, dtype, head_dim, share, block_size, options)
    yield from attention_of("", jnp.bfloat16, jnp.bfloat16, 192, 16, 16, {"sliding_window": 129, "sinks": jnp.ones(32)})
    for head_dim, share, block_size, options in ((64, 8, 16, plain), (128, 4, 16, plain), (128, 32, 16, plain)):
        yield from attention_of(" over e4m3", jnp.bfloat16, jnp.float8_e4m3fn, head_dim, share, block_size, options)
    for head_dim in (256, 512):
        yield from attention_of(" over e4m3", jnp.bfloat16, jnp.float8_e4m3fn, head_dim, 7, 16, plain)
    yield from attention_of(" over e4m3", jnp.float16, jnp.float8_e4m3fn, 80, 7, 128, every)
    # Decode attention of more than 32 sequences has other tiles there.
    yield next(attention_of(" over e4m3, 64 rows", jnp.bfloat16, jnp.float8_e4m3fn, 128, 4, 16, plain, batch=64))


def attention_of(
    what: str,
    dtype: Any,
    kept: Any,
    head_dim: int,
    share: int,
    block_size: int,
    options: dict[str, Any],
    batch: int = 16,
) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Both kinds, of queries in a type over keys and values in another."""
    pool = Shape((4096, 2, 2, block_size, head_dim), kept)
    name = f"D {head_dim} {jnp.dtype(dtype)} group {share} block {block_size}{' options' if options else ''}{what}"
    arguments = {"kv_pool": pool, "block_tables": ids(batch, 4096 // block_size), "kv_lens": ids(batch)}
    q = Shape((batch, 2 * share, head_dim), dtype)
    yield f"decode {name}", partial(ops.decode_attention, **options), arguments | {"q": q}
    q = Shape((2048, 2 * share, head_dim), dtype)
    starts = {"query_starts": ids(batch + 1)}
    yield f"ragged {name}", partial(ops.ragged_attention, **options), arguments | {"q": q} | starts


def latents() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Attention over latents: those of DeepSeek, with all heads of V2-Lite and V3, and the largest in 32 bits."""
    for value_dim, dtype, heads, block_size in (
        (512, jnp.bfloat16, 16, 16),
        (512, jnp.bfloat16, 128, 16),
        (512, jnp.float16, 32, 64),
        (256, jnp.float32, 16, 16),
    ):
        pool = Shape((20_000, 1, 1, block_size, value_dim + 64), dtype)
        arguments = {"kv_pool": pool, "block_tables": ids(16, 4096 // block_size), "kv_lens": ids(16)}
        name = f"latents {value_dim} {jnp.dtype(dtype)} heads {heads} block {block_size}"
        q = Shape((16, heads, value_dim + 64), dtype)
        yield f"decode {name}", partial(ops.decode_attention, value_dim=value_dim), arguments | {"q": q}
        q = Shape((2048, heads, value_dim + 64), dtype)
        arguments |= {"q": q, "query_starts": ids(17)}
        yield f"ragged {name}", partial(ops.ragged_attention, value_dim=value_dim), arguments
    for dtype, heads, rank in ((jnp.bfloat16, 16, 512), (jnp.float32, 128, 256)):
        q, pool = Shape((2048, heads, rank + 64), dtype), Shape((20_000, 1, 1, 16, rank + 64), dtype)
        to_keys, own_q = Shape((heads, 128, rank), dtype), Shape((2048, heads, 192), dtype)
        arguments = {"q": q, "latents": Shape((2048, rank + 64), dtype), "kv_pool": pool, "block_tables": ids(16, 256)}
        arguments |= {"kv_lens": ids(16), "query_starts": ids(17), "num_decodes": ids()}
        arguments["expansion"] = ops.Expansion(own_q, to_keys, to_keys)
        yield f"expanded {jnp.dtype(dtype)} heads {heads}", ops.expanded_attention, arguments
    pool = Shape((20_000, 1, 1, 16, 576), jnp.bfloat16)
    written = {"kv_pool": pool, "k": Shape((24, 1, 576), jnp.bfloat16), "slot_mapping": ids(24)}
    yield "write_kv latents", partial(ops.write_kv, v=None), written


def other_ops() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """What writes and moves keys and values, and what draws tokens."""
    for kv_heads, group, head_dim, block_size, dtype, rotated, normed in (
        (8, 4, 128, 16, jnp.bfloat16, True, False),
        (8, 2, 128, 128, jnp.float32, True, True),
        (1, 7, 64, 32, jnp.bfloat16, True, True),
        (32, 1, 80, 64, jnp.float16, False, False),
        (4, 32, 96, 16, jnp.bfloat16, True, True),
        (8, 4, 256, 16, jnp.float32, True, True),
        (4, 2, 256, 32, jnp.bfloat16, True, jnp.float32),
    ):
        kept = jnp.float8_e4m3fn if (kv_heads, head_dim) in ((1, 64), (4, 256)) else dtype
        pool = Shape((20_000, 2, kv_heads, block_size, head_dim), kept)
        new, table = Shape((24, kv_heads, head_dim), dtype), Shape((24, head_dim // 2), jnp.float32)
        name = f"{kv_heads} x {group} D {head_dim} {jnp.dtype(dtype)} block {block_size} in {jnp.dtype(kept)}"
        arguments: dict[str, Any] = {"kv_pool": pool, "slot_mapping": ids(24)}
        yield f"write_kv {name}", ops.write_kv, arguments | {"k": new, "v": new}
        arguments["qkv"] = Shape((24, kv_heads, group + 2, head_dim), dtype)
        if rotated:
            arguments["rotation"] = (table, table)
        if normed:
            scale = Shape((head_dim,), jnp.float32 if normed is jnp.float32 else dtype)
            arguments["norms"] = (scale, scale)
        yield f"rope_and_write {name}", ops.rope_and_write, arguments
        pools, moved = (pool, pool), {"block_ids": ids(8)}
        yield f"copy_blocks {name}", ops.copy_blocks, {"kv_pools": pools, "src": ids(8), "dst": ids(8)}
        yield f"gather_blocks {name}", ops.gather_blocks, {"kv_pools": pools} | moved
        staging = Shape((2, 8, *pool.shape[1:]), kept)
        yield f"scatter_blocks {name}", ops.scatter_blocks, {"kv_pools": pools, "staging": staging} | moved
    for vocab, truncates in ((151_936, True), (128_256, False), (50_257, True)):
        floats, whole = Shape((64,), jnp.float32), ids(64)
        arguments = {"logits": Shape((64, vocab), jnp.float32), "temperature": floats, "positions": whole}
        arguments |= {"seeds": Shape((64, 2), jnp.uint32)}
        arguments |= (
            {"top_k": whole, "top_p": floats, "min_p": floats}
            if truncates
            else dict.fromkeys(("top_k", "top_p", "min_p"))
        )
        name = f"sample_tokens of {vocab}{', truncated' if truncates else ''}"
        yield name, ops.sample_tokens, arguments


def experts() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """The grouped products of Qwen3-30B-A3B, every height of a tile."""
    for rows, dtype in (
        (8, jnp.bfloat16),
        (4096, jnp.float16),
        (8192, jnp.bfloat16),
        (65_536, jnp.bfloat16),
        (8, jnp.float32),
    ):
        sizes = {"group_sizes": ids(128)}
        arguments = sizes | {"x": Shape((rows, 2048), dtype), "w": Shape((128, 2048, 2, 768), dtype)}
        yield f"gated_grouped_product {rows}", ops.gated_grouped_product, arguments
        arguments = sizes | {"x": Shape((rows, 768), dtype), "w": Shape((128, 768, 2048), dtype)}
        arguments["weights"] = Shape((rows,), jnp.float32)
        yield f"weighted_grouped_product {rows}", ops.weighted_grouped_product, arguments


def routing() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """One kernel and two, and every kind of score; of Qwen3-30B-A3B, Qwen3-Next and DeepSeek V2-Lite and V3."""
    best, every = ops.ExpertChoice(per_token=8), ops.ExpertChoice(per_token=6, renormalized=False)
    grouped = ops.ExpertChoice(per_token=8, score="sigmoid", factor=2.5, groups=8, kept_groups=4)
    for tokens, experts, choice in (
        (1, 128, best),
        (8, 128, best),
        (32, 128, best),
        (256, 128, best),
        (8192, 128, best),
        (8, 512, ops.ExpertChoice(per_token=10)),
        (256, 512, ops.ExpertChoice(per_token=10)),
        (64, 64, every),
        (2048, 64, every),
        (8, 256, grouped),
        (1024, 256, grouped),
    ):
        arguments: dict[str, Any] = {"logits": Shape((tokens, experts), jnp.float32)}
        arguments |= {"live": Shape((tokens,), jnp.bool_)}
        if choice.score == "sigmoid":
            arguments |= {"correction": Shape((experts,), jnp.float32)}
        if choice is best:
            arguments |= {"first": Shape((), jnp.int32)}
        op = partial(ops.route_tokens, choice=choice, held=experts // 2 if choice is best else None)
        yield f"route_tokens {tokens} x {experts}, {choice.score}", op, arguments


WIDE = {"fp8": jnp.float8_e4m3fn, "int8": jnp.int8}
"""The types of weights in 8 bits."""


def few_bits_of_experts() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """The grouped products in few bits of Qwen3-30B-A3B, every height of a tile and form of weights."""
    for rows, form, group, dtype, zeros in (
        (8, "fp8", None, jnp.bfloat16, False),
        (2048, "fp8", None, jnp.bfloat16, False),
        (4096, "fp8", None, jnp.float16, False),
        (8192, "fp8", None, jnp.bfloat16, False),
        (65_536, "fp8", None, jnp.bfloat16, False),
        (8, "fp8", 128, jnp.bfloat16, False),
        (2048, "fp8", 128, jnp.bfloat16, False),
        (65_536, "fp8", 128, jnp.bfloat16, False),
        (8, "int8", None, jnp.bfloat16, False),
        (8192, "int8", 32, jnp.float16, False),
        (8, "int4", 128, jnp.bfloat16, True),
        (2048, "int4", 128, jnp.bfloat16, True),
        (4096, "int4", 64, jnp.bfloat16, False),
        (8192, "int4", 128, jnp.float16, True),
        (8, "mxfp4", 32, jnp.bfloat16, False),
        (2048, "mxfp4", 32, jnp.bfloat16, False),
        (4096, "mxfp4", 32, jnp.float16, False),
        (8192, "mxfp4", 32, jnp.bfloat16, False),
        (8, "nvfp4", 16, jnp.bfloat16, False),
        (2048, "nvfp4", 16, jnp.bfloat16, False),
        (4096, "nvfp4", 16, jnp.float16, False),
        (8192, "nvfp4", 16, jnp.bfloat16, False),
    ):
        shapes: list[tuple[int, int, str | None]] = [(1536, 2048, "silu"), (2048, 768, None)]
        if form == "mxfp4":  # GPT-OSS, whose inputs are no whole number of steps
            shapes.append((5760, 2880, None))
        for outputs, depth, activation in shapes:
            shape = (128, outputs, depth if form in WIDE else depth // 2)
            scales = (128, outputs, 1 if group is None else depth // group)
            arguments: dict[str, Any] = {"x": Shape((rows, depth), dtype), "group_sizes": ids(128)}
            if activation:  # of a token's experts, as the first product of a layer reads them
                arguments |= {"x": Shape((-(-rows // 8), depth), dtype), "row_indices": ids(rows)}
            arguments |= {"w": Shape(shape, WIDE.get(form, jnp.uint8))}
            kinds = {"mxfp4": jnp.uint8, "nvfp4": jnp.float8_e4m3fn}
            arguments |= {"scale": Shape(scales, kinds.get(form, jnp.float32))}
            arguments |= {"outer": Shape(scales[:2], jnp.float32) if form == "nvfp4" else None}
            arguments |= {"zero": Shape(scales, jnp.uint8) if zeros else None}
            arguments |= {"weights": None if activation else Shape((rows,), jnp.float32)}
            op = partial(ops.quantized_grouped_product, form=form, group=group, activation=activation)
            yield f"quantized_grouped_product {rows} {depth} {form} {group} {activation}", op, arguments


def int4() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """The 4-bit product, every size of its tables."""
    for rows, group, dtype, zeros in (
        (8, 128, jnp.bfloat16, True),
        (16, 32, jnp.bfloat16, True),
        (32, 64, jnp.bfloat16, True),
        (64, 128, jnp.bfloat16, True),
        (512, 128, jnp.float16, False),
        (64, 32, jnp.bfloat16, False),
    ):
        groups = (6144, 4096 // group)
        arguments: dict[str, Any] = {"x": Shape((rows, 4096), dtype), "w": Shape((6144, 2048), jnp.uint8)}
        arguments |= {"scale": Shape(groups, jnp.float32), "zero": Shape(groups, jnp.uint8) if zeros else None}
        name = f"int4_product {rows} of {jnp.dtype(dtype)} in groups of {group}"
        yield name, partial(ops.int4_product, group=group), arguments
    for rows, dtype in ((8, jnp.bfloat16), (32, jnp.bfloat16), (512, jnp.float16)):
        arguments = {"x": Shape((rows, 4096), dtype), "w": Shape((6144, 2048), jnp.uint8)}
        arguments |= {"scale": Shape((6144, 256), jnp.float8_e4m3fn), "outer": Shape((6144,), jnp.float32)}
        name = f"int4_product {rows} of {jnp.dtype(dtype)} in NVFP4"
        yield name, partial(ops.int4_product, group=16, form="nvfp4"), arguments


def invariant() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Products whose bits depend on a row alone."""
    for first, result in ((False, jnp.bfloat16), (True, jnp.float32)):
        w = Shape((4096, 1024) if first else (1024, 4096), jnp.bfloat16)
        op = partial(ops.invariant_product, outputs_first=first, dtype=result)
        yield f"invariant_product, outputs first: {first}", op, {"x": Shape((512, 1024), jnp.bfloat16), "w": w}


def fp8() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """The FP8 product, every size of its tables: both operands in e4m3 (from 8.9 on), and weights alone."""
    for rows, groups, activations, dtype in (
        (1, 1, "dynamic", jnp.bfloat16),
        (32, 32, "dynamic", jnp.bfloat16),
        (64, 1, "dynamic", jnp.float16),
        (64, 32, "dynamic", jnp.bfloat16),
        (8192, 32, "dynamic", jnp.bfloat16),
        (1, 1, "none", jnp.bfloat16),
        (32, 1, "none", jnp.float16),
        (64, 32, "none", jnp.bfloat16),
        (512, 32, "none", jnp.bfloat16),
        (32, 128, "dynamic", jnp.bfloat16),
        (8192, 128, "dynamic", jnp.bfloat16),
        (512, 128, "none", jnp.bfloat16),
    ):
        arguments: dict[str, Any] = {"x": Shape((rows, 4096), dtype), "w": Shape((4096, 4096), jnp.float8_e4m3fn)}
        arguments |= {"scale": Shape((4096, groups), jnp.float32)}
        options: dict[str, Any] = {"group": None if groups == 1 else 4096 // groups, "activations": activations}
        name = f"fp8_product {rows} of {jnp.dtype(dtype)}, {activations}, {groups} groups"
        yield name, partial(ops.fp8_product, **options), arguments


def int8() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """The product with 8-bit integers, which is that of FP8 weights alone: few rows, and the most registers."""
    for rows, groups, dtype in ((8, 1, jnp.float16), (512, 1, jnp.bfloat16), (512, 32, jnp.bfloat16)):
        arguments = {"x": Shape((rows, 4096), dtype), "w": Shape((4096, 4096), jnp.int8)}
        arguments |= {"scale": Shape((4096, groups), jnp.float32)}
        group = None if groups == 1 else 4096 // groups
        name = f"int8_product {rows} of {jnp.dtype(dtype)}, {groups} groups"
        yield name, partial(ops.int8_product, group=group), arguments


def sums(rows: int, width: int, dtype: Any) -> ops.Sums:
    arrays = Shape((rows, width), type_of_sums(dtype)), Shape((rows, 1), jnp.float32)
    return ops.Sums(*arrays, Shape((width,), jnp.float32), rows, jnp.dtype(dtype))


def rounding() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Rows rounded to FP8, behind a norm and behind an activation."""
    x, norm = Shape((32, 4096), jnp.bfloat16), Shape((4096,), jnp.bfloat16)
    yield "round_rows as they are", ops.round_rows, {"x": x}
    behind_a_norm = {"x": sums(32, 4096, jnp.bfloat16), "residual": x, "norm": norm}
    yield "round_rows behind a norm", ops.round_rows, behind_a_norm
    gated = partial(ops.round_rows, activation="silu")
    yield "round_rows behind an activation", gated, {"x": sums(32, 2 * 14_336, jnp.bfloat16)}


def recurrence() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """The gated delta rule, of Qwen3-Next's heads and of others: steps, and chunks. A step of Granite 4's state space
    layers, and of others.
    """
    for key_heads, heads, key_dim, value_dim, dtype, ragged in (
        (16, 32, 128, 128, jnp.bfloat16, False),
        (4, 4, 256, 96, jnp.float16, False),
        (2, 8, 512, 128, jnp.float32, False),
        (16, 32, 128, 128, jnp.bfloat16, True),
        (4, 4, 96, 80, jnp.float16, True),
        (16, 32, 128, 128, jnp.float32, True),
    ):
        tokens, rows = (2048, 32) if ragged else (64, 64)
        q, gates = Shape((tokens, key_heads, key_dim), dtype), Shape((tokens, heads), jnp.float32)
        arguments = {"states": Shape((256, heads, key_dim, value_dim), jnp.float32), "q": q, "k": q}
        arguments |= {"v": Shape((tokens, heads, value_dim), dtype), "log_decay": gates, "beta": gates}
        arguments |= {"slots": ids(rows), "fresh": Shape((rows,), jnp.bool_)}
        arguments |= {"query_starts": ids(rows + 1)} if ragged else {}
        name = f"{heads} x {key_dim} x {value_dim} {jnp.dtype(dtype)}{', chunks' if ragged else ''}"
        yield f"gated_delta_rule {name}", ops.gated_delta_rule, arguments
    for groups, heads, head_dim, state_dim, dtype in (
        (1, 48, 64, 128, jnp.bfloat16),
        (8, 128, 80, 256, jnp.float16),
        (1, 4, 64, 1024, jnp.float32),
    ):
        of_heads, b = Shape((heads,), jnp.float32), Shape((64, groups, state_dim), dtype)
        arguments = {"states": Shape((256, heads, head_dim, state_dim), jnp.float32), "a": of_heads, "d": of_heads}
        arguments |= {"x": Shape((64, heads, head_dim), dtype), "dt": Shape((64, heads), jnp.float32), "b": b, "c": b}
        arguments |= {"slots": ids(64), "fresh": Shape((64,), jnp.bool_)}
        yield f"state_space_dual {heads} x {head_dim} x {state_dim} {jnp.dtype(dtype)}", ops.state_space_dual, arguments


def programs() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """(name, op, its arguments)."""
    yield from attention()
    yield from latents()
    yield from other_ops()
    yield from experts()
    yield from routing()
    yield from few_bits_of_experts()
    yield from int4()
    yield from invariant()
    yield from fp8()
    yield from int8()
    yield from rounding()
    yield from recurrence()


def main(capabilities: list[int], names: list[str]) -> None:
    for capability in capabilities:
        family, done, of_family = FAMILY[capability], set(), set()
        for name, op, arguments in programs():
            if names and not any(part in name for part in names):
                continue
            call = partial(op, backend="triton")
            found = launches(call, arguments, capability)
            if family != capability:
                of_family.update(launches(call, arguments, family))
            for recorded in found:
                if recorded in done:
                    continue
                done.add(recorded)
                has_same_ptx = recorded in of_family and "*fp8e4nv" not in recorded.pointers
                limit = SHARED_BYTES[family]
                record = {"name": name, "capability": capability, "kernel": recorded.kernel.fn.__name__, "limit": limit}
                launch = recorded.launch
                record |= {"warps": launch.warps, "stages": launch.stages, "resident": launch.resident}
                found_out = compiled(recorded, capability, family if has_same_ptx else None)
                print(json.dumps(record | asdict(found_out)), flush=True)


if __name__ == "__main__":
    gc.freeze()  # what was imported stays
    numbers = [argument for argument in sys.argv[1:] if argument.isdigit()]
    main([int(number) for number in numbers], [name for name in sys.argv[1:] if not name.isdigit()])
