"""Random arrivals, aborts, stop strings and steps, with everything checked after each.

The fake executor fails on any row that reads what is not its own sequence's, the engine on any block that is lost or
doubly owned. Here the outputs are compared with what each request must generate on its own.
"""

from collections import Counter
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jpaged.api.errors import InvalidParameterError, OutOfMemoryError
from jpaged.api.sampling_params import RequestOutputKind
from jpaged.engine.interface import CacheGroup, StepPlan
from jpaged.engine.sequences.request import Request, RequestStatus
from tests.engine.helpers import Engine, assert_found, expected_tokens, make_request, make_search, name_of


class Drive:
    """An engine under load, with what each of its requests should come to held against what it does come to."""

    def __init__(self, **changes) -> None:
        self.engine = Engine(**changes)
        self.engine.executor.on_execute = self._check_order
        self.unfinished: dict[str, Request] = {}  # sequences, by name
        self.num_added = 0
        self.last_admitted = -1

    @property
    def running(self) -> list[Request]:
        return [request for request in self.unfinished.values() if request.status == RequestStatus.RUNNING]

    def add(self, prompt: list[int], max_tokens: int | None, **options) -> None:
        self._add(make_request(str(self.num_added), prompt, max_tokens, **options))

    def search(self, prompt: list[int], beam_width: int, max_tokens: int, **options) -> None:
        self._add(make_search(str(self.num_added), prompt, beam_width, max_tokens, **options))

    def _add(self, request: Request) -> None:
        self.num_added += 1
        self.engine.add(request)
        self.unfinished |= {name_of(member): member for member in request.group.members}

    def step(self) -> None:
        """One turn of the loop. Whoever is preempted must have nothing in flight."""
        preemptions = self.engine.core.stats().num_preemptions
        in_flight = self.engine.scheduler.num_in_flight
        self.engine.step()
        assert in_flight == 0 or self.engine.core.stats().num_preemptions == preemptions
        self._check_outputs()

    def preempt(self, request: Request, mode: str) -> None:
        """In whatever state it is; as `Engine.preempt`."""
        self.engine.preempt(request, mode)
        self._check_outputs()

    def _check_outputs(self) -> None:
        for request in list(self.unfinished.values()):
            if request.finished:
                self._check_finished(request)
            elif request.reports_each_token and request.beam is None:
                assert request.output_token_ids == self.engine.reported.get(name_of(request), [])

    def abort(self, request: Request) -> None:
        unfinished = [member for member in request.group.members if not member.finished]
        assert self.engine.core.abort([request.request_id]) == [request.group.leader]
        for member in unfinished:
            self._check_cut(member, "abort")

    def stop(self, request: Request) -> None:
        """As the caller does at a stop string, having seen all tokens that were read."""
        assert self.engine.core.finish(request.request_id, "x", request.index) is request
        self._check_cut(request, "stop")

    def finish(self) -> None:
        """Runs to the end; there is always progress, so there is a bound on the steps."""
        for _ in range(100 + 6 * sum(request.max_len for request in self.unfinished.values())):
            if not self.engine.core.has_unfinished() and not self.engine.scheduler.num_in_flight:
                break
            self.step()
        assert not self.engine.core.has_unfinished()
        assert not self.unfinished
        self.engine.assert_idle()
        self.engine.core.check_integrity()

    def _check_finished(self, request: Request) -> None:
        del self.unfinished[name_of(request)]
        output = request.output_token_ids
        if request.beam is not None:
            assert self.engine.reported.pop(name_of(request)) == output
            if not any(member.finish_reason == "abort" for member in request.group.members):
                assert_found(request)
            return
        assert output == self.engine.reported.pop(name_of(request)) == expected_tokens(request)
        assert request.finish_reason == ("stop" if output[-1] in request.stop_token_ids else "length")
        if request.logprobs is not None:
            assert [next(iter(position)) for position in request.logprobs] == output
        if request.prompt_logprobs is not None and request.index == 0:
            found = [next(iter(position)) for position in request.prompt_logprobs[1:]]
            assert found == request.prompt_token_ids[1:].tolist()

    def _check_cut(self, request: Request, reason: str) -> None:
        del self.unfinished[name_of(request)]
        output = request.output_token_ids
        assert request.finish_reason == reason
        assert request.beam is not None or output == expected_tokens(request)[: len(output)]
        reported = self.engine.reported.pop(name_of(request), [])
        assert reported == (output if request.reports_each_token else [])
        self.engine.core.check_integrity()

    def _check_order(self, plan: StepPlan) -> None:
        """First come, first served: nobody starts before one who has waited longer."""
        if self.engine.config.policy != "fcfs":
            return
        forked = [s.block_ids.shape[1] == 0 or s.num_computed_tokens == len(s.token_ids) for s in plan.starts]
        admitted = [start for start, is_forked in zip(plan.starts, forked, strict=True) if not is_forked]
        started = [self.engine.scheduler.slots.requests[start.slot] for start in admitted]
        waiting = [r.arrival_number for r in self.unfinished.values() if r.status != RequestStatus.RUNNING]
        assert not started or not waiting or max(r.arrival_number for r in started) <= min(waiting)
        for request in started:
            if not request.stats.num_preemptions:
                assert request.arrival_number > self.last_admitted
                self.last_admitted = request.arrival_number


GROUPS = {
    "full": (CacheGroup(),),
    "window": (CacheGroup(window=6),),
    "full and window": (CacheGroup(), CacheGroup(window=9)),
    "windows and full": (CacheGroup(window=4), CacheGroup(), CacheGroup(window=13)),
    "own token only": (CacheGroup(window=1),),
}

configs = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(6, 24) | st.just(48),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([1, 3, 8, 16, 64]),
        "max_model_len": st.sampled_from([20, 61]),
        "enable_prefix_caching": st.booleans(),
        "shared_prefix_attention": st.booleans(),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "watermark": st.sampled_from([0.0, 0.1]),
        "pipeline_depth": st.integers(0, 3),
        "num_swap_chunks": st.sampled_from([0, 1, 4]),
        "preemption_mode": st.sampled_from(["auto", "swap", "recompute"]),
        "host_prefix_cache": st.booleans(),
        "tokens_per_row": st.sampled_from([1, 1, 2, 4]),
        "cache_groups": st.sampled_from(["full", "full", *GROUPS]).map(GROUPS.__getitem__),
        "keeps_states": st.sampled_from([False, True]),
        "num_state_snapshots": st.sampled_from([0, 1, 3, 8]),
        "state_snapshot_tokens": st.sampled_from([1, 8]),
    }
)
requests = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 1), min_size=1, max_size=24) | st.integers(1, 24).map(lambda n: [2] * n),
        "max_tokens": st.none() | st.integers(1, 24),
        "priority": st.integers(0, 2),
        "salt": st.sampled_from([None, None, "salt"]),
        "seed": st.sampled_from([None, 0]),
        "temperature": st.sampled_from([0.0, 1.0]),
        "stop_token_ids": st.sampled_from([None, None, list(range(0, 97, 9))]),
        "logprobs": st.sampled_from([None, None, 1]),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
        "output_kind": st.sampled_from(list(RequestOutputKind)),
        "n": st.sampled_from([1, 1, 1, 2, 4]),
    }
)


searches = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 1), min_size=1, max_size=16) | st.integers(16, 48).map(lambda n: [2] * n),
        "beam_width": st.integers(1, 4),
        "max_tokens": st.integers(1, 14),
        "priority": st.integers(0, 2),
        "length_penalty": st.sampled_from([1.0, 0.0]),
        "early_stopping": st.sampled_from([True, False]),
        "stop_token_ids": st.sampled_from([None, list(range(0, 97, 12))]),
    }
)


class SchedulingMachine(RuleBasedStateMachine):
    changes: ClassVar[dict[str, Any]] = {}
    """Of every configuration, as `Engine` takes them."""

    @initialize(config=configs)
    def start(self, config):
        if config["keeps_states"]:
            config |= {"shared_prefix_attention": False, "host_prefix_cache": False}
            config["enable_prefix_caching"] = config["num_state_snapshots"] > 0
            config["preemption_mode"] = config["preemption_mode"].replace("swap", "auto")
        else:
            config["num_state_snapshots"] = 0
        config["host_prefix_cache"] &= config["enable_prefix_caching"] and config["num_swap_chunks"] > 0
        self.drive = Drive(**config, **self.changes)
        self.pinned: list[list[int]] = []
        limits = self.drive.engine.scheduler.limits
        self.longest = min(config["max_model_len"], limits.pool_tokens) - 1
        self.most = min(config["max_num_seqs"], config["max_num_batched_tokens"])

    @rule(new=st.lists(requests, min_size=1, max_size=4))
    def arrive(self, new):
        for request in new:
            request["n"] = min(request["n"], self.most)
            if self.longest:  # else the pool holds not a block of each group
                self.drive.add(request.pop("prompt")[: self.longest], request.pop("max_tokens"), **request)

    @rule(new=searches)
    def arrive_to_search(self, new):
        width = min(new.pop("beam_width"), self.most)
        prompt = new.pop("prompt")[: max(1, self.longest)]
        with suppress(OutOfMemoryError):
            self.drive.search(prompt, width, **new)

    @rule(n=st.integers(1, 12))
    def step(self, n):
        for _ in range(n):
            self.drive.step()

    @precondition(lambda self: self.drive.unfinished)
    @rule(data=st.data())
    def abort(self, data):
        self.drive.abort(data.draw(st.sampled_from(list(self.drive.unfinished.values()))))

    @precondition(lambda self: self.drive.running)
    @rule(data=st.data())
    def stop(self, data):
        running = [request for request in self.drive.running if request.group.forked and request.beam is None]
        if running:
            self.drive.stop(data.draw(st.sampled_from(running)))

    @precondition(lambda self: self.drive.running)
    @rule(data=st.data(), mode=st.sampled_from(["swap", "recompute"]))
    def preempt(self, data, mode):
        self.drive.preempt(data.draw(st.sampled_from(self.drive.running)), mode)

    @precondition(lambda self: self.drive.engine.config.enable_prefix_caching)
    @rule(prompt=st.lists(st.integers(0, 1), min_size=4, max_size=12) | st.integers(4, 24).map(lambda n: [2] * n))
    def pin(self, prompt):
        with suppress(OutOfMemoryError):
            self.drive.engine.core.pin_prefix(np.array(prompt, np.int32))
            self.pinned.append(prompt)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self):
        assert self.drive.engine.core.unpin_prefix(np.array(self.pinned[-1], np.int32))
        self.pinned = [prompt for prompt in self.pinned if prompt != self.pinned[-1]]

    @rule()
    def reset_prefix_cache(self):
        engine = self.drive.engine
        holds_any = self.drive.running or engine.core.stats().num_used_swap_blocks
        assert engine.core.reset_prefix_cache() == (not holds_any)
        if not holds_any:
            assert engine.core.stats().num_cached_blocks == engine.core.stats().num_host_cached_blocks == 0
            self.pinned.clear()

    def teardown(self):
        if hasattr(self, "drive"):
            while self.pinned:
                self.unpin()
            self.drive.finish()


TestSchedulingMachine = SchedulingMachine.TestCase
TestSchedulingMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


WALKS = [
    ("fcfs", "auto", "full", 1),
    ("priority", "swap", "full", 1),
    ("priority", "recompute", "full", 1),
    ("fcfs", "auto", "full", 4),
    ("fcfs", "auto", "window", 1),
    ("priority", "swap", "full and window", 2),
    ("fcfs", "recompute", "windows and full", 1),
]
"""Policy, way to preempt, cache groups and most tokens a row of `serve_at_random`."""


@pytest.mark.parametrize(("groups", "num_snapshots"), [("full", 0), ("full", 12), ("full and window", 6)])
def test_states_of_sequences_are_their_own_under_load(groups, num_snapshots):
    """Forks, searches, aborts and preemptions, in slots that are never cleared, with few snapshots or none."""
    states = {"keeps_states": True, "host_prefix_cache": False, "state_snapshot_tokens": 4}
    states |= {"num_state_snapshots": num_snapshots, "enable_prefix_caching": num_snapshots > 0}
    serve_at_random("fcfs", "auto", groups, 1, 2, num_requests=200, **states)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_state_snapshots", 0),
        ("preemption_mode", "swap"),
        ("host_prefix_cache", True),
        ("shared_prefix_attention", True),
    ],
)
def test_states_refuse_what_they_cannot_do(option, value):
    with pytest.raises(InvalidParameterError, match=f"keeps_states=True needs .*{option}"):
        Engine(**{"keeps_states": True, "num_state_snapshots": 4, option: value})


@pytest.mark.parametrize("option", ["keeps_states", "enable_prefix_caching"])
def test_snapshots_are_for_cached_prefixes_of_sequences_with_states(option):
    with pytest.raises(InvalidParameterError, match="num_state_snapshots=4 needs"):
        Engine(**{"keeps_states": True, "num_state_snapshots": 4, option: False})


@pytest.mark.long
@pytest.mark.parametrize(("policy", "mode", "groups", "tokens_per_row"), WALKS)
@pytest.mark.parametrize("depth", [0, 2])
def test_many_requests_come_and_go(policy, mode, groups, tokens_per_row, depth):
    """Enough for blocks, slots and the prefix cache to turn over many times; `make drill-scheduling` goes further."""
    serve_at_random(policy, mode, groups, tokens_per_row, depth, num_requests=200)


def serve_at_random(
    policy: str,
    mode: str,
    groups: str,
    tokens_per_row: int,
    depth: int,
    *,
    num_requests: int = 600,
    seed: int = 20,
    **changes: Any,
) -> Drive:
    """Serves requests that come, are aborted, stop and are preempted at random. changes: as `Engine` takes them."""
    rng = np.random.default_rng(seed + depth)
    drive = Drive(
        num_blocks={"full": 33, "window": 15, "full and window": 45, "windows and full": 56}[groups],
        cache_groups=GROUPS[groups],
        tokens_per_row=tokens_per_row,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        policy=policy,
        pipeline_depth=depth,
        watermark=0.0,
        num_swap_chunks=4,
        preemption_mode=mode,
        **{"host_prefix_cache": depth == 2} | changes,
    )
    aborted = stopped = 0
    histories: list[list[int]] = [[]]
    while drive.num_added < num_requests:
        while len(drive.unfinished) < 12:
            prefix = histories[rng.integers(len(histories))] if rng.random() < 0.3 else [int(rng.integers(4))] * 20
            if rng.random() < 0.05:
                drive.search([int(rng.integers(4))] * 9, int(rng.integers(1, 5)), int(rng.integers(1, 10)))
                continue
            drive.add(
                prefix[: rng.integers(31)] + rng.integers(0, 3, rng.integers(1, 10)).tolist(),
                int(rng.integers(1, 24)),
                priority=int(rng.integers(3)),
                stop_token_ids=list(range(0, 97, 16)) if rng.random() < 0.5 else None,
                output_kind=RequestOutputKind(int(rng.integers(3))),
                n=int(rng.choice([1, 1, 1, 3])),
            )
        running = drive.running
        drive.step()
        finished = (request for request in running if request.finished)
        histories = [*histories, *([*r.prompt_token_ids.tolist(), *r.output_token_ids] for r in finished)][-20:]
        if rng.random() < 0.05:
            drive.abort(list(drive.unfinished.values())[rng.integers(len(drive.unfinished))])
            aborted += 1
        if rng.random() < 0.05 and drive.running:
            running = [request for request in drive.running if request.group.forked and request.beam is None] or [None]
            if (request := running[rng.integers(len(running))]) is not None:
                drive.stop(request)
            stopped += 1
    drive.finish()
    stats = drive.engine.core.stats()
    assert stats.num_finished == drive.num_added
    assert min(aborted, stopped, stats.num_preemptions) > num_requests // 50
    config = drive.engine.config
    keeps_states = config.keeps_states  # which are not swapped, and hit prefixes with snapshots alone
    least = num_requests // 2 if config.num_state_snapshots else num_requests * 5 // 3
    assert (stats.prefix_cache_hits > least) == config.enable_prefix_caching
    assert (stats.prefix_cache_host_hits > num_requests // 6) == (depth == 2 and not keeps_states)
    assert (stats.num_swapped_in > 0) == (mode != "recompute" and not keeps_states)
    return drive


@pytest.mark.parametrize(("tiers", "depth"), [(0, 0), (0, 2), (1, 0), (2, 2)])
def test_whoever_is_preempted_in_whatever_state_gets_its_own_tokens(tiers, depth):
    """Above all while prompts, or what is to be computed again, come in chunks; with as many tiers of prefixes."""
    rng = np.random.default_rng(4)
    drive = Drive(
        num_blocks=49,
        max_num_seqs=10,
        max_num_batched_tokens=8,
        pipeline_depth=depth,
        num_swap_chunks=6,
        enable_prefix_caching=tiers > 0,
        host_prefix_cache=tiers == 2,
        shared_prefix_attention=tiers > 0,
        watermark=0.0,
    )
    slots, in_prefill = drive.engine.scheduler.slots, Counter[tuple[bool, bool]]()
    while drive.num_added < 200:
        while len(drive.unfinished) < 8:
            common, own = rng.integers(1, 12), rng.integers(30)
            prompt = [int(rng.integers(3))] * int(common) + rng.integers(97, size=own).tolist()
            if rng.random() < 0.5:
                drive.search(prompt, int(rng.integers(1, 4)), int(rng.integers(2, 12)))
            else:
                drive.add(prompt, int(rng.integers(1, 20)), n=int(rng.choice([1, 1, 3])))
        drive.step()
        if rng.random() < 0.25 and (running := drive.running):
            behind = [r for r in running if slots.num_computed[r.slot] < slots.num_known[r.slot] - 1]
            request = rng.choice(behind or running)
            in_prefill[request.beam is not None, request.group.forked] += bool(behind)
            drive.preempt(request, str(rng.choice(["swap", "recompute"])))
    drive.finish()
    assert drive.engine.core.stats().num_swapped_in > 200
    assert len(in_prefill) == 4
    assert min(in_prefill.values()) >= 10, in_prefill


@pytest.mark.parametrize(
    "changes", [{"num_blocks": 24}, {"max_num_batched_tokens": 5}, {"enable_prefix_caching": False}]
)
def test_the_pipelined_loop_gives_the_tokens_of_the_plain_one(changes):
    outputs = []
    for depth in range(4):
        rng = np.random.default_rng(1)
        engine = Engine(**(changes | {"pipeline_depth": depth}))
        requests = [
            make_request(str(i), rng.integers(0, 2, rng.integers(1, 30)), int(rng.integers(1, 30)), n=1 + i % 3)
            for i in range(24)
        ]
        engine.add(*requests)
        engine.run()
        sequences = [member for request in requests for member in request.group.members]
        outputs.append([sequence.output_token_ids for sequence in sequences])
        assert engine.reported == {name_of(sequence): sequence.output_token_ids for sequence in sequences}
    assert outputs[1:] == outputs[:1] * 3
