"""Beam search: which beams go on, with which tokens, and which sequences are finished.

    slot 0   The -- dog ---+-- runs     candidates of each beam: its best tokens, scored on the device
    slot 1     \\-- cat --+ \\-- barks    of all of them together, the best `beam_width` that do not end go on;
    slot 2      \\- ox --x \\--- sleeps   a beam without such a candidate is dropped (x), and its slot goes to another

A step of a search: its beams compute their last tokens; the device returns for each the most likely next tokens with
their log-probabilities; `BeamSearch.advance` picks from them; the block tables of the beams are forked and freed
accordingly; and the next plan tells the device which slot goes on from which, and with which token.

The algorithm is that of transformers (`_beam_search` of `generation/utils.py`, version 5): of the candidates that end,
those among the best `beam_width` of all are finished sequences; the best `beam_width` of these are kept; the search
ends by `early_stopping`, or when the live beams have reached the greatest length.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jpaged.beam_search_params import BeamSearchParams
from jpaged.engine.request import Request, RequestStatus
from jpaged.engine.sequence_group import SequenceGroup


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
    """How the beams go on. parents, token_ids: int [beam_width]; beam i goes on from beam parents[i] with its token.

    A beam that goes on at all goes on from itself once, so only beams that are dropped get another parent.
    """

    parents: np.ndarray
    token_ids: np.ndarray


class BeamSearch:
    """The beams' scores and the finished sequences of one search; it knows nothing of slots and blocks.

    Args:
        params: how to search.
        max_tokens: most tokens to generate; what `params` asks, or less where the context ends.
        stop_token_ids: tokens that end a sequence.

    Attributes:
        num_live: beams that have tokens to compute: one until the first choice, as all would be equal.
        scores: float32 [num_live]; cumulative log-probabilities.
        hypotheses: finished sequences, best first, at most beam_width.
    """

    def __init__(self, params: BeamSearchParams, max_tokens: int, stop_token_ids: tuple[int, ...]) -> None:
        self.params = params
        self.num_candidates = params.beam_width + len(stop_token_ids)
        self.num_live = 1
        self.scores = np.zeros((1,), np.float32)
        self.hypotheses: list[Hypothesis] = []
        self._max_tokens = max_tokens
        self._stop_token_ids = frozenset(stop_token_ids)
        self._early_stopping = True if params.beam_width == 1 else params.early_stopping

    def advance(
        self,
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        num_generated: int,
        history: Callable[[int], list[int]],
    ) -> Choice | None:
        """Takes in the candidates for the next token and picks among them.

        Args:
            token_ids, logprobs: int32, float32 [num_live, num_candidates]; of each beam the most likely tokens. More
                are not needed: the best beam_width that do not end are among these, and so is whatever can finish.
            num_generated: tokens that each beam has generated, without the candidates.
            history: gives the tokens that a beam has generated.
        Returns:
            How the beams go on; None when the search is over, and `hypotheses` are its result.
        """
        # Lists, not arrays: of a few numbers, they cost a third.
        width = self.params.beam_width
        sums = (logprobs + self.scores[:, None]).reshape(-1)
        order = np.argsort(-sums, kind="stable")[: width + self.num_live * len(self._stop_token_ids)]
        totals = sums[order]
        tokens, parents = token_ids.reshape(-1)[order].tolist(), (order // token_ids.shape[1]).tolist()
        length = num_generated + 1
        stops = [token in self._stop_token_ids for token in tokens]
        is_last = length >= self._max_tokens
        for i in range(width):
            if stops[i] or is_last:
                self._finish([*history(parents[i]), tokens[i]], totals[i], stops[i])
        going_on = [] if is_last else [i for i, stop in enumerate(stops) if not stop][:width]
        if not going_on or self._is_over(totals[going_on[0]], length):
            return None
        self.num_live = width
        return self._assign([parents[i] for i in going_on], [tokens[i] for i in going_on], totals[going_on])

    def _finish(self, token_ids: list[int], total: np.float32, stopped: bool) -> None:
        score = float(total / np.float32(len(token_ids) ** self.params.length_penalty))
        self.hypotheses.append(Hypothesis(token_ids, float(total), score, stopped))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.params.beam_width :]

    def _is_over(self, best_total: np.float32, length: int) -> bool:
        """Whether live beams cannot improve on what is finished, by the rule that `early_stopping` names."""
        if len(self.hypotheses) < self.params.beam_width:
            return False
        if self._early_stopping is True:
            return True
        penalty = self.params.length_penalty
        if self._early_stopping == "never" and penalty > 0:
            length = self._max_tokens
        return bool(best_total / np.float32(length**penalty) <= np.float32(self.hypotheses[-1].score))

    def _assign(self, parents: list[int], tokens: list[int], totals: np.ndarray) -> Choice:
        """Lets each parent's first child take its place, and the others the places of those that have none."""
        width = len(parents)
        vacant = iter(sorted(set(range(width)).difference(parents)))
        taken: set[int] = set()
        choice = Choice(np.empty((width,), np.int64), np.empty((width,), np.int32))
        self.scores = np.empty((width,), np.float32)
        for i, parent in enumerate(parents):
            place = next(vacant) if parent in taken else parent
            taken.add(parent)
            choice.parents[place], choice.token_ids[place], self.scores[place] = parent, tokens[i], totals[i]
        return choice


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

    def __init__(self, request: Request) -> None:
        if request.beam is None:
            raise ValueError(f"request {request.request_id!r} is not for a beam search")
        super().__init__(request)
        max_tokens = request.max_len - request.prompt_len
        self.search = BeamSearch(request.beam, max_tokens, request.stop_token_ids)
        self.rest()

    def rest(self) -> None:
        """Forgets what only running beams have; they have lost their slots, or never had any."""
        self.is_ready = False
        self.num_due = 0
        self.pending_starts: list[Request] = []
        self.pending_moves: list[tuple[int, int, int]] = []
        self._candidates: dict[int, tuple[np.ndarray, np.ndarray]] = {}

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

    def take_candidates(self, beam: int, token_ids: np.ndarray, logprobs: np.ndarray) -> bool:
        """Keeps what the device found for a beam. Returns whether those of all live beams are there."""
        count = self.search.num_candidates
        self._candidates[beam] = token_ids[:count].copy(), logprobs[:count].copy()
        return len(self._candidates) == self.search.num_live

    def choose(self, num_generated: int, history: Callable[[int], list[int]]) -> Choice | None:
        """Lets the search advance by the candidates of all beams; as `BeamSearch.advance`."""
        found = [self._candidates[beam] for beam in range(self.search.num_live)]
        self._candidates.clear()
        token_ids, logprobs = np.stack([ids for ids, _ in found]), np.stack([values for _, values in found])
        return self.search.advance(token_ids, logprobs, num_generated, history)
