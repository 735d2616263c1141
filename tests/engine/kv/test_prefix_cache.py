import hashlib

import numpy as np
import pytest

from jpaged.api.errors import InvalidParameterError, OutOfMemoryError
from jpaged.engine.kv import prefix_cache
from jpaged.engine.kv.block_pool import BlockPool
from jpaged.engine.kv.prefix_cache import PrefixCache
from tests.engine.fake_executor import reference_tokens
from tests.engine.helpers import Engine, assert_complete, assert_found, make_request, make_search

SIZE = 4


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def filled(pool: BlockPool, token_ids: np.ndarray, salt: str | None = None) -> np.ndarray:
    """Blocks that hold these tokens, registered and freed again."""
    blocks = pool.allocate(len(token_ids) // SIZE)
    pool.cache.register([], token_ids, blocks[None], 0, len(blocks), salt)
    pool.free(blocks)
    return blocks


def hits(cache: PrefixCache, token_ids: np.ndarray, salt: str | None = None) -> list[int]:
    return cache.match([], token_ids, len(token_ids) // SIZE, salt)[0].tolist()


@pytest.fixture
def hashed(monkeypatch) -> list[bytes]:
    """The tokens of each block that is hashed."""
    found: list[bytes] = []
    original = prefix_cache.block_digest
    monkeypatch.setattr(prefix_cache, "block_digest", lambda parent, data: found.append(data) or original(parent, data))
    return found


def prompt_of(*numbers: int) -> np.ndarray:
    """Ten blocks of each number, one behind the other."""
    return np.repeat(np.array(numbers, np.int32), 10 * SIZE)


def test_the_longest_common_run_of_full_blocks_is_found():
    pool = BlockPool(16, SIZE, True)
    blocks = filled(pool, np.arange(12, dtype=np.int32))
    assert hits(pool.cache, np.arange(12, dtype=np.int32)) == blocks.tolist()
    assert hits(pool.cache, tokens(0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11)) == blocks[:1].tolist()
    assert hits(pool.cache, tokens(4, 5, 6, 7)) == [], "the same tokens after another prefix are another block"
    assert hits(pool.cache, tokens(0, 1, 2)) == []


def test_no_more_blocks_are_matched_than_asked_for():
    pool = BlockPool(16, SIZE, True)
    blocks = filled(pool, np.arange(12, dtype=np.int32))
    assert pool.cache.match([], np.arange(12, dtype=np.int32), 2, None).tolist() == [blocks[:2].tolist()]


def test_requests_of_another_salt_share_nothing():
    pool = BlockPool(16, SIZE, True)
    prompt = np.arange(8, dtype=np.int32)
    plain, salted = filled(pool, prompt), filled(pool, prompt, "salt")
    assert hits(pool.cache, prompt) == plain.tolist()
    assert hits(pool.cache, prompt, "salt") == salted.tolist()
    assert hits(pool.cache, prompt, "other") == []


def test_a_prompt_that_begins_like_another_is_hashed_from_where_they_part(hashed):
    cache = BlockPool(16, SIZE, True).cache
    first, second = np.arange(40, dtype=np.int32), np.arange(48, dtype=np.int32)
    second[22] = 99
    hits(cache, first)
    hashed.clear()
    hits(cache, second)
    assert len(hashed) == 48 // SIZE - 22 // SIZE
    hashed.clear()
    hits(cache, second[:32])
    assert not hashed
    hits(cache, second, "salt")
    assert len(hashed) == 48 // SIZE


def test_digests_are_the_same_whatever_prompts_came_before():
    rng, cache = np.random.default_rng(0), BlockPool(16, SIZE, True).cache
    stems = rng.integers(0, 3, (5, 60)).astype(np.int32)
    for _ in range(300):
        prompt = np.concatenate([stems[rng.integers(5)][: rng.integers(61)], rng.integers(0, 3, 20).astype(np.int32)])
        salt = [None, "a", "b"][rng.integers(3)]
        found, parent = list[bytes](), prefix_cache.root_digest(salt)
        cache.extend_digests(found, prompt, int(rng.integers(1, len(prompt) // SIZE + 1)), salt)
        for index, digest in enumerate(found):
            parent = prefix_cache.block_digest(parent, prompt[index * SIZE : (index + 1) * SIZE].tobytes())
            assert digest == parent
        prompt[:60] = stems[rng.integers(5)][: len(prompt)]  # what is remembered is a copy


def test_prompts_with_one_first_block_may_take_turns(hashed):
    cache = BlockPool(16, SIZE, True).cache
    prompts = [prompt_of(1, 2), prompt_of(1, 3), prompt_of(1)[:SIZE]]
    for prompt in prompts:
        hits(cache, prompt)
    hashed.clear()
    for prompt in prompts * 10:
        hits(cache, prompt)
    assert not hashed


def test_digests_of_few_prompts_are_kept_and_those_in_use_last(hashed):
    cache = BlockPool(16, SIZE, True).cache
    for other in range(1, 1000):
        hits(cache, prompt_of(0))
        hits(cache, prompt_of(other))
        hits(cache, prompt_of(0, other))
    assert sum(data == prompt_of(0)[:SIZE].tobytes() for data in hashed) == 10
    latest = cache._prompts._latest
    assert len(latest) == prefix_cache._RECENT_BEGINNINGS
    assert max(map(len, latest.values())) == prefix_cache._RECENT_PROMPTS


def test_of_a_very_long_prompt_the_beginning_is_kept(hashed):
    cache, most = BlockPool(16, SIZE, True).cache, prefix_cache._MOST_BLOCKS
    prompt = np.arange((most + 50) * SIZE, dtype=np.int32)
    for _ in range(3):
        hashed.clear()
        hits(cache, prompt)
    assert len(hashed) == 50
    assert [len(kept) for prompts in cache._prompts._latest.values() for _, kept in prompts] == [most]


def test_a_salt_that_reads_like_a_digest_is_no_block(monkeypatch):
    """Or a prompt with that salt would be hit by what follows that block, elsewhere in another prompt."""
    digest_of = lambda parent, data: hashlib.sha256(parent + data).hexdigest()[:32].encode()  # noqa: E731
    monkeypatch.setattr(prefix_cache, "block_digest", digest_of)
    pool = BlockPool(16, SIZE, True)
    prompt, digests = np.arange(12, dtype=np.int32), list[bytes]()
    filled(pool, prompt)
    pool.cache.extend_digests(digests, prompt, 1, None)
    assert hits(pool.cache, prompt[4:], digests[0].decode()) == []


def test_freed_blocks_can_be_hit_until_they_are_reused():
    pool = BlockPool(4, SIZE, True)
    prompt = np.arange(12, dtype=np.int32)
    blocks = filled(pool, prompt)
    pool.allocate(1)
    assert hits(pool.cache, prompt) == blocks[:2].tolist(), "the tail goes first"
    pool.allocate(2)
    assert hits(pool.cache, prompt) == []
    assert len(pool.cache) == 0


def test_equal_content_keeps_its_first_name():
    pool = BlockPool(8, SIZE, True)
    prompt = np.arange(8, dtype=np.int32)
    first = filled(pool, prompt)
    filled(pool, prompt)
    assert hits(pool.cache, prompt) == first.tolist()
    pool.cache.check_integrity()


def test_reset_forgets_every_name():
    pool = BlockPool(8, SIZE, True)
    prompt = np.arange(8, dtype=np.int32)
    filled(pool, prompt)
    pool.cache.reset()
    assert hits(pool.cache, prompt) == []
    assert len(pool.cache) == 0


@pytest.mark.parametrize("other", [tokens(9, 9, 9, 9, 4, 5, 6, 7), tokens(0, 1, 2, 3, 9, 9, 9, 9)])
def test_a_digest_that_collides_is_a_miss(monkeypatch, other):
    monkeypatch.setattr(prefix_cache, "block_digest", lambda parent, data: bytes([len(parent)]) * 2)
    pool = BlockPool(8, SIZE, True)
    prompt = np.arange(8, dtype=np.int32)
    blocks = filled(pool, prompt)
    common = 1 if other[0] == 0 else 0
    assert hits(pool.cache, other) == blocks[:common].tolist()
    assert hits(pool.cache, prompt) == blocks.tolist()
    assert hits(pool.cache, prompt, "salt") == [], "a salt is compared too"


def test_a_block_whose_parent_is_another_is_a_miss(monkeypatch):
    """The second blocks are equal, and so are their digests; what is before them differs."""
    monkeypatch.setattr(prefix_cache, "block_digest", lambda parent, data: data)
    pool = BlockPool(8, SIZE, True)
    filled(pool, tokens(0, 1, 2, 3, 4, 5, 6, 7))
    first = filled(pool, tokens(9, 9, 9, 9))
    assert hits(pool.cache, tokens(9, 9, 9, 9, 4, 5, 6, 7)) == first.tolist()


def test_an_engine_whose_digests_all_collide_gives_the_right_tokens(monkeypatch):
    monkeypatch.setattr(prefix_cache, "block_digest", lambda parent, data: b"same")
    engine = Engine()
    requests = [make_request(str(i), [i // 2] * 9, 12) for i in range(8)]
    engine.add(*requests)
    engine.run()
    assert_complete(*requests)
    assert engine.core.stats().prefix_cache_hits > 0


def test_one_token_of_a_prompt_is_always_computed():
    engine = Engine()
    prompt = list(range(8))
    for name, cached in (("first", 0), ("again", 7)):
        request = make_request(name, prompt)
        engine.add(request)
        engine.run()
        assert_complete(request)
        assert request.num_cached_tokens == cached
    longer = make_request("longer", [*prompt, 8])
    engine.add(longer)
    engine.run()
    assert longer.num_cached_tokens == 8
    stats = engine.core.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (25, 15)
    assert stats.prefix_cache_hit_rate == pytest.approx(15 / 25)


def test_a_prompt_shares_blocks_with_one_that_is_computed_in_the_same_step():
    engine = Engine()
    requests = [make_request(str(i), [*range(10), i]) for i in range(3)]
    engine.add(*requests)
    engine.step()
    tables = [engine.table(request) for request in requests]
    assert len(engine.plans) == 1
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    engine.run()
    assert_complete(*requests)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_conversation_hits_the_tokens_that_it_generated(depth):
    engine = Engine(pipeline_depth=depth)
    first = make_request("first", 5, 14)
    engine.add(first)
    engine.run()
    history = [*first.prompt_token_ids.tolist(), *first.output_token_ids]
    second = make_request("second", [*history, 1, 2, 3])
    engine.add(second)
    engine.run()
    assert_complete(first, second)
    # 19 tokens were known and the last one was never computed, so 18 are in 4 full blocks.
    assert second.num_cached_tokens == 16


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("stops", [False, True])
def test_a_block_that_ends_with_a_token_never_computed_gets_no_name(depth, stops):
    """The eighth token is the last of the second block, but was only sampled, even if steps beyond were planned."""
    prompt = list(range(5))
    tokens = next(t for seed in range(99) if (t := reference_tokens(prompt, seed, 20)).index(t[2]) == 2)
    seed = next(seed for seed in range(99) if reference_tokens(prompt, seed, 20) == tokens)
    engine = Engine(pipeline_depth=depth)
    limit = {"max_tokens": 15, "stop_token_ids": [tokens[2]]} if stops else {"max_tokens": 3}
    first = make_request("first", prompt, seed=seed, **limit)
    engine.add(first)
    engine.run()
    assert first.output_token_ids == tokens[:3]
    second = make_request("second", [*prompt, *tokens[:3], 1])
    engine.add(second)
    engine.run()
    assert second.num_cached_tokens == 4
    assert_complete(first, second)


def test_without_prefix_caching_nothing_is_shared():
    engine = Engine(enable_prefix_caching=False)
    requests = [make_request(str(i), list(range(9))) for i in range(3)]
    engine.add(*requests)
    engine.run()
    assert_complete(*requests)
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0]
    assert engine.core.stats().num_cached_blocks == 0


def test_prompt_logprobs_skip_the_cache_and_are_complete():
    engine = Engine()
    prompt = list(range(9))
    plain, scored = make_request("plain", prompt), make_request("scored", prompt, prompt_logprobs=2)
    engine.add(plain)
    engine.run()
    engine.add(scored)
    engine.run()
    assert_complete(plain, scored)
    assert scored.num_cached_tokens == 0
    assert len(scored.prompt_logprobs) == 9


def test_the_cache_is_reset_only_while_nothing_runs():
    engine = Engine()
    request = make_request("first", list(range(9)))
    engine.add(request)
    engine.step()
    assert engine.core.reset_prefix_cache() is False
    engine.run()
    assert engine.core.reset_prefix_cache() is True
    again = make_request("again", list(range(9)))
    engine.add(again)
    engine.run()
    assert again.num_cached_tokens == 0


@pytest.mark.parametrize("host", [False, True])
def test_the_cache_is_not_reset_while_a_sequence_is_swapped_out(host):
    """It would go on from keys and values that a change of weights has made stale."""
    engine = Engine(num_swap_chunks=2, host_prefix_cache=host)
    request = make_request("first", 22, 20)
    engine.add(request)
    for _ in range(3):
        engine.step()
    engine.preempt(request, "swap")
    cached = engine.core.stats().num_cached_blocks
    assert cached == 6
    assert engine.core.reset_prefix_cache() is False
    assert engine.core.stats().num_cached_blocks == cached
    engine.run()
    assert_complete(request)
    assert engine.core.reset_prefix_cache() is True
    stats = engine.core.stats()
    assert (stats.num_cached_blocks, stats.num_host_cached_blocks) == (0, 0)


# --- blocks that are hit in part ------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 2])
def test_a_prompt_that_parts_within_a_block_copies_it_and_keeps_what_is_equal(depth):
    engine = Engine(pipeline_depth=depth)
    first = make_request("first", range(12), 4)
    engine.add(first)
    engine.run()
    second = make_request("second", [*range(7), 90, 91, 92], 6)
    engine.add(second)
    num_plans = len(engine.plans)
    engine.step()
    plan = engine.plans[num_plans]
    copied = int(plan.starts[0].block_ids[0, 1])
    assert second.num_cached_tokens == 7
    assert plan.copies.shape == (1, 2)
    assert plan.copies[0, 1] == copied != plan.copies[0, 0]
    assert engine.scheduler.pool.ref_count(int(plan.copies[0, 0])) == 0
    engine.run()
    again = make_request("again", range(12), 4)
    engine.add(again)
    engine.run()
    assert_complete(first, second, again)
    assert again.num_cached_tokens == 11, "the block that was copied is what it was"
    engine.assert_idle()


def test_the_block_with_the_most_equal_tokens_is_copied():
    engine = Engine()
    engine.add(*(make_request(str(n), [*range(4), *range(4, 4 + n), *[90 + n] * (4 - n), 80], 1) for n in (1, 3, 2)))
    engine.run()
    request = make_request("request", range(9), 3)
    engine.add(request)
    engine.run()
    assert request.num_cached_tokens == 7
    assert_complete(request)


def test_less_than_half_a_block_is_computed_rather_than_copied():
    engine = Engine()
    first, second = make_request("first", range(8), 1), make_request("second", [0, 1, 2, 3, 4, 90, 91], 3)
    for request in (first, second):
        engine.add(request)
        engine.run()
    assert second.num_cached_tokens == 4
    assert all(not len(plan.copies) for plan in engine.plans)


def test_a_block_that_the_same_step_fills_is_not_copied():
    """A copy comes before the step."""
    engine = Engine()
    first, second = make_request("first", range(8), 3), make_request("second", [*range(7), 90, 91], 3)
    engine.add(first, second)
    engine.step()
    assert len(engine.plans[0].starts) == 2
    assert second.num_cached_tokens == 4
    engine.run()
    assert_complete(first, second)


def test_every_block_after_another_can_be_copied_whichever_of_them_are_reused():
    pool = BlockPool(8, SIZE, True)
    pool.cache.step_id = 1
    common = tokens(0, 1, 2, 3)
    first, second, third = (np.concatenate([common, tokens(4, 5, last, last)]) for last in (60, 70, 80))
    digests: list[bytes] = []
    pool.cache.extend_digests(digests, common, 1, None)

    def parts() -> list[int]:
        """How much of each is found after the common block: three tokens only of it, not of another of them."""
        return [pool.cache.match_part(digests[0], prompt[4:7])[1] for prompt in (first, second, third)]

    def reuse(*block_ids: int) -> None:
        pool.cache.forget(np.array(block_ids, np.int32))
        pool.cache.check_integrity()

    blocks = filled(pool, first)
    held = [pool.allocate(2), pool.allocate(2)]
    pool.cache.register([], second, np.array([[blocks[0], held[0][1]]]), 0, 2, None)
    pool.cache.register([], third, np.array([[blocks[0], held[1][1]]]), 0, 2, None)
    pool.cache.step_id = 2
    assert parts() == [3, 3, 3]
    reuse(int(blocks[1]))
    assert parts() == [2, 3, 3]
    reuse(int(blocks[0]))
    pool.cache.register([], common, held[0][None, :1], 0, 1, None)  # computed again, in another block
    pool.cache.step_id = 3
    assert parts() == [2, 3, 3]
    pool.cache.register([], first, np.array([[held[0][0], blocks[1]]]), 1, 2, None)
    pool.cache.step_id = 4
    assert parts() == [3, 3, 3]
    reuse(int(held[0][0]))
    pool.cache.register([], common, held[1][None, :1], 0, 1, None)
    pool.cache.step_id = 5
    assert parts() == [3, 3, 3]
    pool.cache.check_integrity()


def test_blocks_of_another_salt_are_not_copied():
    engine = Engine()
    first, second = make_request("first", range(8), 1, salt="a"), make_request("second", range(8), 3, salt="b")
    for request in (first, second):
        engine.add(request)
        engine.run()
    assert second.num_cached_tokens == 0


# --- what is reused first, and what never -----------------------------------------------------------------------------


def test_names_are_lost_by_last_use_and_then_from_the_end_of_a_sequence():
    pool = BlockPool(11, SIZE, True)
    old, new = (np.arange(first, first + 20, dtype=np.int32) for first in (0, 100))
    filled(pool, old)
    filled(pool, new)
    (used_again,) = pool.cache.match([], old, 2, None)  # the first two blocks are needed once more
    pool.share(used_again)
    pool.free(used_again)
    left = []
    for _ in range(10):
        pool.allocate(1)
        left.append((len(hits(pool.cache, old)), len(hits(pool.cache, new))))
    assert left[:3] == [(4, 5), (3, 5), (2, 5)]
    assert left[3:8] == [(2, 4), (2, 3), (2, 2), (2, 1), (2, 0)]
    assert left[8:] == [(1, 0), (0, 0)]


def test_a_pinned_prefix_is_hit_whatever_came_in_between():
    engine = Engine(num_blocks=33, max_model_len=60)
    system = list(range(9))
    engine.add(make_request("first", system, 1))
    engine.run()
    assert engine.core.pin_prefix(np.array(system, np.int32)) == 8
    for i in range(20):
        engine.add(make_request(f"other {i}", 30, 20))
    engine.run()
    again = make_request("again", [*system, 50], 4)
    engine.add(again)
    engine.run()
    assert again.num_cached_tokens == 8
    assert_complete(again)
    assert engine.core.stats().num_used_blocks == 2
    engine.core.check_integrity()
    assert engine.core.unpin_prefix(np.array(system, np.int32)) is True
    assert engine.core.unpin_prefix(np.array(system, np.int32)) is False
    engine.assert_idle()


def test_pinning_leaves_room_for_the_longest_sequence_and_for_what_is_unfinished():
    engine = Engine(num_blocks=19, max_model_len=40)
    prompt = np.arange(33, dtype=np.int32)
    engine.add(make_request("first", prompt, 1))
    engine.run()
    assert engine.core.pin_prefix(prompt) == 32
    other = np.arange(100, 109, dtype=np.int32)
    engine.add(make_request("second", other, 1))
    engine.run()
    with pytest.raises(OutOfMemoryError, match="Pinning 2 blocks leaves 8 of 18 to others, but 10 are needed"):
        engine.core.pin_prefix(other)
    with pytest.raises(OutOfMemoryError, match=r"beam_width=4 .* the KV pool has 10"):
        engine.add(make_search("search", 8, 4, 9))
    fits = make_search("search", 8, 4, 8)
    engine.add(fits)
    engine.run()
    assert_found(fits)
    engine.core.check_integrity()


def test_blocks_that_pinned_prefixes_share_count_once():
    engine = Engine(num_blocks=41, max_model_len=80)
    prompt = np.arange(61, dtype=np.int32)
    engine.add(make_request("first", prompt, 1))
    engine.run()
    assert engine.core.pin_prefix(prompt[:49]) == 48
    assert engine.core.pin_prefix(prompt[:49]) == 48, "the same again takes nothing"
    assert engine.core.pin_prefix(prompt) == 60, "three blocks more"
    assert engine.core.pin_prefix(prompt[:20]) == 20
    assert engine.core.stats().num_used_blocks == engine.scheduler.pool.capacity - engine.scheduler.capacity == 15
    assert engine.core.unpin_prefix(prompt)
    assert engine.core.stats().num_used_blocks == engine.scheduler.pool.capacity - engine.scheduler.capacity == 12
    other = np.arange(100, 137, dtype=np.int32)
    engine.add(make_request("second", other, 1))
    engine.run()
    with pytest.raises(OutOfMemoryError, match="Pinning 9 blocks leaves 19 of 40 to others, but 20 are needed"):
        engine.core.pin_prefix(other)
    assert engine.core.pin_prefix(other[:32]) == 32
    engine.core.check_integrity()


def test_a_prefix_pinned_twice_is_pinned_once_and_a_reset_unpins_it():
    engine = Engine()
    prompt = np.arange(9, dtype=np.int32)
    engine.add(make_request("first", prompt, 1))
    engine.run()
    assert engine.core.pin_prefix(prompt) == engine.core.pin_prefix(prompt) == 8
    assert engine.core.stats().num_used_blocks == 2
    assert engine.core.reset_prefix_cache() is True
    engine.core.check_integrity()
    engine.assert_idle()


def test_without_a_prefix_cache_nothing_can_be_pinned():
    with pytest.raises(InvalidParameterError, match="enable_prefix_caching"):
        Engine(enable_prefix_caching=False).core.pin_prefix(np.arange(8, dtype=np.int32))
