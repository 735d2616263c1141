"""The benchmark of samples, beams and swapping, on a tiny model."""

import json
from functools import partial

import pytest

from jpaged import EngineArgs
from jpaged.api.errors import InvalidParameterError
from jpaged.bench import sequences
from jpaged.bench.sequences import CASES, main
from tests.bench import small_engine


@small_engine.GROUP
def test_each_case_is_measured_and_written_down(tmp_path, capsys, monkeypatch):
    few_tokens = partial(EngineArgs, max_num_batched_tokens=small_engine.MAX_NUM_BATCHED_TOKENS)
    monkeypatch.setattr(sequences, "EngineArgs", few_tokens)
    file = tmp_path / "figures.json"
    model, max_num_seqs = small_engine.write_model(tmp_path), small_engine.MAX_NUM_SEQS
    arguments = ["--model", str(model), "--max-num-seqs", str(max_num_seqs), "--dataset", "random"]
    arguments += ["--num-prompts", "3", "--input-len", "10", "--output-len", "5", "--width", "2", "--runs", "2"]
    arguments += ["--swap-chunks", "3"]
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
