import numpy as np
import pytest

from jpaged.api.errors import EngineDeadError, InvalidParameterError, InvalidPromptError, JPagedError, OutOfMemoryError
from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.engine.interface import NO_TOKEN, SamplingVariant, StepResult
from jpaged.engine.scheduler.preemption import Preemption
from jpaged.engine.scheduler.scheduler import NoPlan, Scheduler
from jpaged.engine.sequences.request import Request, RequestStatus
from jpaged.engine.stats import EngineStats
from tests.engine.fake_executor import FakeExecutor, fingerprint, logprob_of, next_token, reference_tokens, top_tokens
from tests.engine.helpers import Engine, assert_complete, expected_tokens, make_config, make_request


def chunk_sizes(plan) -> dict[int, int]:
    return {chunk.slot: len(chunk.token_ids) for chunk in plan.chunks}


def filled(engine: Engine, request: Request) -> list[int]:
    """Tokens written to each of the request's blocks."""
    n, size = int(engine.scheduler.slots.num_computed[request.slot]), engine.config.block_size
    return [min(size, n - at) for at in range(0, n, size)]


class TestThePagedAttentionPaper:
    """Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023."""

    def test_figure_6_blocks_are_allocated_as_tokens_come(self):
        engine = Engine(block_size=4)
        request = make_request("Four score and seven years ago our", 7, max_tokens=10)
        engine.add(request)

        engine.step()  # the prompt: two blocks, of which the second has a slot left
        first_two = engine.table(request)
        assert len(first_two) == 2
        assert filled(engine, request) == [4, 3]
        engine.step()  # "fathers" goes where there is room
        assert engine.table(request) == first_two
        assert filled(engine, request) == [4, 4]
        engine.step()  # "brought" needs a third block
        assert engine.table(request)[:2] == first_two
        assert len(set(engine.table(request))) == 3
        assert filled(engine, request) == [4, 4, 1]
        assert engine.plans[2].table_updates.tolist() == [[request.slot, 0, 2, engine.table(request)[2]]]

    def test_figure_7_two_requests_at_once_have_blocks_of_their_own_anywhere(self):
        engine = Engine(block_size=4)
        a = make_request("Four score and seven years ago our", 7, max_tokens=10)
        b = make_request("It was the best of", 5, max_tokens=10)
        engine.add(a, b)
        for _ in range(3):
            engine.step()
        assert (filled(engine, a), filled(engine, b)) == ([4, 4, 1], [4, 3])
        table_a, table_b = engine.table(a), engine.table(b)
        assert len({*table_a, *table_b}) == 5
        assert table_a[2] > max(table_b), "a's third block came after b's, so a's are not consecutive"
        engine.run()
        assert_complete(a, b)
        engine.assert_idle()


class TestOrder:
    def test_first_come_first_served(self):
        engine = Engine(max_num_seqs=2)
        requests = [make_request(str(i), 4, max_tokens=3, priority=-i) for i in range(5)]
        engine.add(*requests)
        engine.run()
        assert_complete(*requests)
        started = [request.stats.first_scheduled_time for request in requests]
        assert started == sorted(started)

    def test_a_head_that_does_not_fit_is_waited_for(self):
        engine = Engine(num_blocks=11, watermark=0.0)
        running, large, small = make_request("a", 20, 9), make_request("b", 24, 2), make_request("c", 2, 2)
        engine.add(running, large, small)
        engine.step()
        assert running.status == RequestStatus.RUNNING
        assert large.status == small.status == RequestStatus.WAITING
        engine.run()
        assert_complete(running, large, small)
        assert large.stats.first_scheduled_time < small.stats.first_scheduled_time

    def test_a_head_that_does_not_fit_is_not_looked_up_again_until_blocks_are_freed(self, monkeypatch):
        engine = Engine(num_blocks=12, watermark=0.0)
        first, second, large = make_request("a", 8, 4), make_request("b", 8, 9), make_request("c", 36, 2)
        engine.add(first, second, large)
        cache = engine.scheduler.pool.cache
        looked_up = []
        match = cache.match
        monkeypatch.setattr(cache, "match", lambda digests, *args: looked_up.append(1) or match(digests, *args))
        counts = []
        while not second.finished:
            engine.step()
            counts.append(len(looked_up))
        assert counts == [3, 3, 3, 3, 4, 4, 4, 4, 4]
        engine.run()
        assert_complete(first, second, large)

    def test_priority_goes_before_arrival_and_arrival_breaks_ties(self):
        engine = Engine(max_num_seqs=1, policy="priority")
        requests = [make_request(name, 4, 2, priority=p) for name, p in (("c", 5), ("a", -1), ("b", 0), ("d", 5))]
        engine.add(*requests)
        engine.run()
        order = sorted(requests, key=lambda request: request.stats.first_scheduled_time)
        assert [request.request_id for request in order] == ["a", "b", "c", "d"]

    def test_slots_are_given_out_lowest_first(self):
        engine = Engine(max_num_seqs=3)
        a, b, c, d = (make_request(name, 4, n) for name, n in (("a", 9), ("b", 2), ("c", 9), ("d", 2)))
        engine.add(a, b, c, d)
        engine.step()
        assert [r.slot for r in (a, b, c, d)] == [0, 1, 2, -1]
        engine.step()
        engine.step()
        assert d.slot == 1


class TestTokenBudget:
    def test_a_long_prompt_is_computed_in_chunks(self):
        engine = Engine(max_num_batched_tokens=8)
        request = make_request("a", 21, 3)
        engine.add(request)
        engine.run()
        assert [chunk_sizes(plan) for plan in engine.plans[:3]] == [{0: 8}, {0: 8}, {0: 5}]
        assert [plan.chunks[0].samples for plan in engine.plans[:3]] == [False, False, True]
        assert_complete(request)

    def test_decode_rows_come_first_and_chunks_take_the_rest(self):
        engine = Engine(max_num_batched_tokens=8)
        a, b, c = make_request("a", 6, 9), make_request("b", 12, 3), make_request("c", 4, 3)
        engine.add(a, b, c)
        for _ in range(3):
            engine.step()
        first, second, third = engine.plans
        assert chunk_sizes(first) == {0: 6, 1: 2}
        assert (second.decode_slots.tolist(), chunk_sizes(second)) == ([0], {1: 7})
        assert (third.decode_slots.tolist(), chunk_sizes(third)) == ([0], {1: 3, 2: 4})
        engine.run()
        assert_complete(a, b, c)

    def test_a_prompt_begun_goes_before_one_that_waits(self):
        engine = Engine(max_num_batched_tokens=8, policy="priority")
        begun, urgent = make_request("begun", 20, 2, priority=1), make_request("urgent", 4, 2, priority=0)
        engine.add(begun)
        engine.step()
        engine.add(urgent)
        engine.step()
        assert chunk_sizes(engine.plans[1]) == {begun.slot: 8}
        engine.run()
        assert_complete(begun, urgent)

    def test_a_budget_below_the_slots_limits_how_many_decode(self):
        engine = Engine(max_num_batched_tokens=3, max_num_seqs=6)
        requests = [make_request(str(i), 2, 6) for i in range(6)]
        engine.add(*requests)
        engine.run()
        assert max(len(plan.decode_slots) for plan in engine.plans) == 3
        assert_complete(*requests)

    def test_a_budget_of_one_token_is_enough(self):
        engine = Engine(max_num_batched_tokens=1, max_num_seqs=3)
        requests = [make_request(str(i), 5, 3) for i in range(4)]
        engine.add(*requests)
        engine.run()
        assert_complete(*requests)


class TestWatermark:
    def test_admission_leaves_part_of_the_pool_free(self):
        engine = Engine(num_blocks=21, watermark=0.25)  # of 20 blocks, 5 stay free
        a, b, c = make_request("a", 24, 4), make_request("b", 28, 4), make_request("c", 12, 4)
        engine.add(a, b, c)
        engine.step()
        assert [r.status for r in (a, b, c)] == [RequestStatus.RUNNING] * 2 + [RequestStatus.WAITING]
        assert engine.scheduler.pool.num_free == 7, "c's three blocks would have left four"
        engine.run()
        assert_complete(a, b, c)

    def test_a_request_alone_may_have_the_whole_pool(self):
        engine = Engine(num_blocks=9, watermark=0.5)
        request = make_request("a", 31, None)
        engine.add(request)
        engine.run()
        assert_complete(request)
        assert len(request.output_token_ids) == 1


class TestPreemption:
    def make(self, **changes) -> Engine:
        """Ten blocks: two requests of 16 tokens have them all after a few steps and need more."""
        return Engine(**({"num_blocks": 11, "watermark": 0.0} | changes))

    def test_the_latest_arrival_gives_way_and_comes_back_with_its_tokens(self):
        engine = self.make()
        a, b = make_request("a", 16, 20), make_request("b", 16, 20)
        engine.add(a, b)
        while b.status != RequestStatus.PREEMPTED:
            engine.step()
        assert a.status == RequestStatus.RUNNING
        assert len(b.output_token_ids) > 1
        first_token_time = b.stats.first_token_time
        assert b.output_token_ids == expected_tokens(b)[: len(b.output_token_ids)]
        engine.run()
        assert_complete(a, b)
        assert engine.reported == {"a": a.output_token_ids, "b": b.output_token_ids}
        assert b.stats.first_token_time == first_token_time < b.stats.last_token_time
        assert (a.stats.num_preemptions, b.stats.num_preemptions) == (0, 1)
        assert engine.core.stats().num_preemptions == 1

    def test_a_preempted_request_finds_what_is_left_of_its_blocks(self):
        engine = self.make()
        a, b = make_request("a", 16, 12), make_request("b", 16, 20)
        engine.add(a, b)
        engine.run()
        assert_complete(a, b)
        resumed = [start for plan in engine.plans for start in plan.starts][2]
        assert resumed.num_computed_tokens >= 12
        assert resumed.prompt_len == 16 < len(resumed.token_ids)
        assert b.num_cached_tokens == 0, "only what was there at the first admission counts"

    def test_blocks_computed_again_after_a_preemption_get_their_names_again(self):
        engine = self.make()
        a, b = make_request("a", 16, 24), make_request("b", 16, 20)
        engine.add(a, b)
        engine.run()
        assert b.stats.num_preemptions == 1
        resumed = [start for plan in engine.plans for start in plan.starts][2]
        assert resumed.num_computed_tokens == 0, "a had all of b's blocks"
        again = make_request("again", [*b.prompt_token_ids.tolist(), *b.output_token_ids], 1)
        engine.add(again)
        engine.run()
        assert again.num_cached_tokens == 32
        assert_complete(a, b, again)

    def test_a_preempted_request_goes_before_those_that_never_ran(self):
        engine = self.make()
        a, b, c = make_request("a", 16, 20), make_request("b", 16, 20), make_request("c", 4, 2)
        engine.add(a, b)
        engine.step()
        engine.step()
        engine.add(c)
        c_started = False
        while not b.finished:
            engine.step()
            c_started = c_started or (c.slot >= 0 and b.status == RequestStatus.PREEMPTED)
        assert b.stats.num_preemptions == 1
        assert not c_started
        engine.run()
        assert_complete(a, b, c)

    def test_under_priority_the_least_urgent_gives_way(self):
        engine = self.make(policy="priority")
        a, b = make_request("a", 16, 20, priority=1), make_request("b", 16, 20, priority=0)
        engine.add(a, b)
        engine.run()
        assert_complete(a, b)
        assert (a.stats.num_preemptions, b.stats.num_preemptions) == (1, 0)

    def test_a_prompt_in_the_middle_of_its_chunks_can_be_preempted(self):
        engine = self.make(max_num_batched_tokens=4, max_num_seqs=3)
        a, b = make_request("a", 4, 24), make_request("b", 30, 3)
        engine.add(a)
        for _ in range(4):
            engine.step()
        engine.add(b)
        engine.run()
        assert b.stats.num_preemptions == 1
        assert any(chunk.slot == 1 and not chunk.samples for plan in engine.plans for chunk in plan.chunks)
        assert_complete(a, b)

    def test_results_in_flight_are_read_before_anyone_is_preempted(self):
        """b stops with its fifth token, which is in flight when both need a sixth block and none is left."""
        prompt = list(range(16))
        tokens = next(t for seed in range(99) if (t := reference_tokens(prompt, seed, 21)).index(t[4]) == 4)
        seed = next(seed for seed in range(99) if reference_tokens(prompt, seed, 21) == tokens)
        engine = self.make(pipeline_depth=2, enable_prefix_caching=False)
        a, b = make_request("a", 16, 20), make_request("b", prompt, 20, seed=seed, stop_token_ids=[tokens[4]])
        engine.add(a, b)
        for _ in range(5):
            engine.step()
        slots, pool = engine.scheduler.slots, engine.scheduler.pool
        assert (slots.num_computed[:2].tolist(), slots.capacity[:2].tolist(), pool.num_free) == ([20, 20], [20, 20], 0)
        assert engine.scheduler.num_in_flight == 2
        before = {name: array.copy() for name, array in vars(slots).items() if isinstance(array, np.ndarray)}
        assert engine.scheduler.schedule() is NoPlan.BLOCKED
        for name, array in before.items():
            assert np.array_equal(array, getattr(slots, name)), f"{name} changed though nothing was planned"
        engine.run()
        assert_complete(a, b)
        assert b.output_token_ids == tokens
        assert engine.core.stats().num_preemptions == 0

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_nobody_is_preempted_with_results_in_flight(self, monkeypatch, depth):
        in_flight = []
        preempt = Preemption.preempt

        def spy(preemption, members, mode):
            in_flight.append(engine.scheduler.num_in_flight)
            preempt(preemption, members, mode)

        monkeypatch.setattr(Preemption, "preempt", spy)
        engine = self.make(pipeline_depth=depth)
        a, b = make_request("a", 16, 20), make_request("b", 16, 20)
        engine.add(a, b)
        engine.run()
        assert_complete(a, b)
        assert in_flight == [0]

    @pytest.mark.parametrize("depth", [0, 1, 2, 4])
    def test_many_sequences_in_a_small_pool_all_finish(self, depth):
        engine = Engine(num_blocks=17, max_num_seqs=8, pipeline_depth=depth)
        requests = [make_request(str(i), 3 + i % 7, 20 + i) for i in range(16)]
        engine.add(*requests)
        engine.run()
        assert engine.core.stats().num_preemptions > 5
        assert_complete(*requests)
        assert engine.reported == {request.request_id: request.output_token_ids for request in requests}
        engine.assert_idle()


class TestAbort:
    @pytest.mark.parametrize("depth", [0, 2])
    def test_while_waiting(self, depth):
        engine = Engine(max_num_seqs=1, pipeline_depth=depth)
        a, b, c = (make_request(name, 4, 6) for name in "abc")
        engine.add(a, b, c)
        engine.step()
        assert engine.core.abort(["b"]) == [b]
        assert (b.finish_reason, b.output_token_ids, engine.core.stats().num_waiting) == ("abort", [], 1)
        engine.run()
        assert_complete(a, c)
        assert "b" not in engine.reported

    @pytest.mark.parametrize("depth", [0, 2])
    def test_in_the_middle_of_its_prompt(self, depth):
        engine = Engine(max_num_batched_tokens=8, pipeline_depth=depth)
        a, b = make_request("a", 4, 6), make_request("b", 30, 6)
        engine.add(a, b)
        engine.step()
        engine.step()
        assert 0 < engine.scheduler.slots.num_computed[b.slot] < 30
        engine.core.abort(["b"])
        engine.run()
        assert_complete(a)
        assert b.output_token_ids == []
        engine.assert_idle()

    @pytest.mark.parametrize("depth", [0, 2])
    def test_while_decoding_keeps_the_tokens_read_so_far(self, depth):
        engine = Engine(pipeline_depth=depth)
        a, b = make_request("a", 4, 9), make_request("b", 4, 30, output_kind=RequestOutputKind.FINAL_ONLY)
        engine.add(a, b)
        for _ in range(6):
            engine.step()
        assert b.output_token_ids == []
        engine.core.abort(["b"])
        assert len(b.output_token_ids) == 6 - depth
        assert b.output_token_ids == expected_tokens(b)[: 6 - depth]
        engine.run()
        assert_complete(a)
        assert "b" not in engine.reported
        engine.assert_idle()

    def test_while_preempted(self):
        engine = Engine(num_blocks=11, watermark=0.0)
        a, b = make_request("a", 16, 20), make_request("b", 16, 20)
        engine.add(a, b)
        while b.status != RequestStatus.PREEMPTED:
            engine.step()
        engine.core.abort(["b"])
        assert b.output_token_ids == expected_tokens(b)[: len(b.output_token_ids)] != []
        engine.run()
        assert_complete(a)
        engine.assert_idle()

    def test_of_a_finished_or_unknown_request_does_nothing(self):
        engine = Engine()
        a = make_request("a", 4, 2)
        engine.add(a)
        engine.run()
        assert engine.core.abort(["a", "nobody"]) == []
        assert a.finish_reason == "length"

    def test_an_aborted_request_leaves_its_finished_prefix_to_others(self):
        engine = Engine(pipeline_depth=2)
        a = make_request("a", 9, 30)
        engine.add(a)
        for _ in range(10):
            engine.step()
        engine.core.abort(["a"])
        b = make_request("b", [*a.prompt_token_ids.tolist(), *a.output_token_ids, 5], 4)
        engine.add(b)
        engine.run()
        assert b.num_cached_tokens == (9 + len(a.output_token_ids) - 1) // 4 * 4
        assert_complete(b)


class TestHostEnds:
    def test_a_stop_string_ends_a_request_and_drops_what_is_in_flight(self):
        engine = Engine(pipeline_depth=2)
        a, b = make_request("a", 4, 20, stop=["x"]), make_request("b", 4, 20)
        engine.add(a, b)
        while len(a.output_token_ids) < 5:
            engine.step()
        assert engine.core.finish("a", "x") is a
        assert (a.finish_reason, a.stop_reason) == ("stop", "x")
        engine.run()
        assert a.output_token_ids == engine.reported["a"] == expected_tokens(a)[:5]
        assert_complete(b)
        assert engine.core.finish("a", "x") is None

    def test_a_slot_can_end_and_start_anew_in_one_plan_with_results_in_flight(self):
        engine = Engine(max_num_seqs=1, pipeline_depth=2)
        a, b = make_request("a", 4, 30), make_request("b", 6, 9)
        engine.add(a, b)
        for _ in range(5):
            engine.step()
        engine.core.abort(["a"])
        engine.step()
        plan = engine.plans[-1]
        assert (plan.ends.tolist(), [start.slot for start in plan.starts]) == ([0], [0])
        assert engine.scheduler.num_in_flight == 2
        engine.run()
        assert_complete(b)
        assert engine.reported["b"] == b.output_token_ids

    def test_an_end_with_nothing_else_to_run_waits_for_the_next_plan(self):
        engine = Engine(pipeline_depth=2)
        a = make_request("a", 4, 30)
        engine.add(a)
        for _ in range(4):
            engine.step()
        engine.core.abort(["a"])
        num_plans = len(engine.plans)
        assert not engine.core.has_unfinished()
        assert engine.step() == engine.step() == engine.step() == []
        assert len(engine.plans) == num_plans
        b = make_request("b", 4, 3)
        engine.add(b)
        engine.run()
        assert engine.plans[num_plans].ends.tolist() == [0]
        assert all(not len(plan.ends) for plan in engine.plans[num_plans + 1 :])
        assert_complete(b)


class TestFinish:
    def run_one(self, request: Request, **changes) -> Engine:
        engine = Engine(**changes)
        engine.add(request)
        engine.run()
        assert_complete(request)
        return engine

    @pytest.mark.parametrize("depth", [0, 2])
    def test_at_max_tokens_no_row_is_planned_beyond(self, depth):
        request = make_request("a", 4, 6)
        engine = self.run_one(request, pipeline_depth=depth)
        assert (request.finish_reason, request.stop_reason) == ("length", None)
        assert len(request.output_token_ids) == 6
        assert len(engine.plans) == 6

    @pytest.mark.parametrize(("depth", "surplus"), [(0, 0), (2, 2)])
    def test_a_stop_token_is_found_on_the_device_and_the_surplus_ignored(self, depth, surplus):
        free = make_request("a", 4, 30)
        self.run_one(free)
        at = next(i for i in range(3, 30) if free.output_token_ids[i] not in free.output_token_ids[:i])
        request = make_request("a", 4, 30, stop_token_ids=[free.output_token_ids[at]])
        engine = self.run_one(request, pipeline_depth=depth)
        assert (request.finish_reason, request.stop_reason) == ("stop", free.output_token_ids[at])
        assert request.output_token_ids == free.output_token_ids[: at + 1]
        assert len(engine.plans) == at + 1 + surplus

    def test_an_end_of_sequence_token_is_no_stop_reason_and_can_be_ignored(self):
        free = make_request("a", 4, 12)
        self.run_one(free)
        eos = free.output_token_ids[0]
        params = SamplingParams(temperature=0.0, max_tokens=12)
        stopped = Request("a", free.prompt_token_ids, params, eos_token_ids=[eos])
        self.run_one(stopped)
        assert (stopped.finish_reason, stopped.stop_reason, stopped.output_token_ids) == ("stop", None, [eos])
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        ignoring = Request("a", free.prompt_token_ids, params, eos_token_ids=[eos])
        self.run_one(ignoring)
        assert ignoring.output_token_ids == free.output_token_ids

    def test_without_max_tokens_the_context_is_the_limit(self):
        request = make_request("a", 10, None)
        self.run_one(request, max_model_len=32)
        assert (len(request.output_token_ids), request.finish_reason) == (22, "length")

    def test_a_pool_smaller_than_the_context_is_the_limit(self):
        request = make_request("a", 10, None)
        self.run_one(request, num_blocks=6)
        assert len(request.output_token_ids) == 10


class TestReports:
    @pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
    def test_each_token_is_reported_when_read(self, kind):
        engine = Engine()
        a = make_request("a", 4, 5, output_kind=kind)
        engine.add(a)
        for n in range(1, 6):
            (update,) = engine.step()
            assert update.request is a
            assert update.new_token_ids == a.output_token_ids[n - 1 :]
            assert len(a.output_token_ids) == n
            assert a.finished == (n == 5)

    def test_a_final_only_request_is_reported_once_and_whole(self):
        engine = Engine(num_blocks=11, watermark=0.0)
        a, b = (make_request(name, 16, 20, output_kind=RequestOutputKind.FINAL_ONLY) for name in "ab")
        engine.add(a, b)
        seen = []
        while engine.core.has_unfinished():
            seen += engine.step()
        assert [(update.request, update.new_token_ids) for update in seen] == [
            (a, expected_tokens(a)),
            (b, expected_tokens(b)),
        ]
        assert b.stats.num_preemptions > 0

    def test_a_final_only_request_with_stop_strings_reports_each_token(self):
        engine = Engine()
        engine.add(make_request("a", 4, 5, output_kind=RequestOutputKind.FINAL_ONLY, stop="x"))
        assert [len(engine.step()) for _ in range(5)] == [1] * 5

    def test_a_step_where_nothing_happens_touches_no_request(self):
        class Untouchable(list):
            def __getitem__(self, key):
                raise AssertionError("a request was looked at")

            __iter__ = __getitem__

        engine = Engine(block_size=4, pipeline_depth=2, max_num_seqs=8)
        kind = RequestOutputKind.FINAL_ONLY
        requests = [make_request(str(i), 3 + i, 30, output_kind=kind) for i in range(6)]
        engine.add(*requests)
        for _ in range(4):
            engine.step()
        tenants = engine.scheduler.slots.requests
        engine.scheduler.slots.requests = Untouchable(tenants)
        num_plans = len(engine.plans)
        for _ in range(12):
            assert engine.core.step() == []
        assert sum(len(plan.table_updates) for plan in engine.plans[num_plans:]) == 18, "while blocks were added"
        engine.scheduler.slots.requests = tenants
        engine.run()
        assert_complete(*requests)

    def test_times_are_recorded_in_order(self):
        engine = Engine(pipeline_depth=2)
        request = make_request("a", 4, 5)
        engine.add(request)
        engine.run()
        stats = request.stats
        times = [
            stats.arrival_time,
            stats.first_scheduled_time,
            stats.first_token_time,
            stats.last_token_time,
            stats.finished_time,
        ]
        assert times == sorted(times)
        assert stats.first_token_time < stats.last_token_time


class TestLogprobs:
    @pytest.mark.parametrize("depth", [0, 2])
    def test_each_generated_token_has_its_own(self, depth):
        engine = Engine(num_blocks=11, watermark=0.0, pipeline_depth=depth)
        kinds = {"a": RequestOutputKind.DELTA, "b": RequestOutputKind.FINAL_ONLY}
        a, b = (make_request(name, 16, 20, logprobs=2, output_kind=kind) for name, kind in kinds.items())
        engine.add(a, b)
        engine.run()
        assert b.stats.num_preemptions > 0
        for request in (a, b):
            last = 0
            for token in request.prompt_token_ids.tolist():
                last = fingerprint(last, token)
            assert len(request.logprobs) == 20
            for token, found in zip(request.output_token_ids, request.logprobs, strict=True):
                best, second = top_tokens(last, 2)
                assert list(found) == list(dict.fromkeys([token, best, second]))
                for rank, likely in ((1, best), (2, second)):
                    assert (found[likely].logprob, found[likely].rank) == (logprob_of(last, likely), rank)
                assert found[token].logprob == logprob_of(last, token)
                last = fingerprint(last, token)

    @pytest.mark.parametrize("depth", [0, 2])
    def test_those_of_a_prompt_come_once_whatever_its_chunks(self, depth):
        engine = Engine(num_blocks=14, max_num_batched_tokens=7, watermark=0.0, pipeline_depth=depth)
        a = make_request("a", 12, 30)
        b = make_request("b", 33, 4, prompt_logprobs=1, logprobs=None)
        engine.add(a)
        for _ in range(3):
            engine.step()
        engine.add(b)
        engine.run()
        assert b.stats.num_preemptions > 0
        assert b.prompt_logprobs[0] is None
        assert len(b.prompt_logprobs) == 33
        last = 0
        prompt = b.prompt_token_ids.tolist()
        for before, token, found in zip(prompt, prompt[1:], b.prompt_logprobs[1:], strict=False):
            last = fingerprint(last, before)
            assert list(found) == list(dict.fromkeys([token, *top_tokens(last, 1)]))
            assert found[token].logprob == logprob_of(last, token)
        assert_complete(a, b)


class TestPlans:
    def test_the_variant_is_the_least_that_does_for_all_running_requests(self):
        engine = Engine()
        greedy = make_request("greedy", 4, 12)
        random = make_request("random", 4, 9, temperature=0.7)
        truncated = make_request("truncated", 4, 6, temperature=0.7, top_p=0.9)
        full = make_request("full", 4, 3, presence_penalty=0.5)
        engine.add(greedy, random, truncated, full)
        engine.run()
        variants = [plan.variant for plan in engine.plans]
        by_ability = (SamplingVariant.FULL, SamplingVariant.TRUNCATED, SamplingVariant.SAMPLING, SamplingVariant.GREEDY)
        assert variants == [variant for variant in by_ability for _ in range(3)]

    def test_a_seed_is_passed_on_and_others_derive_from_the_engine_and_the_arrival(self):
        def seeds(engine_seed: int) -> list[int]:
            engine = Engine(seed=engine_seed)
            engine.add(make_request("a", 4), make_request("b", 4), make_request("c", 4, seed=-1))
            engine.run()
            return [start.seed for start in engine.plans[0].starts]

        a, b, c = seeds(0)
        assert c == 2**64 - 1
        assert len({a, b, *seeds(1)[:2]}) == 4
        assert seeds(0) == [a, b, c]
        assert min(a, b) >= 0
        assert max(a, b) < 2**64

    def test_a_start_says_all_that_the_device_needs(self):
        engine = Engine()
        params = SamplingParams(max_tokens=7, stop_token_ids=[5, 6], seed=9, bad_words=["no"])
        request = Request("a", [1, 2, 3], params, eos_token_ids=[2, 5], bad_words_token_ids=[[8, 9]])
        engine.add(request)
        engine.step()
        (start,) = engine.plans[0].starts
        assert start.token_ids.tolist() == [1, 2, 3]
        assert start.token_ids.dtype == start.block_ids.dtype == np.int32
        assert (start.slot, start.prompt_len, start.num_computed_tokens, start.max_len) == (0, 3, 0, 10)
        assert (start.sampling, start.seed, start.stop_token_ids) == (params, 9, (2, 5, 6))
        assert start.bad_words_token_ids == ((8, 9),)

    def test_nothing_is_planned_when_nothing_is_there(self):
        scheduler = Scheduler(make_config())
        assert scheduler.schedule() is NoPlan.IDLE

    def test_results_out_of_order_are_refused(self):
        config = make_config(pipeline_depth=2)
        scheduler, executor = Scheduler(config), FakeExecutor(config)
        scheduler.add(make_request("a", 4))
        first = scheduler.schedule()
        executor.execute(first)
        second = scheduler.schedule()
        with pytest.raises(EngineDeadError, match="step 1 do not belong to the oldest"):
            scheduler.update(second, executor.execute(second).result())

    def test_a_token_that_the_device_lost_is_noticed(self):
        scheduler = Scheduler(make_config())
        scheduler.add(make_request("a", 4))
        plan = scheduler.schedule()
        lost = StepResult(np.array([[NO_TOKEN]], np.int32), np.zeros((1,), np.uint8))
        with pytest.raises(EngineDeadError, match="0 tokens for 1 running"):
            scheduler.update(plan, lost)


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompt", "error", "message"),
        [
            ([], InvalidPromptError, "empty"),
            ([1, -1], InvalidPromptError, "-1, which is no token id"),
            ([1, 2**31], InvalidPromptError, "2147483648, which is no token id"),
            ([1, 2**70], InvalidPromptError, "list of integer token ids"),
            ([1.0, 2.0], InvalidPromptError, "list of integer token ids"),
            (["a"], InvalidPromptError, "list of integer token ids"),
            ([[1], [2]], InvalidPromptError, "list of integer token ids"),
            ([[1], [2, 3]], InvalidPromptError, "list of integer token ids"),
            (7, InvalidPromptError, "list of integer token ids"),
        ],
    )
    def test_a_prompt_that_is_none(self, prompt, error, message):
        with pytest.raises(error, match=message):
            Request("a", prompt, SamplingParams())

    def test_more_stop_tokens_than_are_tested(self):
        with pytest.raises(InvalidParameterError, match="come to 65 tokens; at most 64"):
            Request("a", [1], SamplingParams(stop_token_ids=list(range(64))), eos_token_ids=[100])

    @pytest.mark.parametrize(
        ("changes", "length", "error", "message"),
        [
            ({}, 64, InvalidPromptError, "64 tokens; with max_model_len=64 at most 63"),
            ({"num_blocks": 5}, 16, OutOfMemoryError, r"16 tokens, but the KV pool holds 16 \(4 blocks of 4\)"),
        ],
    )
    def test_a_prompt_that_can_never_fit_leaves_no_trace(self, changes, length, error, message):
        engine = Engine(**changes)
        other = make_request("other", 5, 4)
        engine.add(other)
        with pytest.raises(error, match=message):
            engine.add(make_request("a", length))
        fits = make_request("a", length - 1, 8)
        engine.add(fits)
        engine.run()
        assert_complete(other, fits)
        assert len(fits.output_token_ids) == 1

    def test_an_id_in_use(self):
        engine = Engine()
        engine.add(make_request("a", 4, 2))
        with pytest.raises(InvalidParameterError, match="'a' is in use"):
            engine.add(make_request("a", 4, 2))
        engine.run()
        engine.add(make_request("a", 4, 2))
        engine.run()

    def test_an_engine_that_cannot_go_on_says_so(self, monkeypatch):
        engine = Engine()
        engine.add(make_request("a", 4, 2))
        monkeypatch.setattr(engine.scheduler, "schedule", lambda num_queued: NoPlan.IDLE)
        with pytest.raises(EngineDeadError, match="1 requests are left, but none can run"):
            engine.step()
        assert issubclass(EngineDeadError, JPagedError)


class TestStats:
    def test_they_count_what_happened(self):
        engine = Engine(num_blocks=21)
        a, b = make_request("a", 6, 4), make_request("b", 9, 6)
        engine.add(a, b)
        engine.step()
        engine.step()
        stats = engine.core.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_steps) == (2, 0, 2)
        assert (stats.prompt_tokens, stats.generated_tokens) == (15, 4)
        assert stats.step_tokens[:4] == (0, 1, 0, 1)  # with the 15 tokens of the prompts, and without
        assert EngineStats.total([stats, stats]).step_tokens[:4] == (0, 2, 0, 2)
        assert (stats.num_used_blocks, stats.num_blocks) == (5, 20)
        assert stats.kv_cache_usage == 0.25
        assert (stats.tokens_held, stats.token_slots) == (17, 20)
        engine.run()
        stats = engine.core.stats()
        assert (stats.num_running, stats.num_finished, stats.generated_tokens) == (0, 2, 10)
        assert (stats.num_used_blocks, stats.tokens_held, stats.token_slots) == (0, 0, 0)

    def test_a_shared_token_is_held_once_and_a_sequence_wastes_less_than_a_block(self):
        engine = Engine()
        engine.add(*[make_request(str(i), [*range(8), i], 20) for i in range(6)])
        for _ in range(12):
            engine.step()
            stats = engine.core.stats()
            assert stats.token_slots - stats.tokens_held < 6 * engine.config.block_size
        assert stats.tokens_held == 8 + 6 * (1 + 11)


def test_the_fake_model_depends_on_all_that_came_before():
    assert len({next_token(fingerprint(fingerprint(0, i), 7), 0, 2) for i in range(50)}) > 20
