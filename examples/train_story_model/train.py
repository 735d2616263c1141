"""Trains a small Llama chat model on stories made up by this folder's generator, and saves it for serving.

    python examples/train_story_model/train.py --output story_model              # one H200: six minutes
    python examples/train_story_model/train.py --output tiny --size tiny --steps 20   # a smoke run on a CPU: a minute

The result is a Hugging Face directory: `jpaged chat --model story_model` talks to it, and transformers
loads it too. The way from training to serving, for your own model:

1. `ModelConfig.from_dict` and `build` give the same model that the engine serves: a pure function of a flat tuple
   of weights. Training calls it with `dense_causal_attend` in place of the paged attention.
2. Any optax optimizer updates the tuple; master weights stay float32, the forward pass runs in bfloat16.
3. `save_pretrained` writes the checkpoint; the tokenizer and its chat template are saved beside it.
"""

import argparse
import json
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

try:
    import optax
except ModuleNotFoundError as error:
    sys.exit(f"{sys.argv[0]} needs {error.name}: pip install 'jpaged[train]'")
from data import Batch, Stream, held_out_batch
from text_tokenizer import BEGIN, CONTEXT, END, PAD, corpus_sample, save_tokenizer, train_tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for a run without installing it

from jpaged.models import Model, ModelConfig, Weights, build, dense_causal_attend, load, save_pretrained
from jpaged.pallas_kernels import split_qkv


class Size(NamedTuple):
    """config: entries of config.json. rows, length: of a batch. learning_rate: at its peak."""

    config: dict[str, Any]
    rows: int
    length: int
    learning_rate: float


SIZES = {
    "tiny": Size(  # 0.14 million parameters, for smoke runs
        {
            "vocab_size": 1024,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "intermediate_size": 128,
        },
        *(4, 512, 3e-3),
    ),
    "story": Size(  # 3.97 million: just under 8,000,000 bytes in bfloat16
        {
            "vocab_size": 2816,
            "hidden_size": 256,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 448,
        },
        *(64, CONTEXT, 3e-3),
    ),
    "large": Size(  # 105 million, of the widths and positions of models that are served
        {
            "vocab_size": 2816,
            "hidden_size": 1024,
            "num_hidden_layers": 9,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "intermediate_size": 2816,
            "max_position_embeddings": 32768,
            "rope_theta": 500000.0,
        },
        *(32, CONTEXT, 1e-3),
    ),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="directory for the trained model")
    parser.add_argument("--tokenizer", type=Path, help="use the tokenizer of this directory instead of training one")
    parser.add_argument(
        "--size", choices=SIZES, default="story", help="0.14, 3.97 or 105 million parameters (%(default)s)"
    )
    parser.add_argument("--begin", type=Path, help="a model of this size to train on, instead of random weights")
    parser.add_argument("--steps", type=int, default=5000, help="optimizer steps (%(default)s)")
    parser.add_argument(
        "--minutes", type=float, help="after the warm-up, choose the steps so that training takes this long"
    )
    parser.add_argument("--rows", type=int, help="packed rows in a batch (default: 4, 64 or 32, by size)")
    parser.add_argument("--length", type=int, help=f"tokens in a row ({CONTEXT}, or 512 of size tiny)")
    parser.add_argument(
        "--join", action="store_true", help="conversations of a row follow and see each other: for long contexts"
    )
    parser.add_argument("--learning-rate", type=float, help="at its peak (default: 3e-3, or 1e-3 of size large)")
    parser.add_argument(
        "--warmup", type=int, default=200, help="steps of linear warm-up, then cosine to a tenth (%(default)s)"
    )
    parser.add_argument("--weight-decay", type=float, default=0.1, help="on matrices, not on norms (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that make up text (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and text (%(default)s)")
    parser.add_argument("--log-every", type=int, default=50, help="steps between lines of progress (%(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="directory for Orbax checkpoints; training resumes from it")
    parser.add_argument("--checkpoint-every", type=int, default=1000, help="steps between checkpoints (%(default)s)")
    args = parser.parse_args()
    size = SIZES[args.size]
    args.rows = args.rows or size.rows
    args.length = args.length or size.length
    args.learning_rate = args.learning_rate or size.learning_rate
    args.warmup = min(args.warmup, max(1, args.steps // 4))
    return args


def model_config(size: str) -> dict[str, Any]:
    """A config.json, as Hugging Face spells it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        **SIZES[size].config,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def fused_attend(qkv: jax.Array, *, scale: float, rotation: Any = None, **unused: Any) -> jax.Array:
    """Causal attention over a joined row, by cuDNN, which keeps no scores: those of long rows would not fit.

    unused: what layers of this model's kind do without, such as windows.
    """
    q, k, v = split_qkv(qkv, rotation=rotation)
    implementation = "cudnn" if jax.default_backend() == "gpu" else None
    return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True, implementation=implementation)


def loss_sums(model: Model, joined: bool, weights: Weights, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Summed cross-entropy (nats) over the learned tokens of a batch, and how many they are."""

    def one_row(tokens: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        # The engine passes an `attend` that reads the paged cache; here it is plain causal attention in segments.
        attend = fused_attend if joined else partial(dense_causal_attend, segment_ids=segments)
        return model.logits(weights, model.forward(weights, tokens, positions, attend))

    logits = jax.vmap(one_row)(batch.tokens, batch.segments, batch.positions)
    successors = jnp.roll(batch.tokens, -1, axis=1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, successors)
    return jnp.sum(losses * batch.learned), jnp.sum(batch.learned)


def make_step(model: Model, joined: bool, optimizer: optax.GradientTransformation) -> Any:
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(
        weights: Weights, state: optax.OptState, batch: Batch, learning_rate: jax.Array
    ) -> tuple[Weights, optax.OptState, jax.Array]:
        def loss(weights: Weights) -> jax.Array:
            total, count = loss_sums(model, joined, tuple(w.astype(model.dtype) for w in weights), batch)
            return total / count

        value, gradients = jax.value_and_grad(loss)(weights)
        updates, state = optimizer.update(gradients, state, weights)
        weights = optax.apply_updates(weights, jax.tree.map(lambda u: -learning_rate * u, updates))
        return weights, state, value

    return step


def evaluate(model: Model, joined: bool, weights: Weights, batch: Batch, rows_at_once: int = 8) -> float:
    """Mean loss (nats a token) on a batch."""
    sums = jax.jit(partial(loss_sums, model, joined))
    weights = tuple(w.astype(model.dtype) for w in weights)
    total = count = 0.0
    for start in range(0, len(batch.tokens), rows_at_once):
        some = sums(weights, Batch(*(x[start : start + rows_at_once] for x in batch)))
        total, count = total + float(some[0]), count + float(some[1])
    return total / count


def learning_rate_at(step: int, steps: int, warmup: int, peak: float) -> float:
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


class Checkpoints:
    """Saves and restores (weights, optimizer state, step) with Orbax; does nothing without a directory."""

    def __init__(self, directory: Path | None, every: int) -> None:
        self._manager = None
        if directory is not None:
            import orbax.checkpoint as ocp

            self._args = ocp.args
            options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=every)
            self._manager = ocp.CheckpointManager(directory.resolve(), options=options)

    def restore(self, weights: Weights, state: optax.OptState) -> tuple[Weights, optax.OptState, int]:
        latest = self._manager.latest_step() if self._manager else None
        if latest is None:
            return weights, state, 0
        weights, state = self._manager.restore(latest, args=self._args.StandardRestore((weights, state)))
        return weights, state, latest

    def save(self, step: int, weights: Weights, state: optax.OptState) -> None:
        if self._manager:
            self._manager.save(step, args=self._args.StandardSave((weights, state)))

    def close(self) -> None:
        if self._manager:
            self._manager.wait_until_finished()


def main() -> None:
    args = arguments()
    config = model_config(args.size)
    args.output.mkdir(parents=True, exist_ok=True)

    tokenizer_file = args.output / "tokenizer.json"
    if args.tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (args.output / name).write_bytes((args.tokenizer / name).read_bytes())
    else:
        texts = corpus_sample(2_000 if args.size == "tiny" else 40_000, seed=args.seed)
        save_tokenizer(train_tokenizer(texts, config["vocab_size"]), args.output)
    rows = args.rows if args.size == "tiny" else max(1, 256 * CONTEXT // args.length)
    held_out = held_out_batch(tokenizer_file, args.seed, rows, args.length, joined=args.join)

    gpu = jax.default_backend() != "cpu"
    model = build(ModelConfig.from_dict(config), "bfloat16" if gpu else "float32")
    master = build(ModelConfig.from_dict(config), "float32")  # the same model; its weights are what is optimized
    weights = load(master, args.begin) if args.begin else master.init(args.seed)
    decayed = tuple(w.ndim > 1 for w in weights)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(args.weight_decay, mask=decayed),
    )
    state = optimizer.init(weights)
    checkpoints = Checkpoints(args.checkpoint, args.checkpoint_every)
    weights, state, first_step = checkpoints.restore(weights, state)
    step_fn = make_step(model, args.join, optimizer)
    print(
        f"{model.num_parameters:,} parameters, {args.rows} rows of {args.length} tokens a step, "
        f"{jax.devices()[0].device_kind}",
        flush=True,
    )

    steps, history = args.steps, []
    losses: list[jax.Array] = []
    with Stream(tokenizer_file, args.seed, args.rows, args.length, args.workers, joined=args.join) as stream:
        batches = iter(stream)
        for _ in range(first_step):  # the stream is a function of the step: skip what was learned before
            next(batches)
        start = mark = time.perf_counter()
        measured_from, step, waited = None, first_step, 0.0
        while step < steps:
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            rate = np.float32(learning_rate_at(step, steps, args.warmup, args.learning_rate))
            weights, state, loss = step_fn(weights, state, batch, rate)
            losses.append(loss)
            step += 1
            if step % args.log_every == 0 or step == steps:
                mean = float(jnp.mean(jnp.stack(losses)))
                now = time.perf_counter()
                tokens_per_s = len(losses) * args.rows * args.length / (now - mark)
                history.append({"step": step, "loss": round(mean, 4), "learning_rate": float(rate),
                                "tokens_per_s": round(tokens_per_s), "seconds": round(now - start, 1)})  # fmt: skip
                print(
                    f"step {step:6d}/{steps}  loss {mean:.4f}  rate {rate:.2e}  {tokens_per_s:11,.0f} tokens/s  "
                    f"waited for text {waited:.1f} s",
                    flush=True,
                )
                mark, waited = now, 0.0
                losses.clear()
                # The speed is known once the program is compiled and the workers have filled their queue.
                if args.minutes and measured_from is None and step >= args.warmup // 2:
                    measured_from = (step, now)
                elif args.minutes and measured_from and step >= args.warmup and steps == args.steps:
                    per_step = (now - measured_from[1]) / (step - measured_from[0])
                    steps = step + max(1, int((60 * args.minutes - (now - start)) / per_step))
                    print(f"{per_step * 1e3:.1f} ms a step: {steps} steps in all", flush=True)
            checkpoints.save(step, weights, state)
    checkpoints.close()

    weights = tuple(w.astype(jnp.bfloat16) for w in weights)  # as saved: the figure below is the served model's
    final = evaluate(model, args.join, weights, held_out)
    print(f"held-out loss {final:.4f} nats a token", flush=True)
    save_pretrained(master, weights, args.output, dtype="bfloat16")
    ids = {name: config[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    generation = {f"{name}_token_id": token for name, token in ids.items()} | {
        "do_sample": True, "temperature": 0.7, "top_p": 0.95, "max_new_tokens": 400,
    }  # fmt: skip
    (args.output / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    curve = {"held_out_loss": round(final, 4), "seconds": round(time.perf_counter() - start, 1),
             "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
             "steps": history}  # fmt: skip
    (args.output / "training.json").write_text(json.dumps(curve, indent=1) + "\n")
    print(f"saved to {args.output}: {BEGIN} {END} {PAD} are tokens {tuple(ids.values())}", flush=True)


if __name__ == "__main__":
    main()
