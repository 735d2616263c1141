"""Whether a request can ever be served, and how long it may become. Both are decided once, before it is queued.

    prompt_len < max_len <= prompt_len + max_tokens
                         <= max_model_len
                         <= pool_tokens

A scheduler tells its limits to whoever takes in requests for it, in this process or another. So a request that the
scheduler would refuse is refused where it arrives, with the same message.

pool_tokens is the longest sequence that the pool has room for. With a window in every cache group it may exceed the
pool's blocks times their size: a sequence holds only its window and a chunk.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Protocol

from jpaged.api.errors import InvalidParameterError, OutOfMemoryError, PromptTooLongError, shown
from jpaged.engine.footprint import Footprint


class RequestParams(Protocol):
    """What limits ask of a request's parameters, whatever kind of request it is.

    max_tokens: None without a bound.
    num_sequences: that run for the request. sequences_parameter: the parameter that says how many they are.
    runs_together: whether they must all hold their blocks at once, since none can be preempted alone.
    """

    @property
    def max_tokens(self) -> int | None: ...

    @property
    def num_sequences(self) -> int: ...

    @property
    def sequences_parameter(self) -> str: ...

    @property
    def runs_together(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may ask of an engine.

    max_model_len: tokens of a sequence, prompt and output.
    max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens of a step, one at least for each of them.
    block_size: tokens that a block holds. num_blocks: blocks that requests can have, those that are pinned left out.
    windows: of the cache groups (`CacheGroup.window`). tokens_per_row: as in `SchedulerConfig`.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    windows: tuple[int | None, ...] = (None,)
    tokens_per_row: int = 1

    @property
    def footprint(self) -> Footprint:
        """What sequences need of the pool."""
        return Footprint(self.block_size, self.windows, self.max_num_batched_tokens, self.tokens_per_row)

    @property
    def pool_tokens(self) -> int:
        """Tokens of the longest sequence that the pool has room for."""
        return self.footprint.longest(self.num_blocks, self.max_model_len)

    @staticmethod
    def least(of_engines: "Iterable[RequestLimits]") -> "RequestLimits":
        """The limits that satisfy every one of these engines. They serve the same model."""
        each = list(of_engines)
        numbers = [field.name for field in fields(RequestLimits) if field.name != "windows"]
        return replace(each[0], **{name: min(getattr(one, name) for one in each) for name in numbers})

    def max_len(self, prompt_len: int, params: RequestParams) -> int:
        """The length, prompt and output, at which a sequence of a request ends at the latest: tokens.

        Raises:
            PromptTooLongError: the prompt leaves no room for a token within max_model_len.
            OutOfMemoryError: the prompt leaves no room for a token within the whole pool; or sequences that must run
                together might not fit it.
            InvalidParameterError: more sequences are asked for than can run.
        """
        self._check_num_sequences(params)
        if prompt_len >= self.max_model_len:
            raise PromptTooLongError(
                f"The prompt has {prompt_len} tokens; with max_model_len={self.max_model_len} at most "
                f"{self.max_model_len - 1} leave room for an answer. Shorten it or raise max_model_len."
            )
        pool_tokens = self.pool_tokens
        if prompt_len >= pool_tokens:
            raise OutOfMemoryError(
                f"The prompt has {prompt_len} tokens, but the KV pool holds {pool_tokens} ({self.num_blocks} "
                f"blocks of {self.block_size}); shorten it or enlarge the pool."
            )
        max_len = min(self.max_model_len, pool_tokens)
        if params.max_tokens is not None:
            max_len = min(max_len, prompt_len + int(params.max_tokens))
        if params.runs_together:
            name, count = params.sequences_parameter, params.num_sequences
            needed = self.footprint.alone(prompt_len, max_len, count)
            if needed > self.num_blocks:
                raise OutOfMemoryError(
                    f"{name}={count} may need {needed} blocks for {max_len} tokens, but the KV pool has "
                    f"{self.num_blocks}; lower {name} or max_tokens or enlarge the pool."
                )
        return max_len

    def _check_num_sequences(self, params: RequestParams) -> None:
        name, count = params.sequences_parameter, params.num_sequences
        for limit in ("max_num_seqs", "max_num_batched_tokens"):
            if count > getattr(self, limit):
                raise InvalidParameterError(
                    f"{name}={shown(count)} exceeds {limit}={getattr(self, limit)}; all sequences of a request run at"
                    f" once, so lower {name} or raise {limit}."
                )
