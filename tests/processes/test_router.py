"""The router, against counts made by hand."""

import pytest

from jpaged.processes.router import CHUNK_TOKENS, Router

LONG = list(range(4 * CHUNK_TOKENS))


def test_requests_go_to_the_replica_that_owes_the_fewest_tokens():
    router = Router(3)
    assert [router.route(str(i), [1] * tokens, 10) for i, tokens in enumerate((50, 20, 30))] == [0, 1, 2]
    assert router.outstanding == [60, 30, 40]
    assert router.route("3", [2], 5) == 1
    assert router.route("4", [3], 5) == 1
    assert router.route("5", [4], 5) == 2


def test_a_request_may_be_assigned_to_a_replica_by_name():
    router = Router(3)
    router.assign("a", 2, LONG, 1)
    assert router.outstanding == [0, 0, len(LONG) + 1]
    assert router.replica_of("a") == 2
    assert router.route("b", LONG, 1) == 0  # waiting for "a" costs more than computing the prompt again
    router.finish("a")
    assert router.route("c", LONG, 1) == 2


def test_a_finished_request_is_owed_no_more():
    router = Router(2)
    router.route("a", [1] * 10, 10)
    router.route("b", [2] * 4, 4)
    router.finish("a")
    router.finish("a")
    assert router.outstanding == [0, 8]
    assert (router.replica_of("a"), router.replica_of("b")) == (None, 1)
    assert router.num_unfinished == 1


def test_prompts_that_begin_alike_stay_together_while_that_saves_more_than_waiting_costs():
    router = Router(2)
    assert router.route("first", LONG, 10) == 0
    assert router.route("other", [9] * len(LONG), 10) == 1
    assert router.route("alike", [*LONG, 7], 10) == 0
    assert router.outstanding[0] == len(LONG) + 10 + 1 + 10  # the known tokens are not computed again
    chosen = [router.route(f"more-{i}", [*LONG, i], 10) for i in range(50)]
    there = chosen.index(1)  # by then replica 0 owes more than another's computing the prompt anew costs
    assert chosen[:there] == [0] * there
    assert 0 <= len(LONG) + 10 + 11 * (there + 1) - (len(LONG) + 10) - len(LONG) <= 11
    assert abs(router.outstanding[0] - router.outstanding[1]) <= len(LONG)  # both know it now and share what comes


@pytest.mark.parametrize("salt", [None, "another"])
def test_prefixes_are_known_within_one_salt(salt):
    router = Router(2)
    router.route("first", LONG, 0, "one")
    assert router.route("second", LONG, 0, salt) == 1
    assert router.outstanding == [len(LONG), len(LONG)]


def test_without_prefix_caching_or_after_a_reset_nothing_is_known():
    for router in (Router(2, match_prefixes=False), Router(2)):
        router.route("first", LONG, 0)
        router.forget_prefixes()
        assert router.route("second", LONG, 0) == 1


def test_a_beginning_shorter_than_a_chunk_counts_for_nothing():
    router = Router(2)
    router.route("first", LONG[: CHUNK_TOKENS - 1], 0)
    assert router.route("second", LONG[: CHUNK_TOKENS - 1], 0) == 1
