"""Tiny models of every supported family, with random weights, for tests that compare with transformers.

A case is a name and a config.json. `write_tiny_model` makes a checkpoint directory of it, with the same weights
whether transformers writes it (needs torch; names, shapes and layout are then transformers' own) or jpaged does.
The weights are drawn so that greedy decoding wanders through the vocabulary. Over a text of 32 tokens the best
logit leads the second by at least some 1e-3 of the largest, where float32 implementations differ by some 1e-6.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny_blocks import models_of_blocks
from tests.tiny_cases import MAX_LENGTH, VOCAB_SIZE, WINDOW, TinyModel, tiny_models

__all__ = [
    "DEMO_ENGINE",
    "DEMO_OPTIONS",
    "MAX_LENGTH",
    "TINY_ENGINE",
    "VOCAB_SIZE",
    "WINDOW",
    "TinyModel",
    "draw",
    "models_of_blocks",
    "tiny_model",
    "tiny_models",
    "torch_model",
    "write_tiny_model",
]

TINY_ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "num_gpu_blocks_override": 512,
    "max_model_len": 128,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 128,
    "decode_buckets": (32,),
    "token_buckets": (128,),
    "skip_tokenizer_init": True,
    "verbose": False,
}
"""Arguments of the engines that run a tiny model: with the same ones everywhere, its programs are compiled once."""

DEMO_ENGINE: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 600,
    "decode_buckets": (4, 16),
    "token_buckets": (64,),
}
"""Likewise for the embedded model."""

DEMO_OPTIONS = tuple(
    word
    for name, size in DEMO_ENGINE.items()
    for word in ("--" + name.replace("_", "-"), ",".join(map(str, size)) if isinstance(size, tuple) else str(size))
)
"""The same on the command line."""


_STDS = {
    "lm_head": 0.5,
    "embed_tokens": 0.1,
    "wte": 0.1,
    "word_embeddings": 0.1,
    "embed_in": 0.1,
    "embed_out": 0.5,
    "embed_positions": 1.0,
    "wpe": 1.0,
}
"""Of tables of tokens and positions, and of heads. A small embedding keeps tied models from repeating a token for
ever."""


def tiny_model(name: str) -> TinyModel:
    """The case of that name."""
    return next(case for case in (*tiny_models(), *models_of_blocks()) if case.name == name)


def write_tiny_model(
    case: TinyModel,
    directory: str | Path,
    *,
    use_torch: bool = True,
    dtype: str = "float32",
    max_shard_bytes: int | None = None,
) -> Path:
    """Writes the checkpoint (no tokenizer) and returns its directory.

    use_torch: transformers makes and saves it; False: jpaged does, which needs no torch.
    max_shard_bytes: split into shards of about this size (only with torch).
    """
    directory = Path(directory)
    if not use_torch:
        if max_shard_bytes is not None:
            raise ValueError("only transformers writes shards.")
        _write_with_jpaged(case, directory, dtype)
        return directory
    model = torch_model(case)
    import torch

    options = {} if max_shard_bytes is None else {"max_shard_size": max_shard_bytes}
    model.to(getattr(torch, dtype)).save_pretrained(directory, **options)
    # What this version of transformers writes differs in style from what most checkpoints have; test the latter.
    (directory / "config.json").write_text(json.dumps(case.config | {"torch_dtype": dtype}))
    return directory


def torch_model(case: TinyModel) -> Any:
    """The transformers model of a case, float32, in evaluation mode, with the weights of `write_tiny_model`."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(case.config)))
    eager = case.family in ("gemma", "gpt_oss")  # other implementations of attention leave soft caps and sinks out
    options = {"dtype": torch.float32} | ({"attn_implementation": "eager"} if eager else {})
    model = model_class(config)._from_config(config, **options).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.from_numpy(_draw_parameter(case, name, tuple(weight.shape))))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                buffer.copy_(torch.from_numpy(_draw_parameter(case, name, tuple(buffer.shape))))
    return model


def model_class(config: Any) -> Any:
    """The class of a transformers configuration's model; "auto" knows none for Mistral 4."""
    import transformers

    if config.model_type == "mistral4":
        return transformers.models.mistral4.modeling_mistral4.Mistral4ForCausalLM
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _draw_parameter(case: TinyModel, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weights of a parameter of transformers', which holds all experts where a checkpoint has a tensor for each."""
    if case.family == "gpt_neox":  # whose head has another name in checkpoints
        name = name.replace("lm_head", "embed_out")
    if case.family in ("gpt_oss", "llama4", "gemma4"):  # whose checkpoints hold all experts in one
        return draw(case, name, shape)
    if case.family == "granite":  # likewise, under other names
        names = {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight"}
        names |= {"router.weight": "router.layer.weight"}
        block, _, part = name.partition(".block_sparse_moe.")
        return draw(case, f"{block}.block_sparse_moe.{names[part]}" if part else name, shape)
    if case.family == "olmo_hybrid":
        return _draw_olmo_hybrid(case, name, shape)
    name = name.replace(".gate.moe_statics.", ".moe_statics.")  # of ERNIE 4.5
    name = name.replace("self_attn.sinks", "self_attn.attention_sink_bias")  # of MiMo-V2-Flash
    prefix, _, part = name.rpartition(".experts.")
    if case.config["model_type"] in ("mixtral", "minimax_m2"):
        prefix, name = (one.replace(".mlp.", ".block_sparse_moe.") for one in (f"{prefix}.", name))
        prefix = prefix.removesuffix(".")
        names = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
    elif case.family == "lfm2":
        names = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
    else:
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    if case.family == "nemotron_h":
        prefix, name = (one.replace("model.", "backbone.", 1) for one in (prefix, name))
        names = {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}
    if part not in names:
        return draw(case, name, shape)
    experts, rows, columns = shape
    each = (rows // len(names[part]), columns)
    stored = [f"{prefix}.experts.{expert}.{one}.weight" for expert in range(experts) for one in names[part]]
    stacked = [draw(case, one, each) for one in stored]
    return np.asarray(stacked).reshape(shape)


def _draw_olmo_hybrid(case: TinyModel, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Likewise of OLMo Hybrid's, which saves each convolution in three chunks."""
    if not name.endswith(".conv1d.weight"):
        return draw(case, name, shape)
    chunk = -(-shape[0] // 3)
    channels = {"q": chunk, "k": chunk, "v": shape[0] - 2 * chunk}
    drawn = [draw(case, name.replace(".conv1d.", f".{one}_conv1d."), (n, *shape[1:])) for one, n in channels.items()]
    return np.concatenate(drawn)


def draw(case: TinyModel, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 weights of one checkpoint tensor; they depend on the case and the tensor's name only."""
    rng = np.random.default_rng(zlib.crc32(f"{case.name}/{tensor}".encode()))
    values = rng.standard_normal(shape, np.float32)
    if tensor.endswith("A_log"):  # states that last: a layer whose output is near zero is all rounding, once normed
        return values * np.float32(0.5) - 3
    if tensor.endswith(("conv1d.weight", "conv.conv.weight")):
        return values * np.float32(shape[-1] ** -0.5)
    if tensor.endswith("bias") or (case.family == "qwen_hybrid" and len(shape) == 1 and "linear_attn" not in tensor):
        return values * np.float32(0.2)
    if len(shape) == 1:
        return 1 + values * np.float32(0.2)
    for part, std in _STDS.items():
        if part in tensor:
            scale = case.config.get("embedding_multiplier", 1.0) if part == "embed_tokens" else 1.0
            return values * np.float32(std / max(1.0, scale / 4))
    fan_in = shape[0] if case.family == "gpt2" else shape[1]
    # DeepSeek's temperature doubles scores; that of the weights is lower, so that softmaxes do not amplify rounding.
    std = 1.2 if case.family == "deepseek" and "self_attn" in tensor else 2.0
    return values * np.float32(std * fan_in**-0.5)


def _write_with_jpaged(case: TinyModel, directory: Path, dtype: str) -> None:
    import jax.numpy as jnp

    from jpaged import models

    model = models.build(models.ModelConfig.from_dict(case.config), "float32")
    shapes = dict(zip(model.parameter_names, model.abstract_weights, strict=True))
    arrays = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
    for piece in model.pieces:
        piece.place(arrays[piece.parameter], draw(case, piece.tensor, piece.shape))
    models.save_pretrained(model, tuple(map(jnp.asarray, arrays.values())), directory, dtype)
