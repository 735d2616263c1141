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

import numpy as np

from jpaged.engine.constraints.constrained_sequence import ConstrainedSequence
from jpaged.engine.constraints.dependent_rows import Confirmed
from jpaged.engine.constraints.following import Places
from jpaged.engine.constraints.run_ahead import RunAhead
from jpaged.engine.constraints.sent_masks import SentMasks
from jpaged.engine.interface import NO_TOKEN, NUM_RANKED, FinishCode
from jpaged.engine.sequences.slots import Slots

_RUNNING, _STOP, _LENGTH = int(FinishCode.RUNNING), int(FinishCode.STOP), int(FinishCode.LENGTH)


class HeldGuesses:
    """By slot, the guesses that are checked, which its length counts, and those that are allowed but not stored yet.

    device, ahead: learn of slots whose last token is another one than they have seen.
    """

    def __init__(self, slots: Slots, device: SentMasks, ahead: RunAhead) -> None:
        n = len(slots.requests)
        self._slots, self._device, self._ahead = slots, device, ahead
        self._is_checked, self._is_allowed = np.zeros((n,), np.bool_), np.zeros((n,), np.bool_)
        self._tokens = np.full((n, NUM_RANKED), NO_TOKEN, np.int32)  # best first
        self._codes = np.zeros((n,), np.uint8)  # that came with the first of them; then with the allowed one
        self._is_full = np.zeros((n,), np.bool_)  # each of them ends the sequence by its length
        self._stops = np.zeros((n,), np.int64)  # a bit for each of them that is a stop token
        self._allowed = np.zeros((n,), np.int32)
        self._ends_here = np.zeros((n,), np.bool_)  # the allowed one ends the sequence, which the device does not know
        self._order: list[np.ndarray] = []  # slots of allowed guesses, as they came

    def __len__(self) -> int:
        return int(np.count_nonzero(self._is_checked))

    @property
    def has_allowed(self) -> bool:
        """Whether `collect` would find something."""
        return bool(self._order)

    def hold(
        self, slots: np.ndarray, sequences: Sequence[ConstrainedSequence], tokens: np.ndarray, codes: np.ndarray
    ) -> np.ndarray:
        """Holds back what these slots have guessed. Returns `Job.last` of each.

        tokens: int32 [slots, guesses], the likeliest first. codes: of the first ones.
        """
        is_full = self._slots.num_known[slots] >= self._slots.end[slots]
        stops = [_places_of(one.stops, of_row) for one, of_row in zip(sequences, tokens.tolist(), strict=True)]
        self._is_checked[slots] = True
        self._tokens[slots] = NO_TOKEN
        self._tokens[slots, : tokens.shape[1]] = tokens
        self._codes[slots], self._is_full[slots], self._stops[slots] = codes, is_full, stops
        return np.where(is_full, -1, self._stops[slots])

    def answered(self, slots: np.ndarray, places: Places) -> None:
        """Takes in what the grammars say of the guesses of some of these slots."""
        is_held = self._is_checked[slots]
        if not is_held.any():
            return
        self._is_checked[slots] = False
        is_lost = is_held & places.is_refused
        refused = slots[is_lost]
        self._device.refused[refused] = True
        for i in places.failures:
            is_lost[i] = is_held[i]
        for slot in slots[is_lost].tolist():
            self._slots.take_back(slot)
        self._ahead.changed(refused)
        is_allowed = is_held & ~is_lost
        if is_allowed.any():
            self._allow(slots[is_allowed], places.num_refused[is_allowed])

    def _allow(self, slots: np.ndarray, num_refused: np.ndarray) -> None:
        """The tokens that count. What the device knows of a slot's end is of the first one."""
        self._allowed[slots] = self._tokens[slots, num_refused]
        self._is_allowed[slots], self._ends_here[slots] = True, False
        self._order.append(slots)
        is_later = num_refused > 0
        if not is_later.any():
            return
        slots, num_refused = slots[is_later], num_refused[is_later]
        is_stop = self._stops[slots] >> num_refused & 1 != 0
        self._ends_here[slots] = is_stop & (self._codes[slots] == _RUNNING)
        ends = np.where(self._is_full[slots], _LENGTH, _RUNNING)
        self._codes[slots] = codes = np.where(is_stop, _STOP, ends)
        replaced = slots[codes == _RUNNING]
        self._device.replaced[replaced] = True
        self._ahead.changed(replaced)

    def refused_tokens(self, slot: int) -> np.ndarray:
        """The tokens that the slot guessed last, all of which were refused: int32 [n]."""
        tokens = self._tokens[slot]
        return tokens[tokens != NO_TOKEN]

    def take_back(self, slot: int) -> int | None:
        """The token of a guess that is allowed but not stored. The slot loses it."""
        if not self._is_allowed[slot]:
            return None
        self._is_allowed[slot] = False
        self._order = [left for slots in self._order if len(left := slots[slots != slot])]
        self._slots.take_back(slot)
        return int(self._allowed[slot])

    def collect(self, by_slot: Sequence[ConstrainedSequence | None], needs_care: np.ndarray) -> Confirmed | None:
        """The guesses that are allowed, to be stored now, with what their sequences have not reported; or None.

        needs_care: bool [slots]; of whose sequences some may be unreported.
        """
        if not self._order:
            return None
        slots = np.concatenate(self._order)
        self._order = []
        self._is_allowed[slots] = False
        before: dict[int, list[int]] = {}
        for slot in slots[needs_care[slots]].tolist():
            sequence = by_slot[slot]
            if sequence is not None and sequence.unreported:
                before[slot], sequence.unreported = sequence.unreported, []
        ended: list[int] = slots[self._ends_here[slots]].tolist()
        return Confirmed(slots, self._allowed[slots], self._codes[slots], before, ended)


def _places_of(stops: frozenset[int], tokens: list[int]) -> int:
    """A bit for each of the tokens that is one of the stops."""
    if stops.isdisjoint(tokens):
        return 0
    return sum(1 << i for i, token in enumerate(tokens) if token in stops)
