"""The beam searches that have slots: whose turn it is, what their results say, what the next plan must tell the device.

plan i      beams of all searches that are ready      results awaited: no search is planned
plan i+1    (other sequences)
update i    candidates -> choices; tables forked and freed; searches are ready
plan i+3    moves and starts of the beams, then their rows
"""

import numpy as np

from jpaged.api.errors import EngineDeadError
from jpaged.engine.interface import StepResult
from jpaged.engine.kv.block_manager import BlockManager
from jpaged.engine.sequences.beam_search import BeamGroup, Ranking, rankings
from jpaged.engine.sequences.request import Request
from jpaged.engine.sequences.slots import Slots


class Searches:
    """Keeps the block tables and tokens of beams as their searches choose."""

    def __init__(self, slots: Slots, blocks: BlockManager) -> None:
        self._slots = slots
        self._blocks = blocks
        self._groups: list[BeamGroup] = []
        self._step_in_flight: int | None = None

    def is_awaited(self, step_id: int) -> bool:
        """Whether a step's results may concern searches."""
        return bool(self._groups) or step_id == self._step_in_flight

    def add(self, group: BeamGroup) -> None:
        """A search has got its slots."""
        self._groups.append(group)

    def discard(self, group: BeamGroup) -> None:
        """A search loses its slots; nothing happens if it has."""
        if group in self._groups:
            self._groups.remove(group)
            group.rest()

    @property
    def num_due(self) -> int:
        """Tokens of each step's budget that are kept for beams, whether they run in it or not."""
        return sum(group.num_due for group in self._groups)

    def rows(self) -> list[int]:
        """The slots of the beams whose turn it is. All searches move in the same step, or steps would be half empty."""
        if self._step_in_flight is not None:
            return []
        return [member.slot for group in self._groups if group.is_ready for member in group.members]

    def take_rows(self, step_id: int) -> int:
        """Takes what `rows` names as planned; returns how many they are."""
        num_rows = len(self.rows())
        if num_rows:
            self._step_in_flight = step_id
            for group in self._groups:
                group.is_ready = False
        return num_rows

    def take_changes(self) -> tuple[list[Request], np.ndarray]:
        """What was chosen since the last plan: beams that start, and `StepPlan.beams`."""
        starts: list[Request] = []
        moves: list[tuple[int, int, int]] = []
        for group in self._groups:
            starts += group.pending_starts
            moves += group.pending_moves
            group.pending_starts, group.pending_moves = [], []
        return starts, np.array(moves, np.int32).reshape(-1, 3)

    def update(self, step_id: int, slots: np.ndarray, rows: np.ndarray, result: StepResult) -> list[BeamGroup]:
        """Hands what a step found for beams to their searches, and lets those that have all they need choose.

        Args:
            slots: int [rows]; by row of the step. rows: those that are beams'.
        Returns:
            The searches that are over.
        Raises:
            EngineDeadError: a row is no beam's, or came back without candidates.
        """
        if step_id == self._step_in_flight:
            self._step_in_flight = None
        complete: list[BeamGroup] = []
        requests, found = self._slots.requests, result.logprobs
        for row, slot in zip(rows.tolist(), slots[rows].tolist(), strict=True):
            request = requests[slot]
            if request is None or found is None or not isinstance(request.group, BeamGroup):
                raise EngineDeadError(f"Slot {slot} ran as a beam's, but is not, or came back without candidates.")
            if request.group.take_candidates(request.index, found, row):
                complete.append(request.group)
        known = self._slots.num_known[[group.leader.slot for group in complete]].tolist()
        going_on: list[BeamGroup] = []
        over: list[BeamGroup] = []
        for group, ranking, num_known in zip(complete, rankings(complete), known, strict=True):
            goes_on = self._choose(group, ranking, num_known - group.leader.prompt_len)
            (going_on if goes_on else over).append(group)
        moves = np.array([move for group in going_on for move in group.pending_moves], np.intp).reshape(-1, 3)
        chosen = moves[:, 0]
        self._slots.token_ids[chosen, self._slots.num_known[chosen]] = moves[:, 2]
        self._slots.num_known[chosen] += 1
        return over

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
