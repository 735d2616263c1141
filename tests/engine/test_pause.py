"""Steps that are read at once, as before new weights and in a pause, beside those that are read in turn."""

import pytest

from tests.engine.helpers import Engine, assert_complete, make_request


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("at", range(1, 11))
def test_a_pause_at_any_step_tells_a_sequence_of_several_tokens_in_one_update(depth, at):
    """Of two updates the first would say already that the sequence has ended, and the second bring its last token."""
    engine = Engine(pipeline_depth=depth)
    requests = [make_request(str(length), 5, length, n=n) for length, n in ((1, 1), (2, 2), (5, 1), (8, 2))]
    engine.add(*requests)
    for _ in range(at):
        engine.step()
    engine.core.pause()
    engine.core.pause()
    while engine.core.can_step():
        engine.step()
    engine.core.resume()
    engine.run()
    engine.assert_idle()
    for request in requests:
        for member in request.group.members:
            assert_complete(member)
            name = f"{member.request_id}/{member.index}" if member.index else member.request_id
            assert engine.reported[name] == member.output_token_ids
