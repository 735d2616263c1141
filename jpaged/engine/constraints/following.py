"""What follows grammars for the engine: where that is asked, and what it answers.

put(job)     what some slots' sequences sampled
take_all()   results: where their guides stand, as soon as that is known; the masks of those that need one, later
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np

from jpaged.api.structured_outputs import StructuredOutputsParams


class Table(Protocol):
    """A constraint as a finite automaton over tokens; `jpaged.text.token_tables` makes them.

    masks: uint32 [masks, words].
    mask_of: int32 [states]; the mask of each state.
    classes: int32 [vocabulary]; tokens that lead to the same state from every state are of one class.
    next: int16 [states, classes]; -1 where a token may not follow, or ends.
    start: the state where a sequence begins, before any forced tokens.
    """

    @property
    def masks(self) -> np.ndarray: ...
    @property
    def mask_of(self) -> np.ndarray: ...
    @property
    def classes(self) -> np.ndarray: ...
    @property
    def next(self) -> np.ndarray: ...
    @property
    def start(self) -> int: ...
    def follow(self, state: int, token_ids: Sequence[int]) -> int:
        """The state after some tokens; -1 if one of them may not follow."""
        ...


class Grammar(Protocol):
    """A compiled constraint: first come its forced tokens, then one that its mask, uint32 [words], allows.

    table: the same as an automaton, in which each forced token is the only one allowed in its state; None where there
        is none, or none yet.
    """

    forced: tuple[int, ...]
    mask: np.ndarray

    @property
    def table(self) -> Table | None: ...

    def begin(self, ignore_eos: bool, guesses: bool) -> Any:
        """The guide of a new sequence: it stands behind the forced tokens. ignore_eos: as in `SamplingParams`. guesses:
        whether the sequence's rows may do without masks.
        """
        ...


class Place(Protocol):
    """Where a guide stands.

    forced: tokens that must follow. needs_mask: a mask is made; what follows the forced tokens must keep to it.
    Otherwise the row may guess.
    failure: why it cannot go on, or empty.
    """

    @property
    def forced(self) -> tuple[int, ...]: ...
    @property
    def needs_mask(self) -> bool: ...
    @property
    def failure(self) -> str: ...


class Places(Protocol):
    """Where guides stand, by array: most have neither forced tokens nor a failure.

    needs_mask: bool [guides].
    num_refused: int [guides]; of what was guessed, the tokens before the first one that may follow, behind which the
        guide stands.
    is_refused: bool [guides]; none of them may, and the guide stands before them still. Without a mask the row guesses
        again, and none of these tokens.
    forced, failures: as of `Place`, of those that have any, by index.
    """

    @property
    def needs_mask(self) -> np.ndarray: ...
    @property
    def num_refused(self) -> np.ndarray: ...
    @property
    def is_refused(self) -> np.ndarray: ...
    @property
    def forced(self) -> dict[int, tuple[int, ...]]: ...
    @property
    def failures(self) -> dict[int, str]: ...


class Grammars(Protocol):
    """Compiles constraints and follows them; `jpaged.text.grammar_compiler` implements it.

    num_words: uint32 words of a mask.
    """

    num_words: int

    def compile(self, params: StructuredOutputsParams) -> "Future[Any]":
        """Compiles in a thread, unless it is known already. The future brings a Grammar, or raises JPagedError."""
        ...

    def follower(self) -> "Follower":
        """What follows grammars for an engine."""
        ...

    def make_masks(self, guides: Sequence[Any]) -> Sequence["np.ndarray | str"]:
        """What may follow where guides stand. Waits.

        Returns: for each guide a mask as `StepPlan.masks` has them, or why it cannot go on.
        """
        ...

    def resume(self, guide: Any, token_ids: Sequence[int]) -> Place:
        """Moves a guide past many tokens at once, forced ones included. Forced tokens that are not among them come
        back. Waits.
        """
        ...

    def close(self) -> None:
        """Nothing will be asked for any more."""
        ...


class Job(NamedTuple):
    """What these slots, int64 [n], sampled.

    tokens: int32 [slots, most]; of each the one that was sampled under its mask, first; or, where it was guessed, some
        in order of preference, of which the first that may follow counts. NO_TOKEN behind the last.
    guessed: bool [n].
    last: int64 [n]; a bit for each of a slot's tokens that ends its sequence, so that nothing need be known of what
        follows.
    """

    slots: np.ndarray
    guides: list[Any]
    tokens: np.ndarray
    guessed: np.ndarray
    last: np.ndarray


class Result(Protocol):
    """Of some slots, int64 [n], where their guides stand, or their masks (or why there is none). Equal masks are often
    one array.
    """

    @property
    def slots(self) -> np.ndarray: ...
    @property
    def places(self) -> Places | None: ...
    @property
    def masks(self) -> Sequence["np.ndarray | str"] | None: ...


class Follower(Protocol):
    """Takes jobs; `jpaged.text.grammar_follower` implements it. One thread calls it; any may call `wake`."""

    def put(self, job: Job) -> None:
        """Hands over a job."""
        ...

    def wake(self) -> None:
        """Has `has_news` say yes, and ends a `wait`."""
        ...

    @property
    def has_news(self) -> bool:
        """Whether `take_all` may have something, or `wake` was called since."""
        ...

    def wait(self, seconds: float) -> None:
        """Until there are news, at most so long."""
        ...

    def take_all(self, waits: bool = False) -> Sequence[Result]:
        """What has come. Raises what following the grammars raised. waits: for something."""
        ...

    def close(self) -> None:
        """Nothing will be asked for any more."""
        ...
