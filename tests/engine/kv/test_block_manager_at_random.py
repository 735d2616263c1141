"""The block manager, the pool, the prefix cache and the swap space together, without a scheduler, at random.

Sequences start, with prefix hits in the pool and in host memory, append, fork, part by copy-on-write, search with
beams, are swapped out and come back, end, and are pinned. After each action, which is one plan carried out in the order
of `StepPlan`, three things are compared with a shadow of the device:

    references     of each block: as many as tables and pins hold it
    contents       of every sequence, of every named block, of everything in host memory: what its owner computed
    chunks         free, or of one record, or of prefixes

A token's content is a fingerprint of all tokens up to it, which is what keys and values depend on.
"""

from collections import Counter
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jpaged.engine.constraints.dependent_rows import Dependents
from jpaged.engine.constraints.searches import Searches
from jpaged.engine.interface import NULL_BLOCK, CacheGroup, Logprobs, StepResult
from jpaged.engine.kv.block_manager import BlockManager
from jpaged.engine.kv.block_pool import BlockPool
from jpaged.engine.kv.host_tier import HostTier
from jpaged.engine.kv.swap_record import NO_PLACE
from jpaged.engine.kv.swap_space import SwapSpace
from jpaged.engine.plan_in_progress import NO_BLOCKS, PlanInProgress
from jpaged.engine.scheduler.admission import Admission
from jpaged.engine.scheduler.foresight import Foresight
from jpaged.engine.scheduler.scheduler import Scheduler
from jpaged.engine.scheduler.state import SchedulerState
from jpaged.engine.scheduler.waiting_queue import WaitingQueue
from jpaged.engine.sequences.beam_search import BeamGroup
from jpaged.engine.sequences.group import SequenceGroup
from jpaged.engine.sequences.request import Request, RequestStatus
from jpaged.engine.sequences.slots import Slots
from jpaged.engine.stats import Counters
from tests.engine.fake_executor import content_of, fingerprint
from tests.engine.helpers import make_config, make_request, make_search

SIZE, MAX_LEN, MAX_SEQS, CHUNK = 4, 64, 10, 16


GROUPS = {
    "full": (CacheGroup(),),
    "window": (CacheGroup(window=10),),
    "full and window": (CacheGroup(), CacheGroup(window=7)),
    "three": (CacheGroup(window=4), CacheGroup(), CacheGroup(window=13)),
}


class Memory:
    """All that deals with blocks, and the contents of pool and host memory as a device would have them."""

    def __init__(self, num_blocks: int, num_chunks: int, with_tier: bool, groups: tuple[CacheGroup, ...]) -> None:
        config = make_config(
            block_size=SIZE,
            num_blocks=num_blocks,
            max_num_seqs=MAX_SEQS,
            max_model_len=MAX_LEN,
            num_swap_chunks=num_chunks,
            watermark=0.0,
            max_num_batched_tokens=CHUNK,
            cache_groups=groups,
        )
        self.windows = config.windows
        self.pool = BlockPool(num_blocks, SIZE, True, self.windows)
        self.space = SwapSpace(num_chunks, HostTier() if with_tier else None)
        self.cache = self.pool.cache
        self.cache.host = self.space.tier
        self.slots = Slots(config)
        self.manager = BlockManager(self.pool, self.slots)
        self.searches = Searches(1, self.slots, self.manager)
        shared = (self.pool, self.slots, self.manager, self.space)
        dependents = Dependents((), self.slots, self.manager)
        state = SchedulerState(config, *shared, WaitingQueue(False), dependents, Counters())
        self.admission = Admission(state, Foresight(state))
        self.limits = Scheduler(config).limits
        self.content = np.zeros((num_blocks, SIZE), np.int64)
        self.host: dict[int, np.ndarray] = {}
        self.pins: list[np.ndarray] = []
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.groups: list[BeamGroup] = []
        self.content_of: dict[bytes, list[int]] = {}  # of named blocks, by name
        self.num_steps = self.num_named = 0
        self.done: Counter[str] = Counter()

    @property
    def plain(self) -> list[Request]:
        """Running sequences that are no beams."""
        return [request for request in self.running if request.beam is None]

    def plan(self) -> PlanInProgress:
        self.num_steps += 1
        self.cache.step_id = self.num_steps
        return PlanInProgress(self.num_steps, budget=10**6)

    def name(self) -> str:
        self.num_named += 1
        return str(self.num_named)

    def tokens(self, request: Request) -> np.ndarray:
        return self.slots.known(request.slot)

    def admit(self, request: Request) -> bool:
        """Starts a sequence, or lets those come back that were swapped out with it, and computes what is known."""
        members = [request] if request.swap is None else request.swap.members.copy()
        plan, back = self.plan(), request.swap is not None
        if not self.admission.admit(plan, request):
            return False
        self.carry_out(plan, [])
        for source, _ in plan.copies:
            self.pool.free(np.array([source], np.int32))
        self.running += members
        self.done["came back"] += back
        for member in members:
            known = len(self.tokens(member))
            assert self.slots.num_computed[member.slot] < known, "something is left to compute"
            if not self.compute(member):
                self.done["prompts that waited"] += 1
                self.end_now(member.group.members if member.beam is not None else [member])
                break
        if request.beam is not None and request in self.running:
            self.searches.admitted(request.group)
            self.groups.append(request.group)
        return True

    def compute(self, request: Request) -> bool:
        """Computes what a sequence knows, chunk by chunk; False if it waits for blocks, which nobody will give."""
        slot, known = request.slot, len(self.tokens(request))
        while (start := int(self.slots.num_computed[slot])) < known:
            stop = self.manager.reach(slot, min(known, start + CHUNK))
            if stop == start:
                return False
            self.manager.extend(slot, stop, known)
            self.manager.check_integrity()
            self.space.keep_evicted(self.pool)
            self.carry_out(self.plan(), [])
            self.write(request, start, stop)
            self.done["chunks of long prompts"] += stop < known
        return True

    def end_now(self, members: list[Request]) -> None:
        """Sequences end that are in the way."""
        for member in members:
            if member.slot >= 0:
                self.leave(member)

    def carry_out(self, plan: PlanInProgress, copies: list[list[int]]) -> None:
        """What a plan moves, in the order of `StepPlan`."""
        self.space.keep_evicted(self.pool)
        for out in self.space.end_plan():
            assert 0 <= out.chunk < self.space.num_chunks
            self.host[out.chunk] = self.content[out.block_ids].copy()
        for back in plan.swap_ins:
            held = self.host[back.chunk] if back.keep else self.host.pop(back.chunk)
            wanted = np.flatnonzero(back.block_ids)
            self.done["blocks hit in host memory"] += back.keep * len(wanted)
            self.content[back.block_ids[wanted]] = held[wanted]
        for source, target in [*copies, *plan.copies]:
            self.content[target] = self.content[source]
        self.done["copies on write"] += len(copies)
        self.done["copies of parts"] += len(plan.copies)

    def write(self, request: Request, start: int, stop: int) -> None:
        """Computes tokens of a sequence, and names its full blocks. Nobody else may have what is written to."""
        prints = prints_of(tuple(self.tokens(request)[:stop].tolist()))
        for group, table in enumerate(self.slots.block_tables[:, request.slot]):
            for position in range(start, stop):
                assert self.pool.ref_count(int(table[position // SIZE])) == 1
                self.content[table[position // SIZE], position % SIZE] = content_of(prints[position], group)
            self.check_sees(request, start, stop, group, prints)
        self.slots.compute_up_to(request.slot, max(stop, start))
        self.register(request)

    def register(self, request: Request) -> None:
        """Names what a running sequence has computed, as the scheduler does when it leaves its slot."""
        slot = request.slot
        num_full = int(self.slots.num_computed[slot]) // SIZE
        known, tables = self.tokens(request), self.slots.table(slot)
        self.cache.register(request.block_digests, known, tables, request.num_registered_blocks, num_full, None)
        request.num_registered_blocks = max(num_full, request.num_registered_blocks)
        prints = prints_of(tuple(known[: num_full * SIZE].tolist()))
        for index, digest in enumerate(request.block_digests[:num_full]):
            for group, suffix in enumerate(self.cache._suffixes):
                of_block = prints[index * SIZE : (index + 1) * SIZE]
                self.content_of[digest + suffix] = [content_of(one, group) for one in of_block]

    def check_sees(self, request: Request, start: int, stop: int, group: int, prints: tuple[int, ...]) -> None:
        """Queries at start .. stop-1 find what they see in a group's table."""
        window = self.windows[group]
        first = 0 if window is None else max(0, start - window + 1)
        table = self.slots.block_tables[group, request.slot]
        for position in range(first, stop):
            assert self.content[table[position // SIZE], position % SIZE] == content_of(prints[position], group)

    def fork(self, parent: Request) -> None:
        """A sequence of its own that goes on from what another has computed."""
        child = request_of(make_request(self.name(), self.tokens(parent), MAX_LEN))
        self.slots.acquire(child, self.num_steps, NO_BLOCKS, NO_BLOCKS, 0)
        self.manager.fork(parent.slot, [child.slot])
        child.status = RequestStatus.RUNNING
        child.block_digests = parent.block_digests.copy()
        child.num_registered_blocks = parent.num_registered_blocks
        self.running.append(child)

    def append(self, tokens: dict[int, int | None]) -> bool:
        """One step, if there is room: each slot computes a token, its last known one where None is given."""
        rows = np.array(sorted(tokens), np.int64)
        growth = self.manager.growth(rows)
        if growth.num_blocks > self.manager.num_available:
            return False
        plan = self.plan()
        _, copies = self.manager.append(growth)
        assert not set(copies[:, 0].tolist()) & set(copies[:, 1].tolist())
        self.carry_out(plan, copies.tolist())
        for slot, token in tokens.items():
            if token is not None:
                self.slots.append_tokens(np.array([slot]), np.array([token]))
            at = int(self.slots.num_computed[slot])
            self.write(self.slots.requests[slot], at, at + 1)
        return True

    def leave(self, request: Request) -> None:
        """Takes a sequence out of its slot; it keeps its tokens."""
        self.register(request)
        request.output_token_ids = self.tokens(request)[request.prompt_len :].tolist()
        self.manager.free(request.slot)
        if request.beam is not None:
            self.searches.left(request)
        self.slots.release(request.slot)
        self.running.remove(request)
        request.status = RequestStatus.PREEMPTED

    def swap_out(self, members: list[Request]) -> bool:
        """Sequences that leave together for host memory, if there is room. They take part in no plan, so the copies
        are carried out at once.
        """
        if not self.space.store(members, self.slots, SIZE):
            return False
        self.carry_out(self.plan(), [])
        if members[0].beam is not None:
            self.groups.remove(members[0].group)
        for member in members:
            self.leave(member)
        self.swapped += members
        self.done["swapped out"] += 1
        self.done["searches swapped out"] += members[0].beam is not None
        return True

    def swap_in(self, request: Request) -> None:
        """Those come back that were swapped out with a sequence, if there is room."""
        back = request.swap.members.copy()
        if request.beam is None:  # each knows one token more than it has computed, as a sequence that decodes does
            for member in back:
                member.output_token_ids.append(1)
        if self.admit(back[0]):
            self.swapped = [one for one in self.swapped if one not in back]
        elif request.beam is None:
            for member in back:
                member.output_token_ids.pop()

    def end_in_swap(self, request: Request) -> None:
        """A sequence, or a whole search, ends while it is swapped out."""
        for member in [request] if request.beam is None else request.group.members:
            self.space.drop(member)
            self.swapped.remove(member)

    def turn_over(self) -> None:
        """Sequences that nobody else resembles take all free blocks for a moment, so that prefixes are evicted."""
        while self.slots.num_free and (
            length := min(self.limits.footprint.longest(self.pool.num_free, MAX_LEN), MAX_LEN - SIZE)
        ):
            tokens = [1000 + self.num_steps] * length
            assert self.admit(request_of(make_request(self.name(), tokens, MAX_LEN)))
        for request in [one for one in self.plain if self.tokens(one)[0] >= 1000]:
            self.leave(request)

    def start_search(self, request: Request) -> bool:
        group = BeamGroup.form(request_of(request, grouped=False))
        if self.slots.num_free < len(group.members) or not self.admit(request):
            return False
        for sibling in group.members[1:]:
            assert sibling.slot >= 0, "admitted with the leader"
            self.running.append(sibling)
        return True

    def choose(self, group: BeamGroup, rng: np.random.Generator) -> None:
        """Candidates come back for the beams of a search; it forks and frees tables, or is over."""
        live = group.members[: group.search.num_live]
        shape = (len(live), group.search.num_candidates)
        ids = np.stack([rng.permutation(90)[: shape[1]] for _ in live]).astype(np.int32)
        scores = -np.sort(rng.exponential(1.0, shape).astype(np.float32), axis=1)
        zeros = np.zeros((len(live),), np.int32)
        found = Logprobs(zeros[:, None].astype(np.float32), zeros[:, None], ids[:, None], scores[:, None])
        slots = np.array([member.slot for member in live])
        before = {member.slot: self.tokens(member).tolist() for member in live}
        result = StepResult(ids[:, :1], zeros.astype(np.uint8), found)
        taken = self.searches.take(self.num_steps, slots, np.arange(len(live)), result)
        plan = PlanInProgress(self.num_steps, budget=0)
        self.searches.contribute(plan)
        moves = np.array(plan.beams, np.int32).reshape(-1, 3)
        if taken.ended:
            self.end_search(group)
            return
        self.done["beams forked"] += int((moves[:, 0] != moves[:, 1]).sum())
        for slot, parent, token in moves.tolist():
            assert self.slots.known(slot).tolist() == [*before[parent], token]

    def turn_of(self, group: BeamGroup, rng: np.random.Generator) -> None:
        """A search chooses, and its beams compute their tokens. Where they do not all find room, they are swapped out,
        or end.
        """
        if not group.is_ready:
            self.choose(group, rng)
            self.check()
        if group not in self.groups:
            return
        if self.append({member.slot: None for member in group.members}):
            group.is_ready = False
        elif not self.swap_out(group.members):
            self.end_search(group)

    def end_all(self) -> None:
        """Nothing must be left."""
        for group in self.groups.copy():
            self.end_search(group)
        for request in self.running.copy():
            self.leave(request)
        while self.swapped:
            self.end_in_swap(self.swapped[0])
        while self.pins:
            self.pool.free(self.pins.pop())
        self.space.drop_prefixes()
        self.check()
        assert self.pool.num_free == self.pool.capacity
        assert self.space.num_used == 0

    def end_search(self, group: BeamGroup) -> None:
        self.groups.remove(group)
        for member in group.members:
            self.leave(member)

    def check(self) -> None:
        tables = [self.slots.blocks(request.slot) for request in self.running]
        counts = np.zeros((self.pool.num_blocks,), np.int64)
        self.manager.check_integrity()
        for table in [*tables, *self.pins]:
            assert NULL_BLOCK not in table
            for block_id in table.tolist():
                counts[block_id] += 1
        assert self.pool.occupancy()[0].tolist() == counts.tolist(), "as many references as tables hold the block"
        assert self.pool.num_free == self.pool.capacity - np.count_nonzero(counts)
        self.pool.check_integrity([*tables, *self.pins])
        self.space.check_integrity({id(r.swap): r.swap for r in self.swapped}.values())
        for request in self.running:
            computed = int(self.slots.num_computed[request.slot])
            prints = prints_of(tuple(self.tokens(request)[:computed].tolist()))
            for group, table in enumerate(self.slots.table(request.slot)):
                assert self.windows[group] is not None or NULL_BLOCK not in table
                self.check_held(group, self.content[table], table != NULL_BLOCK, prints)
                if self.windows[group] is not None and computed:
                    most = -(-(self.windows[group] - 1 + CHUNK) // SIZE) + 1
                    assert np.count_nonzero(table) <= most, "no more than the window and a chunk"
        for request in self.swapped:
            record = request.swap
            index = record.members.index(request)
            chunks = np.concatenate([self.host[chunk] for chunk in record.chunks])
            prints = prints_of(tuple(request.known_token_ids()[: record.num_computed[index]].tolist()))
            for group, places in enumerate(record.places[index]):
                self.check_held(group, chunks[places], places != NO_PLACE, prints)
        for block in self.cache.named(np.arange(self.pool.num_blocks)):
            assert self.content[block.block_id].tolist() == self.content_of[block.digest]
        if self.space.tier is not None:
            for digest, (chunk, place) in self.space.tier._place_of.items():
                assert self.host[chunk][place].tolist() == self.content_of[digest]

    def check_held(self, group: int, held: np.ndarray, is_held: np.ndarray, prints: tuple[int, ...]) -> None:
        """The blocks that are held of a table have what belongs there, as far as it is computed: int64 [n, SIZE]."""
        computed = len(prints)
        expected = contents_of(prints, group)
        there = np.repeat(is_held, SIZE)[:computed]
        assert (held.reshape(-1)[:computed] == expected[: held.size])[there].all()


@lru_cache(maxsize=1 << 12)  # each check asks for those of all sequences, most of which have not changed
def prints_of(tokens: tuple[int, ...]) -> tuple[int, ...]:
    prints: list[int] = []
    for token in tokens:
        prints.append(fingerprint(prints[-1] if prints else 0, token))
    return tuple(prints)


@lru_cache(maxsize=1 << 12)
def contents_of(prints: tuple[int, ...], group: int) -> np.ndarray:
    """What a group's blocks hold for tokens of these fingerprints: int64 [tokens]."""
    return np.array([content_of(one, group) for one in prints], np.int64)


def request_of(request: Request, grouped: bool = True) -> Request:
    """A request as `Scheduler.add` leaves it."""
    request.max_len = MAX_LEN if request.beam is None else request.prompt_len + request.beam.max_tokens
    if grouped:
        SequenceGroup.form(request)
    return request


class BlockManagerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([8, 16, 24, 40]),
        num_chunks=st.sampled_from([0, 1, 3, 6]),
        with_tier=st.sampled_from([True, True, False]),
        groups=st.sampled_from(["full", *GROUPS]).map(GROUPS.__getitem__),
    )
    def start_up(self, num_blocks, num_chunks, with_tier, groups):
        self.memory = Memory(num_blocks * len(groups), num_chunks, with_tier, groups)

    @precondition(lambda self: self.memory.slots.num_free)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24) | st.integers(24, 48).map(lambda n: [2] * n))
    def start(self, tokens):
        self.memory.admit(request_of(make_request(self.memory.name(), tokens, MAX_LEN)))

    @precondition(lambda self: self.memory.slots.num_free)
    @rule()
    def turn_over(self):
        self.memory.turn_over()

    @precondition(lambda self: self.memory.plain and self.memory.slots.num_free)
    @rule(data=st.data())
    def fork(self, data):
        self.memory.fork(data.draw(st.sampled_from(self.memory.plain)))

    @precondition(lambda self: self.memory.plain)
    @rule(data=st.data(), steps=st.integers(1, 6), rng=st.integers(0, 2**32 - 1).map(np.random.default_rng))
    def append(self, data, steps, rng):
        rows = [r.slot for r in self.memory.plain if len(self.memory.tokens(r)) < MAX_LEN - 6]
        rows = data.draw(st.lists(st.sampled_from(rows), unique=True)) if rows else []
        for _ in range(steps):
            if not self.memory.append({slot: int(rng.integers(2)) for slot in rows}):
                break
            self.memory.check()

    @precondition(lambda self: self.memory.plain)
    @rule(data=st.data())
    def end(self, data):
        self.memory.leave(data.draw(st.sampled_from(self.memory.plain)))

    @precondition(lambda self: self.memory.plain)
    @rule(data=st.data())
    def swap_out(self, data):
        self.memory.swap_out(data.draw(st.lists(st.sampled_from(self.memory.plain), min_size=1, unique=True)))

    @precondition(lambda self: self.memory.swapped)
    @rule(data=st.data())
    def swap_in(self, data):
        self.memory.swap_in(data.draw(st.sampled_from(self.memory.swapped)))

    @precondition(lambda self: self.memory.swapped)
    @rule(data=st.data())
    def end_in_swap(self, data):
        self.memory.end_in_swap(data.draw(st.sampled_from(self.memory.swapped)))

    @precondition(lambda self: self.memory.slots.num_free)
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=16),
        width=st.integers(1, 4),
        max_tokens=st.integers(1, 12),
    )
    def start_search(self, prompt, width, max_tokens):
        self.memory.start_search(make_search(self.memory.name(), prompt, width, max_tokens))

    @precondition(lambda self: self.memory.groups)
    @rule(data=st.data(), steps=st.integers(1, 6), rng=st.integers(0, 2**32 - 1).map(np.random.default_rng))
    def search(self, data, steps, rng):
        group = data.draw(st.sampled_from(self.memory.groups))
        for _ in range(steps):
            if group in self.memory.groups:
                self.memory.turn_of(group, rng)
                self.memory.check()

    @precondition(lambda self: self.memory.plain)
    @rule(data=st.data())
    def pin(self, data):
        request = data.draw(st.sampled_from(self.memory.plain))
        tokens = self.memory.tokens(request)
        hits = self.memory.cache.match([], tokens, len(tokens) // SIZE, None, use_host=False)
        hits = hits[hits != NULL_BLOCK]
        self.memory.pool.share(hits)
        self.memory.pins.append(hits)

    @precondition(lambda self: self.memory.pins)
    @rule()
    def unpin(self):
        self.memory.pool.free(self.memory.pins.pop())

    @precondition(lambda self: not self.memory.running)
    @rule()
    def reset(self):
        while self.memory.pins:
            self.unpin()
        self.memory.cache.reset()
        self.memory.space.drop_prefixes()
        assert self.memory.space.tier is None or not len(self.memory.space.tier)

    @invariant()
    def every_block_holds_what_its_owners_believe_and_none_is_lost(self):
        if hasattr(self, "memory"):
            self.memory.check()

    def teardown(self):
        if hasattr(self, "memory"):
            self.memory.end_all()


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_blocks", "groups"), [(25, "full"), (41, "full"), (25, "window"), (50, "full and window"), (66, "three")]
)
def test_a_long_walk_meets_everything_that_can_happen(num_blocks, groups):
    """What the machine above draws rarely: all actions equally often, over a few prompts that are asked for again."""
    rng = np.random.default_rng(num_blocks)
    memory = Memory(num_blocks, num_chunks=6, with_tier=True, groups=GROUPS[groups])
    prompts = [rng.integers(0, 3, length).tolist() for length in (17, 30, 34, 41, 48)]
    for _ in range(2000):
        pick = lambda things: things[rng.integers(len(things))]  # noqa: E731
        plain, swapped, free_slots = memory.plain, memory.swapped, memory.slots.num_free
        match int(rng.integers(10)):
            case 0 | 1 if free_slots:
                memory.admit(request_of(make_request(memory.name(), pick(prompts), MAX_LEN)))
            case 2 if free_slots:
                memory.start_search(make_search(memory.name(), pick(prompts)[:18], int(rng.integers(1, 5)), 10))
            case 3 if free_slots:
                memory.turn_over()
            case 4 if plain and free_slots:
                memory.fork(pick(plain))
            case 5 if plain:
                rows = [request.slot for request in plain if len(memory.tokens(request)) < MAX_LEN - 6]
                memory.append({slot: int(rng.integers(3)) for slot in rows if rng.random() < 0.7})
            case 6 if plain:
                for request in [request for request in plain if rng.random() < 0.4]:
                    memory.leave(request)
            case 7 if plain:
                memory.swap_out([request for request in plain if rng.random() < 0.2] or [pick(plain)])
            case 8 if swapped:
                memory.swap_in(pick(swapped)) if rng.random() < 0.8 else memory.end_in_swap(pick(swapped))
            case 9 if memory.groups:
                group = pick(memory.groups)
                for _ in range(4):
                    if group in memory.groups:
                        memory.turn_of(group, rng)
        memory.check()
    memory.end_all()
    least = {"came back": 12, "swapped out": 30, "searches swapped out": 3, "beams forked": 30, "copies on write": 30}
    least |= {"copies of parts": 5, "blocks hit in host memory": 5}
    if groups != "full":
        least |= {"chunks of long prompts": 120}
    assert all(memory.done[what] >= count for what, count in least.items()), memory.done
