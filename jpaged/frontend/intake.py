"""How a request enters an engine: it is checked first, which leaves no trace, and then queued.

add_request = check_request --> queue       LLMEngine          the scheduler of this process
add_score_request           -->             ReplicatedEngine   the replica that will be done with it first
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypedDict, Unpack

import numpy as np

from jpaged.api.sampling_params import SamplingParams
from jpaged.engine.sequences.request import Request
from jpaged.frontend.embedding_config import EmbeddingConfig
from jpaged.frontend.inputs import InputProcessor, Params, ProcessedInput, Prompt, refuse_call_options


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of `RequestIntake.add_request`."""

    priority: int
    cache_salt: str | None
    arrival_time: float | None


class RequestIntake(ABC):
    """What `LLMEngine` and `ReplicatedEngine` have in common.

    Attributes:
        default_sampling_params: for requests that come without parameters.
    """

    default_sampling_params: SamplingParams
    _inputs: InputProcessor

    @property
    def embeddings(self) -> EmbeddingConfig:
        """How the model embeds."""
        return self._inputs.embeddings

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
        lora_request: None = None,
        tokenization_kwargs: None = None,
    ) -> None:
        """Queues a request. One that is refused leaves nothing behind.

        Args:
            request_id: not that of an unfinished request.
            prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; a dict may have a "cache_salt".
            params: how to sample, to search or to pool; the model's sampling defaults if None. A search reports once,
                when it has finished, and so does what is pooled, with an `embedding` and no `outputs`.
            priority: with scheduling_policy "priority", lower runs first.
            cache_salt: prefixes are shared only among requests of equal salt.
            arrival_time: seconds of `time.monotonic()`, for the output's metrics; now by default.
            lora_request, tokenization_kwargs: vLLM's options that are not supported.
        Raises:
            InvalidPromptError, InvalidParameterError, OutOfMemoryError: the input cannot be served; the message says
                why.
            UnsupportedParameterError: an option that is not supported is given, and not None.
            EngineDeadError: the engine failed earlier.
        """
        refuse_call_options(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        self.queue(
            *self.check_request(
                request_id, prompt, params, priority=priority, cache_salt=cache_salt, arrival_time=arrival_time
            )
        )

    def check_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params | None = None,
        **options: Unpack[RequestOptions],
    ) -> tuple[Request, ProcessedInput]:
        """The first half of `add_request`, which leaves nothing behind. It lets a caller queue all of several requests
        or none. Returns: what `queue` takes. Arguments and errors are those of `add_request`.
        """
        self._check_ready()
        params = self.default_sampling_params if params is None else params
        return self._inputs.request(request_id, prompt, params, **options)

    def add_score_request(
        self,
        request_id: str,
        token_ids: Sequence[int] | np.ndarray,
        first_scored: int = 1,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queues tokens to score: they are prefilled for their log-probabilities, and nothing is sampled.

        What comes before the scored tokens may come out of the prefix cache. `step` returns one output, finished, with
        `scores` of token_ids[first_scored:] and no `outputs`.

        Args:
            token_ids: int [n], at least two and at most max_model_len tokens; the last is scored, never computed.
            first_scored: index of the first token to score, from 1 to n-1; the others are its context.
            request_id, priority, cache_salt: as in `add_request`.
        Raises:
            InvalidPromptError, InvalidParameterError, OutOfMemoryError: the input cannot be served; the message says
                why.
            EngineDeadError: the engine failed earlier.
        """
        self._check_ready()
        request = self._inputs.score_request(
            request_id, token_ids, first_scored, priority=priority, cache_salt=cache_salt
        )
        self.queue(request, ProcessedInput(None, [], ()))

    @abstractmethod
    def queue(self, request: Request, checked: ProcessedInput) -> None:
        """The second half of `add_request` and of `add_score_request`.

        Raises:
            InvalidParameterError: its id is that of an unfinished request.
            OutOfMemoryError: prefixes that are pinned leave too little of the pool.
            EngineDeadError: the engine failed earlier.
        """

    @abstractmethod
    def _check_ready(self) -> None:
        """Raises EngineDeadError if the engine can take no more requests."""
