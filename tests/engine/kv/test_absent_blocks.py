"""Blocks of a pool that have no memory for a while."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.api.errors import EngineDeadError, OutOfMemoryError
from jpaged.engine.kv.block_pool import BlockPool, FreeList


@given(st.lists(st.tuples(st.sampled_from(["push", "push_front", "pop", "remove"]), st.integers(1, 5)), max_size=60))
def test_a_free_list_is_a_queue_that_can_be_entered_at_both_ends(operations):
    num_blocks = 12
    free_list, model, outside = FreeList(num_blocks), [], list(range(num_blocks))
    for what, n in operations:
        if what.startswith("push"):
            some, outside = outside[:n], outside[n:]
            getattr(free_list, what)(np.array(some, np.int32))
            model = model + some if what == "push" else some + model
        elif what == "pop":
            n = min(n, len(model))
            assert free_list.pop(n).tolist() == model[:n]
            outside, model = outside + model[:n], model[n:]
        else:
            some = model[::2][:n]
            free_list.remove(np.array(some, np.int64))
            outside, model = outside + some, [block for block in model if block not in some]
        assert free_list.to_array().tolist() == model
        assert len(free_list) == len(model)


def test_the_least_recently_used_blocks_become_absent_and_come_back_before_all_others():
    pool = BlockPool(8, 4, enable_prefix_caching=False)
    pool.free(pool.allocate(2))  # 1 and 2 are now the most recently used
    assert pool.withhold(3).tolist() == [3, 4, 5]
    assert (pool.num_present, pool.num_free, pool.num_used, pool.num_absent) == (4, 4, 0, 3)
    pool.check_integrity([])
    assert not pool.granted(np.array([3, 4])).any()
    with pytest.raises(OutOfMemoryError, match="4 of 4 are free"):
        pool.allocate(5)
    assert pool.absent(2).tolist() == [3, 4]
    pool.restore(np.array([3, 4], np.int32))
    assert pool.allocate(3).tolist() == [3, 4, 6]
    pool.check_integrity([np.array([3, 4, 6])])


def test_an_absent_block_that_is_referenced_is_found():
    pool = BlockPool(8, 4, enable_prefix_caching=False)
    (block,) = pool.allocate(1).tolist()
    pool._is_absent[block] = True
    with pytest.raises(EngineDeadError, match="though absent"):
        pool.check_integrity([np.array([block])])


def test_a_prefix_in_a_block_that_becomes_absent_is_forgotten():
    pool = BlockPool(8, 4, enable_prefix_caching=True)
    tokens = np.arange(8, dtype=np.int32)
    blocks = pool.allocate(2)
    pool.cache.register([], tokens, blocks[None], 0, 2, None)
    pool.free(blocks)
    assert pool.cache.match([], tokens, 2, None).shape[1] == 2
    pool.withhold(7)
    assert pool.cache.match([], tokens, 2, None).shape[1] == 0
    pool.check_integrity([])


def test_which_blocks_are_present_can_be_set_while_none_is_used():
    pool = BlockPool(6, 4, enable_prefix_caching=False)
    pool.set_present(np.array([True, False, True, True, False, False]))
    assert pool.allocate(2).tolist() == [2, 3]
    assert pool.num_absent == 3
    pool.check_integrity([np.array([2, 3])])
