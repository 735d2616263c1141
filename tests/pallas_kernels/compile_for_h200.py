"""Compiles all kernels of this package for an H200, or the programs that are named, and prints one JSON line a program.

A program of its own: the CUDA compiler must be found before JAX starts. `test_hopper_compile.py` runs it.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.h200_compile import compile_for_h200, h200_mesh  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jpaged import pallas_kernels as ops
from jpaged.executor.cache.paged import PagedCache
from jpaged.executor.cache.spec import LayerCache
from jpaged.executor.config import ExecutorConfig
from jpaged.models.experts import ClampedSwiGLU, mix
from jpaged.models.grouped_linear import PlainProduct

Shape = jax.ShapeDtypeStruct


def ids(*shape: int) -> Shape:
    return Shape(shape, jnp.int32)


def rope_and_write(pool: Any, qkv: Any, slots: Any, rotation: Any, norms: Any) -> Any:
    return ops.rope_and_write(pool, qkv, slots, rotation=rotation, norms=norms, backend="hopper")


def rounded(options: dict[str, Any], x: Any, residual: Any = None, norm: Any = None) -> Any:
    return ops.round_rows(x, residual=residual, norm=norm, backend="hopper", **options)


def experts_of_gpt_oss(x: Any, gate_up: Any, down: Any, experts: Any, weights: Any, biases: Any) -> Any:
    options = {"activation": ClampedSwiGLU(), "backend": "hopper", "biases": biases}
    products = PlainProduct(gate_up), PlainProduct(down)
    return mix(x, products, gate_up.shape[0], experts, weights, **options)


def two_sizes_of_heads() -> tuple[str, Any, tuple[Any, ...], bool]:
    """A decode step's attention as of Gemma 4, in one pool: heads of 256 columns with a window, and of 512 without,
    which XLA reads; and a layer of each kind that reads what another wrote."""
    small = LayerCache(kv_heads=2, head_dim=256, dtype=np.dtype(jnp.bfloat16), window=512)
    large = replace(small, head_dim=512, window=None)
    spec = (small, small, large, replace(small, source=1), replace(large, source=2))
    sizes: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 4096, "block_size": 16, "num_blocks": 4096}
    config = ExecutorConfig(**sizes, decode_buckets=(16,), token_buckets=(256,), kernel_backend="hopper,xla")
    cache = PagedCache(spec, config)

    def step(pools: Any, tables: Any, positions: Any, active: Any, projected: Any) -> Any:
        layers, outputs = cache.decode_layers(pools, tables, positions, active), []
        for i, (qkv, layer) in enumerate(zip(projected, spec, strict=True)):
            attend, half = layers[i], (16, layer.head_dim // 2)
            options: dict[str, Any] = {"norms": None, "norm_eps": 0.0, "scale": 1.0, "sliding_window": layer.window}
            outputs.append(attend(qkv, rotation=(jnp.ones(half), jnp.zeros(half)), **options))
            layers[i] = attend
        return layers.pools, outputs

    slots = [4 if layer.source is not None else 6 for layer in spec]
    projected = [Shape((16, 2, n, layer.head_dim), jnp.bfloat16) for n, layer in zip(slots, spec, strict=True)]
    arguments = (cache.pools, ids(16, 2, config.max_blocks_per_seq), ids(16), Shape((16,), jnp.bool_), projected)
    return "heads of two sizes in one pool", step, arguments, True


def programs() -> Iterator[tuple[str, Any, tuple[Any, ...], bool]]:
    """(name, function, arguments, whether the pools, its first argument, are donated)."""
    for heads, kv_heads, head_dim, block_size, dtype, options in (
        (32, 8, 128, 16, jnp.bfloat16, {}),
        (32, 32, 64, 16, jnp.float16, {"sliding_window": 1500}),
        (32, 1, 128, 128, jnp.bfloat16, {}),
        (28, 4, 128, 64, jnp.bfloat16, {"alibi_slopes": jnp.ones(28)}),
        (16, 4, 256, 16, jnp.bfloat16, {}),
        (32, 1, 80, 64, jnp.bfloat16, {"logit_softcap": 30.0}),
        (28, 4, 96, 128, jnp.bfloat16, {"alibi_slopes": jnp.ones(28)}),
        (64, 8, 64, 16, jnp.bfloat16, {"sliding_window": 128, "sinks": jnp.ones(64)}),  # gpt-oss
    ):
        pool = Shape((4096, 2, kv_heads, block_size, head_dim), dtype)
        call = partial(ops.decode_attention, backend="hopper", return_lse=True, **options)
        arguments = (Shape((16, heads, head_dim), dtype), pool, ids(16, 4096 // block_size), ids(16))
        yield f"decode {heads}/{kv_heads} D {head_dim} block {block_size}", call, arguments, False
    for heads, head_dim, value_dim, block_size in ((16, 576, 512, 16), (128, 576, 512, 64), (20, 320, 256, 16)):
        pool = Shape((4096, 1, 1, block_size, head_dim), jnp.bfloat16)
        call = partial(ops.decode_attention, backend="hopper", return_lse=True, value_dim=value_dim)
        arguments = (Shape((16, heads, head_dim), jnp.bfloat16), pool, ids(16, 4096 // block_size), ids(16))
        yield f"decode {heads} over latents of {head_dim} block {block_size}", call, arguments, False
    call = partial(ops.mixed_attention, backend="hopper")
    for rows, heads, kv_heads, blocks in ((256, 32, 8, 128), (332, 8, 2, 313)):
        pool = Shape((4096, 2, kv_heads, 16, 128), jnp.bfloat16)
        arguments = (Shape((1024, heads, 128), jnp.bfloat16), pool, ids(rows, blocks), ids(rows), ids(rows + 1), ids())
        yield f"mixed 1,024 tokens, {rows} rows, {heads}/{kv_heads} D 128 block 16", call, arguments, False
    pool = Shape((1280, 2, 16, 16, 192), jnp.bfloat16)  # keys and values of DeepSeek's heads, for a step's own tokens
    arguments = (Shape((4096, 16, 192), jnp.bfloat16), pool, ids(64, 256), ids(64), ids(65))
    call = partial(ops.ragged_attention, backend="hopper", value_dim=128, return_lse=True)
    yield "ragged 16/16 D 192, values 128", call, arguments, False
    weights = Shape((28_672, 4096), jnp.int8), Shape((28_672, 1), jnp.float32)  # of which no transposed copy is written
    call = partial(ops.int8_product, activations="dynamic", backend="xla")
    yield "int8_product 32 rows", call, (Shape((32, 4096), jnp.bfloat16), *weights), False
    for rows, heads, kv_heads, head_dim, block_size, options in (
        (64, 32, 8, 128, 16, {}),
        (512, 16, 8, 128, 16, {"sinks": jnp.ones(16)}),
        (64, 8, 8, 64, 32, {"alibi_slopes": jnp.ones(8)}),
        (256, 28, 4, 80, 64, {"logit_softcap": 30.0}),
    ):
        pool = Shape((4096, 2, kv_heads, block_size, head_dim), jnp.bfloat16)
        call = partial(ops.shared_prefix_attention, backend="hopper", return_lse=True, **options)
        arguments = (
            Shape((rows, heads, head_dim), jnp.bfloat16),
            pool,
            ids(rows, 4096 // block_size),
            ids(rows),
            ids(),
            ids(),
        )
        yield f"shared prefix {rows} x {heads}/{kv_heads} D {head_dim} block {block_size}", call, arguments, False
    pool = Shape((20_000, 2, 8, 16, 128), jnp.bfloat16)
    new = Shape((256, 8, 128), jnp.bfloat16)
    yield "write_kv", partial(ops.write_kv, backend="hopper"), (pool, new, new, ids(256)), True
    pools = (pool,) * 10
    staging = Shape((10, 8, 2, 8, 16, 128), jnp.bfloat16)
    yield "copy_blocks", partial(ops.copy_blocks, backend="hopper"), (pools, ids(8), ids(8)), True
    yield "gather_blocks", partial(ops.gather_blocks, backend="hopper"), (pools, ids(8)), False
    yield "scatter_blocks", partial(ops.scatter_blocks, backend="hopper"), (pools, staging, ids(8)), True
    for kv_heads, group, head_dim, dtype, rotated, normed in (
        (8, 4, 128, jnp.bfloat16, True, False),
        (8, 2, 128, jnp.bfloat16, True, True),
        (1, 7, 64, jnp.bfloat16, True, True),
        (32, 1, 80, jnp.float16, False, False),
        (8, 4, 256, jnp.float32, True, True),
        (4, 2, 256, jnp.bfloat16, True, jnp.float32),  # Gemma 3, whose scales are float32
    ):
        table = Shape((24, head_dim // 2), jnp.float32)
        scale = Shape((head_dim,), jnp.float32 if normed is jnp.float32 else dtype)
        arguments = (
            Shape((20_000, 2, kv_heads, 16, head_dim), dtype),
            Shape((24, kv_heads, group + 2, head_dim), dtype),
            ids(24),
            (table, table) if rotated else None,
            (scale, scale) if normed else None,
        )
        yield f"rope_and_write {kv_heads} x {group} D {head_dim}", rope_and_write, arguments, True
    tables = Shape((32, 64), jnp.float32), Shape((32, 64), jnp.float32)
    products = Shape((32, 6144), jnp.bfloat16), Shape((32, 1), jnp.float32), Shape((6144,), jnp.float32)
    arguments = (pool, ops.Sums(*products, 32, jnp.dtype(jnp.bfloat16)), ids(32), tables, None)
    yield "rope_and_write of sums", rope_and_write, arguments, True
    for rows, vocab in ((1, 151_936), (1024, 128_256), (32, 50_257)):
        floats, whole = Shape((rows,), jnp.float32), ids(rows)
        logits, seeds = Shape((rows, vocab), jnp.float32), Shape((rows, 2), jnp.uint32)
        arguments = (logits, floats, whole, floats, floats, seeds, whole)
        yield f"sample_tokens {rows} x {vocab}", partial(ops.sample_tokens, backend="hopper"), arguments, False
    for rows, depth, columns, dtype, activation, biased in (
        (1024, 4096, 14336, jnp.bfloat16, "silu", False),  # 2 consumers, 128 columns, clusters
        (384, 4096, 14336, jnp.float16, "gelu", True),  # 3 consumers, 112 columns
        (100, 1024, 3072, jnp.bfloat16, "gelu_tanh", True),  # 64 columns
    ):
        arguments = (Shape((rows, depth), dtype), Shape((depth, 2, columns), dtype))
        arguments += (Shape((2, columns), dtype),) if biased else ()
        call = partial(ops.gated_product, activation=activation, backend="hopper")
        yield f"gated_product {rows} x {depth} x {columns} {activation}", call, arguments, False
    for rows, depth, columns, first, result in (
        (64, 3072, 1024, False, jnp.bfloat16),  # 1 consumer, 64 columns
        (129, 1024, 4096, False, jnp.bfloat16),
        (512, 1024, 151_936, True, jnp.float32),  # logits of a tied embedding
        (2048, 4096, 28_672, False, jnp.bfloat16),  # 2 consumers, 256 columns, clusters
        (2048, 4096, 4096, True, jnp.bfloat16),
    ):
        shapes = (rows, depth), (columns, depth) if first else (depth, columns)
        arguments = tuple(Shape(shape, jnp.bfloat16) for shape in shapes)
        call = partial(ops.invariant_product, outputs_first=first, dtype=result, backend="hopper")
        yield f"invariant_product {rows} x {depth} x {columns}", call, arguments, False
    for rows in (8, 2048, 65_536):  # 64 columns; 128; 2 consumers in clusters
        x, sizes = Shape((rows, 2048), jnp.bfloat16), ids(128)
        call = partial(ops.gated_grouped_product, backend="hopper")
        yield f"gated_grouped_product {rows}", call, (x, Shape((128, 2048, 2, 768), jnp.bfloat16), sizes), False
        x, down = Shape((rows, 768), jnp.float16), Shape((128, 768, 2048), jnp.float16)
        call = partial(ops.weighted_grouped_product, backend="hopper")
        arguments = (x, down, sizes, Shape((rows,), jnp.float32))
        yield f"weighted_grouped_product {rows}", call, arguments, False
    for rows in (4, 512):  # gpt-oss-20b: biases and activation in XLA between the products
        shapes = ((rows, 2880), (32, 2880, 2, 2880), (32, 2880, 2880), (32, 2, 2880), (32, 2880))
        x, gate_up, down, *biases = (Shape(shape, jnp.bfloat16) for shape in shapes)
        arguments = (x, gate_up, down, ids(rows, 4), Shape((rows, 4), jnp.float32), tuple(biases))
        yield f"experts of gpt-oss {rows}", experts_of_gpt_oss, arguments, False
    for depth, what in ((4096, "norm"), (16_384, "norm"), (14_336, "silu"), (16_384, "gelu")):
        gated = what != "norm"
        sizes = (32, 2 * depth if gated else depth), (32, 1), (2 * depth if gated else depth,)
        arrays = [Shape(size, jnp.float32) for size in sizes]
        arrays[0] = Shape(sizes[0], jnp.bfloat16 if depth < 16_384 else jnp.float32)
        x = ops.Sums(*arrays, 32, jnp.dtype(jnp.bfloat16))
        options = {"activation": what} if gated else {}
        arguments = (x,) if gated else (x, Shape((32, depth), jnp.bfloat16), Shape((depth,), jnp.bfloat16))
        yield f"round_rows 32 x {depth} {what}", partial(rounded, options), arguments, False
    for rows, outputs, inputs, group, zeros, dtype in (
        (1, 28_672, 4096, 128, False, jnp.bfloat16),
        (16, 4096, 11_008, 64, True, jnp.float16),
        (32, 4096, 14_336, 128, True, jnp.bfloat16),
        (32, 6144, 4096, 32, True, jnp.bfloat16),
        (64, 6144, 4096, 64, True, jnp.bfloat16),
        (8, 6144, 4096, 32, True, jnp.bfloat16),
        (16, 6144, 4096, 32, True, jnp.bfloat16),
        (32, 6144, 4096, 64, True, jnp.bfloat16),
        (64, 6144, 4096, 128, True, jnp.bfloat16),
        (16, 6144, 4096, 128, True, jnp.bfloat16),
        (32, 28_672, 4096, 128, False, jnp.bfloat16),
        (512, 28_672, 4096, 128, True, jnp.bfloat16),
    ):
        arguments = (Shape((rows, inputs), dtype), Shape((outputs, inputs // 2), jnp.uint8))
        arguments += (Shape((outputs, inputs // group), jnp.float32),)
        arguments += (Shape((outputs, inputs // group), jnp.uint8),) if zeros else ()
        call = partial(ops.int4_product, group=group, backend="hopper")
        yield f"int4_product {rows} x {inputs} x {outputs} of {group}", call, arguments, False
    for rows, outputs, inputs, group, dtype in (
        (1, 28_672, 4096, None, jnp.bfloat16),
        (16, 4096, 14_336, 128, jnp.bfloat16),
        (16, 6144, 4096, 32, jnp.float16),
    ):
        arguments = (Shape((rows, inputs), dtype), Shape((outputs, inputs), jnp.float8_e4m3fn))
        arguments += (Shape((outputs, 1 if group is None else inputs // group), jnp.float32),)
        call = partial(ops.fp8_product, group=group, backend="hopper")
        yield f"fp8_product {rows} x {inputs} x {outputs} of {group}", call, arguments, False
    yield "write_kv in XLA", partial(ops.write_kv, backend="xla"), (pool, new, new, ids(256)), True
    yield "copy_blocks in XLA", partial(ops.copy_blocks, backend="xla"), (pools, ids(8), ids(8)), True
    yield two_sizes_of_heads()


def all_reduces() -> Iterator[tuple[str, Any, tuple[Any, ...], Any]]:
    """(name, function, arguments, mesh): two calls in one program over several GPUs; the state is donated."""
    for devices, rows, max_rows, hidden, biased in (
        (2, 1, 64, 4096, False),
        (4, 64, 64, 8192, False),
        (2, 1000, 1024, 2560, True),
        (2, 8192, 8192, 1024, False),
        (8, 300, 512, 4096, True),
    ):
        mesh = h200_mesh(devices)
        own, same = PartitionSpec("model"), PartitionSpec()

        def twice(
            inbox: Any,
            generations: Any,
            parts: Any,
            residual: Any,
            vectors: dict[str, Any],
            how: dict[str, Any],
        ) -> tuple:
            peers = ops.all_reduce_peers(inbox, **how)
            parts = parts[0]
            for vector in (vectors, vectors | {"scale": None}):
                inbox, generations, residual, normed = ops.all_reduce_add_norm(
                    inbox, generations, peers, parts, residual, norm_eps=1e-5, **vector, **how
                )
                parts = jnp.tanh(residual if normed is None else normed)
            return inbox, generations, residual[None]

        part = Shape((hidden,), jnp.bfloat16)
        vectors = {"scale": part} | ({"bias": part} if biased else {})
        state = ops.initial_all_reduce_state(devices, max_rows, hidden, jnp.bfloat16)
        split = [
            Shape((devices * leaf.shape[0], *leaf.shape[1:]), leaf.dtype, sharding=NamedSharding(mesh, own))
            for leaf in (*state, Shape((1, rows, hidden), jnp.bfloat16))
        ]
        program = jax.shard_map(
            partial(twice, how={"axis": "model", "num_devices": devices, "backend": "hopper"}),
            mesh=mesh,
            in_specs=(own, own, own, same, same),
            out_specs=(own, own, own),
            check_vma=False,
        )
        arguments = (*split, Shape((rows, hidden), jnp.bfloat16), vectors)
        yield f"all_reduce {devices} x {rows} x {hidden}", program, arguments, mesh


def main(names: list[str]) -> None:
    for name, program, arguments, mesh in all_reduces():
        if names and name not in names:
            continue
        memory = compile_for_h200(program, *arguments, donate_argnums=(0, 1), mesh=mesh).memory_analysis()
        state = sum(leaf.size * leaf.dtype.itemsize for leaf in arguments[:2]) // mesh.size
        alias, temp = memory.alias_size_in_bytes, memory.temp_size_in_bytes
        print(json.dumps({"name": name, "pool": state, "alias": alias, "temp": temp}), flush=True)
    for name, fn, arguments, donated in programs():
        if names and name not in names:
            continue
        memory = compile_for_h200(fn, *arguments, donate_argnums=(0,) if donated else ()).memory_analysis()
        pool_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments[0])) if donated else 0
        record = {
            "name": name,
            "pool": pool_bytes,
            "alias": memory.alias_size_in_bytes,
            "temp": memory.temp_size_in_bytes,
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
