"""Batch scoring: log-likelihoods of texts, completions and choices, from memory or from files (`docs/scoring.md`)."""

from jpaged.scoring.files import score_files
from jpaged.scoring.jobs import JobSummary
from jpaged.scoring.rows import Row, RowScore, SequenceScore, parse_row
from jpaged.scoring.scorer import Scorer

__all__ = ["JobSummary", "Row", "RowScore", "Scorer", "SequenceScore", "parse_row", "score_files"]
