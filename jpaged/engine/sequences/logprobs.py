"""Log-probabilities as a step returns them, arrays by row, become those of a request, one dictionary a position."""

import math

from jpaged.api.outputs import Logprob, PositionLogprobs
from jpaged.engine.interface import Chunk, Logprobs
from jpaged.engine.sequences.request import Request


def store_logprobs(request: Request, token_id: int, logprobs: Logprobs, place: tuple[int, int]) -> None:
    """Appends those of a token that was sampled, for a request that wants them. place: its row, and which of the row's
    tokens it is.
    """
    if request.logprobs is not None:
        request.logprobs.append(_position(logprobs, place, token_id, request.sampling.logprobs or 0))


def store_prompt_logprobs(request: Request, chunk: Chunk, logprobs: Logprobs) -> None:
    """Appends what a chunk brings of the prompt: one computed again after a preemption brings some positions twice.

    logprobs: by token of the chunk, of the token that follows it.
    """
    if request.prompt_logprobs is None:
        return
    stop = min(chunk.start + len(chunk.token_ids), request.prompt_len - 1)
    for position in range(len(request.prompt_logprobs), stop + 1):
        token_id, place = int(request.prompt_token_ids[position]), (position - 1 - chunk.start,)
        request.prompt_logprobs.append(_position(logprobs, place, token_id, request.sampling.prompt_logprobs or 0))


def _position(logprobs: Logprobs, place: tuple[int, ...], token_id: int, num_top: int) -> PositionLogprobs:
    """The token that is there and the `num_top` most likely ones, without those that cannot come. place: index among
    the leading axes of `logprobs`.
    """
    position = {token_id: Logprob(float(logprobs.token_logprobs[place]), int(logprobs.token_ranks[place]))}
    top_ids, top_logprobs = logprobs.top_ids[place][:num_top].tolist(), logprobs.top_logprobs[place][:num_top].tolist()
    for rank, (top_id, logprob) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1):
        if logprob == -math.inf:  # and with it those behind
            break
        position.setdefault(top_id, Logprob(logprob, rank))
    return position
