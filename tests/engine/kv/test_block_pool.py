import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from jpaged.api.errors import EngineDeadError, OutOfMemoryError
from jpaged.engine.interface import NULL_BLOCK
from jpaged.engine.kv.block_pool import BlockPool, FreeList


def array(*block_ids: int) -> np.ndarray:
    return np.array(block_ids, np.int32)


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(8, 4, False)
    assert pool.capacity == pool.num_free == 7
    assert sorted(pool.allocate(7).tolist()) == [1, 2, 3, 4, 5, 6, 7]
    assert NULL_BLOCK not in pool.allocate(0)


def test_allocating_more_than_is_free_names_the_figures_and_takes_nothing():
    pool = BlockPool(8, 4, False)
    pool.allocate(5)
    with pytest.raises(OutOfMemoryError, match="3 blocks wanted, 2 of 7 are free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_blocks_are_reused_least_recently_freed_first_and_tails_before_heads():
    pool = BlockPool(8, 4, False)
    first, second = pool.allocate(3), pool.allocate(2)
    pool.free(second)
    pool.free(first)
    untouched = [6, 7]
    assert pool.allocate(7).tolist() == [*untouched, *second[::-1], *first[::-1]]


def test_a_shared_block_is_freed_by_its_last_owner():
    pool = BlockPool(8, 4, False)
    blocks = pool.allocate(2)
    pool.share(blocks[:1])
    pool.free(blocks)
    assert [pool.ref_count(block) for block in blocks] == [1, 0]
    pool.free(blocks[:1])
    assert pool.num_free == 7


def test_sharing_a_free_block_takes_it_from_the_middle_of_the_free_list():
    pool = BlockPool(8, 4, False)
    blocks = pool.allocate(7)
    pool.free(blocks)
    assert pool.num_unreferenced(blocks[2:4]) == 2
    pool.share(blocks[2:4])
    assert pool.num_free == 5
    assert pool.allocate(5).tolist() == blocks[[6, 5, 4, 1, 0]].tolist()


def test_freeing_what_nobody_owns_is_an_error():
    pool = BlockPool(8, 4, False)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(EngineDeadError, match="nobody owns"):
        pool.free(blocks)


def test_the_check_finds_a_lost_a_doubly_owned_and_a_leaked_block():
    pool = BlockPool(8, 4, False)
    blocks = pool.allocate(3)
    pool.check_integrity([blocks])
    with pytest.raises(EngineDeadError, match="referenced more or less often"):
        pool.check_integrity([blocks[:2]])
    with pytest.raises(EngineDeadError, match="referenced more or less often"):
        pool.check_integrity([blocks, blocks[:1]])
    pool._free_list.push(blocks[:1])
    with pytest.raises(EngineDeadError, match="free and owned at once"):
        pool.check_integrity([blocks])


def test_the_free_list_survives_many_times_its_length():
    blocks = FreeList(5)
    blocks.push(array(1, 2, 3, 4))
    for _ in range(100):
        blocks.remove(array(3))
        taken = blocks.pop(2)
        blocks.push(taken)
        blocks.push(array(3))
        assert sorted(blocks.to_array().tolist()) == [1, 2, 3, 4]
        assert len(blocks) == 4


class FreeListMachine(RuleBasedStateMachine):
    """The free list against a Python list."""

    outside = Bundle("outside")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = FreeList(12)
        self.model = list(range(1, 12))
        self.blocks.push(np.arange(1, 12, dtype=np.int32))

    @rule(target=outside, data=st.data())
    def pop(self, data):
        n = data.draw(st.integers(0, len(self.model)))
        taken, self.model = self.model[:n], self.model[n:]
        assert self.blocks.pop(n).tolist() == taken
        return multiple(*taken)

    @rule(target=outside, data=st.data())
    def remove(self, data):
        taken = data.draw(st.lists(st.sampled_from(self.model), unique=True)) if self.model else []
        self.blocks.remove(array(*taken))
        self.model = [block for block in self.model if block not in taken]
        return multiple(*taken)

    @rule(block=consumes(outside))
    def push(self, block):
        self.blocks.push(array(block))
        self.model.append(block)

    @invariant()
    def same(self):
        assert self.blocks.to_array().tolist() == self.model
        assert len(self.blocks) == len(self.model)


TestFreeListMachine = FreeListMachine.TestCase
TestFreeListMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
