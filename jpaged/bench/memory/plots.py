"""Plots of the figures, ours beside the paper's, as PNG and SVG. Needs matplotlib (`pip install jpaged[bench]`)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jpaged.api.errors import InvalidParameterError
from jpaged.bench.memory import paper
from jpaged.bench.memory.figures import LATENCY_LIMIT_S, Row, published_curves
from jpaged.bench.memory.simulate import SYSTEMS

NAMES = {"orca-max": "Orca (Max)", "orca-pow2": "Orca (Pow2)", "orca-oracle": "Orca (Oracle)", "paged": "paged"}
_COLORS = {"orca-max": "#c0392b", "orca-pow2": "#e08e0b", "orca-oracle": "#2e8b57", "paged": "#1f5fbf"}
_PARTS = {
    "token_states": ("token states", "#2e8b57"),
    "reserved": ("reserved", "#e6b800"),
    "internal": ("internal fragmentation", "#c0392b"),
    "external": ("external fragmentation, free", "#b8bec6"),
}
_SETUPS = {"opt-13b": "OPT-13B", "opt-66b": "OPT-66B, 4 GPUs", "opt-175b": "OPT-175B, 8 GPUs"}
_DATASETS = {"sharegpt": "ShareGPT", "alpaca": "Alpaca", "chat": "chatbot"}


def draw(figures: Mapping[str, Sequence[Row]], directory: Path) -> list[Path]:
    """Draws every figure it knows into `directory`.

    Returns: the files written.

    Raises:
        InvalidParameterError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise InvalidParameterError("--plots needs matplotlib: pip install 'jpaged[bench]'.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "jpaged", "font.size": 9, "axes.spines.top": False})
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, rows in figures.items():
        if name not in _DRAW:
            continue
        figure = _DRAW[name](pyplot, name, [row for row in rows if not row.get("variant")])
        for suffix in ("png", "svg"):
            file = directory / f"paper-figure-{name}.{suffix}"
            figure.savefig(file, dpi=130, bbox_inches="tight", metadata={"Date": None} if suffix == "svg" else None)
            written.append(file)
        pyplot.close(figure)
    return written


def _memory(pyplot: Any, name: str, rows: Sequence[Row]) -> Any:
    shown = [row for row in rows if row["dataset"] == "sharegpt"]
    figure, axes = pyplot.subplots(figsize=(7.5, 3.6))
    places = [i + offset for i in range(len(SYSTEMS)) for offset in (-0.2, 0.2)]
    bottoms = [0.0] * len(places)
    for part, (label, color) in _PARTS.items():
        heights = []
        for system in SYSTEMS:
            ours = next(row["share"] for row in shown if row["system"] == system and row["part"] == part)
            published = paper.FIGURE_2[system].get(part)
            if published is None:  # the paper prints what is not tokens in one piece
                published = 1 - sum(paper.FIGURE_2[system].values()) if part == "external" else 0.0
            heights += [100 * published, 100 * ours]
        bars = axes.bar(places, heights, 0.36, bottoms, color=color, label=label, edgecolor="white", linewidth=0.5)
        labels = [f"{height:.1f}" if height > 4 else "" for height in heights]
        axes.bar_label(bars, labels, label_type="center", fontsize=8)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xticks(places, ["paper", "jpaged"] * len(SYSTEMS), fontsize=8)
    for i, system in enumerate(SYSTEMS):
        axes.text(i, -17, NAMES[system], ha="center", weight="bold")
    axes.set_ylabel("KV cache memory (%)")
    axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure


def _bars(
    axes: Any, labels: Sequence[str], published: Sequence[float | None], ours: Sequence[float], form: str
) -> None:
    for offset, values, color, label in ((-0.2, published, "#9aa4b0", "paper"), (0.2, ours, "#1f5fbf", "jpaged")):
        heights = [value or 0.0 for value in values]
        bars = axes.bar([i + offset for i in range(len(labels))], heights, 0.38, color=color, label=label)
        axes.bar_label(bars, [form.format(value) if value else "" for value in values], fontsize=8)
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.legend(frameon=False)


def _batches(pyplot: Any, name: str, rows: Sequence[Row]) -> Any:
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.2))
    for axes, (dataset, rate) in zip(panels, paper.FIGURE_13_RATES.items(), strict=True):
        shown = [row for row in rows if row["dataset"] == dataset]
        labels = [NAMES[row["system"]] for row in shown]
        _bars(axes, labels, [row["paper"] for row in shown], [row["mean_batch"] for row in shown], "{:.1f}")
        axes.set_title(f"{_DATASETS[dataset]}, {rate:g} requests/s")
        axes.set_ylabel("mean batched requests")
    figure.tight_layout()
    return figure


def _saving(pyplot: Any, name: str, rows: Sequence[Row]) -> Any:
    figure, panels = pyplot.subplots(1, 2, figsize=(10.5, 3.2))
    for axes, (kind, title) in zip(
        panels, {"parallel": "parallel sampling", "beam": "beam search"}.items(), strict=True
    ):
        shown = [row for row in rows if row["kind"] == kind]
        labels = [f"{_DATASETS[row['dataset']]}\n{row['n']}" for row in shown]
        published = [100 * row["paper"] if row["paper"] else None for row in shown]
        _bars(axes, labels, published, [100 * row["saved"] for row in shown], "{:.1f}")
        axes.set_title(title)
        axes.set_ylabel("blocks saved (%)")
    figure.tight_layout()
    return figure


def _latencies(pyplot: Any, name: str, rows: Sequence[Row]) -> Any:
    keys = [key for key in ("dataset", "setup", "samples", "prefix_len") if key in rows[0]]
    panels = list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(lines, columns, figsize=(4.2 * columns, 2.9 * lines), squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        of_panel = [row for row in rows if tuple(row[key] for key in keys) == panel]
        curves = published_curves(name, of_panel[0])
        for system in SYSTEMS:
            mine = sorted((row["rate"], row["latency_s_per_token"]) for row in of_panel if row["system"] == system)
            axes.plot(*zip(*mine, strict=True), "-o", ms=3, color=_COLORS[system], label=NAMES[system])
            if system in curves:
                axes.plot(*zip(*curves[system], strict=True), "--x", ms=4, lw=1, alpha=0.7, color=_COLORS[system])
        axes.set_ylim(0, LATENCY_LIMIT_S)
        axes.set_xlim(left=0)
        axes.set_title(", ".join(_panel_label(key, value) for key, value in zip(keys, panel, strict=True)))
        axes.set_xlabel("requests/s")
    for axes in grid[:, 0]:
        axes.set_ylabel("normalized latency (s/token)")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    handles += [pyplot.Line2D([], [], color="gray", ls=style, marker=m, ms=4) for style, m in (("-", "o"), ("--", "x"))]
    figure.tight_layout()
    figure.legend(
        handles, [*labels, "jpaged", "paper"], ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False
    )
    return figure


def _panel_label(key: str, value: Any) -> str:
    if key in ("dataset", "setup"):
        return (_DATASETS | _SETUPS)[value]
    return f"{value} samples" if key == "samples" else f"shared prefix of {value} tokens"


def _block_sizes(pyplot: Any, name: str, rows: Sequence[Row]) -> Any:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    for dataset, style in (("sharegpt", "-o"), ("alpaca", "--s")):
        shown = [row for row in rows if row["dataset"] == dataset]
        sizes = [row["block_size"] for row in shown]
        left.plot(sizes, [100 * row["token_states"] for row in shown], style, ms=4, label=_DATASETS[dataset])
        label = f"{_DATASETS[dataset]}, {shown[0]['rate']:g} requests/s"
        right.plot(sizes, [row["latency_s_per_token"] for row in shown], style, ms=4, label=label)
    left.set_ylabel("memory that holds tokens (%)")
    right.set_ylabel("normalized latency (s/token)")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xlabel("block size (tokens)")
        axes.legend(frameon=False)
    figure.tight_layout()
    return figure


_DRAW: dict[str, Callable[[Any, str, Sequence[Row]], Any]] = {
    "2": _memory,
    "12": _latencies,
    "13": _batches,
    "14": _latencies,
    "15": _saving,
    "16": _latencies,
    "17": _latencies,
    "18": _block_sizes,
}
