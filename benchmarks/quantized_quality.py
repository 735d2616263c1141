"""How much a quantized model differs from the same model in bfloat16.

    python benchmarks/quantized_quality.py --quantization fp8
    python benchmarks/quantized_quality.py --model DIR --quantized-model DIR-W4A16

The model that is not quantized writes texts at temperature 1, and both models read them, in bfloat16 beside each other:

    perplexity     of the texts; the model that wrote them is beaten by chance alone
    agreement      tokens at which both models find the same one likeliest
    divergence     of the quantized model's distributions from the other's (Kullback-Leibler), in nats a token

The first line of output is what was run, the last one JSON.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged import LLM, SamplingParams, models
from jpaged.assets import demo_model_path

SUBJECTS = ("a fox and a lantern", "a boat", "the wind", "two brothers and a bridge", "an old clock", "a red kite")
SUBJECTS += ("a baker who lost a spoon", "the moon", "a shy dragon", "a girl and her drum", "a snail", "winter")


@partial(jax.jit, static_argnums=0)
def log_probabilities(model: models.Model, weights: models.Weights, tokens: jax.Array) -> jax.Array:
    """float32 [T, vocab], of what comes after each token."""
    hidden = model.forward(weights, tokens, jnp.arange(tokens.size), models.dense_causal_attend)
    return jax.nn.log_softmax(model.logits(weights, hidden))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="in bfloat16 (default: the embedded model)")
    parser.add_argument("--quantized-model", help="a quantized checkpoint of it (default: it, with --quantization)")
    parser.add_argument("--quantization", help="as of `jpaged serve`")
    parser.add_argument("--texts", type=int, default=24, help="how many (default: 24)")
    parser.add_argument("--max-tokens", type=int, default=200, help="of a text (default: 200)")
    args = parser.parse_args()
    plain = Path(models.resolve(args.model)) if args.model else demo_model_path()
    other = Path(models.resolve(args.quantized_model)) if args.quantized_model else plain

    length = 64 + args.max_tokens
    llm = LLM(str(plain), max_model_len=length, max_num_seqs=32, max_num_batched_tokens=64, verbose=False)
    asks = [[{"role": "user", "content": f"Tell me a story about {subject}."}] for subject in SUBJECTS]
    prompts = [llm.engine.tokenizer.apply_chat_template(ask) for ask in asks]
    prompts = [prompts[i % len(prompts)] for i in range(args.texts)]
    sampling = [SamplingParams(temperature=1, seed=i, max_tokens=args.max_tokens) for i in range(args.texts)]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    texts = [(prompt, list(output.outputs[0].token_ids)) for prompt, output in zip(prompts, outputs, strict=True)]

    both = load(plain, None), load(other, args.quantization)
    read = [compared(both, prompt, tokens, length) for prompt, tokens in texts]
    losses, other_losses, agrees, divergence = (np.concatenate(arrays) for arrays in zip(*read, strict=True))
    result = {
        "tokens": int(losses.size),
        "perplexity_bfloat16": float(np.exp(losses.mean())),
        "perplexity_quantized": float(np.exp(other_losses.mean())),
        "agreement": float(agrees.mean()),
        "divergence": float(divergence.mean()),
        "bytes_bfloat16": both[0][0].num_bytes,
        "bytes_quantized": both[1][0].num_bytes,
    }
    print(f"{plain.name}: bfloat16 and {args.quantization or other.name} on {jax.devices()[0].device_kind}")
    print(json.dumps(result))


def load(directory: Path, quantization: str | None) -> tuple[models.Model, models.Weights]:
    model = models.build(models.ModelConfig.from_directory(directory, quantization=quantization), "bfloat16")
    return model, models.load(model, directory)


def compared(both: Any, prompt: list[int], tokens: list[int], length: int) -> tuple[Any, Any, Any, Any]:
    """Of each of a text's tokens: both models' losses, whether they find the same one likeliest, and the divergence."""
    padded = np.zeros(length, np.int32)
    padded[: len(prompt) + len(tokens)] = prompt + tokens
    places = np.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
    ours, theirs = (np.asarray(log_probabilities(model, weights, padded))[places] for model, weights in both)
    at = np.arange(len(tokens)), tokens
    divergence = np.sum(np.exp(ours) * (ours - theirs), axis=1)
    return -ours[at], -theirs[at], ours.argmax(axis=1) == theirs.argmax(axis=1), divergence


if __name__ == "__main__":
    main()
