"""Batch scoring: log-likelihoods of texts, completions and choices, from memory or from files (`docs/scoring.md`)."""

from jpaged.scoring.files import ScoreSummary, score_files
from jpaged.scoring.rows import Row, RowScore, SequenceScore, parse_row
from jpaged.scoring.scorer import Scorer

__all__ = ["Row", "RowScore", "ScoreSummary", "Scorer", "SequenceScore", "parse_row", "score_files"]
