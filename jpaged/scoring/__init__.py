"""Batch scoring: log-likelihoods of texts, completions and choices, from memory or from files (`docs/scoring.md`)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jpaged.scoring.files import score_files
    from jpaged.scoring.jobs import JobSummary
    from jpaged.scoring.rows import Row, RowScore, SequenceScore, parse_row
    from jpaged.scoring.scorer import Scorer

_LAZY = {  # `Scorer` imports jax, which takes a second or two
    "JobSummary": "jpaged.scoring.jobs",
    "Row": "jpaged.scoring.rows",
    "RowScore": "jpaged.scoring.rows",
    "Scorer": "jpaged.scoring.scorer",
    "SequenceScore": "jpaged.scoring.rows",
    "parse_row": "jpaged.scoring.rows",
    "score_files": "jpaged.scoring.files",
}

__all__ = ["JobSummary", "Row", "RowScore", "Scorer", "SequenceScore", "parse_row", "score_files"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'jpaged.scoring' has no attribute {name!r}")
