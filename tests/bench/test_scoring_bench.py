"""The scoring benchmark on a tiny model."""

import json

import numpy as np
import pytest

from jpaged.bench import scoring
from jpaged.bench.models import model_directory
from jpaged.bench.scoring import main, operations
from jpaged.models import ModelConfig, build
from tests.bench import small_engine


@small_engine.GROUP
def test_a_run_is_measured_and_written_down(tmp_path, capsys):
    file = tmp_path / "figures.json"
    arguments = [*small_engine.options(tmp_path), "--num-rows", "6", "--row-len", "40", "--runs", "2", "--choices", "2"]
    assert main([*arguments, "--json", str(file)]) == 0
    results = json.loads(file.read_text())["results"]
    assert results["tokens"] == 6 * (40 + 2 * 16)
    assert len(results["seconds"]) == 2
    median = np.median(results["seconds"])
    assert results["tokens_per_s"] == pytest.approx(results["tokens"] / median)
    rate = results["matrix_rate_tflops"] * 1e12
    assert results["share_of_roofline"] == pytest.approx(results["operations"] / median / rate)
    assert "of the roofline" in capsys.readouterr().out


def test_operations_are_two_a_weight_of_the_products_and_attentions():
    model = build(ModelConfig.from_directory(model_directory("llama-3.1-8b")))
    products = 2 * (8.03e9 - 128256 * 4096)  # less the embedding, which is looked up
    attention = 32 * 32 * 4 * 128 * 512.5
    assert operations(model, 1, 1, 1024) == pytest.approx(products + attention, rel=1e-3)
    head = 2 * 128256 * 4096
    assert operations(model, 10, 0, 1024) == pytest.approx(10 * (products - head + attention), rel=1e-3)


class OneProcess:
    """Takes the place of `WorkerPool`, which is slow to start."""

    def __init__(self, work, num_workers: int, devices_each: int) -> None:
        assert num_workers == 2
        self._processor = work.make()

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        pass

    def run(self, shards, done, progress) -> None:
        self._processor.run(shards, done, progress)


@small_engine.GROUP
def test_workers_are_measured_through_their_shard_files(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(scoring, "WorkerPool", OneProcess)
    arguments = [*small_engine.options(tmp_path), "--num-rows", "40", "--row-len", "40", "--runs", "1"]
    arguments += ["--data-parallel-size", "2"]
    assert main(arguments) == 0
    assert "1,600 tokens in" in capsys.readouterr().out
