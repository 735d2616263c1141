"""A request that ran in another engine goes on here with the tokens that it would have had there."""

import numpy as np
import pytest

from jpaged.engine.sequences.request import Request
from tests.engine.helpers import Engine, make_request, make_search

KINDS = [{}, {"n": 3, "seed": 5}, {"logprobs": 2}, {"n": 2, "seed": 1, "logprobs": 1}, {"stop_token_ids": [7]}]


def requests():
    return [make_request(f"r{i}", 5 + 3 * i, 12, **kind) for i, kind in enumerate(KINDS * 2)] + [make_search("s", 6, 3)]


def collect(engine, tokens):
    """Runs an engine to its end; {(request id, index): tokens}."""
    while engine.core.has_unfinished():
        take(engine, tokens)


def take(engine, tokens):
    for request, new_token_ids in engine.core.step():
        found = tokens.setdefault((request.request_id, request.index), [])
        found += new_token_ids
    engine.core.check_integrity()


def copy_of(request: Request) -> Request:
    return Request(request.request_id, request.prompt_token_ids, request.sampling, beam=request.beam)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("num_steps", [1, 3, 5, 8, 11, 14])
def test_requests_go_on_in_another_engine_wherever_the_first_one_ended(num_steps, depth):
    options = {"pipeline_depth": depth, "max_num_seqs": 8, "num_blocks": 48, "max_num_batched_tokens": 24}
    calm: dict = {}
    engine = Engine(**options)
    for request in requests():
        engine.core.add_request(request)
    collect(engine, calm)

    tokens: dict = {}
    first, second = Engine(**options), Engine(**options)
    running = requests()
    for request in running:
        first.core.add_request(request)
    seeds = {request.request_id: request.seed for request in running}
    for _ in range(num_steps):
        take(first, tokens)
    for request in running:
        if request.group.finished:
            continue
        again = copy_of(request)
        generated = [
            None if member.finished else tokens.get((member.request_id, member.index), [])
            for member in request.group.members
        ]
        known = any(generated) or None in generated
        if request.beam is not None:
            known = False
        second.core.add_request(again, generated if known else None)
        again.seed = seeds[request.request_id]
        for member, old in zip(again.group.members, request.group.members, strict=True):
            member.seed = old.seed
            if generated[member.index] is None:
                assert member.finished
    collect(second, tokens)
    assert tokens == calm
    assert second.core.stats().num_used_blocks == 0


def test_what_has_tokens_is_not_counted_as_a_prompt_again_and_is_sampled_at_the_same_positions():
    calm, resumed = Engine(), Engine()
    request = make_request("a", 9, 10, seed=3)
    calm.core.add_request(request)
    tokens: dict = {}
    collect(calm, tokens)
    again = copy_of(request)
    resumed.core.add_request(again, [tokens["a", 0][:4]])
    found: dict = {}
    collect(resumed, found)
    assert found["a", 0] == tokens["a", 0][4:]
    assert resumed.core.stats().prompt_tokens == 0
    chunks = [chunk for plan in resumed.executor.plans for chunk in plan.chunks]
    assert np.array_equal(chunks[0].token_ids[-4:], tokens["a", 0][:4])
