"""Text through multimodal models, as transformers makes and saves them, gives transformers' logits in float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny_models import VOCAB_SIZE, tiny_model

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers

from tests.support.against_transformers import our_logits, our_model  # noqa: E402

SIGLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGLIP |= {"image_size": 28, "patch_size": 14}
PIXTRAL = SIGLIP | {"model_type": "pixtral", "head_dim": 16}
QWEN = {"depth": 1, "hidden_size": 64, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
INTERLEAVED = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [12, 10, 10]}

CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "Gemma3": ("gemma3", "gemma3", SIGLIP | {"model_type": "siglip_vision_model"}, {}),
    "Gemma4": ("gemma4-e4b-style", "gemma4", SIGLIP | {"model_type": "gemma4_vision", "num_key_value_heads": 2}, {}),
    "Mistral3": ("mistral-full", "mistral3", PIXTRAL, {}),
    "Mistral3, of Ministral 3": ("ministral3", "mistral3", PIXTRAL, {}),
    "Qwen2VL": ("qwen2-window", "qwen2_vl", QWEN | {"embed_dim": 32}, {"rope_scaling": MROPE}),
    "Qwen2_5_VL": ("qwen2-tied", "qwen2_5_vl", QWEN | {"fullatt_block_indexes": [0]}, {"rope_scaling": MROPE}),
    "Qwen3VL": (
        *("qwen3-tied-d64", "qwen3_vl", QWEN | {"deepstack_visual_indexes": [0]}),
        {"rope_scaling": INTERLEAVED},
    ),
    "Qwen3VLMoe": (
        *("qwen3-moe", "qwen3_vl_moe", QWEN | {"deepstack_visual_indexes": [0]}),
        {"rope_scaling": INTERLEAVED | {"mrope_section": [4, 2, 2]}},
    ),
    "Qwen3_5": ("qwen3.5", "qwen3_5", QWEN, {"model_type": "qwen3_5_text"}),
    "Qwen3_5Moe": ("qwen3.5-moe", "qwen3_5_moe", QWEN, {"model_type": "qwen3_5_moe_text"}),
}
"""The model of text, "model_type", the vision tower, and what else config.json says of the text."""


def logits_of(whole: dict[str, Any], directory: Path, seed: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Ours of what transformers saves of the model, with its config.json, and theirs. seed: of the tokens."""
    (directory / "config.json").write_text(json.dumps(whole))
    config = transformers.AutoConfig.from_pretrained(directory)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = getattr(transformers, whole["architectures"][0])._from_config(config, **options).eval()
    with torch.no_grad():
        for weight in model.parameters():
            values = torch.randn(weight.shape)
            weight.copy_(1 + 0.2 * values if values.ndim == 1 else values * values.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    if "text_config" not in whole:
        (directory / "config.json").write_text(json.dumps(whole))
    tokens = np.random.default_rng(seed).integers(3, VOCAB_SIZE, 30)
    with torch.no_grad():
        theirs = np.asarray(model(input_ids=torch.tensor(tokens[None])).logits[0])
    return our_logits(*our_model(directory, None), tokens), theirs


@pytest.mark.parametrize("name", CASES)
def test_text_gives_the_logits_of_the_whole_model(name: str, tmp_path: Path) -> None:
    text, model_type, vision, more = CASES[name]
    part = tiny_model(text).config | more
    if "_vl" in model_type:
        part["model_type"] = f"{model_type}_text"
    whole = {
        "architectures": [f"{name.partition(',')[0]}ForConditionalGeneration"],
        "model_type": model_type,
        "text_config": part,
        "vision_config": vision,
        "tie_word_embeddings": part["tie_word_embeddings"],
    }
    ours, theirs = logits_of(whole, tmp_path)
    assert np.abs(ours - theirs).max() < 1e-4 * max(1.0, np.abs(theirs).max())


def test_a_qwen_vl_whose_config_is_flat_is_read_as_well(tmp_path: Path) -> None:
    """As those of Qwen2-VL and Qwen2.5-VL are published."""
    text, model_type, vision, more = CASES["Qwen2_5_VL"]
    named = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": model_type}
    ours, theirs = logits_of(tiny_model(text).config | more | named | {"vision_config": vision}, tmp_path)
    assert np.abs(ours - theirs).max() < 1e-4 * max(1.0, np.abs(theirs).max())


@pytest.mark.parametrize("as_wide", [False, True])
def test_published_experts_of_qwen3_vl_are_read_whose_inputs_come_first(as_wide: bool, tmp_path: Path) -> None:
    """What transformers saves of a new model has them the other way round; either way it reads both. Where gate and up
    are together as wide as the stream, only the shape of down tells which it is."""
    text, model_type, vision, more = CASES["Qwen3VLMoe"]
    part = tiny_model(text).config | more | {"model_type": "qwen3_vl_moe_text"}
    if as_wide:
        part["moe_intermediate_size"] = part["hidden_size"] // 2
    whole = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": model_type, "text_config": part}
    whole |= {"vision_config": vision, "tie_word_embeddings": part["tie_word_embeddings"]}
    ours, theirs = logits_of(whole, tmp_path, seed=4)
    assert np.abs(ours - theirs).max() < 1e-4 * max(1.0, np.abs(theirs).max())
    (file,) = tmp_path.glob("*.safetensors")
    tensors = safetensors.load_file(file)
    experts = [name for name in tensors if ".mlp.experts." in name]
    assert experts
    safetensors.save_file(tensors | {name: tensors[name].transpose(1, 2).contiguous() for name in experts}, file)
    tokens = np.random.default_rng(4).integers(3, VOCAB_SIZE, 30)
    ours = our_logits(*our_model(tmp_path, None), tokens)
    assert np.abs(ours - theirs).max() < 1e-4 * max(1.0, np.abs(theirs).max())
