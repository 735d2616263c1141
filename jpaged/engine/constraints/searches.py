"""The beam searches that have slots: whose turn it is, what their results say, what the next plan must tell the device.
They are a kind of rows that wait for their last result.

plan i      beams of all searches that are ready      results awaited: no search is planned
plan i+1    (other sequences)
update i    candidates -> choices; tables forked and freed; searches are ready
plan i+3    moves and starts of the beams, then their rows
"""

import time
from collections.abc import Sequence

import numpy as np

from jpaged.api.errors import EngineDeadError
from jpaged.engine.constraints.dependent_rows import DependentRows, Ended, Taken
from jpaged.engine.interface import SamplingVariant, StepResult
from jpaged.engine.kv.block_manager import BlockManager
from jpaged.engine.plan_in_progress import PlanInProgress, slot_start
from jpaged.engine.sequences.beam_search import BeamGroup, Ranking, rankings
from jpaged.engine.sequences.request import Group, Request
from jpaged.engine.sequences.slots import Slots


class Searches(DependentRows):
    """Keeps the block tables and tokens of beams as their searches choose."""

    def __init__(self, number: int, slots: Slots, blocks: BlockManager) -> None:
        super().__init__(number, slots, blocks)
        self._groups: list[BeamGroup] = []
        self._step_in_flight: int | None = None

    def group_of(self, request: Request) -> BeamGroup | None:
        """The group of a request for a beam search."""
        return None if request.beam is None else BeamGroup.form(request)

    def admitted(self, group: Group) -> None:
        """A search has got its slots."""
        self._groups.append(_search(group))

    def begins(self, group: Group, slots: Sequence[int]) -> None:
        """The beams in these slots wait for candidates from here; those to be forked from them need rows after that."""
        siblings = [sibling.slot for sibling in group.siblings_to_fork]
        super().begins(group, [*slots, *siblings])
        _search(group).num_due += len(slots) + len(siblings)

    def left(self, request: Request) -> None:
        """A beam loses its slot, and its search with it."""
        group = _search(request.group)
        if group in self._groups:
            self._groups.remove(group)
            group.rest()

    @property
    def num_due(self) -> int:
        """A token for each beam that has computed what it knows, or is to be forked from one that has."""
        return sum(group.num_due for group in self._groups)

    def rows(self) -> np.ndarray:
        """The slots of the beams whose turn it is. All searches move in the same step, or steps would be half empty."""
        if self._step_in_flight is not None:
            return np.zeros((0,), np.int64)
        ready = [member.slot for group in self._groups if group.is_ready for member in group.members]
        return np.array(ready, np.int64)

    def planned(self, step_id: int, rows: np.ndarray) -> None:
        """The searches that are ready run in this step."""
        self._step_in_flight = step_id
        for group in self._groups:
            group.is_ready = False

    def contribute(self, plan: PlanInProgress) -> None:
        """Adds what was chosen since the last plan: beams that start, and which beam goes on from which."""
        no_blocks = np.zeros((len(self._slots.windows), 0), np.int32)
        for group in self._groups:
            for beam in group.pending_starts:
                plan.starts.append(slot_start(beam, self._slots.known(beam.slot).copy(), no_blocks, 0))
            plan.beams += group.pending_moves
            group.pending_starts, group.pending_moves = [], []

    def variant(self, others: SamplingVariant) -> SamplingVariant:
        """A program that returns the most likely tokens of each row."""
        return SamplingVariant.BEAM if others == SamplingVariant.GREEDY else SamplingVariant.FULL

    def take(self, step_id: int, slots: np.ndarray, rows: np.ndarray, result: StepResult) -> Taken:
        """Hands the candidates to their searches, and lets those that have all they need choose.

        Raises:
            EngineDeadError: a beam came back without candidates.
        """
        if step_id == self._step_in_flight:
            self._step_in_flight = None
        complete: list[BeamGroup] = []
        requests, found = self._slots.requests, result.logprobs
        for row, slot in zip(rows.tolist(), slots[rows].tolist(), strict=True):
            request = requests[slot]
            if request is None or found is None:
                raise EngineDeadError(f"Slot {slot} ran as a beam's, but is free, or came back without candidates.")
            group = _search(request.group)
            if group.take_candidates(request.index, found, row):
                complete.append(group)
        known = self._slots.num_known[[group.leader.slot for group in complete]].tolist()
        going_on: list[BeamGroup] = []
        ended: list[Ended] = []
        for group, ranking, num_known in zip(complete, rankings(complete), known, strict=True):
            if self._choose(group, ranking, num_known - group.leader.prompt_len):
                going_on.append(group)
            else:
                ended += _ended(group)
        moves = np.array([move for group in going_on for move in group.pending_moves], np.intp).reshape(-1, 3)
        self._slots.append_tokens(moves[:, 0], moves[:, 2])
        return Taken(rows[:0], ended)

    def _choose(self, group: BeamGroup, ranking: Ranking, num_generated: int) -> bool:
        """Chooses how the beams go on, and forks and frees their block tables accordingly; `pending_moves` has their
        new tokens. False: the search is over.
        """
        slots, members, prompt_len = self._slots, group.members, group.leader.prompt_len
        choice = group.search.advance(
            ranking, num_generated, lambda beam: slots.known(members[beam].slot)[prompt_len:].tolist()
        )
        if choice is None:
            return False
        if not group.forked:
            group.forked = True
            group.pending_starts = members[1:]
        own_slots = [member.slot for member in members]
        children: dict[int, list[int]] = {}
        for beam, parent in enumerate(choice.parents):
            if parent != beam:
                self._blocks.free(own_slots[beam])
                children.setdefault(own_slots[parent], []).append(own_slots[beam])
                members[beam].block_digests = members[parent].block_digests.copy()
                members[beam].num_registered_blocks = members[parent].num_registered_blocks
        for parent, forked in children.items():
            self._blocks.fork(parent, forked)
        parents = [own_slots[parent] for parent in choice.parents]
        group.pending_moves = list(zip(own_slots, parents, choice.token_ids, strict=True))
        group.is_ready = True
        return True


def _search(group: Group) -> BeamGroup:
    """The group of a request that `Searches.group_of` took. Raises EngineDeadError for any other."""
    if not isinstance(group, BeamGroup):
        raise EngineDeadError(f"Request {group.leader.request_id!r} is no beam search, but came to one.")
    return group


def _ended(group: BeamGroup) -> list[Ended]:
    """What a search has found: its members become its hypotheses."""
    ended = []
    for member, found in zip(group.members, group.search.hypotheses, strict=True):
        member.cumulative_logprob, member.score = found.cumulative_logprob, found.score
        member.stats.last_token_time = time.monotonic()
        stop_reason = member.stop_reason_of(found.token_ids[-1]) if found.stopped else None
        ended.append(Ended(member, found.token_ids, "stop" if found.stopped else "length", stop_reason))
    return ended
