"""Requests for benchmarks: random token ids, with lengths drawn like those of published traces."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """prompt_token_ids, and how many tokens to generate after them."""

    prompt_token_ids: list[int]
    output_len: int


@dataclass(frozen=True)
class LogNormal:
    """Lengths in tokens: log-normal of this mean and sigma, clipped."""

    mean: float
    sigma: float
    least: int
    most: int

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        location = np.log(self.mean) - self.sigma**2 / 2
        return np.clip(rng.lognormal(location, self.sigma, count), self.least, self.most).astype(int)


TRACES = {
    "sharegpt-like": (LogNormal(161, 1.1, 4, 1500), LogNormal(338, 0.9, 4, 1000)),
    "alpaca-like": (LogNormal(19, 0.5, 4, 128), LogNormal(58, 0.8, 4, 400)),
}
"""Input and output lengths like those of the traces in the PagedAttention paper (section 6.1)."""

DATASETS = ("random", "shared-prefix", *TRACES)


@dataclass(frozen=True, slots=True)
class Workload:
    """What `make_requests` draws, and how it is sampled. Lengths in tokens."""

    dataset: str
    num_prompts: int
    input_len: int = 512
    output_len: int = 256
    prefix_len: int = 2048
    temperature: float = 0.0
    top_p: float = 1.0


WORKLOADS = {
    "single": Workload("random", 1, 32, 256),
    "batch-32": Workload("random", 32, 512, 256),
    "batch-256": Workload("random", 256, 512, 256),
    "sharegpt": Workload("sharegpt-like", 1000),
    "sharegpt-sampled": Workload("sharegpt-like", 1000, temperature=1.0, top_p=0.95),
    "alpaca": Workload("alpaca-like", 2000),
    "long-input": Workload("random", 512, 1024, 128),
    "shared-prefix": Workload("shared-prefix", 512, 64, 64),
    "prefill-16k": Workload("random", 1, 16_000, 1),
    "decode-16k": Workload("random", 8, 16_000, 256),
}
"""The workloads of the README's table, by the name that `jpaged bench throughput --workload` takes."""


def make_requests(
    dataset: str,
    num_prompts: int,
    vocab_size: int,
    *,
    input_len: int = 512,
    output_len: int = 128,
    prefix_len: int = 2048,
    seed: int = 0,
) -> list[BenchRequest]:
    """Requests of a dataset.

    dataset: one of `DATASETS`. "random" has inputs and outputs of exactly input_len and output_len tokens;
        "shared-prefix" puts the same prefix_len tokens before each input.
    """
    rng = np.random.default_rng(seed)
    draw: Callable[[int], list[int]] = lambda length: rng.integers(0, vocab_size, length).tolist()  # noqa: E731
    if dataset in TRACES:
        inputs, outputs = (lengths.draw(rng, num_prompts).tolist() for lengths in TRACES[dataset])
        return [BenchRequest(draw(i), o) for i, o in zip(inputs, outputs, strict=True)]
    prefix = draw(prefix_len) if dataset == "shared-prefix" else []
    return [BenchRequest(prefix + draw(input_len), output_len) for _ in range(num_prompts)]
