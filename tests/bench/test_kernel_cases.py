"""What the cases of `jpaged bench kernels` compute, and what they say of it, in small shapes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.bench import kernels
from jpaged.bench.kernel_cases import attention, contiguous, experts, latents, recurrence
from jpaged.bench.kernel_cases.attention import Setting
from jpaged.bench.kernel_cases.experts import Experts
from jpaged.bench.routing import experts_touched
from jpaged.models import Routing
from jpaged.pallas_kernels.quantized_grouped_product.reference import dequantized
from tests.support.quick_compilation import quick_compilation_of_module as quick_compilation_of_module


def test_the_skew_is_that_of_the_experts_cases(monkeypatch):
    monkeypatch.setattr(experts, "_DRAWS", 2)
    cases = [case for case in kernels.cases("xla", 1.5) if case.name.startswith(("experts,", "sparse layer,"))]
    skewed = [case for case in cases if "Zipf 1.5" in case.name]
    assert len(skewed) == len(cases) / 2 == 10
    even, uneven = (Experts(16, 2, 64, 32, zipf) for zipf in (0.0, 1.5))
    assert uneven.floors_us(8)[0] < even.floors_us(8)[0], "fewer experts are read"


@pytest.mark.parametrize("zipf", [0.0, 1.5])
def test_every_call_of_a_sparse_layer_reads_as_many_experts_as_its_tokens_touch(monkeypatch, zipf):
    touched, mix = [], experts.mix

    def noting(x, products, num_experts, picked, weights, **options):
        touched.append(len(np.unique(picked)))
        return mix(x, products, num_experts, picked, weights, **options)

    monkeypatch.setattr(experts, "mix", noting)
    program, arguments, calls, _ = experts.sparse_case(16, Experts(64, 4, 64, 32, zipf), "xla")
    with jax.disable_jit():
        program(*arguments)
    assert len(touched) == calls
    wanted = experts_touched(Routing(per_token=4, zipf=zipf), 64, 16)
    assert touched == pytest.approx([wanted] * calls, rel=0.25)


@pytest.mark.parametrize("layer", [recurrence.DeltaNet(2, 4, 16, 24), recurrence.Mamba(1, 4, 24, 16)])
def test_a_step_of_recurrent_layers_moves_every_row_s_state_once_in_and_once_out(monkeypatch, layer) -> None:
    monkeypatch.setattr(recurrence, "L2_BYTES", 3 * 5 * 4 * 16 * 24 * 4)
    program, (states, *rest), calls, work = recurrence.step_case(layer, 5, "xla")
    assert (len(states), calls) == (15, 16)
    given, out = sum(x.nbytes for x in rest[0]), 2 * 5 * 4 * layer.state[1 if layer.state[1] == 24 else 2]
    assert work == 2 * states[:5].nbytes + given + out
    before = np.asarray(states)
    after = np.asarray(program(states, *rest))
    assert after.shape == before.shape
    assert (np.abs(after - before).max(axis=(1, 2, 3)) > 0).all(), "all slots have their turn"


def test_floors_are_the_bytes_of_experts_touched_and_the_operations_of_their_rows() -> None:
    """Of Qwen3-30B-A3B: one token touches 8 experts of 3 x 2,048 x 768 weights, 8,192 tokens touch all 128."""
    qwen, (e4m3, int8, int4, mxfp4) = Experts(), experts.FEW_BITS
    weights = 3 * 2048 * 768
    outputs = 2 * 768 + 2048
    each = {
        None: 2 * weights,
        e4m3: weights + 4 * outputs,  # a float32 scale for each
        int8: weights + 4 * outputs,
        int4: weights / 2 + 4 * weights / 128,
        mxfp4: weights / 2 + weights / 32,
    }
    for bits, expert_bytes in each.items():
        assert qwen.expert_bytes(bits) == expert_bytes
        for tokens, touched in ((1, 8), (8192, 128)):
            moved = touched * expert_bytes + 8 * tokens * 2 * (2048 + 768 + 768 + 2048)
            assert qwen.floors_us(tokens, bits) == pytest.approx(
                (moved / 4.42e12 * 1e6, 2 * 8 * tokens * weights / 780e12 * 1e6)
            )


@pytest.mark.parametrize("bits", experts.FEW_BITS, ids=lambda bits: bits.form)
@pytest.mark.parametrize("tokens", [1, 5])
def test_experts_in_few_bits_are_as_many_bytes_as_their_floor_counts_and_give_what_their_values_say(
    monkeypatch, bits, tokens
) -> None:
    monkeypatch.setattr(experts, "_DRAWS", 1)
    few = Experts(experts=4, per_token=2, hidden=256, inner=128)
    program, arguments, calls, work = experts.quantized_experts_case(tokens, bits, few, "xla")
    x, gate_up, down, grouped, twos = arguments
    assert calls == len(grouped) == (4 if tokens == 1 else 1)
    assert work == 2 * tokens * 2 * 3 * 256 * 128
    assert sum(part.nbytes for part in (*gate_up, *down)) == 4 * few.expert_bytes(bits)
    arguments = (x, gate_up, down, grouped[:1], twos)
    wide = [
        np.stack([dequantized(w[e], scale[e], None, form=bits.form, group=bits.group) for e in range(4)])
        for w, scale in (gate_up, down)
    ]
    assert [one.std() * one.shape[2] ** 0.5 for one in wide] == pytest.approx([1, 1], rel=0.5)
    owner = np.sort(few.draw(0, tokens).ravel())
    wanted = []
    for row, expert in zip(np.asarray(x, np.float64)[np.asarray(grouped[0][2])], owner, strict=True):
        gate, up = np.split(wide[0][expert] @ row, 2)
        wanted.append(2 * wide[1][expert] @ (gate / (1 + np.exp(-gate)) * up))
    np.testing.assert_allclose(np.asarray(program(*arguments), np.float64), wanted, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("queries", [None, [20, 12], [7, 1]], ids=["decode", "prompts", "chunks"])
def test_contiguous_cases_count_and_compute_what_those_over_block_tables_do(monkeypatch, queries) -> None:
    """The same random keys and values in both: of 20 and 12 tokens, 4 query and 2 KV heads of 8."""
    setting = Setting(heads=4, kv_heads=2, head_dim=8, block_size=4, dtype=np.float32)
    lens = np.array([20, 12])
    counts = None if queries is None else np.array(queries)
    monkeypatch.setattr(attention, "L2_BYTES", 1)
    monkeypatch.setattr(attention, "_LAYERS", 1)
    monkeypatch.setattr(attention, "_PROGRAM_S", 0.0)
    if queries is None:
        assert setting.kv_bytes(lens) == (20 + 12) * 2 * 2 * 8 * 4
    else:
        scores = sum(sum(range(length - n + 1, length + 1)) for length, n in zip(lens, queries, strict=True))
        assert setting.operations(lens, counts) == 4 * scores * 4 * 8
    program, (q, [(keys, values)], stretches, kv_lens, chunks), calls, work = contiguous.contiguous_case(
        lens, counts, setting, "xla"
    )
    assert calls == 1
    assert sorted(stretches.tolist()) == [0, 1]
    by_table, (_, pool, [table], _, *starts), calls, same_work = attention.attention_case(lens, counts, setting, "xla")
    assert (calls, work) == (1, same_work)
    _, (_, _, [counting], *_), _, in_a_row = attention.attention_case(lens, counts, setting, "xla", is_contiguous=True)
    assert counting.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]
    assert in_a_row == work
    for row, length in enumerate(lens):
        for position in range(length):
            entry = int(stretches[row]) * 20 + position
            token = np.stack([keys[entry], values[entry]])
            pool = pool.at[table[row, position // 4], :, :, position % 4].set(token)
    found = program(q, [(keys, values)], stretches, kv_lens, chunks)
    np.testing.assert_allclose(found, by_table(q, pool, [table], kv_lens, *starts), atol=1e-5)


def test_a_pool_in_fp8_is_read_in_half_the_bytes_and_gives_nearly_the_same(monkeypatch) -> None:
    monkeypatch.setattr(attention, "L2_BYTES", 1)
    monkeypatch.setattr(attention, "_LAYERS", 1)
    monkeypatch.setattr(attention, "_PROGRAM_S", 0.0)
    setting, lens = Setting(heads=4, kv_heads=2, head_dim=16, block_size=4), np.array([20, 12])
    plain, of_plain, _, bytes_of_plain = attention.attention_case(lens, None, setting, "xla")
    narrow = replace(setting, kv_dtype=jnp.float8_e4m3fn)
    program, arguments, _, work = attention.attention_case(lens, None, narrow, "xla")
    assert arguments[1].dtype == jnp.float8_e4m3fn
    assert arguments[0].dtype == jnp.bfloat16
    assert 2 * work == bytes_of_plain == 32 * 2 * 2 * 16 * 2
    wanted, found = (np.asarray(x, np.float32) for x in (plain(*of_plain), program(*arguments)))
    assert 0 < np.abs(found - wanted).max() < 0.2


def test_contiguous_cases_stand_beside_those_over_block_tables_whatever_the_backend(monkeypatch) -> None:
    monkeypatch.setattr(experts, "_DRAWS", 1)
    cases = list(kernels.cases("xla"))
    names = {case.name: case for case in cases}
    assert len(names) == len(cases), "a name is that of one case"
    beside = [name for name in names if name.endswith(", contiguous")]
    assert len(beside) == 12
    for name in beside:
        assert names[name].of_the_card == name.startswith("cuDNN")
        assert names[name].unit == names[name.removeprefix("cuDNN ").removesuffix(", contiguous")].unit


def test_prefill_over_latents_is_the_same_expanded_and_absorbed_and_counts_its_operations(monkeypatch) -> None:
    monkeypatch.setattr(latents, "_CALLS", 1)
    shape = latents.Heads(heads=2, rank=64, rotated=16, plain=32, values=32, dtype=np.float32)
    found, works = {}, {}
    for expanded in (True, False):
        program, arguments, _, works[expanded] = latents.prefill_case(20, 13, shape, "xla", expanded=expanded)
        q, pool, table, own, *others = arguments
        pool = np.array(pool)
        for i, latent in enumerate(own, start=13):  # as if the step had written them
            pool[table[0, i // 16], 0, 0, i % 16] = latent
        found[expanded] = program(q, pool, table, own, *others)
    np.testing.assert_allclose(found[True], found[False], atol=1e-4, rtol=1e-3)
    pairs = 20 * 21 / 2
    assert works[False] == 2 * 2 * (20 * 64 * 64 + (pairs + 20 * 13) * (80 + 64))
    assert works[True] == 2 * 2 * (2 * 20 * 64 * 64 + pairs * (48 + 32) + 20 * 13 * (80 + 64))


@pytest.mark.parametrize("lengths", [[40, 24], [1, 1]], ids=["chunks", "steps"])
def test_the_delta_rules_cases_compute_what_their_floors_count(monkeypatch, lengths) -> None:
    monkeypatch.setattr(recurrence, "_CHUNK_CALLS", 1)
    shape = recurrence.DeltaNet(key_heads=2, heads=4, key_dim=16, value_dim=32)
    program, arguments, _, work = recurrence.chunks_case(np.array(lengths), shape, "xla")
    states, v, q, k, log_decay, beta, *_ = arguments
    assert work == 2 * states.nbytes + 2 * v.nbytes + q.nbytes + k.nbytes + log_decay.nbytes + beta.nbytes
    assert np.isfinite(program(*arguments)).all()
    products = 2 * (2 * 64 * 16 + 2 * 64 * 32 + 3 * 16 * 32) * 4  # of a token: K K', Q K'; T R, P U; K S, Q S, K' U
    assert shape.operations(64) == 64 * products
    assert (shape.floors_us(2, sum(lengths))[1] > 0) == (sum(lengths) > 2)
