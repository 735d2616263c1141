"""A benchmark's summary of many durations: mean, percentiles, longest."""

from collections.abc import Mapping

import numpy as np

PERCENTILES = (50, 90, 99)


def summary(seconds: np.ndarray, weights: np.ndarray | None = None) -> dict[str, float] | None:
    """Mean and percentiles in ms; None without durations. weights: how many each duration stands for."""
    if not seconds.size or (weights is not None and not weights.any()):
        return None
    if weights is None:
        points = np.percentile(seconds, PERCENTILES)
    else:
        points = np.percentile(seconds, PERCENTILES, weights=weights, method="inverted_cdf")
    figures = {"mean": np.average(seconds, weights=weights)}
    figures |= {f"p{q}": point for q, point in zip(PERCENTILES, points, strict=True)} | {"max": seconds.max()}
    return {name: 1000 * float(value) for name, value in figures.items()}


def table(rows: Mapping[str, dict[str, float] | None]) -> str:
    """A line for each label and summary; None is left out."""
    lines = [f"{'ms':<20}" + "".join(f"{name:>10}" for name in ("mean", *(f"p{q}" for q in PERCENTILES), "max"))]
    for label, figures in rows.items():
        if figures:
            lines.append(f"{label:<20}" + "".join(f"{value:>10,.2f}" for value in figures.values()))
    return "\n".join(lines)
