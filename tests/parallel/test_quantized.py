"""Quantized models over two CPU devices: scales lie with their weights, and the tokens are those of one device."""

import pytest

from jpaged import models
from jpaged.api.errors import InvalidParameterError
from jpaged.models.sharding import shard_of
from tests.parallel.eight_devices import call_with_eight_devices
from tests.support.quantized import PUBLISHED, tiny

RUNS = "tests.parallel.quantized_runs"


def test_two_devices_give_the_tokens_of_dequantized_weights():
    for found in call_with_eight_devices(f"{RUNS}:tokens", "fp8-blocks", "awq", "bamba/awq").values():
        assert found["two"] == found["exact"]
        assert len({token for tokens in found["two"] for token in tokens}) > 8, "a text that wanders"


def test_integers_on_two_devices_give_the_tokens_of_floats_with_the_same_values():
    found = call_with_eight_devices(f"{RUNS}:integers")
    assert found["two"] == found["exact"]
    assert len(set(found["two"])) > 6, "a text that wanders"


def test_experts_in_4_bits_give_the_same_tokens_split_by_columns_and_by_experts():
    found = call_with_eight_devices(f"{RUNS}:experts", "int4-symmetric")
    assert found["two"] == found["whole"] == found["exact"]
    assert len({token for tokens in found["two"] for token in tokens}) > 8, "a text that wanders"


def test_experts_with_act_order_are_split_whole():
    """Dense layers with act-order are not, so they are left out here."""
    found = call_with_eight_devices(f"{RUNS}:experts_in_act_order")
    assert found["exact"] == found["4"]
    assert len({token for tokens in found["4"] for token in tokens}) > 8, "a text that wanders"


@pytest.mark.parametrize("layout", ["mxfp4", "fp8-blocks", "nvfp4"])
def test_experts_whose_groups_do_not_divide_give_the_tokens_of_one_device_on_four(layout):
    """As of gpt-oss-20b on four devices, with 720 columns each, and of Qwen3-30B-A3B in blocks, 192 on four, 96 on
    eight."""
    found = call_with_eight_devices(f"{RUNS}:padded_experts", layout)
    assert found["1"] == found["4"]
    assert len({token for tokens in found["1"] for token in tokens}) > 8, "a text that wanders"


def test_dense_blocks_that_devices_share_give_the_tokens_of_dequantized_weights_on_four():
    """Each of four has 48 inputs of a product, and of another 56, with padding: parts of blocks of 128."""
    found = call_with_eight_devices(f"{RUNS}:shared_blocks")
    assert found["exact"] == found["4"]
    assert len({token for tokens in found["4"] for token in tokens}) > 8, "a text that wanders"


def test_hybrids_in_fp8_blocks_give_the_tokens_of_dequantized_weights_on_four_devices():
    found = call_with_eight_devices(f"{RUNS}:hybrid")
    assert found["exact"] == found["4"]
    assert len({token for tokens in found["4"] for token in tokens}) > 8, "a text that wanders"


def test_keys_and_values_in_fp8_have_the_same_scales_and_give_the_same_tokens_on_four_devices():
    found = call_with_eight_devices(f"{RUNS}:fp8_cache")
    one, four = found["tokens"]
    assert four == one
    scales, of_four = found["scales"]
    assert of_four == scales
    assert all(scale != 1 for of_layer in scales for scale in of_layer)
    assert len({token for tokens in one for token in tokens}) > 8, "a text that wanders"


def test_shards_side_by_side_are_the_whole_parameters():
    layouts = ["online", "fp8-static", "fp8-blocks", "int8-static", "awq", "bamba/online"]
    layouts += [f"qwen3-moe/{one}" for one in ("online", "fp8-blocks")]
    assert call_with_eight_devices(f"{RUNS}:shards_equal_the_whole", *layouts) == []


@pytest.mark.parametrize(
    ("layout", "degree", "said"),
    [
        ("gptq-act-order", 2, "tensor_parallel_size=2 is not supported for GPTQ with act-order"),
        ("nvfp4", 4, "tensor_parallel_size=4 gives each device 56 inputs of some products, which 32, the inputs that"),
    ],
)
def test_layers_whose_scales_devices_would_share_are_refused(layout, degree, said):
    sizes = {"intermediate_size": 224}
    config = tiny("llama-biases", **sizes).config | {"quantization_config": PUBLISHED[layout].config}
    with pytest.raises(InvalidParameterError, match=said):
        shard_of(models.build(models.ModelConfig.from_dict(config), "float32"), degree)
