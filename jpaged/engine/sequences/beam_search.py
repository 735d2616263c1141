"""Beam search: which beams go on, with which tokens, and which sequences are finished.

    slot 0   The -- dog ---+-- runs     candidates of each beam: its best tokens, scored on the device
    slot 1     \\-- cat --+ \\-- barks    of all of them together, the best `beam_width` that do not end go on;
    slot 2      \\- ox --x \\--- sleeps   a beam without such a candidate is dropped (x), and its slot goes to another

A step of a search: its beams compute their last tokens; the device returns for each the most likely next tokens with
their log-probabilities; `rankings` sorts those of all searches at once, and `BeamSearch.advance` picks from them; the
block tables of the beams are forked and freed accordingly; and the next plan tells the device which slot goes on from
which, and with which token.

The algorithm is that of transformers (`_beam_search` of `generation/utils.py`, version 5): of the candidates that end,
those among the best `beam_width` of all are finished sequences; the best `beam_width` of these are kept; the search
ends by `early_stopping`, or when the live beams have reached the greatest length.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.engine.interface import Logprobs
from jpaged.engine.sequences.group import SequenceGroup
from jpaged.engine.sequences.request import Request, RequestStatus


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence.

    token_ids: generated tokens, the stop token included. stopped: it ended with a stop token.
    cumulative_logprob: the sum of their log-probabilities. score: that, divided by the length penalty.
    """

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    stopped: bool


class Choice(NamedTuple):
    """How the beams go on. parents, token_ids: of each beam; beam i goes on from beam parents[i] with its token.

    A beam that goes on at all goes on from itself once, so only beams that are dropped get another parent.
    """

    parents: list[int]
    token_ids: list[int]


class Ranking(NamedTuple):
    """The best candidates of all beams of a search together, best first.

    parents: their beams. token_ids: their tokens. totals: float32 values; their cumulative log-probabilities.
    """

    parents: list[int]
    token_ids: list[int]
    totals: list[float]


class BeamSearch:
    """The beams' scores and the finished sequences of one search; it knows nothing of slots and blocks.

    Args:
        params: how to search.
        max_tokens: most tokens to generate; what `params` asks, or less where the context ends.
        stop_token_ids: tokens that end a sequence.

    Attributes:
        num_live: beams that have tokens to compute: one until the first choice, as all would be equal.
        scores: float32 values, one for each live beam; cumulative log-probabilities.
        hypotheses: finished sequences, best first, at most beam_width.
    """

    def __init__(self, params: BeamSearchParams, max_tokens: int, stop_token_ids: tuple[int, ...]) -> None:
        self.params = params
        self.num_candidates = params.beam_width + len(stop_token_ids)
        self.num_live = 1
        self.scores = [0.0]
        self.hypotheses: list[Hypothesis] = []
        self._max_tokens = max_tokens
        self._stop_token_ids = frozenset(stop_token_ids)
        self._early_stopping = True if params.beam_width == 1 else params.early_stopping

    @property
    def num_ranked(self) -> int:
        """How many of its candidates may matter: enough that `beam_width` do not end, whichever end."""
        return self.params.beam_width + self.num_live * len(self._stop_token_ids)

    def advance(self, ranking: Ranking, num_generated: int, history: Callable[[int], list[int]]) -> Choice | None:
        """Picks among the candidates for the next token.

        Args:
            ranking: the best `num_ranked` of them (`rank`).
            num_generated: tokens that each beam has generated, without the candidates.
            history: gives the tokens that a beam has generated.
        Returns:
            How the beams go on; None when the search is over, and `hypotheses` are its result.
        """
        # Lists, not arrays: of a few numbers, they cost a third.
        width, length = self.params.beam_width, num_generated + 1
        parents, tokens, totals = ranking
        stops = [token in self._stop_token_ids for token in tokens]
        is_last = length >= self._max_tokens
        for i in range(width):
            if stops[i] or is_last:
                self._finish([*history(parents[i]), tokens[i]], totals[i], stops[i])
        going_on = [] if is_last else [i for i, stop in enumerate(stops) if not stop][:width]
        if not going_on or self._is_over(totals[going_on[0]], length):
            return None
        self.num_live = width
        best = Ranking([parents[i] for i in going_on], [tokens[i] for i in going_on], [totals[i] for i in going_on])
        return self._assign(best)

    def _finish(self, token_ids: list[int], total: float, stopped: bool) -> None:
        score = float(np.float32(total) / np.float32(len(token_ids) ** self.params.length_penalty))
        self.hypotheses.append(Hypothesis(token_ids, total, score, stopped))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.params.beam_width :]

    def _is_over(self, best_total: float, length: int) -> bool:
        """Whether live beams cannot improve on what is finished, by the rule that `early_stopping` names."""
        if len(self.hypotheses) < self.params.beam_width:
            return False
        if self._early_stopping is True:
            return True
        penalty = self.params.length_penalty
        if self._early_stopping == "never" and penalty > 0:
            length = self._max_tokens
        return bool(np.float32(best_total) / np.float32(length**penalty) <= np.float32(self.hypotheses[-1].score))

    def _assign(self, best: Ranking) -> Choice:
        """Lets each parent's first child take its place, and the others the places of those that have none."""
        parents, tokens, totals = best
        places: list[int] = []
        firsts: set[int] = set()
        vacant = iter(sorted(set(range(len(parents))).difference(parents)))
        for parent in parents:
            places.append(next(vacant) if parent in firsts else parent)
            firsts.add(parent)
        children = sorted(range(len(parents)), key=places.__getitem__)
        self.scores = [totals[child] for child in children]
        return Choice([parents[child] for child in children], [tokens[child] for child in children])


def rank(searches: Sequence[BeamSearch], token_ids: np.ndarray, logprobs: np.ndarray) -> Iterator[Ranking]:
    """Ranks the candidates of searches, all at once.

    searches: with equally many live beams, candidates of each, and candidates that may matter.
    token_ids, logprobs: int32, float32 [searches, num_live, num_candidates]; of each beam the most likely next tokens.
        More are not needed: the best beam_width that do not end are among these, and so is whatever can finish.
    """
    scores = np.array([search.scores for search in searches], np.float32)
    totals = (logprobs + scores[:, :, None]).reshape(len(searches), -1)
    order = np.argsort(-totals, axis=1, kind="stable")[:, : searches[0].num_ranked]
    best_ids = np.take_along_axis(token_ids.reshape(len(searches), -1), order, axis=1)
    best_totals = np.take_along_axis(totals, order, axis=1)
    parents = order // token_ids.shape[2]
    return map(Ranking, parents.tolist(), best_ids.tolist(), best_totals.tolist())


class BeamGroup(SequenceGroup):
    """The beams of a search, one a member; the members' outputs are its hypotheses in the end.

    Unlike samples, all its beams must run for any to go on: it waits, comes back and is preempted as one.

    Attributes:
        is_ready: a choice has been made, and its tokens are not planned yet.
        num_due: its beams whose last known token is computed, in flight or about to run: each may need a row at any
            time, so it has its token of every step's budget, in which it runs or not.
        pending_starts: beams that are to take their slots on the device with the next plan.
        pending_moves: `StepPlan.beams` for the next plan.
    """

    runs_together = True
    forks_itself = True
    device_tests_stop_tokens = False

    def __init__(self, members: list[Request]) -> None:
        super().__init__(members)
        self.search = self._new_search()
        self.rest()

    def restart(self) -> None:
        """Begins the search anew, which finds the same: nothing in it is random."""
        super().restart()
        self.search = self._new_search()

    def _new_search(self) -> BeamSearch:
        leader = self.leader
        if leader.beam is None:
            raise ValueError(f"request {leader.request_id!r} is not for a beam search")
        return BeamSearch(leader.beam, leader.max_len - leader.prompt_len, leader.stop_token_ids)

    def rest(self) -> None:
        """Forgets what only running beams have; they have lost their slots, or never had any."""
        self.is_ready = False
        self.num_due = 0
        self.pending_starts: list[Request] = []
        self.pending_moves: list[tuple[int, int, int]] = []
        self._candidates: dict[int, tuple[Logprobs, int]] = {}

    @property
    def can_be_stored(self) -> bool:
        """Not while its beams compute their tokens again: those behind the leader count the prompt as computed before
        it is, and those that are done wait for the others' candidates with nothing left to compute.
        """
        return self.is_ready or not self.forked

    def waiting(self) -> Iterator[Request]:
        """The leader, who stands in the queue for all."""
        if self.leader.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            yield self.leader

    def take_candidates(self, beam: int, found: Logprobs, row: int) -> bool:
        """Keeps what the device found for a beam. Returns whether those of all live beams are there."""
        self._candidates[beam] = found, row
        return len(self._candidates) == self.search.num_live

    def pop_candidates(self) -> list[tuple[Logprobs, int]]:
        """What was found for the live beams: for each a step's log-probabilities and its row among them."""
        found = [self._candidates[beam] for beam in range(self.search.num_live)]
        self._candidates.clear()
        return found


def rankings(groups: Sequence[BeamGroup]) -> list[Ranking]:
    """Ranks what was found for the live beams of searches, which then is forgotten."""
    alike: dict[tuple[int, int, int], list[int]] = {}
    for index, group in enumerate(groups):
        search = group.search
        alike.setdefault((search.num_live, search.num_candidates, search.num_ranked), []).append(index)
    result: dict[int, Ranking] = {}
    for (num_live, count, _), indices in alike.items():
        found = [candidates for index in indices for candidates in groups[index].pop_candidates()]
        shape = (len(indices), num_live, count)
        token_ids = np.concatenate([step.top_ids[row, 0, :count] for step, row in found]).reshape(shape)
        logprobs = np.concatenate([step.top_logprobs[row, 0, :count] for step, row in found]).reshape(shape)
        result.update(zip(indices, rank([groups[index].search for index in indices], token_ids, logprobs), strict=True))
    return [result[index] for index in range(len(groups))]
