"""The PagedAttention paper's models and cards, and how long a step takes on them.

    step time = fixed + per_sequence * sequences + per_context_token * context + per_prompt_token * prompt tokens

    fixed               reading the weights, launching kernels, the software around them
    per_sequence        what each sequence of the batch costs beyond its cache: sampling, Python
    per_context_token   reading a cached token's keys and values
    per_prompt_token    the arithmetic of one more prompt token

Three ways to the four constants (`--step-time`):

    paper      as fast as the paper's system on its cards. OPT-13B: fixed and per_sequence are a straight line through
               the throughputs of Figure 1 (26 ms and 0.44 ms). The larger models take per_sequence from it; their
               fixed time is what their least loaded point in Figure 12 leaves. Nothing is taken from a figure that is
               reproduced with it, Figure 12's lowest point for 66B and 175B excepted. The other two as in the roofline.
    roofline   the cards' limits alone: weights and caches at the memory's bandwidth, prompts at half the peak of
               the tensor cores. No software is that fast; it shows which results depend on speed at all.
    FILE       measured steps (JSON lines, or the report of `jpaged bench steps`), fitted by least squares.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.api.errors import InvalidParameterError
from jpaged.bench.memory import paper


@dataclass(frozen=True)
class Card:
    """bandwidth_bytes_per_s of its memory; flops_per_s: peak of 16-bit tensor-core products."""

    name: str
    bandwidth_bytes_per_s: float
    flops_per_s: float


A100_40 = Card("A100-40GB", 1.555e12, 312e12)
A100_80 = Card("A100-80GB", 2.039e12, 312e12)


@dataclass(frozen=True)
class Setup:
    """A model on cards, as in the paper's Table 1.

    kv_slots: tokens whose keys and values fit. max_model_len: the longest sequence of the model.
    """

    name: str
    parameters: float
    num_layers: int
    hidden_size: int
    card: Card
    num_cards: int
    kv_slots: int
    max_model_len: int = 2048

    @property
    def weight_bytes(self) -> float:
        return 2 * self.parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers in 16 bits: 800 KiB for OPT-13B."""
        return 2 * self.num_layers * self.hidden_size * 2


SETUPS = {
    setup.name: setup
    for setup in (
        Setup("opt-13b", 13e9, 40, 5120, A100_40, 1, 15_728),
        Setup("opt-66b", 66e9, 64, 9216, A100_40, 4, 9_700),
        Setup("opt-175b", 173e9, 96, 12288, A100_80, 8, 60_074),
        Setup("llama-13b", 13e9, 40, 5120, A100_40, 1, 15_728),
    )
}
"""Table 1. 12 GiB at 800 KiB a token are 15,728 slots and 264 GiB at 4.5 MiB 60,074; for OPT-66B its 9.7K is taken."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step; see the top of the module."""

    fixed_s: float
    per_sequence_s: float
    per_context_token_s: float
    per_prompt_token_s: float

    def __call__(self, sequences: int, context_tokens: int, prompt_tokens: int) -> float:
        return (
            self.fixed_s
            + self.per_sequence_s * sequences
            + self.per_context_token_s * context_tokens
            + self.per_prompt_token_s * prompt_tokens
        )


_COMPUTE_EFFICIENCY = 0.5


def roofline(setup: Setup) -> StepTime:
    """The cards' limits."""
    bandwidth = setup.num_cards * setup.card.bandwidth_bytes_per_s
    flops = setup.num_cards * setup.card.flops_per_s * _COMPUTE_EFFICIENCY
    return StepTime(
        fixed_s=setup.weight_bytes / bandwidth,
        per_sequence_s=2 * setup.parameters / flops,
        per_context_token_s=setup.kv_bytes_per_token / bandwidth,
        per_prompt_token_s=2 * setup.parameters / flops,
    )


def as_in_paper(setup: Setup) -> StepTime:
    """As fast as the paper's system was."""
    batch = np.array(list(paper.FIGURE_1_THROUGHPUT))
    seconds = batch / np.array(list(paper.FIGURE_1_THROUGHPUT.values()))
    per_sequence_s, fixed_s = (float(x) for x in np.polyfit(batch, seconds, 1))
    step = replace(roofline(setup), per_sequence_s=per_sequence_s)
    if setup.kv_bytes_per_token == SETUPS["opt-13b"].kv_bytes_per_token:
        return replace(step, fixed_s=fixed_s)
    rate, latency_s = paper.FIGURE_12["sharegpt"][setup.name]["paged"][0]
    mean_in, mean_out = paper.MEAN_LENGTHS["sharegpt"]
    running = rate * mean_out * latency_s  # Little's law
    rest = (
        step.per_sequence_s * running
        + step.per_context_token_s * running * (mean_in + mean_out / 2)
        + step.per_prompt_token_s * rate * mean_in * latency_s
    )
    return replace(step, fixed_s=latency_s - rest)


def fitted(file: Path, setup: Setup) -> StepTime:
    """Constants from measured steps; those that the steps do not vary are the roofline's.

    file: JSON lines {"sequences", "context_tokens", "prompt_tokens" (0 if not given), "seconds"}, or the report that
        `jpaged bench steps --json` writes.

    Raises:
        InvalidParameterError: the file is not readable as such, or holds fewer than two steps.
    """
    rows, seconds = [], []
    for row in _measured_steps(file):
        try:
            rows.append([1.0, row["sequences"], row["context_tokens"], row.get("prompt_tokens", 0)])
            seconds.append(float(row["seconds"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidParameterError(
                f"--step-time {file}: a step needs sequences, context_tokens and seconds, got {row!r}."
            ) from error
    if len(rows) < 2:
        raise InvalidParameterError(f"--step-time {file}: {len(rows)} steps, at least 2 are needed for a fit.")
    limits = roofline(setup)
    matrix, target = np.array(rows, np.float64), np.array(seconds)
    coefficients = np.array([0.0, limits.per_sequence_s, limits.per_context_token_s, limits.per_prompt_token_s])
    free = [True, *(np.ptp(matrix[:, 1:], axis=0) > 0)]
    while True:  # a cost below zero says that the steps cannot tell it from the others: leave it at nothing
        known = ~np.array(free)
        left = target - matrix[:, known] @ coefficients[known]
        solved = np.linalg.lstsq(matrix[:, free], left, rcond=None)[0]
        if (solved >= 0).all():
            coefficients[free] = solved
            return StepTime(*coefficients.tolist())
        worst = np.flatnonzero(free)[int(solved.argmin())]
        free[worst], coefficients[worst] = False, 0.0


def _measured_steps(file: Path) -> list[dict[str, Any]]:
    try:
        text = file.read_text()
        if text.lstrip().startswith("{") and '"benchmark"' in text.split("\n", 2)[1]:
            return [
                {
                    "sequences": row["batch"],
                    "context_tokens": row["batch"] * row["context"],
                    "seconds": row["wall_ms"] / 1e3,
                }
                for row in json.loads(text)["results"]
            ]
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise InvalidParameterError(
            f"--step-time {file} is neither 'paper' nor 'roofline' nor a readable file of measured steps: {error}"
        ) from error


def step_time(source: str, setup: Setup) -> StepTime:
    """The step time that `--step-time` names: "paper", "roofline" or a file."""
    if source == "paper":
        return as_in_paper(setup)
    return roofline(setup) if source == "roofline" else fitted(Path(source), setup)
