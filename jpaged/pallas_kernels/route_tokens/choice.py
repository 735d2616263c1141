"""How a router picks experts, as the op and its implementations take it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ExpertChoice:
    """How a router picks experts.

    per_token: experts of a token.
    score: what its logits become: "softmax" over all experts, or "sigmoid" of each (DeepSeek-V3).
    renormalized: a token's weights are divided by their sum.
    added_to_sum: added to a sum of sigmoids before the division; by default as in DeepSeek-V3.
    factor: multiplies the weights.
    groups, kept_groups: experts are in this many equal groups, and a token's come from the best of these alone. One
        group: no such limit.
    group_best: a group is as good as so many of its best experts together.
    """

    per_token: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalized: bool = True
    added_to_sum: float = 1e-20
    factor: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2

    def picks_by_logits(self, corrected: bool) -> bool:
        """Whether experts are picked by logits: sigmoids are in their order, but those of large ones are all 1.

        corrected: as of `softmax_of_best_alone`.
        """
        return self.score == "sigmoid" and self.groups == 1 and not corrected

    def softmax_of_best_alone(self, corrected: bool) -> bool:
        """Whether a softmax over a token's own experts will do for one over all: weights are divided by their sum, and
        logits are in the order of a softmax. Sums of logits, by which groups are compared, are not.

        corrected: numbers are added to the scores when experts are picked.
        """
        in_order = self.groups == 1 or self.group_best == 1
        return self.score == "softmax" and self.renormalized and in_order and not corrected
