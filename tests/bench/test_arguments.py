"""Benchmarks refuse a number out of range by name, before a model is loaded."""

from importlib import import_module

import pytest

from jpaged import EngineArgs
from jpaged.api.errors import InvalidParameterError
from jpaged.bench.engine_options import engine_options


@pytest.mark.parametrize(
    ("benchmark", "argv", "said"),
    [
        ("throughput", ["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        ("scoring", ["--model", "m", "--runs", "0"], "--runs must be at least 1, got 0"),
        ("scoring", ["--model", "m", "--row-len", "1"], "--row-len must be at least 2, got 1"),
        ("steps", ["--model", "m", "--steps", "7"], "--steps must be at least 8, got 7"),
        ("steps", ["--model", "m", "--batch", "8", "--batch", "0"], "--batch must be at least 1, got 0"),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(benchmark, argv, said):
    with pytest.raises(InvalidParameterError, match=said):
        import_module(f"jpaged.bench.{benchmark}").main(argv)


@pytest.mark.parametrize("benchmark", ["latency", "throughput"])
def test_engines_that_are_measured_have_compiled_all_their_programs_at_start(benchmark):
    parser = import_module(f"jpaged.bench.{benchmark}").parser()
    assert EngineArgs(**engine_options(parser.parse_args([]))).compile_programs == "at_start"
