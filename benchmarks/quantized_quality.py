"""How much quantized models differ from the same model in bfloat16.

    python benchmarks/quantized_quality.py --quantization fp8
    python benchmarks/quantized_quality.py --model DIR --quantized-model DIR-INT4 --quantized-model DIR-FP8 \\
        --kv-cache-dtype fp8 --json quality.json

The model that is not quantized writes texts at temperature 1, and all models read them, with activations in bfloat16:

    perplexity     of the texts; the model that wrote them is beaten by chance alone
    agreement      tokens at which a model finds the same one likeliest as the one in bfloat16
    divergence     of its distributions from the other's (Kullback-Leibler), in nats a token

With --kv-cache-dtype fp8 models whose checkpoints have scales of keys and values also read them with these rounded to
FP8, and so does the plain one, by scales of 1 if it has none.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged import LLM, SamplingParams, models
from jpaged.assets import demo_model_path
from jpaged.bench.report import write_report
from jpaged.models.loading.kv_scales import read_kv_scales
from jpaged.pallas_kernels import split_qkv
from jpaged.pallas_kernels.common.numerics import FP8_MAX

SUBJECTS = ("a fox and a lantern", "a boat", "the wind", "two brothers and a bridge", "an old clock", "a red kite")
SUBJECTS += ("a baker who lost a spoon", "the moon", "a shy dragon", "a girl and her drum", "a snail", "winter")


KVScales = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Reader:
    """A model that reads texts. kv_scales: of its layers' keys and values in FP8; None where they are in bfloat16."""

    name: str
    model: models.Model
    weights: models.Weights
    kv_scales: KVScales | None

    def __call__(self, tokens: np.ndarray) -> jax.Array:
        """float32 [T, vocab]: log-probabilities of what comes after each token."""
        return _read(self.model, self.kv_scales, self.weights, tokens)


@partial(jax.jit, static_argnums=(0, 1))
def _read(model: models.Model, scales: KVScales | None, weights: models.Weights, tokens: jax.Array) -> jax.Array:
    attend = models.dense_causal_attend if scales is None else partial(rounding_attend, iter(scales))
    hidden = model.forward(weights, tokens, jnp.arange(tokens.size), attend)
    return jax.nn.log_softmax(model.logits(weights, hidden))


def rounding_attend(
    scales: Iterator[tuple[float, float]],
    qkv: jax.Array,
    *,
    rotation: Any = None,
    norms: Any = None,
    norm_eps: float = 1e-6,
    **features: Any,
) -> jax.Array:
    """`dense_causal_attend` of keys and values as a pool in FP8 keeps them. scales: of this layer and those behind."""
    q, *both = split_qkv(qkv, rotation=rotation, norms=norms, norm_eps=norm_eps)
    tokens, kv_heads, slots, head_dim = qkv.shape
    kept = [_rounded(x.astype(jnp.float32) / by) * by for x, by in zip(both, next(scales), strict=True)]
    k, v = (x.astype(qkv.dtype)[:, :, None] for x in kept)
    q = q.reshape(tokens, kv_heads, slots - 2, head_dim)
    return models.dense_causal_attend(jnp.concatenate([q, k, v], axis=2), **features)


def _rounded(x: jax.Array) -> jax.Array:
    """float32, each the nearest of e4m3. Without the barrier XLA for GPUs drops both conversions."""
    return jax.lax.optimization_barrier(jnp.clip(x, -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn)).astype(jnp.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="in bfloat16 (default: the embedded model)")
    parser.add_argument(
        "--quantized-model", action="append", default=[], help="a quantized checkpoint of it; may be repeated"
    )
    parser.add_argument("--quantization", help="of the model while it is read, as of `jpaged serve`")
    parser.add_argument("--kv-cache-dtype", choices=("fp8",), help="with keys and values in FP8, too")
    parser.add_argument("--texts", type=int, default=24, help="how many (default: 24)")
    parser.add_argument("--max-tokens", type=int, default=200, help="of a text (default: 200)")
    parser.add_argument("--memory", type=float, default=0.5, help="of the device, to write texts with (default: 0.5)")
    parser.add_argument("--json", type=Path, help="where to write a report")
    args = parser.parse_args()
    plain = Path(models.resolve(args.model)) if args.model else demo_model_path()

    length = 64 + args.max_tokens
    texts = written(plain, args.texts, args.max_tokens, length, args.memory)
    reference = load("bfloat16", plain, None)
    results: list[dict[str, Any]] = []

    def add(reader: Reader) -> None:
        narrow = in_fp8(reader, sources[reader.name]) if args.kv_cache_dtype else None
        for one in (reader, narrow) if narrow is not None else (reader,):
            results.append(compared(reference, one, texts, length))
            print(json.dumps(results[-1]), flush=True)

    sources = {"bfloat16": plain}
    print(f"{plain.name} on {jax.devices()[0].device_kind}")
    add(reference)
    if args.quantization:
        name = f"{args.quantization} online"
        sources[name] = plain
        add(load(name, plain, args.quantization))
    for given in args.quantized_model:
        directory = Path(models.resolve(given))
        sources[directory.name] = directory
        add(load(directory.name, directory, None))
    if args.json:
        write_report(args.json, "quantized_quality", vars(args), results)


def written(directory: Path, number: int, most: int, length: int, memory: float) -> list[tuple[list[int], list[int]]]:
    """Prompts, and texts that the model wrote."""
    options: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "gpu_memory_utilization": memory}
    llm = LLM(str(directory), max_model_len=length, verbose=False, **options)
    asks = [[{"role": "user", "content": f"Tell me a story about {subject}."}] for subject in SUBJECTS]
    prompts = [llm.engine.tokenizer.apply_chat_template(ask) for ask in asks]
    prompts = [prompts[i % len(prompts)] for i in range(number)]
    sampling = [SamplingParams(temperature=1, seed=i, max_tokens=most) for i in range(number)]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [(prompt, list(output.outputs[0].token_ids)) for prompt, output in zip(prompts, outputs, strict=True)]


def load(name: str, directory: Path, quantization: str | None) -> Reader:
    model = models.build(models.ModelConfig.from_directory(directory, quantization=quantization), "bfloat16")
    return Reader(name, model, models.load(model, directory), None)


def in_fp8(reader: Reader, directory: Path) -> Reader | None:
    """The same with keys and values in FP8; None of a quantized model without scales of them."""
    keeps = [state is None for state in reader.model.config.layer_states]
    scales = read_kv_scales("auto", directory, keeps)
    if set(scales) == {(1.0, 1.0)} and reader.name != "bfloat16":
        return None
    name = f"{reader.name}, keys and values in FP8" + (" by scales of 1" if set(scales) == {(1.0, 1.0)} else "")
    return Reader(
        name, reader.model, reader.weights, tuple(one for one, is_kept in zip(scales, keeps, strict=True) if is_kept)
    )


def compared(
    reference: Reader, reader: Reader, texts: Sequence[tuple[list[int], list[int]]], length: int
) -> dict[str, Any]:
    """What the top of this file says, over all tokens of the texts."""
    found = [_of_text(reference, reader, prompt, tokens, length) for prompt, tokens in texts]
    losses, agrees, divergence = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return {
        "name": reader.name,
        "tokens": int(losses.size),
        "perplexity": float(np.exp(losses.mean())),
        "agreement": float(agrees.mean()),
        "divergence": float(divergence.mean()),
        "weights_bytes": reader.model.num_bytes,
    }


def _of_text(
    reference: Reader, reader: Reader, prompt: list[int], tokens: list[int], length: int
) -> tuple[Any, Any, Any]:
    """Of each of a text's tokens: the loss, whether both find the same one likeliest, and the divergence."""
    padded = np.zeros(length, np.int32)
    padded[: len(prompt) + len(tokens)] = prompt + tokens
    places = np.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
    ours, theirs = (np.asarray(one(padded))[places] for one in (reference, reader))
    divergence = np.sum(np.exp(ours) * (ours - theirs), axis=1)
    return -theirs[np.arange(len(tokens)), tokens], ours.argmax(axis=1) == theirs.argmax(axis=1), divergence


if __name__ == "__main__":
    main()
