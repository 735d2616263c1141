"""What a request returns. Field names follow vLLM, so code written for it reads these."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `jpaged --help` does without numpy
    import numpy as np


@dataclass(slots=True)
class Logprob:
    """A token's log-probability under the model (natural log, before temperature, penalties and masks).

    rank: 1 for the most likely token.
    decoded_token: its text, None without a tokenizer or with detokenize=False. Of a token that leaves a character
        incomplete it is "", and of the one that completes it the whole character.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Token id -> Logprob at one position: the sampled (or prompt) token and the most likely alternatives."""


@dataclass(frozen=True, slots=True)
class TargetScores:
    """Scores of given tokens under the model's own distribution: all that scoring needs, at little cost.

    logprobs: float32 [m]; their log-probabilities.
    greedy: bool [m]; whether each is the most likely token, the lowest id on ties: what greedy decoding would take.
    """

    logprobs: "np.ndarray"
    greedy: "np.ndarray"


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    index: which of the request's sequences; with `best_of` and beam search, its rank.
    text: the generated text ("" without a tokenizer or with detokenize=False).
    token_ids: the generated tokens, a stop token included.
    cumulative_logprob: the sum of the tokens' log-probabilities, None unless `logprobs` was asked for, or the
        sequences are ranked by it (`best_of`, beam search).
    logprobs: a dict for each token, None unless asked for.
    score: of a sequence that a beam search found: its cumulative log-probability divided by the length penalty.
    finish_reason: "stop" (a stop token or string, or the end of sequence), "length", "abort", "error" (the model's
        logits were not finite, see `NonFiniteLogitsError`), or None while running.
    stop_reason: the stop string or stop token id that ended it; None for the end-of-sequence token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestStateStats:
    """When things happened to a request, in seconds of `time.monotonic()`, and how long it waited."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A sequence that a beam search found, under the names of vLLM.

    tokens: token ids of prompt and output. text: the prompt's, where it came as text, and the output's, without special
    tokens. cum_logprob: of the output. finish_reason, stop_reason: as of `CompletionOutput`.
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request and what it has generated so far.

    outputs: its sequences by index; with output kind DELTA those that have something new.
    prompt_logprobs: for each prompt token a dict of log-probabilities, None for the first; None unless asked for. With
        output kind DELTA [] in outputs that have no sequence's first tokens.
    num_cached_tokens: prompt tokens found in the prefix cache.
    scores: of a request made by `LLMEngine.add_score_request`, which has no outputs; None for others.
    embedding: float32 [dimensions], of a request with `PoolingParams`, which has no outputs; None for others.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestStateStats = field(default_factory=RequestStateStats)
    scores: TargetScores | None = None
    embedding: "np.ndarray | None" = None

    @property
    def sequences(self) -> list[BeamSearchSequence]:
        """What a beam search found, best first, as vLLM's `LLM.beam_search` returns it."""
        return [
            BeamSearchSequence(
                self.prompt_token_ids + one.token_ids,
                (self.prompt or "") + one.text,
                one.cumulative_logprob or 0.0,
                one.finish_reason,
                one.stop_reason,
            )
            for one in self.outputs
        ]


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """embedding: a prompt's vector."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """What `LLM.embed` returns of a prompt. num_cached_tokens: prompt tokens found in the prefix cache."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """score: the cosine of two embeddings, from -1 to 1; of a reranker the probability of "yes"."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """What `LLM.score` returns of a pair. prompt_token_ids: of its first text and then of its second; of a
    reranker, of the prompt that has both."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
