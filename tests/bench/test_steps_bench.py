"""What `jpaged bench steps` prints."""

import pytest

from jpaged.bench import steps


@pytest.mark.parametrize("kernels", [[], [{"name": "attention", "ms": 0.5, "count": 2.0}]])
def test_a_device_without_kernels_is_not_said_to_be_idle(monkeypatch, capsys, kernels):
    figure = {"wall_ms": 1.0, "wall_least_ms": 0.9, "wall_most_ms": 1.1, "floor_ms": 0.1, "batch": 1}
    figure |= {
        "kernels": kernels,
        "busy_ms": sum(k["ms"] for k in kernels),
        "launches": sum(k["count"] for k in kernels),
    }
    monkeypatch.setattr(steps, "LLMEngine", lambda args: None)
    monkeypatch.setattr(steps, "batch_sizes", lambda engine, asked: [1])
    monkeypatch.setattr(steps, "sizes_that_last", lambda engine, sizes, args: sizes)
    monkeypatch.setattr(steps, "measure", lambda engine, batch, args: figure)
    assert steps.main(["--model", "a"]) == 0
    shown = capsys.readouterr().out
    assert ("busy 0.500 in 2 kernels" in shown) == bool(kernels)
    assert ("the profiler saw no kernels, as on a CPU" in shown) == (not kernels)
