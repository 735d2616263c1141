"""When weights change, running requests compute their keys and values again or go on, and no prefix finds old ones."""

import pytest

from tests.engine.helpers import Engine, assert_found, make_request, make_search, name_of
from tests.engine.scheduler.test_resuming import KINDS

OPTIONS = {"max_num_seqs": 8, "num_blocks": 48, "max_num_batched_tokens": 24, "num_swap_chunks": 8}


def requests():
    return [make_request(f"r{i}", 5 + 3 * i, 12, **kind) for i, kind in enumerate(KINDS * 2)] + [make_search("s", 6, 3)]


def tokens_of(running):
    return {name_of(member): member.output_token_ids for request in running for member in request.group.members}


@pytest.fixture(scope="module")
def calm():
    engine, running = Engine(**OPTIONS), requests()
    engine.add(*running)
    engine.run()
    return tokens_of(running)


@pytest.mark.parametrize("in_flight", ["recompute", "continue"])
@pytest.mark.parametrize("swapped_out", ["r1", "s", None])
@pytest.mark.parametrize("depth", [0, 2])
def test_requests_have_the_tokens_that_they_would_have_had_whenever_weights_come(calm, in_flight, swapped_out, depth):
    """What was in blocks and in host memory is spoilt where nothing may be read of it again."""
    for num_steps in (1, 2, 4, 6, 9, 13, 17):
        engine, running = Engine(pipeline_depth=depth, **OPTIONS), requests()
        engine.add(*running)
        for _ in range(num_steps):
            engine.step()
        for request in running:
            if request.request_id == swapped_out and not request.group.finished:
                engine.preempt(request, "swap")
        engine.core.take_new_weights(in_flight)
        engine.core.check_integrity()
        if in_flight == "recompute":
            assert engine.scheduler.swap_space.num_used == engine.scheduler.slots.num_used == 0
            engine.executor._content[:] = -1
            for held in engine.executor._host.values():
                held[:] = -1
        engine.run()
        assert tokens_of(running) == calm
        engine.assert_idle()


@pytest.mark.parametrize("in_flight", ["recompute", "continue"])
def test_a_search_that_is_swapped_out_when_weights_come_gets_its_slots_once(in_flight):
    engine, search = Engine(**OPTIONS | {"max_num_seqs": 16}), make_search("s", 6, 3, 12)
    engine.add(search, make_request("r", 5, 12))
    while not search.group.is_ready:
        engine.step()
    engine.preempt(search, "swap")
    assert all(member.swap is not None for member in search.group.members)
    engine.core.take_new_weights(in_flight)
    engine.step()
    assert engine.scheduler.slots.num_used == 4
    engine.run()
    assert_found(search)
    engine.assert_idle()


def test_what_goes_on_with_old_keys_and_values_shares_them_with_nobody_until_it_has_computed_them_again():
    engine = Engine(**OPTIONS)
    first, second = make_request("a", 13, 20), make_request("b", 9, 20)
    engine.add(first, second)
    for _ in range(6):
        engine.step()
    cache = engine.scheduler.pool.cache
    assert len(cache) > 0
    engine.core.take_new_weights("continue")
    assert len(cache) == 0
    engine.step()
    engine.preempt(second, "recompute")
    assert len(cache) == 0
    engine.run()
    assert len(cache) == (9 + 20 - 1) // 4  # the second's alone, which were computed again


@pytest.mark.parametrize("in_flight", ["recompute", "continue"])
def test_pins_and_prefixes_in_host_memory_are_forgotten(in_flight):
    engine = Engine(host_prefix_cache=True, **OPTIONS | {"num_blocks": 96})
    request = make_request("a", 13, 2)
    engine.add(request)
    engine.run()
    assert engine.core.pin_prefix(request.prompt_token_ids) == 12
    for i in range(16):
        engine.add(make_request(f"b{i}", 60, 2))
    engine.run()
    tier = engine.scheduler.swap_space.tier
    assert len(tier) > 0
    engine.core.take_new_weights(in_flight)
    assert len(tier) == len(engine.scheduler.pool.cache) == engine.scheduler.swap_space.num_used == 0
    assert not engine.core.unpin_prefix(request.prompt_token_ids)
    engine.core.check_integrity()
    engine.assert_idle()
