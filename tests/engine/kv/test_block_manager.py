"""The block manager alone: fork, append and free, against a shadow that knows what each block must hold."""

import time

import numpy as np
import pytest

from jpaged.api.errors import OutOfMemoryError
from jpaged.engine.kv.block_manager import BlockManager
from jpaged.engine.kv.block_pool import BlockPool
from jpaged.engine.sequences.slots import Slots
from tests.engine.helpers import make_config, make_request

SIZE = 4


class Tables:
    """A manager, its pool and slots, and the contents of the pool as a device would have them."""

    def __init__(self, num_blocks: int = 32, max_num_seqs: int = 8, max_model_len: int = 64) -> None:
        config = make_config(
            block_size=SIZE, num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_model_len=max_model_len
        )
        self.pool = BlockPool(num_blocks, SIZE, False)
        self.slots = Slots(config)
        self.manager = BlockManager(self.pool, self.slots)
        self.content = np.full((num_blocks, SIZE), -1)
        self.names = iter(range(10**6))

    def start(self, tokens: list[int]) -> int:
        """A sequence whose first tokens are computed."""
        blocks = self.pool.allocate(-(-len(tokens) // SIZE))
        request = make_request(str(next(self.names)), 1)
        slot = self.slots.acquire(request, 0, np.array(tokens, np.int32), blocks, len(tokens))
        for i, token in enumerate(tokens):
            self.content[blocks[i // SIZE], i % SIZE] = token
        return slot

    def fork(self, parent: int) -> int:
        request = make_request(str(next(self.names)), 1)
        child = self.slots.acquire(request, 0, np.zeros((0,), np.int32), np.zeros((0,), np.int32), 0)
        self.manager.fork(parent, [child])
        return child

    def append(self, tokens: dict[int, int]) -> tuple[list[list[int]], list[list[int]]]:
        """One step: each slot writes a token. Copies come first, and then table updates, as on the device."""
        rows = np.array(sorted(tokens), np.int64)
        growth = self.manager.growth(rows)
        free = self.pool.num_free
        updates, copies = self.manager.append(growth)
        assert self.pool.num_free == free - growth.num_blocks
        assert not set(copies[:, 0].tolist()) & set(copies[:, 1].tolist())
        self.content[copies[:, 1]] = self.content[copies[:, 0]]
        for slot, token in tokens.items():
            at = int(self.slots.num_computed[slot])
            block = self.slots.block_tables[0, slot, at // SIZE]
            assert self.pool.ref_count(block) == 1
            self.content[block, at % SIZE] = token
            self.slots.compute_up_to(slot, at + 1)
        return updates.tolist(), copies.tolist()

    def free(self, slot: int) -> None:
        self.manager.free(slot)
        self.slots.release(slot)

    def table(self, slot: int) -> list[int]:
        return self.slots.blocks(slot).tolist()

    def read(self, slot: int) -> list[int]:
        return self.content[self.slots.blocks(slot)].reshape(-1)[: self.slots.num_computed[slot]].tolist()

    def check(self) -> None:
        self.pool.check_integrity(self.slots.blocks(slot) for slot in self.slots.used().tolist())


def test_a_forked_sequence_shares_every_block_and_copies_its_last_on_first_write():
    tables = Tables()
    a = tables.start([0, 1, 2, 3, 4, 5])
    b = tables.fork(a)
    first, last = tables.table(a)
    assert tables.table(b) == [first, last]
    assert [tables.pool.ref_count(block) for block in (first, last)] == [2, 2]
    updates, copies = tables.append({a: 10, b: 20})
    copy = tables.table(a)[1]
    assert copies == [[last, copy]]
    assert updates == [[a, 0, 1, copy]]
    assert tables.table(b) == [first, last]
    assert [tables.pool.ref_count(block) for block in (first, last, copy)] == [2, 1, 1]
    assert (tables.read(a), tables.read(b)) == ([0, 1, 2, 3, 4, 5, 10], [0, 1, 2, 3, 4, 5, 20])
    tables.check()


def test_all_copies_of_a_step_come_in_one_batch_and_the_last_owner_copies_nothing():
    tables = Tables()
    a = tables.start([0, 1, 2, 3, 4])
    children = [tables.fork(a) for _ in range(4)]
    shared = tables.table(a)[1]
    _, copies = tables.append({slot: slot for slot in (a, *children)})
    assert [source for source, _ in copies] == [shared] * 4
    assert sorted(table[1] for table in map(tables.table, (a, *children)))[0] == shared
    assert all(tables.read(slot)[-1] == slot for slot in (a, *children))
    assert tables.append({slot: slot for slot in (a, *children)}) == ([], [])


def test_a_fork_at_the_end_of_a_block_copies_nothing():
    tables = Tables()
    a = tables.start([0, 1, 2, 3])
    b = tables.fork(a)
    updates, copies = tables.append({a: 1, b: 2})
    assert copies == []
    assert [(slot, index) for slot, _, index, _ in updates] == [(a, 1), (b, 1)]


def test_an_owner_that_is_gone_leaves_the_block_to_the_other():
    tables = Tables()
    a = tables.start([0, 1])
    b = tables.fork(a)
    tables.free(a)
    assert tables.append({b: 5}) == ([], [])
    tables.free(b)
    assert tables.pool.num_free == tables.pool.capacity


def test_a_slot_that_does_not_write_keeps_sharing_until_it_does():
    tables = Tables()
    a = tables.start([0, 1])
    b = tables.fork(a)
    assert len(tables.append({a: 5})[1]) == 1
    assert tables.append({b: 6}) == ([], [])
    c = tables.fork(b)
    assert len(tables.append({a: 7})[1]) == 0
    assert len(tables.append({c: 8})[1]) == 1
    assert [tables.read(slot) for slot in (a, b, c)] == [[0, 1, 5, 7], [0, 1, 6], [0, 1, 6, 8]]


def test_blocks_that_are_not_there_change_nothing():
    tables = Tables(num_blocks=4)
    a = tables.start([0, 1, 2, 3, 4])
    b = tables.fork(a)
    tables.pool.allocate(1)
    growth = tables.manager.growth(np.array([a, b]))
    with pytest.raises(OutOfMemoryError):
        tables.manager.append(growth)
    assert tables.table(a) == tables.table(b)
    assert tables.manager.growth(np.array([a, b])).copying == [a]


def test_a_fork_of_two_thousand_tokens_takes_the_host_under_100_microseconds():
    tables = Tables(num_blocks=1024, max_num_seqs=256, max_model_len=2048)
    a = tables.start(list(range(2000)))
    children = [make_request(str(i), 1) for i in range(200)]
    empty = np.zeros((0,), np.int32)
    slots = [tables.slots.acquire(child, 0, empty, empty, 0) for child in children]
    times = []
    for slot in slots:
        begun = time.thread_time()
        tables.manager.fork(a, [slot])
        times.append(time.thread_time() - begun)
    assert np.median(times) < 100e-6
