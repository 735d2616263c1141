"""Which pages of a row programs look at: none that its queries do not see, below whose places pages come and go."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.engine.interface import NULL_BLOCK, CacheGroup
from jpaged.executor.cache.virtual.layout import VirtualCache

SIZE, WIDTH, WINDOWS = 4, 8, (None, 6, 1)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, SIZE * WIDTH), st.integers(0, 9)), min_size=2, max_size=2))
def test_pages_hold_a_token_that_some_query_sees_or_are_left_out(rows):
    config = SimpleNamespace(block_size=SIZE, max_model_len=SIZE * WIDTH)
    cache = SimpleNamespace(config=config, groups=tuple(CacheGroup(window) for window in WINDOWS))
    kv_lens = np.array([kv_len for kv_len, _ in rows], np.int32)
    first_queries = np.array([max(0, kv_len - num_queries) for kv_len, num_queries in rows], np.int32)
    tables = np.arange(1, 1 + len(rows) * len(WINDOWS) * WIDTH, dtype=np.int32).reshape(len(rows), len(WINDOWS), WIDTH)
    held = np.asarray(VirtualCache._held(cache, tables, kv_lens, first_queries))
    for row, (kv_len, first_query) in enumerate(zip(kv_lens.tolist(), first_queries.tolist(), strict=True)):
        for group, window in enumerate(WINDOWS):
            first_seen = 0 if window is None else max(0, first_query - window + 1)
            for index in range(WIDTH):
                is_seen = index * SIZE < kv_len and (index + 1) * SIZE > first_seen
                assert held[row, group, index] == (tables[row, group, index] if is_seen else NULL_BLOCK)
