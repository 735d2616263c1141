"""Teaches the embedded model to tell short stories that end happily: GRPO, with rollouts by jpaged.

    python examples/teach_stories/teach.py --plot rewards.svg

Each step: jpaged tells several stories for each of a few requests; a program rewards them; Flax and optax take a step
towards the better ones; and `LLM.update_weights` gives the engine the new weights, on the device.
"""

import argparse
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from grpo import Trainer, make_batch
from plot import write_plot
from rewards import Reward, draw_tasks, reward

from jpaged import LLM, SamplingParams

PROMPT_TOKENS = 24
"""More than any of the requests has, with the chat template around it."""


@dataclass(frozen=True)
class Settings:
    """steps: of training. requests, stories: of each step, and of each request. tokens: the most of a story.
    batch_invariant: sampler and trainer compute the same bits (slower on a CPU).
    """

    steps: int = 40
    requests: int = 4
    stories: int = 8
    tokens: int = 112
    learning_rate: float = 2e-4
    seed: int = 0
    batch_invariant: bool = False
    model: str | None = None


@dataclass
class Step:
    """What became of a step. seconds: by what they went to. distance: of `Trainer.distance`."""

    reward: Reward
    total: float
    distance: float
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - begun


def engine(settings: Settings, **options: Any) -> LLM:
    """With weights and sums in float32, as the trainer has them."""
    rows, length = settings.requests * settings.stories, PROMPT_TOKENS + settings.tokens
    sizes: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": length,
        "max_num_seqs": rows,
        "decode_buckets": (rows,),
        "max_num_batched_tokens": 256,
        "token_buckets": (256,),
        "num_gpu_blocks_override": rows * -(-length // 16) + 1,
        "verbose": False,
    }
    return LLM(settings.model, batch_invariant=settings.batch_invariant, **sizes | options)


def teach(llm: LLM, settings: Settings) -> Iterator[Step]:
    """Trains, a step at a time; the engine has the trained weights when it ends."""
    rng = random.Random(settings.seed)
    trainer = Trainer(
        llm.engine.startup.model, llm.weights_as("module"), settings.learning_rate, settings.batch_invariant
    )
    for _ in range(settings.steps):
        step = Step(Reward(0, 0, 0), 0.0, 0.0)
        tasks = draw_tasks(rng, settings.requests)
        seeds = [rng.randrange(2**40) for _ in tasks]
        params = [
            SamplingParams(n=settings.stories, temperature=1.0, max_tokens=settings.tokens, logprobs=0, seed=seed)
            for seed in seeds
        ]
        with step.timed("rollout"):
            messages: Any = [[{"role": "user", "content": task.text}] for task in tasks]
            outputs = llm.chat(messages, params, use_tqdm=False)
        rewards = [
            [reward(task, one.text, one.finish_reason == "stop") for one in output.outputs]
            for task, output in zip(tasks, outputs, strict=True)
        ]
        totals = np.array([[one.total for one in row] for row in rewards])
        batch = make_batch(outputs, totals, PROMPT_TOKENS + settings.tokens)
        with step.timed("log-probabilities"):
            step.distance = trainer.distance(batch)
        with step.timed("update"):
            trainer.update(batch)
        with step.timed("sync"):
            llm.update_weights(trainer.module)
        step.reward = Reward(*np.mean([one for row in rewards for one in row], axis=0).tolist())
        step.total = float(totals.mean())
        yield step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = Settings()
    for name in ("steps", "requests", "stories", "tokens", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name), help="(default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate, help="(default: %(default)s)")
    parser.add_argument("--model", help="a directory or hub id with a chat template (default: the embedded model)")
    parser.add_argument("--batch-invariant", action="store_true", help="sampler and trainer compute the same bits")
    parser.add_argument("--plot", type=Path, help="write the rewards to this SVG file")
    args = vars(parser.parse_args())
    plot = args.pop("plot")
    settings = Settings(**args)
    done: list[Step] = []
    with engine(settings) as llm:
        for number, step in enumerate(teach(llm, settings)):
            done.append(step)
            parts = "  ".join(f"{name} {value:.2f}" for name, value in step.reward._asdict().items())
            seconds = "  ".join(f"{name} {value:.2f} s" for name, value in step.seconds.items())
            print(
                f"{number:3}  reward {step.total:.3f}  ({parts})  |ratio - 1| {step.distance:.1e}  {seconds}",
                flush=True,
            )
    names = done[0].seconds
    usual = {name: sorted(step.seconds[name] for step in done)[len(done) // 2] for name in names}
    print("median step:", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in usual.items()))
    if plot is not None:
        lines = {"reward": [step.total for step in done]}
        lines |= {name: [getattr(step.reward, name) for step in done] for name in Reward._fields}
        write_plot(plot, f"Rewards of {settings.requests * settings.stories} stories a step", lines)


if __name__ == "__main__":
    main()
