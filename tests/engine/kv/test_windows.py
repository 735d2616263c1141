"""Cache groups with a window: what no query can see any more is given back, and nothing else changes."""

import numpy as np
import pytest

from jpaged.api.errors import InvalidParameterError, OutOfMemoryError
from jpaged.engine.footprint import Footprint
from jpaged.engine.interface import NULL_BLOCK, CacheGroup
from tests.engine.helpers import Engine, assert_complete, assert_found, make_config, make_request, make_search

FULL = CacheGroup()


def held(engine: Engine, request, group: int = 0) -> int:
    """Blocks that a running sequence holds in a group."""
    return int(np.count_nonzero(engine.scheduler.slots.block_tables[group, request.slot]))


def run_watching(engine: Engine, *requests) -> list[list[int]]:
    """Runs to the end; for each request the blocks of group 0 that it held after each step in which it ran."""
    counts: list[list[int]] = [[] for _ in requests]
    engine.add(*requests)
    while engine.core.has_unfinished():
        engine.step()
        for request, of_request in zip(requests, counts, strict=True):
            if request.slot >= 0:
                of_request.append(held(engine, request))
    engine.run()
    return counts


@pytest.mark.parametrize("depth", [0, 2])
def test_32000_tokens_through_a_window_of_4096_hold_no_more_than_the_window_and_a_chunk(depth):
    """In a pool that holds a sixth of them."""
    size, window, chunk = 16, 4096, 512
    most = -(-(window - 1 + chunk) // size) + 1
    engine = Engine(
        block_size=size,
        num_blocks=1 + most,
        max_num_seqs=2,
        max_num_batched_tokens=chunk,
        max_model_len=32_100,
        cache_groups=(CacheGroup(window=window),),
        enable_prefix_caching=False,
        pipeline_depth=depth,
    )
    request = make_request("a", 32_000, 40)
    (counts,) = run_watching(engine, request)
    assert_complete(request)
    assert max(counts) <= most
    assert max(counts[-30:]) <= window // size + 2, "while it decodes, the window and the block that it writes to"
    engine.assert_idle()


def test_a_decoding_sequence_gives_a_block_back_when_it_takes_one():
    engine = Engine(cache_groups=(CacheGroup(window=8),), num_blocks=5, max_num_batched_tokens=5)
    request = make_request("a", 5, 50)
    (counts,) = run_watching(engine, request)
    assert_complete(request)
    assert set(counts[10:]) == {3}
    updates = [update for plan in engine.plans[1:] for update in plan.table_updates.tolist()]
    assert [(slot, group, index) for slot, group, index, _ in updates] == [(0, 0, i) for i in range(2, 14)]


def test_a_step_in_which_no_block_is_needed_looks_at_no_window(monkeypatch):
    engine = Engine(cache_groups=(CacheGroup(window=8),))
    request = make_request("a", 5, 50)
    engine.add(request)
    given_back = []
    blocks = engine.scheduler._planner._blocks
    give_back = blocks._give_back
    monkeypatch.setattr(blocks, "_give_back", lambda rows: given_back.append(len(engine.plans)) or give_back(rows))
    engine.run()
    assert len(given_back) == len([plan for plan in engine.plans if len(plan.table_updates)])


def test_full_and_windowed_groups_have_tables_of_their_own_in_one_pool():
    engine = Engine(cache_groups=(CacheGroup(window=6), FULL, CacheGroup(window=12)), num_blocks=64)
    request = make_request("a", 30, 20)
    engine.add(request)
    for _ in range(12):
        engine.step()
    tables = engine.scheduler.slots.block_tables[:, request.slot]
    counts = [int(np.count_nonzero(table)) for table in tables]
    assert counts == [3, 11, 4]
    assert len({*tables[tables != NULL_BLOCK].tolist()}) == sum(counts), "no block in two groups"
    stats = engine.core.stats()
    assert stats.num_used_blocks == sum(counts)
    num_computed = int(engine.scheduler.slots.num_computed[request.slot])
    first_held = [11 - count for count in counts]  # the first block of each table that is held
    assert stats.tokens_held == sum(num_computed - 4 * first for first in first_held)
    engine.run()
    assert_complete(request)


@pytest.mark.parametrize("caching", [False, True])
def test_many_long_prompts_share_a_small_pool_and_none_is_preempted_while_it_is_computed(caching):
    engine = Engine(
        cache_groups=(CacheGroup(window=8),),
        num_blocks=19,
        max_num_batched_tokens=8,
        max_model_len=200,
        enable_prefix_caching=caching,
        watermark=0.0,
    )
    requests = [make_request(str(i), 100 + i, 3) for i in range(6)]
    run_watching(engine, *requests)
    assert_complete(*requests)
    assert engine.core.stats().num_preemptions == 0
    assert max(plan.num_rows for plan in engine.plans) >= 2, "several fit at once"


def test_prompts_that_gave_back_what_others_share_wait_and_all_finish():
    """What was reserved counted on blocks coming free that, by then, others had hit."""
    engine = Engine(
        cache_groups=(CacheGroup(window=24),),
        num_blocks=20,
        max_num_batched_tokens=16,
        max_model_len=200,
        max_num_seqs=4,
        watermark=0.0,
        pipeline_depth=2,
    )
    common = list(range(60))
    requests = [make_request(str(i), [*common[: 40 + 5 * i], *range(100 * i, 100 * i + 60)], 8) for i in range(4)]
    for request in requests:
        engine.add(request)
        engine.step()
        engine.step()
    engine.run()
    assert_complete(*requests)
    engine.assert_idle()


class TestPrefixCache:
    """Window 8, blocks of 4: what comes after 32 tokens sees 25 .. 32, so it needs blocks 6 and 7."""

    def make(self, *groups: CacheGroup, **changes) -> Engine:
        return Engine(cache_groups=groups, **({"num_blocks": 33 * len(groups)} | changes))

    def serve(self, engine: Engine, name: str, prompt: list[int], max_tokens: int = 1):
        request = make_request(name, prompt, max_tokens)
        engine.add(request)
        engine.run()
        assert_complete(request)
        return request

    def forget(self, engine: Engine, prompt: list[int], group: int, index: int) -> None:
        """As if the pool had reused one of the blocks of a prompt, in one group."""
        cache, digests = engine.scheduler.pool.cache, []
        cache.extend_digests(digests, np.array(prompt, np.int32), index + 1, None)
        cache.forget(np.array([cache._block_of[digests[index] + cache._suffixes[group]]]))
        cache.check_integrity()

    @pytest.mark.parametrize("groups", [(CacheGroup(window=8),), (FULL, CacheGroup(window=8))])
    def test_a_hit_takes_only_the_last_window_of_a_windowed_group(self, groups):
        engine = self.make(*groups)
        self.serve(engine, "first", list(range(33)))
        request = make_request("again", list(range(40)), 1)
        engine.add(request)
        engine.step()
        (start,) = engine.plans[-1].starts
        assert start.num_computed_tokens == 32
        assert np.flatnonzero(start.block_ids[-1][:8]).tolist() == [6, 7]
        if len(groups) == 2:
            assert np.flatnonzero(start.block_ids[0]).tolist() == list(range(10))
        engine.run()
        assert_complete(request)

    def test_what_a_window_has_passed_may_be_reused_and_the_prefix_is_hit_all_the_same(self):
        engine = self.make(FULL, CacheGroup(window=8))
        self.serve(engine, "first", list(range(33)))
        for index in range(6):
            self.forget(engine, list(range(33)), 1, index)
        assert self.serve(engine, "again", list(range(40))).num_cached_tokens == 32

    @pytest.mark.parametrize(("group", "index", "hit"), [(1, 7, 28), (1, 6, 24), (0, 7, 28), (0, 3, 12), (1, 5, 32)])
    def test_a_block_that_is_lost_shortens_the_hit_to_where_every_group_has_what_it_needs(self, group, index, hit):
        engine = self.make(FULL, CacheGroup(window=8), enable_prefix_caching=True)
        self.serve(engine, "first", list(range(33)))
        self.forget(engine, list(range(33)), group, index)
        assert self.serve(engine, "again", list(range(40))).num_cached_tokens == hit

    def test_a_conversation_goes_on_from_the_window_at_its_end(self):
        engine = self.make(CacheGroup(window=8), max_model_len=128)
        first = self.serve(engine, "first", list(range(33)), 30)
        prompt = [*range(33), *first.output_token_ids, 5, 6, 7]
        assert self.serve(engine, "again", prompt).num_cached_tokens == 60

    def test_the_pool_reuses_what_it_must_and_pinned_windows_stay(self):
        engine = self.make(FULL, CacheGroup(window=8), num_blocks=80, max_model_len=60)
        self.serve(engine, "first", list(range(33)))
        assert engine.core.pin_prefix(np.arange(32, dtype=np.int32)) == 32
        assert engine.core.stats().num_used_blocks == 8 + 4, "the windows of hits of 8, 7 and 6 blocks"
        for i in range(12):
            self.serve(engine, str(i), [100 + i] * 50)
        assert self.serve(engine, "again", list(range(40))).num_cached_tokens == 32
        assert engine.core.unpin_prefix(np.arange(32, dtype=np.int32))
        engine.assert_idle()

    @pytest.mark.parametrize("groups", [(CacheGroup(window=8),), (FULL, CacheGroup(window=8))])
    @pytest.mark.parametrize(
        ("prompt", "num_cached"),
        [
            (list(range(32)), 31),
            (list(range(31)), 30),
            ([*range(29), 95, 96, 97, 98], 28),
            (list(range(28)), 27),
        ],
        ids=["the pinned prompt", "a token shorter", "parts in the last block", "a block shorter"],
    )
    def test_a_pin_serves_the_prompt_itself_and_those_that_end_or_part_a_little_earlier(
        self, groups, prompt, num_cached
    ):
        engine = self.make(*groups, num_blocks=80, max_model_len=60)
        self.serve(engine, "first", list(range(33)))
        engine.core.pin_prefix(np.arange(32, dtype=np.int32))
        for i in range(12):
            self.serve(engine, str(i), [100 + i] * 50)
        assert self.serve(engine, "again", prompt).num_cached_tokens == num_cached

    def test_a_pin_takes_no_blocks_that_are_reserved_for_a_prompt(self):
        prefix = np.arange(16, dtype=np.int32)
        engine = self.make(CacheGroup(window=8), num_blocks=10, max_num_batched_tokens=8, watermark=0.0)
        self.serve(engine, "first", [*prefix.tolist(), 16])
        other, prompt = make_request("other", 4, 20), make_request("prompt", 40, 4)
        engine.add(other, prompt)
        engine.step()
        with pytest.raises(OutOfMemoryError, match="reserved for prompts"):
            engine.core.pin_prefix(prefix)
        engine.core.check_integrity()
        engine.run()
        assert_complete(other, prompt)
        assert engine.core.stats().num_preemptions == 0
        engine.assert_idle()
        self.serve(engine, "second", [*prefix.tolist(), 16])
        assert engine.core.pin_prefix(prefix) == 16, "when nobody needs them"


@pytest.mark.parametrize("groups", [(CacheGroup(window=6),), (FULL, CacheGroup(window=6))])
def test_samples_and_beams_part_in_every_group(groups):
    engine = Engine(cache_groups=groups, num_blocks=64)
    request, search = make_request("a", 10, 20, n=3, temperature=1.0), make_search("s", 10, 3, 12)
    engine.add(request, search)
    engine.step()
    engine.step()
    assert len(engine.plans[1].copies) == 2 * len(groups) + 2 * len(groups)
    engine.run()
    assert_complete(*request.group.members)
    assert_found(search)
    engine.assert_idle()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_search_that_gives_way_finds_the_same_when_it_comes_back(mode):
    engine = Engine(cache_groups=(FULL, CacheGroup(window=6)), num_blocks=64, num_swap_chunks=8, preemption_mode=mode)
    search = make_search("s", 30, 3, 14)
    engine.add(search)
    for _ in range(7):
        engine.step()
    engine.preempt(search, mode)
    engine.run()
    assert_found(search)
    assert (engine.core.stats().num_swapped_in > 0) == (mode == "swap")
    swapped = [out.block_ids for plan in engine.plans for out in plan.swap_outs]
    assert all(NULL_BLOCK not in block_ids for block_ids in swapped), "only what is held goes out"


def test_the_hint_of_a_shared_prefix_is_of_the_first_full_group():
    engine = Engine(
        cache_groups=(CacheGroup(window=6), FULL), num_blocks=64, shared_prefix_attention=True, max_model_len=128
    )
    engine.add(*(make_request(str(i), [*range(24), i], 6) for i in range(3)))
    engine.run()
    assert any(plan.num_sharing == 3 and plan.shared_len == 24 for plan in engine.plans)
    windows_only = Engine(cache_groups=(CacheGroup(window=6),), shared_prefix_attention=True)
    windows_only.add(*(make_request(str(i), [*range(24), i], 6) for i in range(3)))
    windows_only.run()
    assert not any(plan.num_sharing for plan in windows_only.plans)


class TestLimits:
    def test_a_prompt_is_refused_only_if_the_pool_could_never_finish_it(self):
        engine = Engine(cache_groups=(FULL, CacheGroup(window=8)), num_blocks=19, max_num_batched_tokens=8)
        assert engine.scheduler.limits.pool_tokens == 13 * 4
        with pytest.raises(OutOfMemoryError, match="has 52 tokens, but the KV pool holds 52"):
            engine.add(make_request("a", 52, 1))
        fits = make_request("b", 51, 20)
        engine.add(fits)
        engine.run()
        assert fits.max_len == 52
        assert_complete(fits)

    def test_beams_of_a_windowed_model_need_their_windows_at_once(self):
        footprint = Footprint(block_size=4, windows=(8,), step_tokens=8)
        assert footprint.alone(1000, 1040) == 5
        assert footprint.alone(1000, 1040, together=4) == 12

    @pytest.mark.parametrize("width", [2, 4])
    @pytest.mark.parametrize("window", [1, 6])
    def test_a_search_ends_in_the_smallest_pool_that_admits_it(self, window, width):
        """Its fork copies blocks while the prompt's last chunk is still held."""
        groups = (CacheGroup(window=window),)
        needed = Footprint(block_size=4, windows=(window,), step_tokens=64).alone(21, 24, together=width)
        engine = Engine(
            num_blocks=needed + 1, cache_groups=groups, max_num_batched_tokens=64, enable_prefix_caching=False
        )
        search = make_search("s", 21, width, 3)
        engine.add(search)
        engine.run(400)
        assert search.finished
        refusing = Engine(
            num_blocks=needed, cache_groups=groups, max_num_batched_tokens=64, enable_prefix_caching=False
        )
        with pytest.raises(OutOfMemoryError):
            refusing.add(make_search("s", 21, width, 3))

    def test_a_window_must_hold_the_query_itself(self):
        with pytest.raises(InvalidParameterError, match="window must be at least 1, got 0"):
            make_config(cache_groups=(CacheGroup(window=0),))
