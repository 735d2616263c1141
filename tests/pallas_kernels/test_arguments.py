"""Bad input is refused while tracing, by a ValueError that names the argument."""

import jax
import jax.numpy as jnp
import pytest

from jpaged.pallas_kernels import (
    copy_blocks,
    decode_attention,
    gather_blocks,
    merge_attention,
    mixed_attention,
    ragged_attention,
    rope_and_write,
    sample_tokens,
    scatter_blocks,
    shared_prefix_attention,
    split_qkv,
    write_kv,
)
from jpaged.pallas_kernels.registry import missing
from tests.pallas_kernels.marks import needs_mosaic


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def ids(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


POOL = array(10, 2, 2, 16, 32)
DECODE = {"q": array(3, 4, 32), "kv_pool": POOL, "block_tables": ids(3, 5), "kv_lens": ids(3)}
RAGGED = {**DECODE, "q": array(9, 4, 32), "query_starts": ids(4)}
MIXED = {**RAGGED, "num_decodes": ids()}
SHARED = {**DECODE, "num_sharing": ids(), "shared_len": ids()}
MERGE = {"outs": [array(3, 4, 32, dtype=jnp.bfloat16)] * 2, "lses": [array(3, 4)] * 2}
WRITE = {"kv_pool": POOL, "k": array(3, 2, 32), "v": array(3, 2, 32), "slot_mapping": ids(3)}
SPLIT = {"qkv": array(3, 2, 4, 32), "rotation": (array(3, 16), array(3, 16)), "norms": (array(32), array(32))}
ROPE = {**SPLIT, "kv_pool": POOL, "slot_mapping": ids(3)}
COPY = {"kv_pools": (POOL, POOL), "src": ids(3), "dst": ids(3)}
GATHER = {"kv_pools": (POOL, POOL), "block_ids": ids(3)}
SCATTER = {"kv_pools": (POOL, POOL), "staging": array(2, 3, 2, 2, 16, 32), "block_ids": ids(3)}
SAMPLE = {
    "logits": array(3, 99),
    "temperature": array(3),
    "top_k": ids(3),
    "top_p": array(3),
    "min_p": None,
    "seeds": ids(3, 2, dtype=jnp.uint32),
    "positions": ids(3),
}

CASES = [
    (decode_attention, DECODE, "q", array(3, 32)),
    (decode_attention, DECODE, "q", array(3, 5, 32)),
    (decode_attention, DECODE, "q", array(3, 4, 64)),
    (decode_attention, DECODE, "q", array(3, 4, 32, dtype=jnp.bfloat16)),
    (decode_attention, DECODE, "kv_pool", array(10, 2, 16, 32)),
    (decode_attention, DECODE, "kv_pool", array(10, 3, 2, 16, 32)),
    (decode_attention, DECODE, "kv_pool", array(10, 2, 2, 16, 32, dtype=jnp.int8)),
    (decode_attention, DECODE, "block_tables", ids(4, 5)),
    (decode_attention, DECODE, "block_tables", ids(3, 0)),
    (decode_attention, DECODE, "block_tables", ids(3)),
    (decode_attention, DECODE, "block_tables", ids(3, 5, dtype=jnp.uint32)),
    (decode_attention, DECODE, "kv_lens", ids(4)),
    (decode_attention, DECODE, "kv_lens", array(3)),
    (ragged_attention, RAGGED, "query_starts", ids(3)),
    (ragged_attention, RAGGED, "kv_lens", ids(2)),
    (mixed_attention, MIXED, "q", array(9, 5, 32)),
    (mixed_attention, MIXED, "kv_pool", array(10, 3, 2, 16, 32)),
    (mixed_attention, MIXED, "query_starts", ids(3)),
    (mixed_attention, MIXED, "num_decodes", ids(1)),
    (mixed_attention, MIXED, "num_decodes", 2.0),
    (shared_prefix_attention, SHARED, "q", array(3, 5, 32)),
    (shared_prefix_attention, SHARED, "kv_pool", array(10, 3, 2, 16, 32)),
    (shared_prefix_attention, SHARED, "block_tables", ids(4, 5)),
    (shared_prefix_attention, SHARED, "block_tables", ids(3, 0)),
    (shared_prefix_attention, SHARED, "kv_lens", ids(4)),
    (shared_prefix_attention, SHARED, "num_sharing", ids(1)),
    (shared_prefix_attention, SHARED, "num_sharing", 2.0),
    (shared_prefix_attention, SHARED, "shared_len", array()),
    (merge_attention, MERGE, "outs", []),
    (merge_attention, MERGE, "outs", [array(3, 4, 32), array(3, 4, 31)]),
    (merge_attention, MERGE, "outs", [array(3, 4), array(3, 4)]),
    (merge_attention, MERGE, "lses", [array(3, 4)] * 3),
    (merge_attention, MERGE, "lses", [array(3, 4), array(3, 4, dtype=jnp.bfloat16)]),
    (write_kv, WRITE, "k", array(3, 4, 32)),
    (write_kv, WRITE, "v", array(2, 2, 32)),
    (write_kv, WRITE, "v", array(3, 2, 32, dtype=jnp.float16)),
    (write_kv, WRITE, "slot_mapping", ids(4)),
    (write_kv, WRITE, "kv_pool", array(2**28, 2, 2, 16, 32)),
    (split_qkv, SPLIT, "qkv", array(3, 4, 32)),
    (split_qkv, SPLIT, "qkv", array(3, 2, 2, 32)),
    (split_qkv, SPLIT, "qkv", ids(3, 2, 4, 32)),
    (split_qkv, SPLIT, "rotation", array(3, 16)),
    (split_qkv, SPLIT, "rotation", (array(3, 16), array(3, 32))),
    (split_qkv, SPLIT, "rotation", (array(3, 16, dtype=jnp.bfloat16), array(3, 16))),
    (split_qkv, SPLIT, "norms", (array(32), array(16))),
    (split_qkv, SPLIT, "norms", (array(32), array(32, dtype=jnp.bfloat16))),
    (rope_and_write, ROPE, "qkv", array(3, 4, 4, 32)),
    (rope_and_write, ROPE, "kv_pool", array(10, 2, 2, 16, 32, dtype=jnp.float16)),
    (rope_and_write, ROPE, "kv_pool", array(2**28, 2, 2, 16, 32)),
    (rope_and_write, ROPE, "slot_mapping", ids(4)),
    (copy_blocks, COPY, "dst", ids(4)),
    (copy_blocks, COPY, "src", ids(3, 1)),
    (copy_blocks, COPY, "kv_pools", ()),
    (copy_blocks, COPY, "kv_pools", POOL),
    (copy_blocks, COPY, "kv_pools", (POOL, array(11, 2, 2, 16, 32))),
    (gather_blocks, GATHER, "block_ids", array(3)),
    (scatter_blocks, SCATTER, "staging", array(2, 4, 2, 2, 16, 32)),
    (scatter_blocks, SCATTER, "staging", array(2, 3, 2, 2, 16, 32, dtype=jnp.bfloat16)),
    (sample_tokens, SAMPLE, "logits", array(3)),
    (sample_tokens, SAMPLE, "logits", array(3, 0)),
    (sample_tokens, SAMPLE, "logits", array(3, 99, dtype=jnp.bfloat16)),
    (sample_tokens, SAMPLE, "temperature", array(4)),
    (sample_tokens, SAMPLE, "temperature", 1.0),
    (sample_tokens, SAMPLE, "top_k", array(3)),
    (sample_tokens, SAMPLE, "top_p", array(3, 1)),
    (sample_tokens, SAMPLE, "min_p", array(4)),
    (sample_tokens, SAMPLE, "seeds", ids(3, 2)),
    (sample_tokens, SAMPLE, "positions", ids(2)),
]


@pytest.mark.parametrize(
    ("op", "good", "name", "bad"), CASES, ids=[f"{op.__name__}-{name}-{i}" for i, (op, _, name, _) in enumerate(CASES)]
)
def test_an_argument_that_does_not_fit_is_named(op, good, name, bad):
    jax.eval_shape(lambda kw: op(**kw), good)
    with pytest.raises(ValueError, match=name):
        jax.eval_shape(lambda kw: op(**kw), {**good, name: bad})


@pytest.mark.parametrize("bad", [-1e-5, float("nan"), "small"])
def test_an_eps_out_of_range_is_named(bad):
    with pytest.raises(ValueError, match="norm_eps must"):
        jax.eval_shape(lambda kw: rope_and_write(**kw, norm_eps=bad), ROPE)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("sliding_window", 0),
        ("sliding_window", 2.0),
        ("sliding_window", True),
        ("logit_softcap", -1.0),
        ("logit_softcap", float("nan")),
        ("scale", "big"),
        ("scale", float("inf")),
        ("alibi_slopes", jnp.ones(3)),
        ("alibi_slopes", jnp.ones(4, jnp.int32)),
        ("sinks", jnp.ones(3)),
        ("sinks", jnp.ones(4, jnp.int32)),
        ("backend", "cuda"),
    ],
)
@pytest.mark.parametrize(("op", "good"), [(decode_attention, DECODE), (ragged_attention, RAGGED)])
def test_an_option_out_of_range_is_named(op, good, name, bad):
    with pytest.raises(ValueError, match=name):
        jax.eval_shape(lambda kw: op(**kw, **{name: bad}), good)


@pytest.mark.parametrize(
    ("op", "good", "name", "bad"),
    [
        (ragged_attention, RAGGED, "causal", 1),
        (mixed_attention, MIXED, "logit_softcap", -1.0),
        (mixed_attention, MIXED, "sinks", jnp.ones((4, 1))),
        (mixed_attention, MIXED, "backend", "cuda"),
        (shared_prefix_attention, SHARED, "scale", "big"),
        (shared_prefix_attention, SHARED, "logit_softcap", -1.0),
        (shared_prefix_attention, SHARED, "alibi_slopes", jnp.ones(3)),
        (shared_prefix_attention, SHARED, "sinks", jnp.ones(3)),
        (shared_prefix_attention, SHARED, "backend", "cuda"),
    ],
)
def test_an_option_that_some_ops_have_is_checked_too(op, good, name, bad):
    with pytest.raises(ValueError, match=name):
        jax.eval_shape(lambda kw: op(**kw, **{name: bad}), good)


def test_a_forced_backend_says_why_it_cannot():
    reason = "JAX" if missing("hopper") else "float32"
    with pytest.raises(ValueError, match=rf"backend='hopper' cannot do this decode_attention: .*{reason}"):
        jax.eval_shape(lambda kw: decode_attention(**kw, backend="hopper"), DECODE)


@needs_mosaic
@pytest.mark.parametrize(("head_dim", "block_size", "reason"), [(72, 16, "head_dim 72"), (64, 8, "block size 8")])
def test_the_kernel_names_the_shape_it_does_not_have(head_dim, block_size, reason):
    half = jnp.bfloat16
    arguments = {
        **DECODE,
        "q": array(3, 4, head_dim, dtype=half),
        "kv_pool": array(10, 2, 2, block_size, head_dim, dtype=half),
    }
    with pytest.raises(ValueError, match=reason):
        jax.eval_shape(lambda kw: decode_attention(**kw, backend="hopper"), arguments)
