"""What follows grammars for the engine, and the thread that asks it.

put(job)     tokens of some slots' sequences
take()       Followed: where their guides stand, as soon as that is known
             MasksMade: the masks of those that need one, later
"""

import queue
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np

from jpaged.api.structured_outputs import StructuredOutputsParams


class Grammar(Protocol):
    """A compiled constraint: first come its forced tokens, then one that its mask, uint32 [words], allows."""

    forced: tuple[int, ...]
    mask: np.ndarray

    def begin(self, ignore_eos: bool, guesses: bool) -> Any:
        """The guide of a new sequence: it stands behind the forced tokens. ignore_eos: as in `SamplingParams`. guesses:
        whether the sequence's rows may do without masks.
        """
        ...


class Place(Protocol):
    """Where a guide stands.

    forced: tokens that must follow. needs_mask: a mask is to be asked for; what follows the forced tokens must keep to
        it. Otherwise the row may guess.
    is_refused: the token was guessed and must not follow; the guide stands before it still. Without a mask the row
        guesses again, and not this token.
    failure: why it cannot go on, or empty.
    waits: whether a mask is to be made for it.
    """

    @property
    def forced(self) -> tuple[int, ...]: ...
    @property
    def needs_mask(self) -> bool: ...
    @property
    def is_refused(self) -> bool: ...
    @property
    def failure(self) -> str: ...
    @property
    def waits(self) -> bool: ...


class Grammars(Protocol):
    """Compiles constraints and follows them; `jpaged.text.grammar_compiler` implements it.

    num_words: uint32 words of a mask.
    """

    num_words: int

    def compile(self, params: StructuredOutputsParams) -> "Future[Any]":
        """Compiles in a thread, unless it is known already. The future brings a Grammar, or raises JPagedError."""
        ...

    def advance(
        self, guides: Sequence[Any], token_ids: Sequence[int], guessed: Sequence[bool], last: Sequence[bool]
    ) -> Sequence[Place]:
        """Moves each guide past a token, and past what this forces. No two calls at a time have a guide in common.

        guessed: of which tokens it is to be said first whether they may follow. last: which of those end their
            sequences, so that nothing need be known of what follows.
        """
        ...

    def make_masks(self, guides: Sequence[Any], before: Sequence[np.ndarray | None]) -> Sequence["np.ndarray | str"]:
        """What may follow where guides stand.

        before: masks as this returns them, or None; the same array is returned where the mask is equal.

        Returns: for each guide a mask as `StepPlan.masks` has them, or why it cannot go on.
        """
        ...

    def resume(self, guide: Any, token_ids: Sequence[int]) -> Place:
        """Moves a guide past many tokens at once, forced ones included. Forced tokens that are not among them come
        back.
        """
        ...

    def close(self) -> None:
        """Nothing will be asked for any more."""
        ...


class Job(NamedTuple):
    """A token for each of these slots. guessed, last: as of `Grammars.advance`. before: the last mask of each."""

    slots: list[int]
    guides: list[Any]
    token_ids: list[int]
    guessed: list[bool]
    last: list[bool]
    before: list[np.ndarray | None]


class Followed(NamedTuple):
    """Where the guides of slots stand."""

    slots: list[int]
    places: Sequence[Place]


class MasksMade(NamedTuple):
    """Masks, or why there is none; the array of before where it is equal."""

    slots: list[int]
    masks: Sequence["np.ndarray | str"]


class MaskMaker:
    """A thread that takes jobs in their order. It starts with the first one, and ends with this object.

    news: set when something has come.
    """

    def __init__(self, grammars: Grammars) -> None:
        self.news = threading.Event()
        self._grammars = grammars
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Followed | MasksMade | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> None:
        """Hands over a job."""
        if self._thread is None:
            arguments = (self._grammars, self._jobs, self._results, self.news)
            self._thread = threading.Thread(target=_make, args=arguments, name="jpaged-masks", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        self._jobs.put(job)

    @property
    def has_result(self) -> bool:
        """Whether `take` need not wait."""
        return not self._results.empty()

    def take(self) -> Followed | MasksMade:
        """The next result; raises what following the grammars raised."""
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None


def _make(
    grammars: Grammars,
    jobs: "queue.SimpleQueue[Job | None]",
    results: "queue.SimpleQueue[Followed | MasksMade | BaseException]",
    news: threading.Event,
) -> None:
    """In a thread, which knows nothing of who made it: until there is no job but None."""
    while (job := jobs.get()) is not None:
        try:
            places = grammars.advance(job.guides, job.token_ids, job.guessed, job.last)
            results.put(Followed(job.slots, places))
            waiting = [i for i, place in enumerate(places) if place.waits]
            if len(waiting) < len(places):
                news.set()
            if waiting:
                masks = grammars.make_masks([job.guides[i] for i in waiting], [job.before[i] for i in waiting])
                results.put(MasksMade([job.slots[i] for i in waiting], masks))
        except BaseException as error:  # raised again where the results are read
            results.put(error)
        news.set()
