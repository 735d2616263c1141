"""Guesses of constrained rows: tokens sampled without a mask, held back until the grammar has been asked.

A row without truncation, log-probabilities or penalties may run without its mask: it samples among all tokens, and
brings those as well that it would have sampled if the first, the second and so on had not been allowed
(`StepResult.ranked`). A token's noise depends on its seed and position alone, so the first of them that is allowed is
the one that the mask would have led to. The grammar is asked only which that is: that takes microseconds, where a mask
takes up to milliseconds. Until it has said so the tokens are held back: nobody has seen them.

    step i        {"name": "Ada ?,L..  sampled among all tokens; held back
    allowed                            it is stored and reported, and ends the sequence if it was to
    a later one                        likewise; it becomes the slot's last in place of the first
    none                               the slot goes back by a token, with the mask for this place, or without one:
    step i + n    {"name": "Ada L      the same position again; a second guess, which leaves out the first one's tokens

A slot that lost its last token computes the token before it again, into the place where that stands already. Layers
with recurrent states cannot go back, so models with them do not guess. `jpaged/text/guides.py` decides where a guess is
worth it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jpaged.engine.constraints.constrained_sequence import ConstrainedSequence
from jpaged.engine.constraints.dependent_rows import Confirmed
from jpaged.engine.constraints.following import Place
from jpaged.engine.constraints.run_ahead import RunAhead
from jpaged.engine.constraints.sent_masks import SentMasks
from jpaged.engine.interface import NO_TOKEN, FinishCode
from jpaged.engine.sequences.slots import Slots


class HeldGuess(NamedTuple):
    """What was guessed, until it is known which of it is allowed. tokens: best first. code: the `FinishCode` of the
    first. is_full: whether each of them ends the sequence by its length.
    """

    tokens: list[int]
    code: int
    is_full: bool


class AllowedGuess(NamedTuple):
    """A guess that is allowed. ends_here: it ends the sequence, which the device does not know."""

    token: int
    code: int
    ends_here: bool


class HeldGuesses:
    """By slot, the guesses that are checked, which its length counts, and those that are allowed but not stored yet.

    device, ahead: learn of slots whose last token is another one than they have seen.
    """

    def __init__(self, slots: Slots, device: SentMasks, ahead: RunAhead) -> None:
        self._slots, self._device, self._ahead = slots, device, ahead
        self._checked: dict[int, HeldGuess] = {}
        self._allowed: dict[int, AllowedGuess] = {}

    def __len__(self) -> int:
        return len(self._checked)

    @property
    def has_allowed(self) -> bool:
        """Whether `collect` would find something."""
        return bool(self._allowed)

    def hold(
        self, slots: Sequence[int], sequences: Sequence[ConstrainedSequence], tokens: np.ndarray, codes: Sequence[int]
    ) -> list[int]:
        """Holds back what these slots have guessed. Returns `Job.last` of each.

        tokens: int32 [slots, guesses], the likeliest first. codes: of the first ones.
        """
        lengths = (self._slots.num_known[slots] + 1).tolist() if slots else []
        last = []
        for slot, sequence, of_row, code, length in zip(slots, sequences, tokens.tolist(), codes, lengths, strict=True):
            is_full = length >= sequence.max_len
            self._checked[slot] = HeldGuess(of_row, code, is_full)
            last.append(-1 if is_full else _places_of(sequence.stops, of_row))
        return last

    def answered(self, slot: int, sequence: ConstrainedSequence, place: Place) -> list[int] | None:
        """Takes in what the grammar says of a slot's guess, if it has one. Returns the tokens that it refuses: all that
        were guessed; None if it allows one.
        """
        held = self._checked.pop(slot, None)
        if held is None:
            return None
        if place.failure:
            self._slots.take_back(slot)
            return None
        if place.is_refused:
            self._slots.take_back(slot)
            self._device.refused.add(slot)
            self._ahead.changed(slot)
            return [token for token in held.tokens if token != NO_TOKEN]
        self._allowed[slot] = self._allow(slot, sequence, held, place.num_refused)
        return None

    def _allow(self, slot: int, sequence: ConstrainedSequence, held: HeldGuess, num_refused: int) -> AllowedGuess:
        """The token that counts. What the device knows of the slot's end is of the first one."""
        token = held.tokens[num_refused]
        if not num_refused:
            return AllowedGuess(token, held.code, False)
        if token in sequence.stops:
            return AllowedGuess(token, FinishCode.STOP, held.code == FinishCode.RUNNING)
        if held.is_full:
            return AllowedGuess(token, FinishCode.LENGTH, False)
        self._device.replaced.add(slot)
        self._ahead.changed(slot)
        return AllowedGuess(token, FinishCode.RUNNING, False)

    def take_back(self, slot: int) -> int | None:
        """The token of a guess that is allowed but not stored. The slot loses it."""
        allowed = self._allowed.pop(slot, None)
        if allowed is None:
            return None
        self._slots.take_back(slot)
        return allowed.token

    def collect(self, by_slot: Sequence[ConstrainedSequence | None]) -> Confirmed | None:
        """The guesses that are allowed, to be stored now, with what their sequences have not reported; or None."""
        if not self._allowed:
            return None
        allowed, self._allowed = self._allowed, {}
        before: dict[int, list[int]] = {}
        for slot in allowed:
            sequence = by_slot[slot]
            if sequence is not None and sequence.unreported:
                before[slot], sequence.unreported = sequence.unreported, []
        tokens, codes, ends_here = zip(*allowed.values(), strict=True)
        ended = [slot for slot, ends in zip(allowed, ends_here, strict=True) if ends] if any(ends_here) else []
        return Confirmed(
            np.array(list(allowed), np.int64), np.array(tokens, np.int32), np.array(codes, np.uint8), before, ended
        )


def _places_of(stops: frozenset[int], tokens: list[int]) -> int:
    """A bit for each of the tokens that is one of the stops."""
    if stops.isdisjoint(tokens):
        return 0
    return sum(1 << i for i, token in enumerate(tokens) if token in stops)
