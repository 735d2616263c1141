"""Requests with arrival times: drawn like the paper's traces, or read from a file.

    lengths    paper: as the bars of the paper's Figure 11 (`jpaged.bench.memory.lengths`)
               log-normal: of about the same means, as all other benchmarks here have them (`jpaged.bench.workloads`)
    arrivals   a Poisson process of the rate asked for

Requests that the model cannot hold are left out, as in the paper's own benchmark: prompt and output together are
shorter than the model's longest sequence.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.api.errors import InvalidParameterError
from jpaged.bench.memory.lengths import FIGURE_11, Histogram
from jpaged.bench.workloads import TRACES, LogNormal


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. Lengths in tokens.

    prefix_len: how many of the prompt's first tokens all requests of the trace have in common.
    samples: outputs generated for the prompt, each of output_len tokens.
    """

    arrival_s: float
    prompt_len: int
    output_len: int
    prefix_len: int = 0
    samples: int = 1


LENGTHS = ("paper", "log-normal")
DATASETS = ("sharegpt", "alpaca", "chat", "translation")

_LEAST_LEN = 4
_CHAT_ROUNDS = 5
_CHAT_LIMIT = 1024
_TRANSLATION = (LogNormal(25, 0.6, _LEAST_LEN, 128), LogNormal(24, 0.6, _LEAST_LEN, 128))


def draw_lengths(
    dataset: str, count: int, rng: np.random.Generator, lengths: str = "paper", max_len: int = 2048
) -> list[tuple[int, int]]:
    """Prompt and output lengths of a dataset.

    sharegpt, alpaca: from the distributions that `lengths` names.
    chat: conversations of ShareGPT-like rounds, 5 on average (geometric); a prompt is the last 1,024 tokens of what
        went before and the question, an output has at most 1,023 tokens (section 6.5).
    translation: log-normal, 25 tokens in and 24 out on average, the prefix not counted. The paper gives no lengths;
        with these the paged system serves as many requests as it did there.
    """
    pairs: list[tuple[int, int]] = []
    while len(pairs) < count:
        if dataset == "chat":
            pairs += _conversation(rng, lengths)
        else:
            inputs, outputs = _TRANSLATION if dataset == "translation" else _distributions(dataset, lengths)
            pairs += _paired(inputs.draw(rng, count), outputs.draw(rng, count), rng, max_len)
    return pairs[:count]


def _paired(inputs: np.ndarray, outputs: np.ndarray, rng: np.random.Generator, max_len: int) -> list[tuple[int, int]]:
    """Pairs that are shorter than max_len in all. Published lengths are those of requests that fit, so the outputs of
    pairs too long are exchanged with others until all fit, and none is dropped that could be kept."""
    for _ in range(100):
        too_long = np.flatnonzero(inputs + outputs >= max_len)
        if not len(too_long):
            break
        others = rng.choice(len(inputs), len(too_long), replace=len(too_long) > len(inputs) // 2)
        for i, j in zip(too_long.tolist(), others.tolist(), strict=True):
            if max(inputs[i] + outputs[j], inputs[j] + outputs[i]) < max_len:
                outputs[[i, j]] = outputs[[j, i]]
    fits = inputs + outputs < max_len
    return list(zip(inputs[fits].tolist(), outputs[fits].tolist(), strict=True))


def _distributions(dataset: str, lengths: str) -> tuple[Histogram, Histogram] | tuple[LogNormal, LogNormal]:
    return FIGURE_11[dataset] if lengths == "paper" else TRACES[f"{dataset}-like"]


def _conversation(rng: np.random.Generator, lengths: str) -> list[tuple[int, int]]:
    inputs, outputs = _distributions("sharegpt", lengths)
    rounds = int(rng.geometric(1 / _CHAT_ROUNDS))
    history, pairs = 0, []
    for asked, answered in zip(inputs.draw(rng, rounds).tolist(), outputs.draw(rng, rounds).tolist(), strict=True):
        pairs.append((min(history + asked, _CHAT_LIMIT), min(answered, _CHAT_LIMIT - 1)))
        history += asked + answered
    return pairs


def draw_trace(
    dataset: str, rate: float, duration_s: float, seed: int = 0, lengths: str = "paper", max_len: int = 2048
) -> list[TraceRequest]:
    """A trace of `duration_s` seconds with `rate` requests a second.

    Lengths do not depend on the rate: with the same seed, traces of all rates begin with the same requests.
    """
    count = max(1, round(rate * duration_s))
    pairs = draw_lengths(dataset, count, np.random.default_rng([seed, 0]), lengths, max_len)
    return at_rate([TraceRequest(0.0, *pair) for pair in pairs], rate, seed)


def at_rate(requests: Sequence[TraceRequest], rate: float, seed: int = 0) -> list[TraceRequest]:
    """The same requests with Poisson arrivals of this rate."""
    gaps = np.random.default_rng([seed, 1]).exponential(1 / rate, len(requests))
    return [replace(request, arrival_s=float(t)) for request, t in zip(requests, np.cumsum(gaps), strict=True)]


def read_trace(file: Path, tokenizer: str | None = None, max_len: int = 2048) -> list[TraceRequest]:
    """Requests of a file, in its order, without those that are too long or shorter than 4 tokens.

    file: JSON lines {"input_len", "output_len", "arrival" in seconds (0 if not given)}, or ShareGPT's JSON, a list of
        {"conversations": [{"from", "value"}, ...]} of which the first two turns count.
    tokenizer: a directory or hub id that turns ShareGPT's text into tokens.

    Raises:
        InvalidParameterError: the file is neither, or nothing of it fits, or a tokenizer is missing.
    """
    try:
        text = file.read_text()
        if text.lstrip().startswith("["):
            lengths = _sharegpt_lengths(json.loads(text), tokenizer)
        else:
            lengths = [
                (float(row.get("arrival", 0.0)), int(row["input_len"]), int(row["output_len"]))
                for row in map(json.loads, filter(str.strip, text.splitlines()))
            ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidParameterError(
            f"--trace {file} must hold JSON lines with input_len and output_len, or ShareGPT's JSON: {error!r}"
        ) from error
    requests = [
        TraceRequest(arrival, prompt_len, output_len)
        for arrival, prompt_len, output_len in lengths
        if prompt_len >= _LEAST_LEN and output_len >= _LEAST_LEN and prompt_len + output_len < max_len
    ]
    if not requests:
        raise InvalidParameterError(f"--trace {file} holds no request of {_LEAST_LEN} to {max_len - 1} tokens.")
    return requests


def _sharegpt_lengths(conversations: list[Any], source: str | None) -> list[tuple[float, int, int]]:
    if source is None:
        raise InvalidParameterError("--trace is ShareGPT's JSON, which is text: name a tokenizer with --tokenizer.")
    from jpaged.text.tokenizer import Tokenizer  # loads transformers: only for this

    encode = Tokenizer.load(source).encode
    turns = [[turn["value"] for turn in entry["conversations"][:2]] for entry in conversations]
    return [(0.0, len(encode(pair[0])), len(encode(pair[1]))) for pair in turns if len(pair) == 2]
