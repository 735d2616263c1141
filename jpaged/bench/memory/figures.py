"""One function for each of the paper's figures that a simulation can draw: what to run, and rows beside the paper's.

    figure   what is run                                                         rows
    2        OPT-13B, ShareGPT, each system, more requests than it can serve     shares of the memory
    13       OPT-13B, two data sets, each system                                 mean batch
    12       three models, two data sets, each system, rates as in the paper     normalized latency
             the same, in whole batches                                          sustained rate
    14       OPT-13B, Alpaca, 4 and 6 samples a prompt                           normalized latency
    15       2, 4, 6 samples or beams a prompt                                   blocks saved
    16       a prefix of 80 or 341 tokens before every prompt                    normalized latency
    17       conversations                                                       normalized latency
    18       block sizes from 1 to 256                                           memory, normalized latency

A row is a flat dictionary; `paper` stands for the paper's value, where there is one, and `variant` says what of the
defaults was changed. Simulations are independent of one another and run in `jobs` processes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from jpaged.bench.memory import paper
from jpaged.bench.memory.setups import SETUPS, StepTime, step_time
from jpaged.bench.memory.sharing import CONCENTRATION, beam_saving
from jpaged.bench.memory.simulate import SYSTEMS, Outcome, Serving, simulate
from jpaged.bench.memory.static_batches import largest_batch, serve_batches
from jpaged.bench.memory.traces import TraceRequest, at_rate, draw_lengths, draw_trace

Row = dict[str, Any]

LATENCY_LIMIT_S = 1.0
"""Where the paper's plots end, in s/token; curves stop there."""

SUSTAINED_S = 0.2
"""The normalized latency at which a system's sustained request rate is read, in s/token."""


@dataclass(frozen=True)
class Options:
    """What the command line sets. duration_s: seconds of requests; None: as each figure needs."""

    step_time: str = "paper"
    lengths: str = "paper"
    duration_s: float | None = None
    seed: int = 0
    jobs: int = 1
    quick: bool = False
    progress: bool = True

    def seconds(self, usual_s: float) -> float:
        """Length of a trace that is `usual_s` long unless said otherwise; a fifteenth for a quick look."""
        return self.duration_s or (usual_s / 15 if self.quick else usual_s)


@dataclass(frozen=True)
class Workload:
    """A trace to be drawn: each process draws its own.

    prefix_len: tokens that stand before every prompt. step_factors: on the constants of the step time, in their order.
    """

    dataset: str
    setup: str
    duration_s: float
    options: Options
    samples: int = 1
    prefix_len: int = 0
    step_factors: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)

    def trace(self, rate: float) -> list[TraceRequest]:
        longest = SETUPS[self.setup].max_model_len
        drawn = draw_trace(
            self.dataset, rate, self.duration_s, self.options.seed, self.options.lengths, longest - self.prefix_len
        )
        return [
            replace(r, prompt_len=r.prompt_len + self.prefix_len, prefix_len=self.prefix_len, samples=self.samples)
            for r in drawn
        ]

    def step_time(self) -> StepTime:
        constants = astuple(step_time(self.options.step_time, SETUPS[self.setup]))
        return StepTime(*(factor * constant for factor, constant in zip(self.step_factors, constants, strict=True)))


@dataclass(frozen=True)
class Steady:
    """A run whose means matter.

    window_s: as for `simulate`; None: from a twelfth of the trace on, since memory fills at first, to its end.
    drain: go on after the last arrival until all are served.
    """

    workload: Workload
    rate: float
    serving: Serving
    window_s: tuple[float, float] | None = None
    drain: bool = False

    def run(self) -> Outcome:
        return simulate(
            self.workload.trace(self.rate),
            SETUPS[self.workload.setup],
            self.serving,
            self.workload.step_time(),
            drain=self.drain,
            window_s=self.window_s or (self.workload.duration_s / 12, math.inf),
        )


@dataclass(frozen=True)
class Curve:
    """Normalized latency at ascending rates, up to the first beyond the limit."""

    workload: Workload
    rates: tuple[float, ...]
    serving: Serving

    def run(self) -> list[tuple[float, Outcome]]:
        points: list[tuple[float, Outcome]] = []
        for rate in self.rates:
            outcome = simulate(
                self.workload.trace(rate),
                SETUPS[self.workload.setup],
                self.serving,
                self.workload.step_time(),
                latency_limit_s=LATENCY_LIMIT_S,
            )
            points.append((rate, outcome))
            if outcome.normalized_latency_s > LATENCY_LIMIT_S:
                break
        return points


@dataclass(frozen=True)
class Beams:
    """Blocks that beam search saves on some requests of a data set."""

    dataset: str
    width: int
    count: int
    options: Options

    def run(self) -> float:
        rng = np.random.default_rng([self.options.seed, 2])
        return beam_saving(draw_lengths(self.dataset, self.count, rng, self.options.lengths), self.width)


_T = TypeVar("_T", Steady, Curve, Beams)


def _run_all(tasks: Sequence[_T], options: Options, what: str) -> list[Any]:
    """The tasks' results, in order."""
    bar = tqdm(total=len(tasks), desc=what, unit="run", disable=not options.progress, leave=False)
    with bar:
        if options.jobs == 1:
            return [_counted(task.run(), bar) for task in tasks]
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as executor:
            return [_counted(result, bar) for result in executor.map(_run, tasks)]


def _run(task: _T) -> Any:
    return task.run()


def _counted(result: Any, bar: "tqdm[Any]") -> Any:
    bar.update()
    return result


_MAX_NUM_SEQS = 2048
"""How many sequences may run at once in the paper's published experiments; the memory holds fewer."""


def figure_2(options: Options) -> dict[str, list[Row]]:
    """What the memory holds, as the published experiment measures it: 15 minutes of ShareGPT at a rate beyond all
    systems, the steps from the fifth minute on."""
    seconds = options.seconds(900)
    workload = Workload("sharegpt", "opt-13b", seconds, options)
    runs = [
        Steady(workload, paper.FIGURE_2_RATE, Serving(system, max_num_seqs=_MAX_NUM_SEQS), (seconds / 3, seconds))
        for system in SYSTEMS
    ]
    rows = []
    for run, outcome in zip(runs, _run_all(runs, options, "figure 2"), strict=True):
        system, means = run.serving.system, outcome.over_steps
        for part, share in asdict(means.memory).items():
            rows.append(
                {
                    "dataset": "sharegpt",
                    "system": system,
                    "rate": run.rate,
                    "part": part,
                    "share": share,
                    "paper": paper.FIGURE_2[system].get(part),
                    "tokens_per_sequence": means.memory.token_states * SETUPS["opt-13b"].kv_slots / means.batch,
                }
            )
    return {"2": rows}


AS_FIGURE_12 = (1.0, 0.83, 1.33, 1.0)
"""Factors on the step time with which Orca's latencies of Figure 12, OPT-13B at loads it can bear, come out nearer to
the paper's: 7 % off instead of 15 % (root mean square of eleven points, docs/paper.md)."""


def figure_13(options: Options) -> dict[str, list[Row]]:
    """Mean batches, as the published experiments count them: over the steps of an hour, without the first ten minutes;
    and variants of that, which show what they depend on."""
    runs: list[tuple[str, Steady]] = []  # variant, run

    def add(
        dataset: str,
        systems: Sequence[str] = SYSTEMS,
        variant: str = "",
        lengths: str = options.lengths,
        factors: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
        quarter: bool = False,
        load: float = 1.0,
    ) -> None:
        """quarter: a trace of a quarter of the time, served to its end. load: factor on the request rate."""
        hour = options.seconds(3600)
        workload = Workload(
            dataset,
            "opt-13b",
            hour / 4 if quarter else hour,
            replace(options, lengths=lengths),
            step_factors=factors,
        )
        rate = load * paper.FIGURE_13_RATES[dataset]
        for system in systems:
            serving = Serving(system, max_num_seqs=_MAX_NUM_SEQS)
            runs.append((variant, Steady(workload, rate, serving, (hour / 6, hour), drain=quarter)))

    for dataset in paper.FIGURE_13:
        add(dataset)
    if not options.quick:
        other = "log-normal" if options.lengths == "paper" else "paper"
        faster = (0.9, 0.9 * AS_FIGURE_12[1], 0.9 * AS_FIGURE_12[2], 0.9)
        for dataset in paper.FIGURE_13:
            add(dataset, ("orca-oracle", "paged"), f"{other} lengths", lengths=other)
            add(dataset, ("paged",), "a quarter of an hour, to the end", quarter=True)
            add(dataset, ("paged",), "steps take 0.9 of the time", factors=(0.9,) * 4)
            add(dataset, ("paged",), "steps as in figure 12", factors=AS_FIGURE_12)
            add(dataset, ("paged",), "steps as in figure 12, 0.9 of the load", factors=AS_FIGURE_12, load=0.9)
            add(dataset, variant="0.9 of the steps as in figure 12", factors=faster)
    rows = []
    for (variant, run), outcome in zip(runs, _run_all([run for _, run in runs], options, "figure 13"), strict=True):
        dataset, system = run.workload.dataset, run.serving.system
        rows.append(
            {
                "dataset": dataset,
                "system": system,
                "variant": variant,
                "rate": run.rate,
                "mean_batch": outcome.over_steps.batch,
                "mean_batch_over_time": outcome.over_time.batch,
                "paper": paper.FIGURE_13[dataset][system],
                "latency_s_per_token": outcome.normalized_latency_s,
                "preemptions": outcome.num_preemptions,
            }
        )
    return {"13": rows}


def _curves(
    panels: Sequence[tuple[Row, Workload, dict[str, paper.Curve], bool]], options: Options, what: str
) -> list[Row]:
    """Latency curves of each system in panels of (what tells it apart, workload, the paper's curves, shared prompts),
    at the rates at which the paper measured any of them."""
    tasks: list[Curve] = []
    labels: list[tuple[Row, dict[str, paper.Curve]]] = []
    for label, workload, published, shared in panels:
        rates = sorted({rate for curve in published.values() for rate, _ in curve})
        rates += [rates[-1] * factor for factor in (1.1, 1.25, 1.5)]
        if options.quick:
            rates = rates[1::4]
        for system in SYSTEMS:
            serving = Serving(system, share_prompts=shared and system == "paged")
            tasks.append(Curve(workload, tuple(rates), serving))
            labels.append((label, published))
    rows: list[Row] = []
    for task, (label, published), points in zip(tasks, labels, _run_all(tasks, options, what), strict=True):
        system = task.serving.system
        at = dict(published.get(system, ()))
        for rate, outcome in points:
            rows.append(
                {
                    **label,
                    "system": system,
                    "rate": rate,
                    "latency_s_per_token": outcome.normalized_latency_s,
                    "at_least": outcome.saturated,
                    "mean_batch": outcome.over_time.batch,
                    "paper": at.get(rate),
                }
            )
    return rows


def figure_12(options: Options) -> dict[str, list[Row]]:
    """One sample a prompt."""
    panels = [
        (
            {"dataset": dataset, "setup": setup},
            Workload(dataset, setup, options.seconds(600), options),
            published,
            False,
        )
        for dataset, by_setup in paper.FIGURE_12.items()
        for setup, published in by_setup.items()
        if not options.quick or setup == "opt-13b"
    ]
    rows = _curves(panels, options, "figure 12")
    batches = [row for label, workload, *_ in panels for row in _whole_batches(label, workload, rows, options)]
    return {"12": rows, "12, whole batches": batches}


_RATE_STEP = 1.1
"""Between the rates at which whole batches are served, as a factor."""


def _whole_batches(label: Row, workload: Workload, rows: Sequence[Row], options: Options) -> Iterator[Row]:
    """What FasterTransformer's batches sustain in a panel, beside the paged system of these rows: at the latency at
    which all are compared, and where plots end. Large models are near the first one in an idle system already, since
    a short answer waits for the longest of its batch. Rates are low, so traces have a number of requests instead of a
    time.
    """
    setup, step = SETUPS[workload.setup], workload.step_time()
    batch, rate, num_requests = largest_batch(setup), 0.01, options.seconds(2000)
    curve: list[tuple[float, float]] = []
    while not curve or curve[-1][1] < LATENCY_LIMIT_S:
        trace = replace(workload, duration_s=num_requests / rate).trace(rate)
        curve.append((rate, serve_batches(trace, setup, step)))
        rate *= _RATE_STEP
    is_paged = [row for row in rows if row["system"] == "paged" and row.items() >= label.items()]
    of_paged = [(row["rate"], row["latency_s_per_token"]) for row in is_paged]
    for limit_s in (SUSTAINED_S, LATENCY_LIMIT_S):
        sustained = sustained_rate(curve, limit_s)
        yield {
            **label,
            "system": "faster-transformer",
            "batch": batch,
            "limit_s_per_token": limit_s,
            "sustained_rate": sustained,
            "paged_over": _ratio(sustained_rate(of_paged, limit_s), sustained),
        }


def figure_14(options: Options) -> dict[str, list[Row]]:
    """Parallel sampling on Alpaca. Orca holds the prompt once for each sample."""
    panels = [
        (
            {"dataset": "alpaca", "samples": samples},
            Workload("alpaca", "opt-13b", options.seconds(600), options, samples=samples),
            published,
            True,
        )
        for samples, published in paper.FIGURE_14.items()
        if not options.quick or samples == 4
    ]
    return {"14": _curves(panels, options, "figure 14")}


def figure_15(options: Options) -> dict[str, list[Row]]:
    """Blocks saved. Samples run through the scheduler, under more requests than it can serve; beam searches one by one,
    over drawn probabilities (`sharing.py`)."""
    rates = {"alpaca": {2: 14.0, 4: 9.0, 6: 6.5}, "sharegpt": {2: 1.3, 4: 0.65, 6: 0.45}}
    serving = Serving("paged", share_prompts=True)
    samples: list[tuple[str, Steady]] = []
    beams: list[Beams] = []
    for dataset, by_samples in rates.items():
        for n, rate in by_samples.items():
            workload = Workload(dataset, "opt-13b", options.seconds(1200), options, samples=n)
            samples.append((dataset, Steady(workload, rate, serving)))
            beams.append(
                Beams(dataset, n, (400 if dataset == "alpaca" else 60) // (4 if options.quick else 1), options)
            )
    rows: list[Row] = []
    for (dataset, run), outcome in zip(
        samples, _run_all([run for _, run in samples], options, "figure 15, samples"), strict=True
    ):
        n = run.workload.samples
        published = paper.FIGURE_15[dataset]["parallel"].get(n)
        rows.append(
            {
                "dataset": dataset,
                "kind": "parallel",
                "n": n,
                "saved": outcome.over_time.saved_blocks,
                "paper": published,
            }
        )
    for task, saved in zip(beams, _run_all(beams, options, "figure 15, beams"), strict=True):
        published = paper.FIGURE_15[task.dataset]["beam"].get(task.width)
        row = {"dataset": task.dataset, "kind": "beam", "n": task.width, "saved": saved, "paper": published}
        rows.append({**row, "concentration": CONCENTRATION})
    return {"15": rows}


def figure_16(options: Options) -> dict[str, list[Row]]:
    """A prefix shared by all prompts, LLaMA-13B, translation."""
    panels = [
        (
            {"prefix_len": prefix_len},
            Workload("translation", "llama-13b", options.seconds(600), options, prefix_len=prefix_len),
            published,
            True,
        )
        for prefix_len, published in paper.FIGURE_16.items()
    ]
    return {"16": _curves(panels, options, "figure 16")}


def figure_17(options: Options) -> dict[str, list[Row]]:
    """Conversations, OPT-13B."""
    workload = Workload("chat", "opt-13b", options.seconds(1200), options)
    return {"17": _curves([({"dataset": "chat"}, workload, paper.FIGURE_17, False)], options, "figure 17")}


def figure_18(options: Options) -> dict[str, list[Row]]:
    """Block sizes: what they do to memory and so to latency; the kernel's side needs a device (`device.py`)."""
    rates = {"sharegpt": 1.9, "alpaca": 24.0}
    sizes = (1, 16, 256) if options.quick else (1, 2, 4, 8, 16, 32, 64, 128, 256)
    runs = [
        (dataset, size, Workload(dataset, "opt-13b", options.seconds(600), options), rate)
        for dataset, rate in rates.items()
        for size in sizes
    ]
    steady = [Steady(workload, rate, Serving("paged", block_size=size)) for _, size, workload, rate in runs]
    curves = [Curve(workload, (rate,), Serving("paged", block_size=size)) for _, size, workload, rate in runs]
    rows = []
    for (dataset, size, _, rate), mean, ((_, point),) in zip(
        runs,
        _run_all(steady, options, "figure 18, memory"),
        _run_all(curves, options, "figure 18, latency"),
        strict=True,
    ):
        rows.append(
            {
                "dataset": dataset,
                "block_size": size,
                "rate": rate,
                **asdict(mean.over_time.memory),
                "mean_batch": mean.over_time.batch,
                "latency_s_per_token": point.normalized_latency_s,
                "at_least": point.saturated,
            }
        )
    return {"18": rows}


FIGURES: dict[str, Callable[[Options], dict[str, list[Row]]]] = {
    "2": figure_2,
    "12": figure_12,
    "13": figure_13,
    "14": figure_14,
    "15": figure_15,
    "16": figure_16,
    "17": figure_17,
    "18": figure_18,
}


def trace_report(
    requests: Sequence[TraceRequest], setup: str, rates: Sequence[float], options: Options
) -> dict[str, list[Row]]:
    """Each system on the requests of a file: with the file's own arrivals, or Poisson arrivals of each rate."""
    traces = {rate: at_rate(requests, rate, options.seed) for rate in rates}
    if not traces:
        traces = {0.0: sorted(requests, key=lambda request: request.arrival_s)}
    step = step_time(options.step_time, SETUPS[setup])
    rows: list[Row] = []
    for rate, trace in traces.items():
        for system in tqdm(SYSTEMS, desc="trace", unit="run", disable=not options.progress, leave=False):
            outcome = simulate(trace, SETUPS[setup], Serving(system), step)
            means = outcome.over_time
            shares = asdict(means.memory) if means.memory is not None else {}
            rows.append(
                {
                    "rate": rate or "file",
                    "system": system,
                    **shares,
                    "mean_batch": means.batch,
                    "latency_s_per_token": outcome.normalized_latency_s,
                    "preemptions": outcome.num_preemptions,
                }
            )
    return {"trace": rows}


def sustained_rate(curve: Sequence[tuple[float, float]], limit_s: float = SUSTAINED_S) -> float | None:
    """The request rate at which a curve of (rate, latency) first crosses a latency; None if it stays below."""
    points = sorted(curve)
    for (rate, latency), (next_rate, next_latency) in pairwise(points):
        if latency < limit_s <= next_latency:
            return rate + (limit_s - latency) / (next_latency - latency) * (next_rate - rate)
    return None


def sustained(rows: Sequence[Row], published: Callable[[Row], dict[str, paper.Curve]]) -> Iterator[Row]:
    """The sustained rates of a latency figure, panel by panel, and how much more than Orca's the paged system's is.

    Where one of the paper's curves leaves the plot before it reaches that latency, its last rate stands for it.
    """
    keys = [key for key in ("dataset", "setup", "samples", "prefix_len") if key in rows[0]]
    panels = list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))
    for panel in panels:
        of_panel = [row for row in rows if tuple(row[key] for key in keys) == panel]
        curves = published(of_panel[0])
        ours = {
            system: sustained_rate([(r["rate"], r["latency_s_per_token"]) for r in of_panel if r["system"] == system])
            for system in SYSTEMS
        }
        theirs = {system: sustained_rate(curves[system]) or curves[system][-1][0] for system in curves}
        for system in SYSTEMS:
            yield {
                **dict(zip(keys, panel, strict=True)),
                "system": system,
                "sustained_rate": ours[system],
                "paper": theirs.get(system),
                "paged_over": _ratio(ours["paged"], ours[system]),
                "paper_paged_over": _ratio(theirs["paged"], theirs.get(system)),
            }


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def published_curves(figure: str, row: Row) -> dict[str, paper.Curve]:
    """The paper's curves of the panel that a row of a latency figure belongs to."""
    if figure == "12":
        return paper.FIGURE_12[row["dataset"]][row["setup"]]
    if figure == "14":
        return paper.FIGURE_14[row["samples"]]
    if figure == "16":
        return paper.FIGURE_16[row["prefix_len"]]
    return paper.FIGURE_17
