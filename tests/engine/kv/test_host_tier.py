"""The prefix cache's tier in host memory. The fake executor fails on any row that reads what is not its own."""

import numpy as np
import pytest

from jpaged.api.config import EngineArgs
from jpaged.api.errors import EngineDeadError, InvalidParameterError
from jpaged.engine.interface import SWAP_CHUNK_BLOCKS
from jpaged.engine.kv.host_tier import HostTier, NamedBlock
from jpaged.engine.kv.prefix_cache import ON_HOST
from jpaged.engine.sequences.request import Request
from tests.engine.helpers import Engine, assert_complete, assert_found, make_request, make_search

SIZE = 4


def tiered(**changes) -> Engine:
    values = {"num_blocks": 33, "num_swap_chunks": 4, "host_prefix_cache": True, "max_model_len": 128}
    return Engine(**(values | {"max_num_batched_tokens": 128, "watermark": 0.0} | changes))


def serve(engine: Engine, request_id: str, prompt: int | list[int], **options) -> Request:
    request = make_request(request_id, prompt, 4, **options)
    engine.add(request)
    engine.run()
    assert_complete(request)
    return request


def evict(engine: Engine, name: str = "others") -> None:
    """Fills the whole pool with another prompt."""
    serve(engine, name, engine.scheduler.capacity * SIZE - 5)


def copies(engine: Engine, which: str) -> list[tuple[int, int]]:
    """(chunk, blocks) of each copy in the engine's plans."""
    found = [copy for plan in engine.plans for copy in getattr(plan, which)]
    return [(copy.chunk, int(np.count_nonzero(copy.block_ids))) for copy in found]


@pytest.mark.parametrize("depth", [0, 2])
def test_an_evicted_prefix_comes_back_from_host_memory_and_counts_apart(depth):
    engine = tiered(pipeline_depth=depth)
    prompt = list(range(42))
    serve(engine, "a", prompt)
    evict(engine)
    assert engine.scheduler.pool.cache.match([], np.array(prompt, np.int32), 10, None).tolist() == [[ON_HOST] * 10]
    back = serve(engine, "again", prompt)
    assert back.num_cached_tokens == 40
    assert sum(n for _, n in copies(engine, "swap_ins")) == 10
    stats = engine.core.stats()
    assert (stats.prefix_cache_hits, stats.prefix_cache_host_hits) == (40, 40)
    assert (stats.num_swapped_out, stats.num_swapped_in, stats.num_used_swap_blocks) == (0, 0, 0)


def test_what_came_back_is_hit_in_the_pool_and_need_not_go_out_again():
    engine = tiered()
    prompt = list(range(42))
    serve(engine, "a", prompt)
    evict(engine)
    serve(engine, "b", prompt)
    num_in = len(copies(engine, "swap_ins"))
    assert serve(engine, "c", prompt).num_cached_tokens >= 40
    assert len(copies(engine, "swap_ins")) == num_in
    evict(engine, "others again")
    held = engine.core.stats().num_host_cached_blocks
    assert sum(n for _, n in copies(engine, "swap_outs")) == held, "each block went out once"
    assert serve(engine, "d", prompt).num_cached_tokens == 40


def test_a_hit_may_begin_in_the_pool_and_go_on_in_host_memory():
    engine = tiered()
    prompt = list(range(82))
    serve(engine, "a", prompt)
    serve(engine, "others", 60)  # takes what was free, and the last blocks of the prompt
    (found,) = engine.scheduler.pool.cache.match([], np.array(prompt, np.int32), 20, None)
    assert 0 < np.count_nonzero(found != ON_HOST) < 20
    assert found.tolist() == [*found[found != ON_HOST].tolist(), *found[found == ON_HOST].tolist()]
    again = serve(engine, "again", prompt)
    assert again.num_cached_tokens == 80
    assert engine.core.stats().prefix_cache_host_hits == SIZE * int(np.count_nonzero(found == ON_HOST))


def test_two_prompts_of_a_plan_that_hit_the_same_chunk_both_get_it():
    engine = tiered()
    first, second = [*range(40), 1, 1, 1], [*range(40), 2, 2, 2]
    serve(engine, "a", first)
    serve(engine, "b", second)
    evict(engine)
    requests = [make_request("c", first, 4), make_request("d", second, 4)]
    engine.add(*requests)
    engine.run()
    assert_complete(*requests)
    assert [request.num_cached_tokens for request in requests] == [40, 40]
    assert engine.core.stats().prefix_cache_host_hits == 40, "the second finds in the pool what comes for the first"


def test_copies_out_are_of_whole_chunks():
    engine = tiered(num_blocks=65, num_swap_chunks=8)
    for i in range(12):
        serve(engine, str(i), 41)
    out = [n for _, n in copies(engine, "swap_outs")]
    assert len(out) > 3
    assert set(out) == {SWAP_CHUNK_BLOCKS}


def test_fewer_than_half_a_chunk_are_forgotten():
    engine = tiered(num_blocks=9)
    serve(engine, "a", 13)
    serve(engine, "b", 29)
    assert copies(engine, "swap_outs") == []
    assert engine.core.stats().num_host_cached_blocks == 0


def test_prompts_of_another_salt_find_nothing():
    engine = tiered()
    prompt = list(range(42))
    serve(engine, "a", prompt, salt="x")
    evict(engine)
    assert serve(engine, "b", prompt).num_cached_tokens == 0
    assert serve(engine, "c", prompt, salt="y").num_cached_tokens == 0
    assert serve(engine, "d", prompt, salt="x").num_cached_tokens == 40


def test_a_name_that_collides_is_no_hit():
    tier = HostTier()
    tokens = np.arange(SIZE, dtype=np.int32)
    tier.put(0, [NamedBlock(5, b"name", b"parent", tokens)])
    assert tier.holds(b"name", b"parent", tokens)
    assert not tier.holds(b"name", b"other parent", tokens)
    assert not tier.holds(b"name", b"parent", tokens + 1)
    assert not tier.holds(b"other name", b"parent", tokens)


def test_a_reset_forgets_what_is_in_host_memory():
    engine = tiered()
    prompt = list(range(42))
    serve(engine, "a", prompt)
    evict(engine)
    assert engine.core.stats().num_host_cached_blocks > 0
    assert engine.core.reset_prefix_cache()
    assert engine.core.stats().num_host_cached_blocks == 0
    engine.core.check_integrity()
    assert serve(engine, "b", prompt).num_cached_tokens == 0


def test_the_chunks_used_least_recently_are_dropped_for_newer_prefixes_within_the_space():
    engine = tiered(num_blocks=17, num_swap_chunks=2, max_model_len=64)
    prompts = {name: [i] * 61 for i, name in enumerate("abcd")}  # 15 full blocks each, so each has a chunk of its own
    most = 0
    for name in "abcadab":
        serve(engine, f"{name} {len(engine.plans)}", prompts[name])
        most = max(most, engine.core.stats().num_host_cached_blocks)
    assert 16 < most <= 2 * SWAP_CHUNK_BLOCKS
    out = [chunk for chunk, _ in copies(engine, "swap_outs")]
    assert set(out) == {0, 1}
    assert len(out) > 3
    before = engine.core.stats().prefix_cache_host_hits
    serve(engine, "a last", prompts["a"])
    assert engine.core.stats().prefix_cache_host_hits == before + 60


def test_sequences_that_are_swapped_out_take_the_room_of_prefixes():
    engine = tiered(num_blocks=33, num_swap_chunks=2, preemption_mode="swap", max_model_len=64)
    prompts = [[i] * 60 for i in range(4)]
    for i, prompt in enumerate(prompts):
        serve(engine, f"old {i}", prompt)
    assert len(engine.scheduler.swap_space.tier.chunks) == 2
    requests = [make_request(str(i), 20, 40, n=2, temperature=1.0) for i in range(3)]
    engine.add(*requests)
    fewest = 2
    while engine.core.has_unfinished():
        engine.step()
        fewest = min(fewest, len(engine.scheduler.swap_space.tier.chunks))
    assert_complete(*(member for request in requests for member in request.group.members))
    stats = engine.core.stats()
    assert 0 < stats.num_swapped_out == stats.num_swapped_in
    assert fewest < 2
    engine.run()
    engine.assert_idle()


def test_pinned_prefixes_stay_in_the_pool_and_only_what_is_there_is_pinned():
    engine = tiered(max_model_len=64)
    pinned, other = np.arange(21, dtype=np.int32), np.arange(100, 142, dtype=np.int32)
    serve(engine, "pinned", pinned.tolist())
    assert engine.core.pin_prefix(pinned) == 20
    serve(engine, "other", other.tolist())
    serve(engine, "others", 60)
    serve(engine, "more", 60)
    assert engine.core.pin_prefix(other) == 0, "its beginning is in host memory"
    before = engine.core.stats().prefix_cache_host_hits
    assert serve(engine, "again", pinned.tolist()).num_cached_tokens == 20
    assert engine.core.stats().prefix_cache_host_hits == before
    assert serve(engine, "other again", other.tolist()).num_cached_tokens == 40
    assert engine.core.pin_prefix(other) == 40


@pytest.mark.parametrize("depth", [0, 2])
def test_a_search_that_was_preempted_finds_its_prompt_in_host_memory(depth):
    engine = tiered(pipeline_depth=depth, num_blocks=45, preemption_mode="recompute")
    search = make_search("search", 40, 3, 30)
    firsts = [make_request(f"first {i}", 13, 60) for i in range(3)]
    engine.add(*firsts, search)
    engine.run()
    assert search.stats.num_preemptions > 0
    assert sum(n for _, n in copies(engine, "swap_ins")) > 0
    assert_found(search)
    assert_complete(*firsts)
    engine.assert_idle()


@pytest.mark.parametrize("depth", [0, 2])
def test_a_long_run_gives_the_tokens_it_gives_without_the_tier_and_computes_less(depth):
    """More prefixes than the pool holds, asked for again and again; a group among the requests, for swaps."""
    computed = {}
    for host_prefix_cache in (False, True):
        engine = Engine(
            num_blocks=65,
            num_swap_chunks=8,
            host_prefix_cache=host_prefix_cache,
            max_model_len=128,
            pipeline_depth=depth,
            preemption_mode="swap",
            watermark=0.0,
        )
        rng = np.random.default_rng(depth)
        prefixes = [rng.integers(0, 90, 24 + 2 * i).tolist() for i in range(12)]
        requests = [
            make_request(
                str(i), [*prefixes[rng.integers(12)], i], int(rng.integers(1, 30)), n=1 + i % 3 // 2, temperature=1.0
            )
            for i in range(150)
        ]
        for i in range(0, 150, 5):
            engine.add(*requests[i : i + 5])
            for _ in range(12):
                engine.step()
        engine.run()
        assert_complete(*(member for request in requests for member in request.group.members))
        engine.assert_idle()
        stats = engine.core.stats()
        assert (stats.prefix_cache_host_hits > 0) == host_prefix_cache
        assert stats.num_host_cached_blocks <= 8 * SWAP_CHUNK_BLOCKS
        computed[host_prefix_cache] = sum(len(chunk.token_ids) for plan in engine.plans for chunk in plan.chunks)
    assert computed[True] < 0.7 * computed[False]


def test_the_check_finds_a_chunk_that_is_lost_and_a_name_that_is_nowhere():
    engine = tiered()
    serve(engine, "a", 42)
    evict(engine)
    engine.core.check_integrity()
    taken = engine.scheduler.swap_space._free.pop()
    with pytest.raises(EngineDeadError, match="chunks of swap space"):
        engine.core.check_integrity()
    engine.scheduler.swap_space._free.append(taken)
    engine.scheduler.swap_space.tier._place_of.popitem()
    with pytest.raises(EngineDeadError, match="places in host memory"):
        engine.core.check_integrity()


@pytest.mark.parametrize("changes", [{"num_swap_chunks": 0}, {"enable_prefix_caching": False}])
def test_a_tier_without_a_cache_or_a_space_is_refused(changes):
    with pytest.raises(InvalidParameterError, match="host_prefix_cache=True"):
        tiered(**changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"host_prefix_cache": True, "swap_space": 0}, "swap_space above 0"),
        ({"host_prefix_cache": True, "enable_prefix_caching": False}, "enable_prefix_caching=True"),
        ({"host_prefix_cache": 1}, "host_prefix_cache must be True or False"),
    ],
)
def test_options_that_contradict_the_tier_are_refused(changes, says):
    with pytest.raises(InvalidParameterError, match=says):
        EngineArgs(**changes)
