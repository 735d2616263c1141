"""The benchmark of samples, beams and swapping, on a tiny model."""

import json

import pytest

from jpaged.api.errors import InvalidParameterError
from jpaged.bench.sequences import CASES, main
from tests.tiny_models import tiny_model, write_tiny_model


def test_each_case_is_measured_and_written_down(tmp_path, capsys):
    model = write_tiny_model(tiny_model("llama-gqa-d64-tied"), tmp_path / "model", use_torch=False)
    file = tmp_path / "figures.json"
    arguments = ["--model", str(model), "--dataset", "random", "--num-prompts", "3", "--input-len", "10"]
    arguments += ["--output-len", "5", "--width", "2", "--runs", "2", "--max-num-seqs", "8", "--swap-chunks", "3"]
    assert main([*arguments, "--num-gpu-blocks-override", "128", "--json", str(file)]) == 0
    results = {result["case"]: result for result in json.loads(file.read_text())["results"]}
    assert tuple(results) == CASES
    assert all(results[case]["output_tokens"] == 3 * 2 * 5 for case in CASES[:4])
    assert all(len(results[case]["seconds"]) == 2 for case in CASES[:4])
    tokens_per_s = {case: results[case]["output_tokens_per_s"] for case in CASES[:4]}
    assert results["samples"]["over_separate"] == tokens_per_s["samples"] / tokens_per_s["separate"]
    assert results["beams"]["over_greedy"] == tokens_per_s["beams"] / tokens_per_s["greedy"]
    assert results["swap"]["over_plain"] == results["swap"]["gib_per_s"] / results["swap"]["plain_gib_per_s"]
    assert results["swap"]["chunks"] == 3
    assert min(results["swap"]["gib_per_s"], results["swap"]["plain_gib_per_s"]) > 0
    assert "beams: " in capsys.readouterr().out


def test_a_width_that_cannot_be_is_refused():
    with pytest.raises(InvalidParameterError, match="--width must be at least 1"):
        main(["--model", "x", "--width", "0"])
