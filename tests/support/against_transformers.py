"""Tiny models of any config.json, with random weights, against transformers in float32: `compare`."""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.config_spaces import Config
from tests.tiny_models import TINY_ENGINE, model_class

TOKENS = 40
TOLERANCE = 1e-4
_BUFFERS = ("e_score_correction_bias", "expert_bias", "layer_scalar")
"""What names of buffers that checkpoints have end with."""


class Refused(Exception):
    """One of the two does not take the configuration. whose: "ours" or "theirs"."""

    def __init__(self, whose: str, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {str(error)[:300]}")
        self.whose = whose


def torch_model(config: Config, seed: int) -> Any:
    """transformers' model of a config.json, float32, with random weights.

    Raises Refused if transformers makes none of it.
    """
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        # Soft caps and sinks need "eager", in which transformers 5.24 adds Falcon's ALiBi twice.
        attention = "sdpa" if config["model_type"] == "falcon" else "eager"
        try:
            theirs = transformers.AutoConfig.from_pretrained(directory)
            theirs._experts_implementation = "eager"  # others have no product in float64
            model = model_class(theirs)._from_config(theirs, dtype=torch.float32, attn_implementation=attention)
        except Exception as error:
            raise Refused("theirs", error) from error
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if name in dict(model.named_buffers()) and not name.endswith(_BUFFERS):
                continue
            values = torch.randn(weight.shape, generator=generator)
            if name.endswith("A_log"):
                values = values * 0.5 - 3
            elif "bias" in name.rsplit(".", 1)[-1]:
                values = values * 0.2
            elif values.ndim == 1:
                values = 1 + values * 0.2
            elif name.endswith(("conv1d.weight", "conv.conv.weight")):
                values = values * values.shape[-1] ** -0.5
            elif "embed" in name or "wte" in name or "wpe" in name:
                values = values * 0.3
            else:
                inputs = values.shape[0] if type(model).__name__ == "GPT2LMHeadModel" else values.shape[-1]
                values = values * 1.2 * inputs**-0.5
            weight.copy_(values)
    return model.eval()


def their_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """float [tokens, vocab] of a whole sequence, in the model's type. Raises Refused if transformers fails."""
    import torch

    try:
        with torch.no_grad():
            return np.asarray(model(torch.tensor(tokens[None])).logits[0])
    except Exception as error:
        raise Refused("theirs", error) from error


def our_model(directory: Path, max_model_len: int | None) -> tuple[Any, Any]:
    """jpaged's model of a checkpoint, and its weights. Raises Refused if it serves none."""
    from jpaged import models
    from jpaged.api.errors import JPagedError

    try:
        config = models.ModelConfig.from_directory(directory, max_model_len)
        model = models.build(config, "float32")
        return model, models.load(model, directory)
    except JPagedError as error:
        raise Refused("ours", error) from error


def our_logits(model: Any, weights: Any, tokens: np.ndarray) -> np.ndarray:
    """float32 [tokens, vocab] of a whole sequence."""
    import jax

    from jpaged import models

    def run(weights: Any, tokens: Any) -> Any:
        positions = jax.numpy.arange(len(tokens))
        return model.logits(weights, model.forward(weights, tokens, positions, models.dense_causal_attend))

    return np.asarray(jax.jit(run)(weights, tokens))


def compare(config: Config, seed: int, engine: bool = False) -> str | None:
    """What is wrong with a configuration; None for nothing.

    Raises Refused where one of the two does not take it.
    """
    theirs = torch_model(config, seed)
    their_logits(theirs, np.arange(3, 7))  # first of all: what transformers cannot run need not be served
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        _write(theirs, directory, config, random.Random(f"file {seed}"))
        length, max_model_len = _lengths(config, chance)
        model, weights = our_model(directory, max_model_len)
        tokens = np.random.default_rng(seed).integers(3, config["vocab_size"], min(length, served(model)))
        ours = our_logits(model, weights, tokens)
        logits = their_logits(theirs, tokens)
        found = _difference(ours, logits)
        if found > TOLERANCE:
            try:
                rounding = _difference(logits, their_logits(theirs.double(), tokens))
            except Refused:  # some experts have no product in float64
                rounding = 0.0
            theirs.float()
            if not found <= 10 * rounding:
                return f"differs by {found:.2g}, of {len(tokens)} tokens; rounding {rounding:.2g}"
        if engine and max_model_len is None and served(model) >= 32:
            return _greedy(theirs, directory, config["vocab_size"], seed, served(model))
    return None


def _write(theirs: Any, directory: Path, config: Config, chance: random.Random) -> None:
    """A checkpoint of the model, in one of the ways in which there are some: in one file or in shards, with config.json
    as it was drawn or as transformers writes it, and of a tied model at times the body alone, whose names are shorter,
    unless its head has a bias.
    """
    is_bare = bool(getattr(theirs.config, "tie_word_embeddings", False)) and chance.random() < 0.3
    is_bare = is_bare and theirs.get_output_embeddings().bias is None
    options = {"max_shard_size": "20KB"} if chance.random() < 0.3 else {}
    (theirs.base_model if is_bare else theirs).save_pretrained(directory, **options)
    if is_bare or chance.random() < 0.6:
        (directory / "config.json").write_text(json.dumps(config))
    if chance.random() < 0.5:
        (directory / "generation_config.json").unlink(missing_ok=True)


def served(model: Any) -> int:
    return int(model.config.max_position_embeddings)


def _lengths(config: Config, chance: random.Random) -> tuple[int, int | None]:
    """How many tokens to compare, and what length to build for: where RoPE depends on it, at times the longer one."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = parameters.get("rope_type") or parameters.get("type")
    length = config.get("max_position_embeddings", TOKENS)
    if kind == "dynamic" and length < 64 and chance.random() < 0.7:
        return 2 * length, 2 * length
    if kind == "longrope" and chance.random() < 0.6:
        return min(length, TOKENS), length
    return TOKENS, None


def _difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest, of logits, in units of their spread where that is above 1."""
    if not np.isfinite(ours).all():
        return float("inf")
    return float(np.abs(ours - theirs).max() / max(1.0, theirs.std()))


def _greedy(theirs: Any, directory: Path, vocab: int, seed: int, length: int) -> str | None:
    """Tokens of an engine that computes prompts in chunks, beside transformers' from scratch."""
    import torch

    from jpaged import LLM, SamplingParams

    rng = np.random.default_rng(seed)
    most = min(length, 96)
    prompts = [rng.integers(3, vocab, n).tolist() for n in (1, 7, most // 2)]
    sizes = {"max_num_batched_tokens": 16, "token_buckets": (16,), "max_num_seqs": 4, "decode_buckets": (4,)}
    llm = LLM(**TINY_ENGINE | {"model": str(directory), "max_model_len": most} | sizes)
    outputs = llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=most // 2, ignore_eos=True), use_tqdm=False
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        generated = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1]
        best = logits.max(-1).values - logits[range(len(generated)), generated]
        if best.max() > 1e-3 * float(logits.std()):
            return f"greedy tokens differ: after {len(prompt)}, at {int(best.argmax())} by {float(best.max()):.2g}"
    return None
