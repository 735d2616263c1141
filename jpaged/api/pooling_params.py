"""Pooling parameters: how a prompt's hidden states become one vector. Names are vLLM's."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from jpaged.api.checks import check_bool, is_integer
from jpaged.api.errors import InvalidParameterError, shown
from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.api.unknown_names import POOLING, explains_unknown

if TYPE_CHECKING:  # `jpaged --help` does without numpy
    import numpy as np

Pooling = Literal["last", "mean"]
"""Which hidden states, after the final norm: the last token's, or the mean over all tokens of the prompt."""


@explains_unknown(POOLING)
@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Parameters of an embedding.

    Args:
        pooling: which tokens' hidden states it is made of.
        dimensions: keep the first so many numbers (matryoshka), before normalising; None: all.
        normalize: scale it to length 1.

    Raises:
        InvalidParameterError: a value of the wrong type or out of range.
    """

    pooling: Pooling = "last"
    dimensions: int | None = None
    normalize: bool = True

    num_sequences: ClassVar[int] = 1
    max_tokens: ClassVar[int] = 1
    sequences_parameter: ClassVar[str] = "n"
    runs_together: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            kinds = " or ".join(map(repr, get_args(Pooling)))
            raise InvalidParameterError(f"pooling must be {kinds}, got {shown(self.pooling)}.")
        if self.dimensions is not None and (not is_integer(self.dimensions) or self.dimensions < 1):
            raise InvalidParameterError(
                f"dimensions must be an integer of at least 1 or None, got {shown(self.dimensions)}."
            )
        check_bool("normalize", self.normalize)

    @property
    def needs_all_states(self) -> bool:
        """Whether hidden states of every token are needed, so that none may be skipped for a cached prefix."""
        return self.pooling == "mean"

    def sampling_params(self) -> SamplingParams:
        """How its row runs: nothing is sampled."""
        return SamplingParams(temperature=0.0, max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)

    def finished(self, pooled: "np.ndarray") -> "np.ndarray":
        """pooled: float32 [hidden], over the tokens. Returns the embedding, float32 [dimensions]; zeros stay zeros."""
        vector = pooled if self.dimensions is None else pooled[: self.dimensions]
        length = float(vector @ vector) ** 0.5
        return vector / length if self.normalize and length else vector
