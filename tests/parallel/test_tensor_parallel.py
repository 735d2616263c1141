"""Tensor parallelism over eight CPU devices: the tokens of one device, and what the compiled programs say."""

from typing import Any

import numpy as np
import pytest

from jpaged.api.config import EngineArgs
from jpaged.api.errors import InvalidParameterError
from jpaged.engine.interface import NUM_RANKED, SamplingVariant
from jpaged.executor.mesh import pick_devices
from jpaged.models import ModelConfig
from jpaged.models.config import VOCAB_UNIT
from jpaged.models.experts import split_by_experts
from jpaged.pallas_kernels.all_reduce.inbox import EMPTY
from tests.parallel.eight_devices import call_with_eight_devices
from tests.parallel.models import VOCAB_SIZE, eight_heads
from tests.parallel.tensor_parallel_runs import check_tokens
from tests.tiny_models import tiny_model

RUNS = "tests.parallel.tensor_parallel_runs"


@pytest.mark.parametrize(
    ("name", "degrees"), [("llama-gqa-d64-tied", (1, 2, 8)), ("opt-350m-style", (1, 8)), ("gpt2", (1, 8))]
)
def test_every_degree_gives_the_greedy_tokens_of_one_device_with_two_sums_a_layer(name, degrees):
    """Where each head has keys and values of its own, shards differ in nothing but their number: the most will do. Over
    four, the first model does all that shards do (`by_degree`)."""
    check_tokens(call_with_eight_devices(f"{RUNS}:tokens_by_degree", name, degrees), degrees)


def test_devices_that_have_whole_experts_or_parts_of_each_give_the_tokens_of_one():
    found = call_with_eight_devices(f"{RUNS}:tokens_of_experts", "qwen3-moe")
    tokens, none = found.pop("1, parts")
    assert not none
    assert set(found) == {"2, whole", "4, parts"}
    layers = tiny_model("qwen3-moe").config["num_hidden_layers"]
    for drawn, collectives in found.values():
        assert drawn == tokens
        assert collectives == {"all-reduce": 2 * layers + 1}


def test_decode_steps_of_one_call_give_the_tokens_of_two():
    two, one = call_with_eight_devices(f"{RUNS}:tokens_of_one_call", "qwen3-moe")
    assert one == two
    (greedy, sampled), counts = one
    assert greedy != sampled
    assert min(map(sum, counts)) > 0


def test_whole_experts_are_refused_where_there_are_none_or_they_do_not_divide():
    dense, sparse = (ModelConfig.from_dict(eight_heads(name).config) for name in ("llama-biases", "qwen2-moe"))
    with pytest.raises(InvalidParameterError, match="LlamaForCausalLM is none"):
        split_by_experts(dense)
    with pytest.raises(InvalidParameterError, match="splits 6 experts over tensor_parallel_size=4"):
        split_by_experts(sparse).shard(4)
    with pytest.raises(InvalidParameterError, match="enable_expert_parallel=True needs a tensor_parallel_size above 1"):
        EngineArgs(enable_expert_parallel=True)


@pytest.fixture(scope="module")
def by_degree() -> dict[str, Any]:
    return call_with_eight_devices(f"{RUNS}:everything_by_degree", "llama-gqa-d64-tied")


one_process = pytest.mark.xdist_group("tensor-parallel")
LAYERS = tiny_model("llama-gqa-d64-tied").config["num_hidden_layers"]
ROWS, SHARDS = 8, 4


@one_process
def test_every_sampling_variant_draws_the_tokens_of_one_device(by_degree):
    tokens = by_degree["1"]["tokens"]
    assert len({str(drawn) for drawn in tokens.values()}) == 3
    assert by_degree["4"]["tokens"] == tokens


@one_process
def test_any_number_of_truncating_rows_is_dealt_out_to_shards(by_degree):
    for rows, alone in by_degree["1"]["odd_rows"].items():
        found = by_degree["4"]["odd_rows"][rows]
        assert [row[0] for row in found] == [row[0] for row in alone]
        np.testing.assert_allclose(found, alone, rtol=1e-5, atol=1e-5)


@one_process
def test_rows_under_masks_draw_the_tokens_of_one_device(by_degree):
    alone = by_degree["1"]["masked"]
    assert by_degree["4"]["masked"] == alone
    assert {rows[3][0] for rows in alone.values()} == {192}
    assert sorted({len(row) for rows in alone.values() for row in rows}) == [1, 1 + NUM_RANKED]


@one_process
def test_every_shard_knows_which_rows_have_no_finite_logits(by_degree):
    for degree, found in by_degree.items():
        for variant, is_finite in found["finite"].items():
            assert is_finite == [False, False, False, True, True, True], f"variant {variant} on {degree} devices"


@one_process
def test_truncating_rows_take_one_exchange_of_logits_and_one_of_tokens(by_degree):
    truncated = by_degree["4"]["collectives"][f"sample_8_{int(SamplingVariant.TRUNCATED)}"]
    assert truncated == {"all-to-all": 1, "all-gather": 1}


@one_process
def test_given_tokens_score_as_on_one_device(by_degree):
    one, split = by_degree["1"]["scores"], by_degree["4"]["scores"]
    assert split["greedy"] == one["greedy"]
    assert split["logprobs"] == pytest.approx(one["logprobs"], rel=1e-5, abs=1e-5)


@one_process
def test_embeddings_are_those_of_one_device(by_degree):
    one, split = by_degree["1"]["embeddings"], by_degree["4"]["embeddings"]
    assert len(one) == len(split)
    for a, b in zip(one, split, strict=True):
        assert b == pytest.approx(a, abs=1e-5)


@one_process
def test_samples_and_beams_that_are_forked_and_swapped_are_those_of_one_device(by_degree):
    assert len(by_degree["1"]["sequences"]) == 16
    assert by_degree["4"]["sequences"] == by_degree["1"]["sequences"]
    assert min(by_degree[degree]["num_swapped_in"] for degree in ("1", "4")) > 0


@one_process
def test_a_prefix_that_is_read_once_gives_the_tokens_of_one_device(by_degree):
    one, four = by_degree["1"], by_degree["4"]
    assert four["shared"] == one["shared"] == one["each for itself"]
    assert four["shared, steps"] == one["shared, steps"] > 0
    assert one["each for itself, steps"] == 0


@one_process
def test_a_step_has_two_all_reduces_a_layer_one_for_the_embedding_and_nothing_else(by_degree):
    collectives = by_degree["4"]["collectives"]
    assert collectives["decode_8"] == {"all-reduce": 2 * LAYERS + 1}
    assert collectives["shared_decode_8"] == collectives["decode_8"]
    assert collectives["mixed_32"] == {"all-reduce": 2 * LAYERS + 1}


@one_process
def test_the_greedy_head_exchanges_one_logit_and_token_a_row(by_degree):
    assert by_degree["4"]["collectives"]["sample_8_0"] == {"all-gather": 1}
    assert by_degree["4"]["gathered"]["sample_8_0"] == SHARDS * ROWS * 2


@one_process
def test_no_program_gathers_logits_weights_or_pool(by_degree):
    alternatives = 20
    assert all(size <= SHARDS * 32 * alternatives for size in by_degree["4"]["gathered"].values())
    assert SHARDS * 32 * alternatives < 32 * VOCAB_SIZE


@one_process
def test_the_pool_is_split_over_devices_and_updated_in_place(by_degree):
    one, four = by_degree["1"], by_degree["4"]
    # Two key-value heads, each of them stored by two of the four shards.
    assert four["pool_bytes_by_device"] == [[pool // 2] * SHARDS for (pool,) in one["pool_bytes_by_device"]]
    assert four["planned_pool_bytes"] == sum(sizes[0] for sizes in four["pool_bytes_by_device"])
    assert four["aliased_bytes"] >= four["planned_pool_bytes"]


@one_process
def test_steps_of_few_rows_sum_through_one_state_which_is_planned_and_updated_in_place(by_degree):
    one, four = by_degree["1"], by_degree["4"]
    assert one["exchange_bytes"] == one["planned_exchange_bytes"] == 0
    assert four["exchange_bytes"] == four["planned_exchange_bytes"] > 0
    pool = four["pool_bytes_by_device"][0][0] * len(four["pool_bytes_by_device"])
    assert four["aliased_bytes"] - pool >= four["exchange_bytes"]
    assert four["inbox_words"] == [EMPTY]
    blocks = four["one_shot_counts"][0]
    assert four["one_shot_counts"] == [blocks] * SHARDS
    assert len(set(blocks)) == 1  # decode steps of 8 rows take it, mixed ones of 32 do not
    assert blocks[0] % (2 * LAYERS + 1) == 0 < blocks[0]


@one_process
def test_the_programs_of_one_device_know_nothing_of_shards(by_degree):
    assert not any(by_degree["1"]["collectives"].values())
    assert not any(by_degree["1"]["partitions"].values())
    assert by_degree["4"]["partitions"]["decode_8"]


def test_a_degree_that_does_not_divide_the_heads_is_refused_with_those_that_do():
    config = ModelConfig.from_dict(eight_heads("llama-mqa-d80").config)
    with pytest.raises(InvalidParameterError, match=r"tensor_parallel_size=3 .* one of 1, 2, 4, 8"):
        config.shard(3)


def test_more_shards_than_devices_are_refused():
    with pytest.raises(InvalidParameterError, match="tensor_parallel_size=64 needs as many devices"):
        pick_devices(64)


@pytest.mark.parametrize(("heads", "kv_heads", "shards"), [(8, 2, 8), (8, 8, 4), (6, 3, 2), (12, 4, 6)])
def test_key_value_heads_are_stored_as_often_as_even_shards_take(heads, kv_heads, shards):
    config = ModelConfig.from_dict(
        tiny_model("llama-mha-d16").config
        | {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16}
    )
    shard = config.shard(shards)
    assert shard.num_heads * shards == heads
    assert shard.num_kv_heads * shards == kv_heads * shard.kv_head_copies
    assert shard.num_heads % shard.num_kv_heads == 0
    assert shard.vocab_size % VOCAB_UNIT == 0
    assert 0 <= shard.vocab_size * shards - config.vocab_size < VOCAB_UNIT * shards
