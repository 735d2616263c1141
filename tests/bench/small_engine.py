"""One small engine for the tests of all benchmarks: with one model and one set of sizes, programs are compiled once.

Tests that start it belong to the group `GROUP`: one worker compiles for all of them.
"""

from pathlib import Path

import pytest

from tests.tiny_models import MAX_LENGTH, tiny_model, write_tiny_model

GROUP = pytest.mark.xdist_group("small engine")
MAX_NUM_SEQS = 4
MAX_NUM_BATCHED_TOKENS = 64


def write_model(directory: Path) -> Path:
    """The checkpoint that all of them serve."""
    return write_tiny_model(tiny_model("llama-gqa-d64-tied"), directory / "model", use_torch=False)


def options(directory: Path) -> list[str]:
    """The model, written to the directory, and the sizes, as options of a benchmark."""
    sizes = ["--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS)]
    return ["--model", str(write_model(directory)), "--max-model-len", str(MAX_LENGTH), *sizes]
