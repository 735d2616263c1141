"""Beam search parameters. Names and meanings follow transformers' generation config and vLLM's `BeamSearchParams`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jpaged.api.checks import is_integer, is_number
from jpaged.api.errors import InvalidParameterError, shown
from jpaged.api.sampling_params import MAX_LOGPROBS, RequestOutputKind, SamplingParams
from jpaged.api.unknown_names import BEAM_SEARCH, explains_unknown


@explains_unknown(BEAM_SEARCH)
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search, which gives the same sequences and scores as transformers'.

    A sequence's score is the sum of its tokens' log-probabilities divided by length ** length_penalty, the length in
    generated tokens, the stop token included.

    Args:
        beam_width: live beams; as many sequences are found. 1 is greedy search.
        max_tokens: most tokens to generate.
        n: sequences to return, best first; beam_width by default.
        length_penalty: above 0 favours long sequences, below 0 short ones; in [-4, 4], beyond which float32, in which
            scores are compared, no longer holds the power of a long sequence's length.
        early_stopping: when to stop once beam_width sequences are finished. True: at once. False: when the best live
            beam, were it to end now, would not be among them. "never": when no live beam can come to be among them,
            whatever its length up to max_tokens.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        stop_token_ids: tokens that end a sequence, besides the model's. Together with beam_width at most 20.
        detokenize, skip_special_tokens: as in `SamplingParams`.

    Raises:
        InvalidParameterError: a value of the wrong type or out of range.
    """

    beam_width: int
    max_tokens: int
    n: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens", "n"):
            value = getattr(self, name)
            if name == "n" and value is None:
                continue
            if not is_integer(value):
                raise InvalidParameterError(f"{name} must be an integer, got {shown(value)}.")
            if value < 1:
                raise InvalidParameterError(f"{name} must be at least 1, got {shown(value)}.")
        if self.beam_width > MAX_LOGPROBS:
            raise InvalidParameterError(f"beam_width must be at most {MAX_LOGPROBS}, got {shown(self.beam_width)}.")
        if self.n is not None and self.n > self.beam_width:
            raise InvalidParameterError(
                f"n={shown(self.n)} is above beam_width={self.beam_width}; a search finds no more sequences than beams."
            )
        penalty = self.length_penalty
        if not is_number(penalty) or not -4 <= penalty <= 4:
            raise InvalidParameterError(f"length_penalty must be a number in [-4, 4], got {shown(penalty)}.")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidParameterError(
                f'early_stopping must be True, False or "never", got {shown(self.early_stopping)}.'
            )
        self.sampling_params()  # checks the rest

    @property
    def num_sequences(self) -> int:
        """How many sequences run for the request: its beams."""
        return self.beam_width

    @property
    def sequences_parameter(self) -> str:
        """The parameter that says how many they are."""
        return "beam_width"

    @property
    def runs_together(self) -> bool:
        """Whether they must all hold their blocks at once: beams must, to be ranked."""
        return True

    def sampling_params(self) -> SamplingParams:
        """How a beam's rows run: the search itself picks the tokens, and ends the sequences."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=int(self.max_tokens),
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            detokenize=self.detokenize,
            skip_special_tokens=self.skip_special_tokens,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
