"""Tokens that are held back until a grammar has said whether they may follow: who leaves meanwhile, and who hears."""

import threading

import pytest

from tests.engine.helpers import make_request
from tests.engine.test_constrained_rows import MadeUpGrammars, Place, constrained, engine_of, expected_tokens


class Gated(MadeUpGrammars):
    """Says of guesses only as often as `permits` is released. broken: it then fails every sequence."""

    def __init__(self) -> None:
        super().__init__(share=1)
        self.permits, self.broken = threading.Semaphore(0), False

    def advance(self, guides, token_ids, guessed, last):
        if any(guessed):
            self.permits.acquire()
        places = super().advance(guides, token_ids, guessed, last)
        return [Place(failure="it is broken")] * len(places) if self.broken else places


def run_to_a_held_guess(engine):
    """Until a token was guessed of which the grammar is asked. Returns the rows' kind."""
    (kind,) = (kind for kind in engine.core.scheduler._dependents._kinds.values() if hasattr(kind, "_held"))
    while not kind._held:
        engine.step()
    return kind


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_sequence_whose_grammar_fails_while_it_is_preempted_ends_with_what_was_stored(mode):
    grammars = Gated()
    engine = engine_of(grammars, num_swap_chunks=8, preemption_mode=mode, pipeline_depth=0)
    request, ordinary = constrained("a", 5, 30), make_request("b", 5, 20)
    engine.add(request, ordinary)
    run_to_a_held_guess(engine)
    grammars.broken = True
    threading.Timer(0.05, grammars.permits.release, [1000]).start()
    engine.preempt(request, mode)
    engine.run()
    assert (request.finish_reason, request.stop_reason) == ("abort", "it is broken")
    assert ordinary.finished
    engine.assert_idle()


def test_a_guess_that_was_allowed_is_told_before_the_next_step_is_read():
    grammars = Gated()
    engine = engine_of(grammars, pipeline_depth=0)
    request = constrained("a", 5, 30)
    engine.add(request, make_request("b", 5, 200))
    told: list = []
    while not told:  # until a guess holds
        kind = run_to_a_held_guess(engine)
        steps = len(engine.plans)
        grammars.permits.release()
        while kind._held:
            told += engine.core.collect()
    assert len(engine.plans) == steps
    (update,) = told
    assert update.request is request
    assert update.new_token_ids[-1] == expected_tokens(request)[len(request.output_token_ids) - 1]
