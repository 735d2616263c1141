"""Rows that a grammar constrains, with a made-up grammar whose masks come late, on the fake executor.

The grammar's state is a fingerprint of the tokens behind it. It says which tokens may follow, and now and then that a
run of tokens must.
"""

import gc
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from jpaged.api.errors import InvalidParameterError
from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.engine.constraints.batch_gate import LEAST_HALVED, gain_by_chunks
from jpaged.engine.constraints.grammars import ConstrainedRows
from jpaged.engine.constraints.searches import Searches
from jpaged.engine.interface import NO_TOKEN, CacheGroup
from jpaged.text.grammar_process import Place, Places
from tests.engine.fake_executor import VOCAB_SIZE, allowed_token, fingerprint, next_token
from tests.engine.helpers import Engine, assert_complete, assert_found, make_request, make_search, name_of
from tests.engine.helpers import expected_tokens as expected_ordinary

WORDS = -(-VOCAB_SIZE // 32)
CONSTRAINT = StructuredOutputsParams(regex="made up")


def forced_after(state: int) -> tuple[int, ...]:
    """The tokens that must follow: after one state in three some, up to eleven."""
    if state % 3:
        return ()
    return tuple((state >> 3 * i) % VOCAB_SIZE for i in range(1 + (state >> 20) % 11))


def mask_after(state: int) -> np.ndarray:
    """The tokens that may follow: about a third of all."""
    bits = np.random.default_rng(state).random(WORDS * 32) < 1 / 3
    bits[VOCAB_SIZE:] = False
    bits[state % VOCAB_SIZE] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


class MadeUpGuide:
    def __init__(self, state: int, guesses: bool = False) -> None:
        self.state, self.guesses = state, guesses

    def advance(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self.state = fingerprint(self.state, token)


class MadeUpGrammar:
    """Begins with three forced tokens."""

    table = None

    def __init__(self) -> None:
        self.forced = (5, 6, 7)
        self._start = MadeUpGuide(0)
        self._start.advance(self.forced)
        self.mask = mask_after(self._start.state)

    def begin(self, ignore_eos: bool, guesses: bool = False) -> MadeUpGuide:
        return MadeUpGuide(self._start.state, guesses)


class ThreadedMaker:
    """Follows made-up grammars in a thread, which knows nothing of who made it."""

    def __init__(self, grammars: "MadeUpGrammars") -> None:
        self.news = threading.Event()
        self.wake = self.news.set
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        self.results: queue.SimpleQueue = queue.SimpleQueue()
        arguments = (grammars, self.jobs, self.results, self.news)
        self.thread = threading.Thread(target=follow, args=arguments, daemon=True)
        self.thread.start()
        self.close = weakref.finalize(self, self.jobs.put, None)

    def put(self, job):
        self.jobs.put(job)

    @property
    def has_news(self):
        return self.news.is_set()

    def wait(self, seconds):
        self.news.wait(seconds)

    def take_all(self, waits=False):
        self.news.clear()
        results = [self.results.get()] if waits else []
        while not self.results.empty():
            results.append(self.results.get())
        for error in results:
            if isinstance(error, BaseException):
                raise error
        return results


def follow(grammars, jobs, results, news) -> None:
    while (job := jobs.get()) is not None:
        try:
            places = Places.of(grammars.advance(job.guides, job.tokens, job.guessed.tolist(), job.last.tolist()))
            results.put(SimpleNamespace(slots=job.slots, places=places, masks=None))
            news.set()
            if waiting := places.waiting:
                masks = grammars.make_masks([job.guides[i] for i in waiting])
                results.put(SimpleNamespace(slots=job.slots[waiting], places=None, masks=masks))
        except BaseException as error:
            results.put(error)
        news.set()


class MadeUpGrammars:
    """delay_s: of masks and checks. share: of the places where rows that may guess do so; two in three guesses are
    refused, and two in three of these may be followed by others. may_compile: set when compilations may end.
    fails_after: guides fail at its multiples.
    """

    num_words = WORDS

    def __init__(self, delay_s: float = 0.0, fails_after: int | None = None, share: float = 0.0) -> None:
        self.delay_s = delay_s
        self.fails_after = fails_after
        self.share = share
        self.num_allowed = self.num_refused = self.num_later = 0
        self.may_compile = threading.Event()
        self.may_compile.set()
        self.failure: Exception | None = None
        self.num_masks = 0

    def close(self):
        pass

    def resume(self, guide, token_ids):
        forced: list[int] = []
        for token in token_ids:
            if forced:
                assert token == forced.pop(0)
            else:
                place = self._place(guide, token)
                if place.failure:
                    return place
                forced = list(place.forced)
        return place._replace(forced=tuple(forced))

    def compile(self, params):
        future: Future = Future()

        def work():
            self.may_compile.wait()
            if self.failure is None:
                future.set_result(MadeUpGrammar())
            else:
                future.set_exception(self.failure)

        threading.Thread(target=work, daemon=True).start()
        return future

    def follower(self):
        return ThreadedMaker(self)

    def advance(self, guides, tokens, guessed, last):
        time.sleep(self.delay_s)
        return [self._answer(*one) for one in zip(guides, tokens.tolist(), guessed, last, strict=True)]

    def make_masks(self, guides):
        time.sleep(self.delay_s)
        self.num_masks += len(guides)
        masks = [mask_after(guide.state) for guide in guides]
        listed = [np.flatnonzero(np.unpackbits(m.view(np.uint8), bitorder="little")).astype(np.int32) for m in masks]
        return [mask if guide.state % 2 else few for guide, mask, few in zip(guides, masks, listed, strict=True)]

    def _answer(self, guide, tokens, is_guess, last):
        taken = 0
        if is_guess:
            assert guide.guesses
            mask = mask_after(guide.state)
            may = [i for i, token in enumerate(tokens) if token != NO_TOKEN and mask[token // 32] >> (token % 32) & 1]
            self.num_allowed += bool(may)
            self.num_refused += not may
            if not may:
                return Place(is_refused=True, needs_mask=self.num_refused % 3 == 0)
            taken = may[0]
            self.num_later += taken > 0
        else:
            assert not last
        place = Place(needs_mask=False) if last >> taken & 1 else self._place(guide, tokens[taken])
        return place._replace(num_refused=taken)

    def _place(self, guide, token):
        guide.advance([token])
        forced = forced_after(guide.state)
        guide.advance(forced)
        if self.fails_after is not None and guide.state % self.fails_after == 0:
            return Place(failure="the grammar is at its end")
        needs_mask = not guide.guesses or (guide.state >> 30) % 1000 >= 1000 * self.share
        return Place(forced, needs_mask)


def expected_tokens(request) -> list[int]:
    """Every token sampled, one at a time; a forced one is the only one that may follow."""
    last = 0
    for token in request.prompt_token_ids.tolist():
        last = fingerprint(last, token)
    grammar, output = MadeUpGrammar(), []
    guide, forced = grammar.begin(False), list(grammar.forced)
    while request.prompt_len + len(output) < request.max_len:
        if forced:
            token = forced.pop(0)
        else:
            token = next_token(last, request.seed, request.prompt_len + len(output))
            token = allowed_token(token, mask_after(guide.state))
            guide.advance([token])
            forced = list(forced_after(guide.state))
            guide.advance(forced)
        output.append(token)
        last = fingerprint(last, token)
        if token in request.stop_token_ids:
            break
    return output


def constrained(name: str, prompt: int, max_tokens: int = 30, **sampling):
    return make_request(name, prompt, max_tokens, structured_outputs=CONSTRAINT, **sampling)


def engine_of(grammars: MadeUpGrammars, runs_ahead: bool = True, **changes) -> Engine:
    kind = partial(ConstrainedRows, grammars=grammars, guesses=grammars.share > 0, runs_ahead=runs_ahead)
    kinds = (Searches, kind)
    return Engine(kinds=kinds, **({"num_blocks": 256, "max_model_len": 128, "max_num_batched_tokens": 160} | changes))


def assert_constrained(*requests) -> None:
    for request in requests:
        for member in request.group.members:
            assert member.finished
            assert member.output_token_ids == expected_tokens(member)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize(("delay_s", "share"), [(0.0, 0), (0.003, 0), (0.0, 1), (0.003, 0.6)])
def test_rows_run_under_the_masks_of_their_own_tokens_among_others(delay_s, share, depth):
    grammars = MadeUpGrammars(delay_s, share=share)
    engine = engine_of(grammars, pipeline_depth=depth)
    stops = [{"stop_token_ids": [(7 * i) % 97, (11 * i + 3) % 97]} if i % 2 else {} for i in range(6)]
    requests = [constrained(f"constrained {i}", 3 + i, 20 + 3 * i, **stops[i]) for i in range(6)]
    ordinary = [make_request(f"ordinary {i}", 3 + i, 25) for i in range(2)]
    engine.add(*requests, *ordinary)
    engine.run(20_000)
    assert_constrained(*requests)
    assert_complete(*ordinary)
    assert [engine.reported[request.request_id] for request in requests] == [r.output_token_ids for r in requests]
    assert engine.core.stats().generated_tokens == sum(len(r.output_token_ids) for r in (*requests, *ordinary))
    assert (min(grammars.num_allowed, grammars.num_refused) > 3) == (share > 0)
    stats = engine.core.stats()
    assert stats.num_kept_guesses == grammars.num_allowed
    assert stats.num_guesses == grammars.num_allowed + grammars.num_refused
    engine.assert_idle()


def test_a_token_that_was_ranked_later_counts_without_another_step_and_may_end_its_sequence():
    grammars = MadeUpGrammars(share=1)
    engine = engine_of(grammars, block_size=1, num_blocks=1024)  # no room for forced tokens: each takes a row
    stops = [{"stop_token_ids": list(range(i % 4, 97, 4))} if i % 8 else {} for i in range(160)]
    requests = [constrained(f"constrained {i}", 3, 20, **stops[i]) for i in range(160)]
    engine.add(*requests)
    engine.run(20_000)
    assert_constrained(*requests)
    assert grammars.num_later > 10
    num_rows = sum(plan.num_rows for plan in engine.plans)
    assert num_rows == sum(len(request.output_token_ids) for request in requests) + grammars.num_refused
    # Nothing was aborted or preempted: the device was told of ends that it had not seen itself.
    assert any(len(plan.ends) for plan in engine.plans)
    engine.assert_idle()


@pytest.mark.parametrize(("num_forced", "num_rows", "gain"), [(1, 1, True), (1, 3, True), (1, 4, False)])
def test_forced_tokens_are_appended_where_that_saves_more_than_it_costs(num_forced, num_rows, gain):
    assert gain_by_chunks(num_forced, num_rows) == gain


def test_what_was_guessed_is_told_only_when_it_is_known_to_be_allowed():
    class Slow(MadeUpGrammars):
        def advance(self, guides, tokens, guessed, last):
            self.asked.set()
            self.may_answer.wait()
            return super().advance(guides, tokens, guessed, last)

        asked, may_answer = threading.Event(), threading.Event()

    grammars = Slow(share=1)
    engine = engine_of(grammars)
    request = constrained("constrained", 5, 12)
    engine.add(request)
    kind = engine.core.scheduler._dependents._kinds[2]
    grammars.may_answer.set()
    while not engine.executor.plans or not any(m[0] == NO_TOKEN for m in engine.executor.plans[-1].masks):
        engine.step()
    grammars.may_answer.clear()
    told = list(engine.reported.get("constrained", ()))
    while not kind._held:
        engine.step()
    assert engine.reported.get("constrained", []) == told == request.output_token_ids
    assert engine.core.stats().generated_tokens == len(told)
    threading.Timer(0.05, grammars.may_answer.set).start()
    engine.core.pause()  # waits for what is to be known of the guess
    assert not kind._held
    engine.core.resume()
    engine.run(20_000)
    assert_constrained(request)
    assert engine.reported["constrained"] == request.output_token_ids


@pytest.mark.parametrize("wants", [{"logprobs": 2}, {"top_k": 5, "temperature": 1.0}, {"frequency_penalty": 0.5}])
def test_rows_that_truncate_or_need_every_tokens_distribution_do_not_guess(wants):
    grammars = MadeUpGrammars(share=1)
    engine = engine_of(grammars)
    request = constrained("constrained", 5, 30, **wants)
    engine.add(request)
    engine.run(20_000)
    assert_constrained(request)
    assert grammars.num_allowed == grammars.num_refused == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_while_guesses_are_refused(seed):
    rng = np.random.default_rng(seed)
    grammars = MadeUpGrammars(delay_s=0.0005, share=float(rng.choice([0.5, 0.9, 1.0])))
    engine = engine_of(
        grammars,
        pipeline_depth=int(rng.integers(0, 4)),
        block_size=int(rng.choice([2, 4, 16])),
        num_blocks=int(rng.choice([40, 90])),
        num_swap_chunks=int(rng.choice([0, 8])),
        preemption_mode=str(rng.choice(["auto", "recompute", "swap"])),
        max_num_seqs=12,
        watermark=0.0,
        max_model_len=64,
    )
    prompts = [rng.integers(0, 97, int(rng.integers(1, 9))).tolist() for _ in range(6)]
    requests, gone = [], set()
    for step in range(50_000):
        if step < 400 and rng.random() < 0.1 and len(requests) - len(gone) < 14:
            stops = rng.integers(0, 97, int(rng.integers(0, 3))).tolist()
            name, prompt = f"r{len(requests)}", prompts[rng.integers(len(prompts))]
            max_tokens = int(rng.integers(1, 40))
            params = {"n": int(rng.integers(1, 4)), "temperature": 1.0, "stop_token_ids": stops}
            make = constrained if rng.random() < 0.8 else make_request
            requests.append(make(name, prompt, max_tokens, **params))
            engine.add(requests[-1])
        engine.step()
        open_ones = [request for request in requests if not request.group.finished]
        if step >= 400 and not open_ones:
            break
        if open_ones and rng.random() < 0.02:
            request = open_ones[rng.integers(len(open_ones))]
            engine.core.abort([request.request_id])
            gone.add(request.request_id)
        if open_ones and rng.random() < 0.02:
            request = open_ones[rng.integers(len(open_ones))]
            if request.group.running():
                engine.preempt(request, str(rng.choice(["swap", "recompute"])))
        if rng.random() < 0.02:
            engine.core.take_new_weights("recompute" if rng.random() < 0.5 else "continue")
    engine.run(20_000)
    for request in requests:
        for member in request.group.members:
            expected = expected_tokens if request.sampling.structured_outputs else expected_ordinary
            if request.request_id in gone:
                output = member.output_token_ids
                assert output == expected(member)[: len(output)]
            else:
                assert member.output_token_ids == expected(member)
                assert engine.reported[name_of(member)] == member.output_token_ids
    assert grammars.num_refused > 0
    engine.assert_idle()


def test_forced_tokens_take_no_steps_of_their_own_and_are_counted():
    engine = engine_of(MadeUpGrammars(), block_size=16, num_blocks=64)
    request = constrained("constrained", 5, 100)
    engine.add(request)
    engine.run()
    assert_constrained(request)
    num_forced = sum(len(chunk.token_ids) - 1 for plan in engine.plans[1:] for chunk in plan.chunks)
    assert num_forced > 30
    num_steps = sum(plan.num_rows for plan in engine.plans)
    assert num_steps == 100 - num_forced
    assert engine.core.stats().generated_tokens == 100


@pytest.mark.parametrize("wants", [{"logprobs": 2}, {"repetition_penalty": 1.1}])
def test_where_every_token_must_be_sampled_forced_ones_are(wants):
    engine = engine_of(MadeUpGrammars(), block_size=16, num_blocks=64)
    request = constrained("constrained", 5, 40, **wants)
    engine.add(request)
    engine.run()
    assert_constrained(request)
    assert sum(plan.num_rows for plan in engine.plans) == 40
    if request.logprobs is not None:
        assert [next(iter(position)) for position in request.logprobs] == request.output_token_ids


def test_only_masks_that_changed_are_sent():
    class Alike(MadeUpGrammars):
        def advance(self, guides, tokens, guessed, last):
            return [Place() for _ in guides]

        mask = MadeUpGrammar().mask

        def make_masks(self, guides):
            return [self.mask] * len(guides)

    engine = engine_of(Alike())
    engine.add(constrained("constrained", 5, 30))
    engine.run()
    # The first forced token's; and the one mask, as it came with the compiled grammar and as it was made.
    assert sum(len(plan.mask_slots) for plan in engine.plans) == 3


def test_rows_that_are_all_ready_run_in_halves_one_behind_the_other():
    engine = engine_of(MadeUpGrammars(), max_num_seqs=32, num_blocks=2048, pipeline_depth=2)
    requests = [constrained(f"constrained {i}", 4, 40) for i in range(4 * LEAST_HALVED)]
    engine.add(*requests)
    engine.run(20_000)
    assert_constrained(*requests)
    sizes = [plan.num_rows for plan in engine.plans if len(plan.decode_slots)]
    assert max(len(plan.decode_slots) for plan in engine.plans) <= 2 * LEAST_HALVED, sizes


def test_rows_whose_masks_come_at_different_times_do_not_end_up_in_steps_of_few():
    engine = engine_of(MadeUpGrammars(delay_s=0.001), max_num_seqs=32, num_blocks=2048, pipeline_depth=2)
    requests = [constrained(f"constrained {i}", 4, 60) for i in range(32)]
    engine.add(*requests)
    engine.run(50_000)
    assert_constrained(*requests)
    rows = [plan.num_rows for plan in engine.plans]
    assert sum(rows) / len(rows) > 10


def test_ready_rows_join_a_step_that_other_rows_need_though_masks_are_in_the_making():
    engine = engine_of(MadeUpGrammars())
    kind = engine.core.scheduler._dependents._kinds[2]
    kind._slots.kind[:8] = kind.number
    kind._is_ready[0] = True
    kind._in_making[1:8] = True
    kind.prepare(0)
    assert not len(kind.rows())
    kind.prepare(None)
    assert kind.rows().tolist() == [0]


def test_an_engine_that_is_let_go_takes_its_thread_along_though_compiled_grammars_are_kept():
    class Keeping(MadeUpGrammars):
        def __init__(self):
            super().__init__()
            self.kept = []

        def compile(self, params):
            self.kept.append(super().compile(params))
            return self.kept[-1]

    grammars = Keeping()
    grammars.may_compile.clear()  # or the one who asks need not wait for news
    engine = engine_of(grammars)
    engine.add(constrained("constrained", 4, 10))
    grammars.may_compile.set()
    engine.run()
    kind = engine.core.scheduler._dependents._kinds[2]
    thread, rows = kind._maker.thread, weakref.ref(kind)
    del engine, kind
    gc.collect()
    assert rows() is None
    thread.join(60)
    assert not thread.is_alive()


def test_ordinary_rows_run_in_every_step_while_masks_are_made():
    engine = engine_of(MadeUpGrammars(delay_s=0.005), pipeline_depth=2)
    request, ordinary = constrained("constrained", 4, 20), make_request("ordinary", 4, 100)
    engine.add(request, ordinary)
    engine.run(20_000)
    (slot,) = {start.slot for plan in engine.plans for start in plan.starts if not start.sampling.structured_outputs}
    steps = [plan.step_id for plan in engine.plans if slot in plan.decode_slots.tolist()]
    assert len(steps) == 99
    assert set(np.diff(steps)) == {1}
    assert_constrained(request)
    assert_complete(ordinary)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("share", [0, 1, 0.6])
def test_constrained_rows_are_preempted_and_come_back_with_their_grammars(share, mode, depth):
    rng = np.random.default_rng(depth)
    engine = engine_of(
        MadeUpGrammars(delay_s=0.001, share=share),
        pipeline_depth=depth,
        num_blocks=40,
        num_swap_chunks=8,
        preemption_mode=mode,
        watermark=0.0,
        max_model_len=64,
    )
    requests = [
        constrained(f"constrained {i}", 3 + i, 40, n=1 + i % 3, temperature=1.0, stop_token_ids=[i, 5 * i + 40])
        for i in range(9)
    ]
    searches = [make_search(f"search {i}", 3 + i, 2, 9) for i in range(3)]
    engine.add(*requests, *searches)
    for _ in range(50_000):
        if not engine.core.has_unfinished():
            break
        engine.step()
        running = [request for request in requests if request.group.running()]
        if running and rng.random() < 0.05:
            engine.preempt(running[rng.integers(len(running))], mode)
    engine.run(20_000)
    assert engine.core.stats().num_preemptions > 5
    assert_constrained(*requests)
    assert_found(*searches)
    engine.assert_idle()


def test_forced_tokens_fit_a_step_whose_budget_is_one_token_a_row():
    engine = engine_of(MadeUpGrammars(), max_num_batched_tokens=8, pipeline_depth=1)
    requests = [constrained(f"constrained {i}", 4, 40) for i in range(8)]
    engine.add(*requests)
    engine.run(20_000)
    assert_constrained(*requests)


def test_a_slot_whose_last_token_is_another_is_told_so_with_each_part_of_its_forced_tokens():
    """The device took the token that it had sampled for the sequence's end, and no part but the last samples."""
    grammars = MadeUpGrammars(share=1)
    engine = engine_of(grammars, max_num_batched_tokens=9, max_num_seqs=8, num_blocks=512, block_size=16)
    stops = [list(range(i % 20, 97, 20)) for i in range(128)]
    requests = [constrained(f"constrained {i}", 4 + i % 9, 60, stop_token_ids=stops[i]) for i in range(128)]
    engine.add(*requests)
    engine.run(40_000)
    assert_constrained(*requests)
    parts = [
        chunk
        for plan in engine.plans
        for chunk in plan.chunks
        if not chunk.samples and chunk.slot in plan.mask_slots[plan.mask_tokens != NO_TOKEN]
    ]
    assert parts
    engine.assert_idle()


@pytest.mark.parametrize("share", [0, 1])
def test_groups_with_windows_have_room_for_forced_tokens(share):
    groups = (CacheGroup(window=6), CacheGroup())
    engine = engine_of(MadeUpGrammars(share=share), cache_groups=groups, num_blocks=128, max_model_len=64)
    requests = [constrained(f"constrained {i}", 3 + i, 40) for i in range(4)]
    engine.add(*requests)
    engine.run(20_000)
    assert_constrained(*requests)


@pytest.mark.parametrize("share", [0, 1])
def test_an_aborted_row_whose_mask_is_in_the_making_leaves_nothing_behind(share):
    engine = engine_of(MadeUpGrammars(delay_s=0.01, share=share), pipeline_depth=2)
    requests = [constrained(f"constrained {i}", 4, 40) for i in range(3)]
    engine.add(*requests)
    for _ in range(8):
        engine.step()
    for request in requests:
        engine.core.abort([request.request_id])
    late = constrained("late", 4, 20)
    engine.add(late)
    engine.run(20_000)
    assert_constrained(late)
    engine.assert_idle()
    assert not engine.scheduler._dependents


def test_a_request_whose_grammar_is_compiled_keeps_nobody_waiting_and_can_be_aborted():
    grammars = MadeUpGrammars()
    grammars.may_compile.clear()
    engine = engine_of(grammars)
    request, aborted, ordinary = constrained("a", 4, 20), constrained("b", 4, 20), make_request("c", 4, 30)
    engine.add(request, aborted, ordinary)
    while not ordinary.finished:
        engine.step()
    assert engine.core.abort(["b"]) == [aborted]
    assert engine.core.stats().num_waiting == 1
    grammars.may_compile.set()
    engine.run(20_000)
    assert_constrained(request)
    assert_complete(ordinary)
    engine.assert_idle()


def test_a_grammar_that_cannot_be_compiled_ends_its_request_and_says_why():
    grammars = MadeUpGrammars()
    grammars.failure = InvalidParameterError("structured_outputs.regex cannot be used: it is made up")
    engine = engine_of(grammars)
    request, ordinary = constrained("a", 4, 20, n=2, temperature=1.0), make_request("c", 4, 30)
    engine.add(request, ordinary)
    engine.run(20_000)
    assert [member.finish_reason for member in request.group.members] == ["abort"] * 2
    assert request.stop_reason == str(grammars.failure)
    assert set(engine.reported) == {"a", "a/1", "c"}
    assert_complete(ordinary)
    engine.assert_idle()


class KnownToFail(MadeUpGrammars):
    """The failure is there at once, as when an earlier request has met it."""

    def compile(self, params):
        future: Future = Future()
        future.set_exception(InvalidParameterError("structured_outputs.regex cannot be used: it is made up"))
        return future


def test_a_request_that_fails_when_it_is_added_is_reported_though_nothing_else_runs():
    engine = engine_of(KnownToFail())
    request = constrained("a", 4, 20)
    engine.add(request)
    engine.run()
    assert (request.finish_reason, set(engine.reported)) == ("abort", {"a"})
    assert not engine.core.has_unfinished()


def test_nothing_is_reported_of_a_failed_request_that_was_aborted_before():
    engine = engine_of(KnownToFail())
    engine.add(constrained("a", 4, 20), constrained("b", 4, 20))
    engine.core.abort(["a"])
    engine.run()
    assert set(engine.reported) == {"b"}


@pytest.mark.parametrize("generated", [[[5], None], [None, [5]]])
def test_a_failure_ends_the_sequences_that_had_not_ended_in_another_engine(generated):
    engine = engine_of(KnownToFail())
    request = constrained("a", 4, 20, n=2, temperature=1.0)
    engine.core.add_request(request, generated)
    engine.run()
    assert set(engine.reported) == {"a" if generated[0] else "a/1"}
    engine.assert_idle()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("share", [0, 1])
def test_a_grammar_that_cannot_be_followed_ends_its_sequence_with_what_there_is(share, depth):
    engine = engine_of(MadeUpGrammars(fails_after=7, share=share), pipeline_depth=depth)
    requests = [constrained(f"constrained {i}", 4 + i, 60) for i in range(4)]
    engine.add(*requests)
    engine.run(20_000)
    for request in requests:
        assert (request.finish_reason, request.stop_reason) == ("abort", "the grammar is at its end")
        assert request.output_token_ids == expected_tokens(request)[: len(request.output_token_ids)]
        assert engine.reported[request.request_id] == request.output_token_ids
    engine.assert_idle()


@pytest.mark.parametrize("depth", [0, 2])
def test_a_token_that_is_allowed_and_the_failure_behind_it_are_told_in_one_update(depth):
    """Of two updates the first would say already that the sequence has ended."""

    class WithoutSomeMasks(MadeUpGrammars):
        def make_masks(self, guides):
            made = super().make_masks(guides)
            return ["no mask" if guide.state % 3 == 0 else mask for guide, mask in zip(guides, made, strict=True)]

    engine = engine_of(WithoutSomeMasks(share=0.6), pipeline_depth=depth)
    requests = [constrained(f"constrained {i}", 4 + i, 60) for i in range(12)]
    engine.add(*requests)
    while engine.core.has_unfinished():
        time.sleep(0.002)  # places and masks of a step have come
        engine.step()
    assert sum(request.stop_reason == "no mask" for request in requests) > 3
    for request in requests:
        assert request.output_token_ids == expected_tokens(request)[: len(request.output_token_ids)]
        assert engine.reported.get(request.request_id, []) == request.output_token_ids


@pytest.mark.parametrize("num_known", [1, 2, 3, 7, 19])
@pytest.mark.parametrize("share", [0, 1])
def test_a_request_goes_on_in_another_engine_under_the_masks_of_all_its_tokens(share, num_known):
    whole = constrained("a", 5, 30, seed=3)
    engine = engine_of(MadeUpGrammars())
    engine.add(whole)
    engine.run()
    engine = engine_of(MadeUpGrammars(share=share))
    resumed = constrained("a", 5, 30, seed=3)
    engine.core.add_request(resumed, [whole.output_token_ids[:num_known]])
    engine.run()
    assert resumed.output_token_ids == whole.output_token_ids
    engine.assert_idle()
