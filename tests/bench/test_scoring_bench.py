"""The scoring benchmark on a tiny model."""

import json

import numpy as np
import pytest

from jpaged.bench.models import model_directory
from jpaged.bench.scoring import main, operations_per_token
from jpaged.models import ModelConfig, build
from tests.tiny_models import tiny_model, write_tiny_model


def test_a_run_is_measured_and_written_down(tmp_path, capsys):
    model = write_tiny_model(tiny_model("llama-gqa-d64-tied"), tmp_path / "model", use_torch=False)
    file = tmp_path / "figures.json"
    arguments = ["--model", str(model), "--num-rows", "6", "--row-len", "40", "--runs", "2", "--json", str(file)]
    assert main([*arguments, "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--choices", "2"]) == 0
    results = json.loads(file.read_text())["results"]
    assert results["tokens"] == 6 * (40 + 2 * 16)
    assert len(results["seconds"]) == 2
    median = np.median(results["seconds"])
    assert results["tokens_per_s"] == pytest.approx(results["tokens"] / median)
    rate = results["matrix_rate_tflops"] * 1e12
    work = 6 * (40 + 2 * 15) * results["operations_per_token"]
    assert results["share_of_roofline"] == pytest.approx(work / median / rate)
    assert "of the roofline" in capsys.readouterr().out


def test_operations_are_two_a_weight_of_the_products_and_attentions():
    model = build(ModelConfig.from_directory(model_directory("llama-3.1-8b")))
    products = 2 * (8.03e9 - 128256 * 4096)  # less the embedding, which is looked up
    attention = 32 * 32 * 4 * 128 * 512.5
    assert operations_per_token(model, 1024) == pytest.approx(products + attention, rel=1e-3)
