"""How long a request may become, and whether it can ever be served: decided once, before it is queued.

prompt_len <= ... max_tokens ... <= max_len <= max_model_len, and what the pool holds
"""

from jpaged.config import SchedulerConfig
from jpaged.engine.request import Request
from jpaged.errors import InvalidParameterError, InvalidPromptError, OutOfMemoryError


def set_max_len(request: Request, config: SchedulerConfig, capacity: int) -> None:
    """Sets `Request.max_len`.

    Args:
        capacity: blocks that requests can have at most.
    Raises:
        InvalidPromptError: its prompt leaves no room for a token within max_model_len.
        OutOfMemoryError: its prompt leaves no room for a token within the whole pool; or beams, which must run
            together, might not fit it.
        InvalidParameterError: it is for more sequences than can run.
    """
    _check_num_sequences(request, config)
    if request.prompt_len >= config.max_model_len:
        raise InvalidPromptError(
            f"The prompt of request {request.request_id!r} has {request.prompt_len} tokens; with "
            f"max_model_len={config.max_model_len} at most {config.max_model_len - 1} leave room for a new one."
        )
    pool_tokens = capacity * config.block_size
    if request.prompt_len >= pool_tokens:
        raise OutOfMemoryError(
            f"The prompt of request {request.request_id!r} has {request.prompt_len} tokens, but the KV pool holds "
            f"{pool_tokens} ({capacity} blocks of {config.block_size}); shorten it or enlarge the pool."
        )
    request.max_len = min(config.max_model_len, pool_tokens)
    if request.score_targets is not None:
        request.max_len = request.prompt_len + 1  # nothing is sampled, so this is where decoding need not begin
    elif request.sampling.max_tokens is not None:
        request.max_len = min(request.max_len, request.prompt_len + request.sampling.max_tokens)
    if request.beam is not None and (needed := num_blocks_alone(request, config.block_size)) > capacity:
        raise OutOfMemoryError(
            f"beam_width={request.num_sequences} of request {request.request_id!r} may need {needed} blocks for "
            f"{request.max_len} tokens, but the KV pool has {capacity}; lower beam_width or max_tokens or enlarge the "
            f"pool."
        )


def num_blocks_alone(request: Request, block_size: int) -> int:
    """The most blocks that a request needs at once to finish; beams may come to share no more than the prompt."""
    together = 1 if request.beam is None else request.num_sequences
    shared = request.prompt_len // block_size
    return shared + together * (-(-request.max_len // block_size) - shared)


def _check_num_sequences(request: Request, config: SchedulerConfig) -> None:
    name = "n" if request.sampling.best_of is None else "best_of"
    name = name if request.beam is None else "beam_width"
    for limit in ("max_num_seqs", "max_num_batched_tokens"):
        if request.num_sequences > getattr(config, limit):
            raise InvalidParameterError(
                f"{name}={request.num_sequences} of request {request.request_id!r} exceeds "
                f"{limit}={getattr(config, limit)}; all sequences of a request run at once, so lower {name} "
                f"or raise {limit}."
            )
