"""Constraints that the device follows by itself: rows that wait for nothing, and where their tables lie."""

from concurrent.futures import Future
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.engine.constraints.grammars import ConstrainedRows
from jpaged.engine.constraints.searches import Searches
from jpaged.engine.constraints.tables import Tables
from jpaged.engine.interface import NO_PLACE, TABLE_ROOM, PartRoom, SamplingVariant, TableRoom
from tests.engine.fake_executor import VOCAB_SIZE, FakeTables, allowed_token, fingerprint, next_token
from tests.engine.helpers import Engine, make_request
from tests.engine.helpers import assert_complete as assert_ordinary
from tests.engine.test_constrained_rows import MadeUpGrammar, MadeUpGrammars, assert_constrained


class Table:
    """Each class of tokens may follow or not, and leads somewhere; one at least may. Others hold their places."""

    def __init__(self, seed: int, states: int, classes: int = 5) -> None:
        rng = np.random.default_rng(seed)
        self.classes = rng.integers(0, classes, VOCAB_SIZE).astype(np.int32)
        may_follow = rng.random((states, classes)) < 0.6
        may_follow[np.arange(states), self.classes[rng.integers(0, VOCAB_SIZE, states)]] = True
        self.next = np.where(may_follow, rng.integers(0, states, (states, classes)), -1).astype(np.int16)
        bits = np.zeros((states, 32 * -(-VOCAB_SIZE // 32)), np.bool_)
        bits[:, :VOCAB_SIZE] = may_follow[:, self.classes]
        masks = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
        self.masks, mask_of = np.unique(masks, axis=0, return_inverse=True)
        self.mask_of, self.start = mask_of.astype(np.int32), int(rng.integers(0, states))

    def follow(self, state: int, token_ids) -> int:
        for token in token_ids:
            state = int(self.next[state, self.classes[token]])
            if state < 0:
                break
        return state

    def tokens_of(self, request) -> list[int]:
        """What a request must generate under it."""
        last, state, output = 0, self.start, []
        for token in request.prompt_token_ids.tolist():
            last = fingerprint(last, token)
        while request.prompt_len + len(output) < request.max_len:
            token = next_token(last, request.seed, request.prompt_len + len(output))
            output.append(allowed_token(token, self.masks[self.mask_of[state]]))
            state, last = self.follow(state, output[-1:]), fingerprint(last, output[-1])
        return output


class Grammars(MadeUpGrammars):
    """By regex: "table N" has the N-th table; others are followed by the host."""

    def __init__(self, num_tables: int = 1) -> None:
        super().__init__()
        self.tables: list[Table | None] = [Table(number, 7 + number) for number in range(num_tables)]
        self.compiled: list[MadeUpGrammar] = []

    def compile(self, params):
        kind, *number = params.regex.split()
        future: Future = Future()
        grammar = MadeUpGrammar()
        grammar.table = self.tables[int(number[0])] if kind == "table" else None
        self.compiled.append(grammar)
        future.set_result(grammar)
        return future


def assert_is_there(placed, device: FakeTables) -> None:
    """The device has a table's own masks, and where its tokens lead."""
    table, first = placed.table, placed.spans.places[0]
    examples = [int(np.flatnonzero(table.classes == one)[0]) for one in np.unique(table.classes)]
    for state in range(len(table.mask_of)):
        assert device.mask_at(first + state).tolist() == table.masks[table.mask_of[state]].tolist()
        for token in examples:
            following = table.follow(state, [token])
            assert device.next_place(first + state, token) == (NO_PLACE if following < 0 else first + following)


def engine_of(grammars: Grammars, **changes) -> Engine:
    kinds = (Searches, partial(ConstrainedRows, grammars=grammars))
    return Engine(kinds=kinds, **({"num_blocks": 256, "max_model_len": 128, "max_num_batched_tokens": 160} | changes))


def tabled(number: int, name: str, prompt: int, max_tokens: int = 30, **sampling):
    constraint = StructuredOutputsParams(regex=f"table {number}")
    return make_request(name, prompt, max_tokens, structured_outputs=constraint, **sampling)


def test_rows_with_tables_wait_for_no_result_among_others_and_after_preemptions():
    grammars = Grammars(3)
    engine = engine_of(grammars, pipeline_depth=2)
    requests = [tabled(i % 3, f"tabled {i}", 3 + i, 20 + i, n=1 + i % 2) for i in range(4)]
    followed = make_request("followed", 5, 15, structured_outputs=StructuredOutputsParams(regex="host"))
    ordinary = make_request("ordinary", 4, 25)
    engine.add(*requests)
    for _ in range(6):
        engine.step()
    assert engine.core.scheduler.num_in_flight == 2
    assert {plan.variant for plan in engine.plans} == {SamplingVariant.TABLE}
    assert [part.number for plan in engine.plans for part in plan.table_parts] == [0, 1, 2]
    engine.preempt(requests[1], "recompute")
    engine.preempt(requests[2], "recompute")
    engine.add(followed, ordinary)
    engine.run(20_000)
    for i, request in enumerate(requests):
        for member in request.group.members:
            assert member.output_token_ids == grammars.tables[i % 3].tokens_of(member)
    assert_constrained(followed)
    assert_ordinary(ordinary)
    assert sum(len(plan.table_parts) for plan in engine.plans) == 3
    assert engine.core.stats().num_requests_by_table == 4
    engine.assert_idle()


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 4}])
def test_ends_that_must_be_late_are_left_to_the_host(options):
    engine = engine_of(Grammars())
    engine.add(request := tabled(0, "late", 3, 12, **options))
    engine.run(20_000)
    assert request.table is None
    assert_constrained(request)


def test_a_request_that_goes_on_from_tokens_that_its_table_does_not_allow_is_left_to_the_host():
    grammars = Grammars()
    table = grammars.tables[0]
    engine = engine_of(grammars)
    before = tabled(0, "before", 3, 9)
    engine.add(before)
    engine.run(20_000)
    again, other = tabled(0, "again", 3, 9), tabled(0, "other", 3, 9)
    wrong = next(t for t in range(VOCAB_SIZE) if table.follow(table.start, [t]) < 0)
    engine.core.scheduler.add(again, [before.output_token_ids[:4]])
    engine.core.scheduler.add(other, [[wrong]])
    engine.step()
    assert again.table is not None
    assert other.table is None


def test_a_table_that_is_made_while_requests_wait_for_slots_serves_these():
    grammars = Grammars()
    table, grammars.tables = grammars.tables[0], [None]
    engine = engine_of(grammars, max_num_seqs=2)
    requests = [tabled(0, f"early {i}", 3, 9, n=1 + i % 2) for i in range(4)]
    early, *late = requests
    engine.add(*requests)
    engine.step()
    engine.preempt(early, "recompute")
    for grammar in grammars.compiled:
        grammar.table = table
    engine.run(20_000)
    assert early.table is None
    assert_constrained(early)
    assert [member.output_token_ids for request in late for member in request.group.members] == [
        table.tokens_of(member) for request in late for member in request.group.members
    ]
    assert engine.core.stats().num_requests_by_table == len(late)
    engine.assert_idle()


def test_others_go_on_while_the_device_gets_a_table_in_parts(monkeypatch):
    monkeypatch.setattr("jpaged.engine.constraints.tables.PART_ROOM", PartRoom(2, 1, 9))
    grammars = Grammars()
    engine = engine_of(grammars)
    requests = [make_request("ordinary", 4, 60), *(tabled(0, f"tabled {i}", 3, 9) for i in range(3))]
    for request in requests:
        engine.add(request)
        engine.step()
    engine.run(20_000)
    ordinary, first, second, third = requests
    assert (first.table, second.table) == (None, None)
    assert third.table is not None
    assert third.output_token_ids == grammars.tables[0].tokens_of(third)
    assert_constrained(first)
    assert_constrained(second)
    assert_ordinary(ordinary)
    sent = [len(plan.table_parts) for plan in engine.plans]
    assert [count for count in sent if count] == [4, 2]
    alone = engine_of(Grammars())
    alone.add(request := tabled(0, "alone", 3, 9), other := tabled(0, "other", 3, 9))
    alone.run(20_000)
    assert [len(plan.table_parts) for plan in alone.plans][:2] == [6, 0]
    assert request.output_token_ids == grammars.tables[0].tokens_of(request)
    assert other.table is not None


def test_tables_in_use_never_overlap_and_others_make_room(monkeypatch):
    monkeypatch.setattr("jpaged.engine.constraints.tables.PART_ROOM", PartRoom(4, 3, 7))
    rng = np.random.default_rng()
    room = TableRoom(tables=5, states=60, masks=30, entries=260)
    tables, device = Tables(room), FakeTables()
    known = [Table(int(rng.integers(1 << 30)), int(rng.integers(3, 20))) for _ in range(12)]
    in_use: list = []
    refused = 0
    for _ in range(400):
        if in_use and rng.random() < 0.5:
            in_use.pop(int(rng.integers(len(in_use)))).release()
            continue
        table = known[int(rng.integers(len(known)))]
        placed = tables.place(table)
        refused += placed is None
        if placed is None:
            assert in_use
            continue
        for part in tables.take_parts(int(rng.integers(3))):  # some tables lose their room before all of them are sent
            device.write(part)
        if not placed.is_sent and rng.random() < 0.5:
            continue
        for part in placed.take_parts():
            device.write(part)
        placed.hold()
        in_use.append(placed)
        distinct = list({id(one): one for one in in_use}.values())
        bounds = (0, room.tables), (1, room.states), (1, room.masks), (0, room.entries)
        for (begin, end), spans in zip(bounds, zip(*(one.spans for one in distinct), strict=True), strict=True):
            spans = sorted(spans)
            assert all(first[1] <= second[0] for first, second in pairwise(spans))
            assert spans[0][0] >= begin
            assert spans[-1][1] <= end
        for one in distinct:
            assert_is_there(one, device)
    assert refused
    assert Tables(TableRoom(1, 3, 100, 1000)).place(Table(0, 9)) is None  # never fits


def test_a_table_that_has_no_room_beside_those_in_use_takes_none_from_others():
    tables = Tables(TableRoom(tables=3, states=40, masks=100, entries=1000))
    used, idle, large = (Table(seed, states) for seed, states in ((1, 20), (2, 5), (3, 30)))
    tables.place(used).hold()
    unused = tables.place(idle)
    assert tables.place(large) is None
    assert tables.place(idle) is unused


def test_a_table_is_sent_once_with_the_numbers_that_it_has_on_the_device(monkeypatch):
    monkeypatch.setattr("jpaged.engine.constraints.tables.PART_ROOM", PartRoom(4, 3, 7))
    tables, device = Tables(TABLE_ROOM), FakeTables()
    first, second = (tables.place(Table(seed, 9)) for seed in (1, 2))
    some = tables.take_parts(2)
    assert not first.is_sent
    while parts := tables.take_parts(3):
        assert len(parts) <= 3
        some += parts
    assert first.is_sent
    assert second.is_sent
    for part in some:
        device.write(part)
    assert second.place_after([]) == second.spans.places[0] + second.table.start
    for one in (first, second):
        assert_is_there(one, device)
