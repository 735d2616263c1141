"""Attention over contiguous keys and values: against float64 numpy, with NaN in every entry that no token owns."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels import Addresses, contiguous_attention
from jpaged.pallas_kernels.contiguous_attention import cudnn
from jpaged.pallas_kernels.contiguous_attention.calls import packed_calls

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16


@dataclass
class World:
    """Sequences in random stretches, and of each the tokens that this step computes."""

    addresses: Addresses
    keys: jax.Array
    values: jax.Array
    stretches: np.ndarray
    lens: np.ndarray
    kv: list[np.ndarray]

    @staticmethod
    def make(seed: int, lens: list[int], addresses: Addresses) -> "World":
        rng = np.random.default_rng(seed)
        stretches = rng.permutation(addresses.num_stretches)[: len(lens)].astype(np.int32)
        arrays = np.full((2, addresses.num_entries, KV_HEADS, HEAD_DIM), np.nan, np.float32)
        kv = []
        for stretch, length in zip(stretches, lens, strict=True):
            tokens = rng.standard_normal((2, length, KV_HEADS, HEAD_DIM)).astype(np.float32)
            arrays[:, np.asarray(addresses.entries(stretch, np.arange(length)))] = tokens
            kv.append(tokens)
        keys, values = jnp.asarray(arrays)
        return World(addresses, keys, values, stretches, np.array(lens, np.int32), kv)

    def expected(self, q: np.ndarray, counts: list[int], scale: float) -> np.ndarray:
        """In float64: the queries of row r are the last counts[r] of its tokens; 0 for what is nobody's."""
        out, token = np.zeros(q.shape), 0
        for (k, v), count, length in zip(self.kv, counts, self.lens, strict=True):
            for i in range(count):
                seen = length - count + i + 1
                for head in range(HEADS if length else 0):  # rows without tokens get 0
                    of_head = head // (HEADS // KV_HEADS)
                    scores = k[:seen, of_head].astype(np.float64) @ q[token, head] * scale
                    weights = np.exp(scores - scores.max())
                    out[token, head] = weights / weights.sum() @ v[:seen, of_head]
                token += 1
        return out


attend = jax.jit(contiguous_attention, static_argnames=("addresses", "scale"))
GAPLESS, WITH_GAPS = Addresses(7, 3, 8, 8), Addresses(7, 3, 7, 8)


@pytest.mark.parametrize("addresses", [GAPLESS, WITH_GAPS], ids=["contiguous", "pages with gaps"])
@pytest.mark.parametrize("lens", [[20, 0, 7, 8, 1], [21, 21, 21, 21, 0]])
def test_one_query_a_row_sees_all_of_its_tokens_and_no_others(addresses: Addresses, lens: list[int]) -> None:
    world = World.make(len(lens), lens, addresses)
    q = np.random.default_rng(1).standard_normal((len(lens), HEADS, HEAD_DIM)).astype(np.float32)
    out = attend(q, world.keys, world.values, world.stretches, world.lens, addresses, scale=0.3)
    np.testing.assert_allclose(out, world.expected(q, [1] * len(lens), 0.3), atol=2e-5)


# Of each row: tokens in all, and those that are computed now. Five rows and 48 tokens each, so one program serves all.
STEPS = {
    "whole prompts": ([9, 21, 1, 0, 0], [9, 21, 1, 0, 0], 0),
    "a chunk in the midst, one that is the first, one that is the last": ([12, 8, 21, 20, 9], [5, 8, 1, 13, 9], 0),
    "decode rows and chunks": ([20, 1, 16, 13, 0], [1, 1, 7, 13, 0], 2),
    "decode rows alone": ([20, 1, 16, 21, 8], [1, 1, 1, 1, 1], 5),
    "rows without queries or tokens": ([5, 0, 14, 0, 6], [1, 0, 9, 0, 0], 1),
    "one chunk": ([17, 0, 0, 0, 0], [4, 0, 0, 0, 0], 0),
    "every token of the step": ([21, 21, 21, 1, 9], [21, 20, 5, 1, 1], 0),
}


@pytest.mark.parametrize("addresses", [GAPLESS, WITH_GAPS], ids=["contiguous", "pages with gaps"])
@pytest.mark.parametrize("step", STEPS)
def test_a_chunk_s_query_sees_its_own_token_and_all_before_it(step: str, addresses: Addresses) -> None:
    lens, counts, num_decodes = STEPS[step]
    world = World.make(3, lens, addresses)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    q = np.random.default_rng(2).standard_normal((48, HEADS, HEAD_DIM)).astype(np.float32)
    chunks = {"query_starts": starts, "num_decodes": np.int32(num_decodes)}
    out = attend(q, world.keys, world.values, world.stretches, world.lens, addresses, **chunks)
    np.testing.assert_allclose(out, world.expected(q, counts, HEAD_DIM**-0.5), atol=2e-5)


def test_what_a_chunk_is_called_with_names_tokens_and_never_one_behind_its_end() -> None:
    """In tokens, as cuDNN's documentation has them: [1, R] lengths and [1, R + 1] offsets, in int32."""
    addresses = Addresses(5, 2, 16, 16)
    stretches, lens = jnp.array([3, 1, 0], jnp.int32), jnp.array([20, 7, 0], jnp.int32)
    before, own = packed_calls(stretches, lens, jnp.array([0, 6, 13, 13], jnp.int32), 16, addresses)
    assert (before.is_causal, own.is_causal) == (False, True)
    for call, kv_lens, kv_offsets in ((before, [14, 0, 0], [96, 32, 0, 160]), (own, [6, 7, 0], [110, 32, 0, 160])):
        assert call.q_lens.tolist() == [[6, 7, 0]]
        assert call.q_offsets.tolist() == [[0, 6, 13, 16]]
        assert call.kv_lens.tolist() == [kv_lens]
        assert call.kv_offsets.tolist() == [kv_offsets]
        assert {x.dtype for x in (call.q_lens, call.q_offsets, call.kv_lens, call.kv_offsets)} == {jnp.dtype("int32")}


SHAPE = jax.ShapeDtypeStruct


def asked(
    dtype: str = "bfloat16", head_dim: int = 128, addresses: Addresses = GAPLESS, entries: int | None = None
) -> str | None:
    entries = entries or addresses.num_entries
    return cudnn.unsupported(SHAPE((4, 8, head_dim), dtype), SHAPE((entries, 8, head_dim), dtype), addresses, True)


def test_cudnn_says_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_capability", lambda: (9, 0))
    assert asked() is None
    assert asked(head_dim=256) is None
    assert "bfloat16 and float16, not float32" in str(asked("float32"))
    assert "up to 256 in steps of 8, not 100" in str(asked(head_dim=100))
    assert "without gaps" in str(asked(addresses=WITH_GAPS))
    assert "and nothing else" in str(asked(entries=GAPLESS.num_entries + 1))
    assert "32 bits" in str(asked(addresses=Addresses(129, 16, 1024, 1024)))
    monkeypatch.setattr(cudnn, "_capability", lambda: (8, 0))
    assert "up to 128 in steps of 8, not 256" in str(asked(head_dim=256))
    assert "9.0 (Hopper)" in str(asked())


def lowered(monkeypatch: pytest.MonkeyPatch, *chunks: SHAPE) -> str:
    """A layer of an 8B model, 64 stretches of 4,096 tokens, for an NVIDIA GPU that this machine need not have."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda capability: False)
    addresses, rows = Addresses(64, 4, 1024, 1024), 8
    kv = SHAPE((addresses.num_entries, 8, 128), jnp.bfloat16)

    def call(q: jax.Array, k: jax.Array, v: jax.Array, stretches: jax.Array, lens: jax.Array, *chunks: jax.Array):
        options = dict(zip(("query_starts", "num_decodes"), chunks, strict=False))
        return contiguous_attention(q, k, v, stretches, lens, addresses, backend="cudnn", **options)

    q = SHAPE((512 if chunks else rows, 32, 128), jnp.bfloat16)
    ids = SHAPE((rows,), jnp.int32)
    traced = jax.jit(call).trace(q, kv, kv, ids, ids, *chunks)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_decode_step_lowers_to_one_call_of_cudnn_over_the_arrays_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = lowered(monkeypatch)
    calls = [line for line in text.splitlines() if "__cudnn$fmha" in line]
    assert len(calls) == 1
    assert "@__cudnn$fmhaSoftmax(" in calls[0]
    assert "PADDING" in calls[0]
    assert "CAUSAL" not in calls[0]
    assert calls[0].count("tensor<64x4096x8x128xbf16>") == 2  # keys and values, whole
    assert not [line for line in text.splitlines() if "gather" in line and "262144x8x128" in line]


def test_a_step_with_chunks_lowers_to_two_packed_calls_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = lowered(monkeypatch, SHAPE((9,), jnp.int32), SHAPE((), jnp.int32))
    calls = [line for line in text.splitlines() if "__cudnn$fmha" in line]
    packed = [line for line in calls if "tensor<1x262144x8x128xbf16>" in line]
    assert (len(calls), len(packed)) == (3, 2)
    assert sum("PADDING_CAUSAL" in line for line in packed) == 1
    assert all("max_seg_per_batch" in line and "tensor<8x32x512xf32>" in line for line in packed)  # log-sum-exps
    assert not [line for line in text.splitlines() if "gather" in line and "262144x8x128" in line]
