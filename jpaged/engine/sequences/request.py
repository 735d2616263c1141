"""One sequence of a request and where it stands: waiting -> running (-> preempted -> running)* -> finished."""

import time
from collections.abc import Iterator, Sequence
from copy import copy
from enum import IntEnum
from typing import ClassVar, Literal, Protocol

import numpy as np

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.checks import is_integer
from jpaged.api.errors import InvalidParameterError, InvalidPromptError, shown
from jpaged.api.outputs import PositionLogprobs, RequestStateStats
from jpaged.api.pooling_params import PoolingParams
from jpaged.api.sampling_params import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, RequestOutputKind, SamplingParams
from jpaged.engine.interface import SamplingVariant, TablePart, TargetScores
from jpaged.engine.kv.swap_record import SwapRecord

FinishReason = Literal["stop", "length", "abort", "error"]

_TOKEN_LIMIT = 2**31


class RequestStatus(IntEnum):
    WAITING = 0  # never ran
    RUNNING = 1  # has a slot
    PREEMPTED = 2  # waits again, with the tokens that it has generated
    FINISHED = 3


class Group(Protocol):
    """What a sequence knows of the group that it belongs to; `SequenceGroup` says what each of these means."""

    runs_together: ClassVar[bool]
    forks_itself: ClassVar[bool]
    device_tests_stop_tokens: ClassVar[bool]
    members: "list[Request]"
    forked: bool

    @property
    def leader(self) -> "Request": ...

    @property
    def finished(self) -> bool: ...

    @property
    def num_together(self) -> int: ...

    @property
    def siblings_to_fork(self) -> "list[Request]": ...

    @property
    def can_be_stored(self) -> bool: ...

    def restart(self) -> None: ...

    def running(self) -> "list[Request]": ...

    def waiting(self) -> "Iterator[Request]": ...


class DeviceTable(Protocol):
    """What the device follows a constraint by; `constraints.tables.PlacedTable` says what each of these means."""

    def place_after(self, token_ids: np.ndarray) -> int: ...

    def take_parts(self) -> list[TablePart]: ...

    def release(self) -> None: ...


class Request:
    """A prompt, how to sample after it, and what has come of it.

    Where several sequences are asked for, the request itself is the first of them, and the scheduler makes `sibling`s
    of it for the others.

    Args:
        request_id: unique among the unfinished requests of an engine.
        prompt_token_ids: at least one token.
        sampling: its parameters; for a beam search `BeamSearchParams.sampling_params()`.
        eos_token_ids: the model's end-of-sequence tokens; they stop the request unless `sampling.ignore_eos`.
        bad_words_token_ids: `sampling.bad_words` as token sequences.
        priority: under the policy "priority", lower runs first.
        cache_salt: prefix blocks are shared only between requests of equal salt.
        arrival_time: seconds of `time.monotonic()`; None: now.
        beam: how to search, for a beam search; its sequences are the hypotheses, best first.
        score_targets: the tokens that follow the last of the prompt's tokens, as many of them as there are targets. A
            request that has them scores them and ends, with nothing sampled and finish_reason "length".
        pooling: how to pool the prompt's hidden states. A request that has it pools them and ends likewise.

    Attributes, kept by the scheduler:
        index: which of the request's sequences this is.
        group: the request's sequences; there is one from `SequenceGroup.form` on, which `Scheduler.add` calls.
        swap: where its blocks are in host memory, while it is swapped out.
        eos_token_ids: end-of-sequence tokens that stop it: none if they are ignored.
        stop_token_ids: tokens that stop it, those included.
        max_len: total length in tokens at which it ends; set by `Scheduler.add`.
        output_token_ids: generated tokens. Up to date at every token if `reports_each_token`, otherwise when the
            request finishes.
        logprobs: by generated token, where asked for or needed to rank the sequences; decoded_token is None.
        prompt_logprobs: by prompt token, None for the first, where asked for, in sequence 0; decoded_token is None.
        cumulative_logprob, score: of a beam search's result; None otherwise.
        scores: of the score targets, complete when the request finishes; None for one that generates.
        pooled: float32 [hidden]; the pooled hidden states, once it has finished; None for one without `pooling`.
        finish_reason, stop_reason: as in `CompletionOutput`; None while unfinished.
        snapshot_stops: lengths, ascending, at which the computation of its known tokens makes a halt, for a snapshot of
            its states.
        num_cached_tokens: prompt tokens found in the prefix cache at its first admission.
        distrusts_cache: its logits were not finite behind cached blocks, so it computes all its tokens itself.
        has_stale_blocks: what is in its blocks was computed, in part, with weights that the model no longer has; no
            other request shares them.
        table: what the device follows its constraint by; None for one without, or that the host follows.
        stats: when things happened to it; one object for all sequences of a request.

    Raises:
        InvalidPromptError: the prompt is empty or holds something other than token ids, or there are more targets
            than tokens that they could follow.
        InvalidParameterError: more stop tokens than the device tests; a priority that is no 64-bit integer; a salt
            that is no text.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        *,
        eos_token_ids: Sequence[int] = (),
        bad_words_token_ids: Sequence[Sequence[int]] = (),
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
        beam: BeamSearchParams | None = None,
        score_targets: Sequence[int] | np.ndarray | None = None,
        pooling: PoolingParams | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = _as_token_array(request_id, prompt_token_ids)
        self.sampling = sampling
        self.beam = beam
        self.pooling = pooling
        self.priority = _checked_priority(priority)
        self.cache_salt = checked_salt(cache_salt)
        # A constraint allows the end of sequence where it is fulfilled; with ignore_eos only where nothing can follow.
        ignores_eos = sampling.ignore_eos and sampling.structured_outputs is None
        self.eos_token_ids = () if ignores_eos else tuple(dict.fromkeys(eos_token_ids))
        self.stop_token_ids = tuple(dict.fromkeys((*self.eos_token_ids, *(sampling.stop_token_ids or ()))))
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidParameterError(
                f"stop_token_ids and the end-of-sequence tokens come to {len(self.stop_token_ids)} tokens; at most "
                f"{MAX_STOP_TOKEN_IDS} are tested. Name fewer."
            )
        self.bad_words_token_ids = tuple(tuple(word) for word in bad_words_token_ids)
        if beam is not None and beam.beam_width + len(self.stop_token_ids) > MAX_LOGPROBS:
            raise InvalidParameterError(
                f"beam_width={beam.beam_width} and {len(self.stop_token_ids)} stop tokens, the end-of-sequence tokens "
                f"included, come to more than {MAX_LOGPROBS}; lower beam_width or name fewer stop_token_ids."
            )
        streams = sampling.output_kind != RequestOutputKind.FINAL_ONLY and not sampling.ranks
        self.reports_each_token = streams or bool(sampling.stop)
        self.variant = _variant_of(sampling)
        self.table: DeviceTable | None = None

        self.index = 0
        self._group: Group | None = None
        self.arrival_number = -1
        self.max_len = 0
        self.seed = 0
        self.num_cached_tokens = 0
        self.distrusts_cache = False
        self.has_stale_blocks = False
        self.prompt_logprobs: list[PositionLogprobs | None] | None = (
            None if sampling.prompt_logprobs is None else [None]
        )
        self.score_targets = self._checked_targets(score_targets)
        self.scores = None
        if self.score_targets is not None:
            shape = self.score_targets.shape
            self.scores = TargetScores(np.full(shape, np.nan, np.float32), np.zeros(shape, np.bool_))
        self.pooled: np.ndarray | None = None
        self._begin()
        self.stats = RequestStateStats(arrival_time=time.monotonic() if arrival_time is None else arrival_time)

    def _begin(self) -> None:
        """Sets what belongs to this sequence alone to what it is before anything has happened."""
        self.status = RequestStatus.WAITING
        self.slot = -1
        self.swap: SwapRecord[Request] | None = None
        self.output_token_ids: list[int] = []
        wanted = self.sampling.logprobs is not None or self.sampling.ranks
        self.logprobs: list[PositionLogprobs] | None = [] if wanted else None
        self.cumulative_logprob: float | None = None
        self.score: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.block_digests: list[bytes] = []
        self.num_registered_blocks = 0
        self.snapshot_stops: tuple[int, ...] = ()

    def sibling(self, index: int) -> "Request":
        """Another sequence after the same prompt, with nothing generated yet."""
        sibling = copy(self)
        sibling.index = index
        sibling.prompt_logprobs = None
        sibling._begin()
        return sibling

    @property
    def group(self) -> Group:
        """The request's sequences. Raises ValueError before `join`."""
        if self._group is None:
            raise ValueError(f"Request {self.request_id!r} is in no group; `SequenceGroup.form` makes one.")
        return self._group

    def join(self, group: Group) -> None:
        """Makes this one of the group's sequences, as `SequenceGroup.form` does with each of its members."""
        self._group = group

    def follow(self, table: DeviceTable) -> None:
        """Has the device follow its constraint by this table from now on."""
        self.table, self.variant = table, max(self.variant, SamplingVariant.TABLE)

    @property
    def params(self) -> SamplingParams | BeamSearchParams | PoolingParams:
        """What was asked for, in the words in which it was asked."""
        return self.beam or self.pooling or self.sampling

    @property
    def num_sequences(self) -> int:
        """How many sequences are generated for the request."""
        return self.params.num_sequences

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        return self.status == RequestStatus.FINISHED

    @property
    def samples(self) -> bool:
        """Whether tokens are generated after the prompt; otherwise it is scored or pooled."""
        return self.score_targets is None and self.pooling is None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt were asked for and some are missing yet."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len

    def num_skippable_tokens(self, num_known: int) -> int:
        """How many of its first tokens, of `num_known`, may come out of the prefix cache instead of being computed."""
        if self.wants_prompt_logprobs or self.distrusts_cache:
            return 0
        if self.pooling is not None and self.pooling.needs_all_states:
            return 0
        if self.score_targets is not None:
            return self.prompt_len - len(self.score_targets)
        return num_known - 1  # one token at least is computed, to sample after

    def targets_of(self, start: int, stop: int) -> np.ndarray | None:
        """The score targets of the tokens at start .. stop-1, None if these have none: int32 [m]."""
        if self.score_targets is None:
            return None
        first = self.prompt_len - len(self.score_targets)
        return self.score_targets[max(0, start - first) : stop - first] if stop > first else None

    def store_scores(self, stop: int, found: TargetScores) -> None:
        """Takes the scores of targets whose last one follows the token at stop-1."""
        if self.scores is not None:
            end = len(self.scores.logprobs) - (self.prompt_len - stop)
            self.scores.logprobs[end - len(found.logprobs) : end] = found.logprobs
            self.scores.greedy[end - len(found.greedy) : end] = found.greedy

    def num_pooled_of(self, start: int, stop: int) -> int:
        """How many of the tokens at start .. stop-1 are pooled: the last of them, all or none."""
        if self.pooling is None:
            return 0
        return stop - start if self.pooling.needs_all_states else int(stop == self.prompt_len)

    def store_pooled(self, start: int, found: np.ndarray) -> None:
        """Takes the sum over the pooled tokens of a chunk that begins at `start`. Chunks come in order; a request that
        was preempted begins again at 0, unless it needs its last token alone.
        """
        if self.pooled is None or start == 0:
            self.pooled = np.zeros(found.shape, np.float64)
        self.pooled += found

    def end_pooling(self) -> bool:
        """All chunks have come: makes what they sum up to a mean. Returns whether its numbers are finite."""
        if self.pooling is None or self.pooled is None:
            return True
        count = self.prompt_len if self.pooling.needs_all_states else 1
        self.pooled = (self.pooled / count).astype(np.float32)
        return bool(np.isfinite(self.pooled).all())

    def known_token_ids(self) -> np.ndarray:
        """The prompt and, for a request without a slot, all that it has generated: int32 [n], not to be written."""
        if not self.output_token_ids:
            return self.prompt_token_ids
        return np.concatenate([self.prompt_token_ids, np.array(self.output_token_ids, np.int32)])

    def stop_reason_of(self, token_id: int) -> int | None:
        """What `stop_reason` says when this token stopped the request: None for an end-of-sequence token."""
        return None if token_id in self.eos_token_ids else token_id

    def _checked_targets(self, targets: Sequence[int] | np.ndarray | None) -> np.ndarray | None:
        if targets is None:
            return None
        array = _as_token_array(self.request_id, targets)
        if len(array) > self.prompt_len:
            raise InvalidPromptError(
                f"Request {self.request_id!r} has {len(array)} score targets for a prompt of {self.prompt_len} tokens; "
                f"each must follow one."
            )
        return array


def _checked_priority(priority: object) -> int:
    if not is_integer(priority) or not -(2**63) <= priority < 2**63:
        raise InvalidParameterError(f"priority must be a 64-bit integer, got {shown(priority)}.")
    return int(priority)


def checked_salt(salt: object) -> str | None:
    """A cache salt as plain text, or None. Raises InvalidParameterError for anything else."""
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        raise InvalidParameterError(f"cache_salt must be a non-empty string or None, got {shown(salt)}.")
    try:
        salt.encode()
    except UnicodeEncodeError:
        raise InvalidParameterError(f"cache_salt holds a lone surrogate: {shown(salt)}.") from None
    return str.__str__(salt)


def _variant_of(sampling: SamplingParams) -> SamplingVariant:
    """The least sampling program that does what is asked."""
    if sampling.needs_full_variant:
        return SamplingVariant.FULL
    if sampling.truncates:
        return SamplingVariant.TRUNCATED
    return SamplingVariant.GREEDY if sampling.greedy else SamplingVariant.SAMPLING


def _as_token_array(request_id: str, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    try:
        array = np.asarray(token_ids)
    except ValueError:
        array = np.zeros((0, 0), np.object_)
    if array.size == 0 and array.ndim == 1:
        raise InvalidPromptError(f"The prompt of request {request_id!r} is empty; give at least one token.")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidPromptError(f"The prompt of request {request_id!r} must be a list of integer token ids.")
    if array.min() < 0 or array.max() >= _TOKEN_LIMIT:
        wrong = array[(array < 0) | (array >= _TOKEN_LIMIT)][0]
        raise InvalidPromptError(f"The prompt of request {request_id!r} holds {wrong}, which is no token id.")
    return array.astype(np.int32)
