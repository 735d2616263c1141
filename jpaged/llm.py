"""`LLM`: completes a list of prompts with a model, in one call. For offline use."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import count
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from tqdm import tqdm

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.config import EngineArgs
from jpaged.api.errors import (
    NOT_FINITE,
    InvalidParameterError,
    InvalidPromptError,
    JPagedError,
    NonFiniteLogitsError,
    OutOfMemoryError,
    Reworded,
    UnsupportedParameterError,
    shown,
)
from jpaged.api.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from jpaged.api.pooling_params import PoolingParams
from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.api.unknown_names import ENGINE, ExplainsMissing, check_known
from jpaged.api.weights import InFlight
from jpaged.engine.sequences.request import Request
from jpaged.engine.stats import EngineStats
from jpaged.frontend.inputs import Messages, Params, ProcessedInput, Prompt, as_prompt_list, refuse_call_options
from jpaged.frontend.llm_engine import LLMEngine, check_one_host
from jpaged.frontend.model_of_config import as_directory, options_of
from jpaged.frontend.reranking import Reranker
from jpaged.host.interrupt import Interruptible
from jpaged.processes.replicas import ReplicatedEngine
from jpaged.text.rendering import takes_variable
from jpaged.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from jpaged.models.loading.live import WeightsForm

log = logging.getLogger("jpaged.engine")


_T = TypeVar("_T")

_LOOK_S = 0.05
"""How often a call that a pause holds up looks for a Ctrl-C."""

_ELSEWHERE = {
    "llm_engine": "the engine is `engine`",
    "encode": "`embed` gives vectors, and `score` similarities",
    "classify": "models that classify are not supported",
    "reward": "models that reward are not supported",
    "collective_rpc": "`update_weights` and `weights_as` reach the weights",
    "apply_model": "`update_weights` and `weights_as` reach the weights",
    "start_profile": "`jpaged bench steps` measures steps, and JAX's profiler traces them",
    "stop_profile": "`jpaged bench steps` measures steps, and JAX's profiler traces them",
    "set_tokenizer": "give `tokenizer` to `LLM`",
    "preprocess_chat": "`get_tokenizer().apply_chat_template` renders a conversation",
    "enqueue": "`LLMEngine` takes requests one by one: `add_request`, then `step`",
    "wait_for_completion": "`LLMEngine` takes requests one by one: `add_request`, then `step`",
    "is_sleeping": "`get_metrics().asleep` is the level it sleeps at",
    "shutdown": "it is `close`",
}
"""Of vLLM's methods, what does the same here, or why there is none."""


class LLM(ExplainsMissing):
    """Generates text for many prompts at once.

        llm = LLM()                                    # the embedded demo model
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=100))
        print(outputs[0].outputs[0].text)

    It has its device until `close`, or until nobody has it any more; `with LLM() as llm:` closes it at the end.

    Several threads may call it: their calls take turns, all but `get_metrics`, which comes between steps. For requests
    that run side by side, give one call many prompts, or use `AsyncLLMEngine`.

    Args:
        model: a directory in Hugging Face layout or a hub id; the embedded demo model by default. Or a configuration:
            the contents of a config.json, a transformers config or a `ModelConfig`. Then weights come from `weights`,
            and prompts and outputs are token ids, unless `tokenizer` names one. What such a configuration does not say
            of the type, `dtype` does (else float32).
        weights: instead of those of a checkpoint, as `update_weights` takes them. The arrays stay the caller's. A
            directory then needs a config.json only.
        options: the other fields of `EngineArgs`, by name: dtype, max_model_len, block_size, gpu_memory_utilization,
            max_num_seqs, enable_prefix_caching, seed, load_format, skip_tokenizer_init and so on.
    Raises:
        InvalidParameterError: an option that does not exist, or with a value out of range.
        ModelNotFoundError, CheckpointError, UnsupportedModelError, OutOfMemoryError: as `LLMEngine`.
    """

    _elsewhere = _ELSEWHERE

    def __init__(self, model: str | Any | None = None, *, weights: Any = None, **options: Any) -> None:
        check_known("LLM", "option", options, EngineArgs.__dataclass_fields__, ENGINE)
        self._config: TemporaryDirectory[str] | None = None  # where `model` is a configuration
        path: str | None
        if model is None or isinstance(model, str | os.PathLike):
            path = None if model is None else os.fspath(model)
        else:
            self._config = as_directory(model)
            path = self._config.name
            if weights is None and options.get("load_format") != "dummy":
                raise InvalidParameterError(
                    "model is a configuration, which has no weights; give weights=..., or load_format='dummy' for"
                    " random ones."
                )
            options = {"skip_tokenizer_init": options.get("tokenizer") is None} | options_of(model) | options
        self.engine = _start_engine(EngineArgs(model=path, **options), weights)
        self._reranker = self._checked_reranker()
        self._request_ids = map(str, count())
        self._turns = threading.RLock()  # a call from within a call is refused (`_serve`), and does not wait for ever
        self._between_steps = _FairLock()  # around whatever reaches the engine
        self._runs = threading.Event()  # not while it is paused
        self._runs.set()

    def _checked_reranker(self) -> Reranker | None:
        """What judges pairs of texts, if the engine was started for that; the engine is closed if it cannot."""
        if self.engine.args.reranker is None:
            return None
        try:
            return Reranker(self.engine.tokenizer)
        except BaseException:
            self.engine.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives back what the engine has: weights, KV pool and state on the device, and the processes of replicas.

        A call of another thread is waited for. From then on, calls that need the engine raise EngineDeadError. The
        second time it does nothing.
        """
        with self._turn(), self._between_steps:
            self.engine.close()
            if self._config is not None:
                self._config.cleanup()

    def __reduce__(self) -> NoReturn:
        raise JPagedError(
            "An LLM cannot be pickled or copied: it holds a device, or processes that do. Send its arguments, and make"
            " one where it is to run."
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        *,
        priority: int | Sequence[int] | None = None,
        lora_request: None = None,
        tokenization_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Completes prompts, as many at once as fit.

        Args:
            prompts: one or a list; each text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; a dict may
                have a "cache_salt": prefixes are shared only among prompts of equal salt.
            sampling_params: for all, or one for each prompt; the model's defaults if None.
            use_tqdm: show a progress bar with input and output tokens/s, or the tqdm class to show it with.
            priority: for all, or one for each prompt; with scheduling_policy "priority", lower runs first.
            lora_request, tokenization_kwargs: vLLM's options that are not supported.
        Returns:
            One output for each prompt, in their order.
        Raises:
            InvalidPromptError, InvalidParameterError, OutOfMemoryError: an input cannot be served; it is named,
                and none has run.
            UnsupportedParameterError: an option that is not supported is given, and not None.
            EngineDeadError: the engine failed.
        """
        refuse_call_options(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        prompt_list = as_prompt_list(prompts)
        params = self._params_for(len(prompt_list), sampling_params)
        if isinstance(priority, int) or priority is None:
            priority = [priority or 0] * len(prompt_list)
        if isinstance(priority, str | bytes) or not isinstance(priority, Iterable):
            raise InvalidParameterError(f"priority must be an integer or a list of them, got {shown(priority)}.")
        priorities = list(priority)
        if len(priorities) != len(prompt_list):
            raise InvalidParameterError(f"priority has {len(priorities)} entries for {len(prompt_list)} prompts.")
        return self._serve(prompt_list, params, priorities, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool | Callable[..., tqdm] = False,
        *,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """Finds for each prompt the likeliest sequences by beam search, as transformers does.

        Args:
            prompts, use_tqdm, lora_request: as in `generate`.
            params: how to search, for all prompts.
        Returns:
            One output for each prompt, in their order; its `outputs` are the sequences, best first, each with its
            cumulative log-probability and score. `sequences` has them under vLLM's names.
        Raises:
            As `generate`; and OutOfMemoryError if the beams of a prompt might not fit the KV pool together.
        """
        refuse_call_options(lora_request=lora_request)
        if not isinstance(params, BeamSearchParams):
            raise InvalidParameterError(f"params must be BeamSearchParams, got {type(params).__name__}.")
        prompt_list = as_prompt_list(prompts)
        return self._serve(prompt_list, [params] * len(prompt_list), [0] * len(prompt_list), use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: None = None,
        tokenization_kwargs: None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Turns prompts into vectors, made of the model's hidden states after its final norm.

        Args:
            prompts, use_tqdm: as in `generate`. Text gets the tokens that the tokenizer adds, token ids get none.
            pooling_params: how to pool, for all or one for each prompt; None: as the checkpoint's `modules.json` says,
                or else the last token's state, normalised.
            lora_request, tokenization_kwargs: as in `generate`.
        Returns:
            One output for each prompt, in their order; its vector is `outputs.embedding`.
        Raises:
            InvalidPromptError, InvalidParameterError, OutOfMemoryError, UnsupportedParameterError: as `generate`.
            NonFiniteLogitsError: a vector holds infinities or NaN.
        """
        refuse_call_options(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        prompt_list = as_prompt_list(prompts)
        pooling = self.engine.embeddings.params() if pooling_params is None else pooling_params
        params = _one_each("pooling_params", pooling, PoolingParams, len(prompt_list))
        return [_embedding_output(output) for output in self._embedded(prompt_list, params, use_tqdm)]

    def score(
        self,
        queries: Prompt | Sequence[Prompt],
        documents: Prompt | Sequence[Prompt],
        *,
        instruction: str | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
    ) -> list[ScoringRequestOutput]:
        """The similarity of queries and documents: the cosine of their embeddings; of a model that is a `reranker`, the
        probability that a document answers its query.

        Args:
            queries: one, for all documents, or as many as there are documents.
            documents, use_tqdm: prompts as in `embed`; texts alone for a reranker.
            instruction: of a reranker: what makes a document relevant.
        Returns:
            One score for each document, in their order.
        Raises:
            As `embed`; and InvalidParameterError for another number of queries, and for an instruction without a
            reranker.
        """
        firsts, seconds = as_prompt_list(queries), as_prompt_list(documents)
        if not firsts or len(firsts) not in (1, len(seconds)):
            raise InvalidParameterError(
                f"queries has {len(firsts)} entries for {len(seconds)} documents; give one or as many."
            )
        if self._reranker is not None:
            firsts = firsts * (len(seconds) // len(firsts))
            return self._judged(self._reranker, firsts, seconds, instruction, use_tqdm)
        if instruction is not None:
            raise InvalidParameterError("instruction is for rerankers; start the engine with reranker='qwen3'.")
        params = [self.engine.embeddings.params(normalize=True)] * (len(firsts) + len(seconds))
        outputs = self._embedded([*firsts, *seconds], params, use_tqdm)
        first, second = outputs[: len(firsts)], outputs[len(firsts) :]
        return [_scoring_output(a, b) for a, b in zip(first * (len(second) // len(first)), second, strict=True)]

    def _judged(
        self,
        reranker: Reranker,
        queries: Sequence[Prompt],
        documents: Sequence[Prompt],
        instruction: str | None,
        use_tqdm: bool | Callable[..., tqdm],
    ) -> list[ScoringRequestOutput]:
        prompts: list[Prompt] = [
            reranker.prompt(query, document, instruction) for query, document in zip(queries, documents, strict=True)
        ]
        params = reranker.params()
        outputs = self._serve(prompts, [params] * len(prompts), [0] * len(prompts), use_tqdm)
        found = [reranker.found(_answered(output)) for output in outputs]
        again = {i: missing for i, one in enumerate(found) if (missing := reranker.missing(one)) is not None}
        if again:
            asked = [reranker.params(missing) for missing in again.values()]
            others = self._serve([prompts[i] for i in again], asked, [0] * len(again), False)
            for i, output in zip(again, others, strict=True):
                found[i] |= reranker.found(_answered(output))
        return [
            ScoringRequestOutput(
                one.request_id, ScoringOutput(reranker.score(of_one)), one.prompt_token_ids, one.num_cached_tokens
            )
            for one, of_one in zip(outputs, found, strict=True)
        ]

    def _embedded(
        self, prompts: list[Prompt], params: Sequence[PoolingParams], use_tqdm: bool | Callable[..., tqdm]
    ) -> list[RequestOutput]:
        outputs = self._serve(prompts, params, [0] * len(prompts), use_tqdm)
        if any(output.embedding is None for output in outputs):
            raise NonFiniteLogitsError()
        return outputs

    def _serve(
        self,
        prompt_list: list[Prompt],
        params: Sequence[Params],
        priorities: list[int],
        use_tqdm: bool | Callable[..., tqdm],
    ) -> list[RequestOutput]:
        if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
            raise InvalidParameterError(f"use_tqdm must be True, False or a class like tqdm, got {shown(use_tqdm)}.")
        with self._turn() as interrupt:
            if not self._runs.is_set():
                raise JPagedError("The engine is paused: call resume first.")
            with self._between_steps:
                if self.engine.has_unfinished_requests():
                    raise JPagedError(
                        "The engine has unfinished requests that were added to it directly, and this call would take"
                        " their outputs; call engine.step() until they have finished, or abort them."
                    )
            request_ids = [next(self._request_ids) for _ in prompt_list]
            checked: deque[tuple[Request, ProcessedInput]] = deque()
            for i, prompt in enumerate(prompt_list):  # all, before any is queued: a replica begins with it at once
                with self._between_steps, _Naming(i, prompt_list):
                    checked.append(self.engine.check_request(request_ids[i], prompt, params[i], priority=priorities[i]))
                if interrupt.requested:
                    raise KeyboardInterrupt
            try:
                for i in range(len(prompt_list)):
                    with self._between_steps, _Naming(i, prompt_list):
                        self.engine.queue(*checked.popleft())
                    if interrupt.requested:
                        raise KeyboardInterrupt
                finished = self._run(request_ids, use_tqdm, interrupt)
            except BaseException:
                with self._between_steps:
                    self.engine.abort_request(request_ids)
                raise
        return [finished[request_id] for request_id in request_ids]

    @contextmanager
    def _turn(self) -> Iterator[Interruptible]:
        """Holds the turn for one thread's call; other threads wait. A Ctrl-C raises where the call checks for it, or at
        its end, never within a step."""
        with self._turns, _interruptible() as interrupt:
            yield interrupt

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several, through the model's chat template.

        Args:
            messages: a list of {"role": ..., "content": ...}, or a list of such lists.
            sampling_params, use_tqdm: as in `generate`.
            chat_template: a Jinja template instead of the tokenizer's own.
            add_generation_prompt: end the prompt with the beginning of an assistant's message.
            continue_final_message: the last message is the beginning of the answer.
            tools: {"type": "function", "function": {...}} each, which the chat template tells the model of. Calls come
                as the model's text; the server reads them.
            chat_template_kwargs: further variables for the template.
            lora_request, tokenization_kwargs, mm_processor_kwargs: vLLM's options that are not supported.
        Returns:
            One output for each conversation, in their order.
        Raises:
            InvalidPromptError: malformed messages, or the model has no chat template.
            InvalidParameterError: chat_template_kwargs that are not variables by name, or tools that the template does
                not know.
            UnsupportedParameterError: as `generate`.
        """
        refuse_call_options(
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise InvalidPromptError("messages must be a non-empty list of messages or of conversations.")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        tokenizer = self._tokenizer()
        variables = _template_variables(tokenizer, chat_template_kwargs)
        if tools:
            variables = {**variables, "tools": _known_tools(tokenizer, tools, chat_template)}
        prompts: list[Prompt] = [
            {
                "prompt_token_ids": tokenizer.apply_chat_template(
                    conversation,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **variables,
                )
            }
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer, as transformers has it. Raises InvalidParameterError if the engine was started without
        one. `chat` writes control tokens in another way: see `jpaged.text.chat_prompts`.
        """
        tokenizer: PreTrainedTokenizerBase = self._tokenizer().hf
        return tokenizer

    def _tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise InvalidParameterError("There is no tokenizer: the engine was started with skip_tokenizer_init=True.")
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when no parameters are given: the model's generation_config.json, if it has one."""
        return copy(self.engine.default_sampling_params)

    def pin_prefix(self, prompt: Prompt) -> int:
        """Computes a prompt and keeps its full blocks in the prefix cache, whatever else is served: for a system
        prompt, or examples that many prompts begin with.

        Returns: the number of tokens kept.

        Raises:
            InvalidPromptError: as `generate`. InvalidParameterError: the engine was started without prefix caching.
            OutOfMemoryError: what is left of the pool would not hold the longest sequence, or an unfinished request; or
                the free blocks are reserved for prompts that are being computed, so that it can be pinned later.
        """
        with self._turn():
            if isinstance(self.engine, LLMEngine):  # replicas compute it themselves, each of them
                params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
                self._serve([prompt], [params], [0], use_tqdm=False)
            with self._between_steps:
                return self.engine.pin_prefix(prompt)

    def unpin_prefix(self, prompt: Prompt) -> bool:
        """Lets a pinned prefix be reused again. Returns whether it was pinned."""
        with self._turn(), self._between_steps:
            return self.engine.unpin_prefix(prompt)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes, pinned ones included. Returns False, and does nothing, while requests run, those
        that are preempted and swapped out included.
        """
        with self._turn(), self._between_steps:
            return self.engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> bool:
        """Gives memory back while the engine lives: 1 that of the KV cache, 2 that of the weights, too. Cached prefixes
        are forgotten, and `generate` raises EngineAsleepError until `wake_up`. With kv_cache_layout="virtual" the
        cache's memory goes back to the device, for any process; otherwise to JAX, for other arrays of this process.

        Returns: False, and nothing is done, while requests are unfinished.

        Raises:
            InvalidParameterError: another level, or a model over several hosts.
        """
        with self._turn(), self._between_steps:
            return self.engine.sleep(level)

    def wake_up(self) -> None:
        """Takes the memory again; weights are read from the checkpoint again, if these were given back.

        Raises:
            OutOfMemoryError: others have the memory. The engine sleeps on.
        """
        with self._turn(), self._between_steps:
            self.engine.wake_up()

    def pause(self) -> None:
        """Stops another thread's call between two steps, until `resume`. The devices are idle when this returns. A call
        that begins before `resume` raises JPagedError.
        """
        with _interruptible(), self._between_steps:
            self.engine.pause()
            self._runs.clear()

    def resume(self) -> None:
        """Goes on where `pause` left off."""
        with _interruptible(), self._between_steps:
            self.engine.resume()
            self._runs.set()

    def update_weights(self, weights: Any, *, partial: bool = False, in_flight: InFlight = "recompute") -> None:
        """Gives the model other weights, in place: nothing is compiled but, the first time, the programs that write
        them. During another thread's call it is done between two of its steps. Cached prefixes are forgotten, pinned
        ones included.

        Args:
            weights: a module of the model (`weights_as("module")`), an `nnx.State` of one, or a mapping, nested or
                flat, to arrays, by the names of a Hugging Face checkpoint or of our own parameters. They are copied on
                the device and stay the caller's.
            partial: what is not given stays as it is; otherwise it is an error that names what is missing.
            in_flight: what running requests do: "recompute" the keys and values of their tokens with the new weights,
                or "continue" with those that the old weights have computed.
        Raises:
            InvalidParameterError: arrays are missing or surplus, or of another shape or type; the message names them.
                Or an array is the engine's own, or JAX is tracing. The engine goes on with the weights that it has.
            EngineDeadError: the device failed in the middle; the engine is of no more use.
        """
        with _interruptible(), self._between_steps:
            self.engine.update_weights(weights, partial=partial, in_flight=in_flight)

    def weights_as(self, form: "WeightsForm") -> Any:
        """Copies of the weights, in a form that `update_weights` takes.

        form: "huggingface": a dictionary by the names of a Hugging Face checkpoint, in its shapes; "parameters": by our
            own names; "state": the `nnx.State` of the model's module; "module": the Flax module, to train it.

        Raises:
            InvalidParameterError: there is no such form, or the model runs in other processes.
        """
        with self._turn(), self._between_steps:
            return self.engine.weights_as(form)

    def get_metrics(self) -> EngineStats:
        """Counters and occupancy of the engine. During another thread's call they are read between two of its steps."""
        with _interruptible(), self._between_steps:
            return self.engine.get_metrics()

    def _params_for(
        self, num_prompts: int, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        """Parameters for each prompt, set to report only when finished."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        each = _one_each("sampling_params", sampling_params, SamplingParams, num_prompts)
        return [params.reporting(RequestOutputKind.FINAL_ONLY) for params in each]

    def _run(
        self, request_ids: Sequence[str], use_tqdm: bool | Callable[..., tqdm], interrupt: Interruptible
    ) -> dict[str, RequestOutput]:
        """Steps the engine until all of these requests have finished."""
        make_bar = tqdm if isinstance(use_tqdm, bool) else use_tqdm
        bar = make_bar(total=len(request_ids), desc="prompts", dynamic_ncols=True, disable=use_tqdm is False)
        finished: dict[str, RequestOutput] = {}
        tokens_in = tokens_out = 0
        begun = time.perf_counter()
        with bar:
            while len(finished) < len(request_ids):
                with self._between_steps:
                    if not self.engine.has_unfinished_requests():
                        raise JPagedError("Requests were aborted from elsewhere while LLM.generate waited for them.")
                    outputs = self.engine.step()
                if not outputs:
                    self._runs.wait(_LOOK_S)
                if interrupt.requested:
                    raise KeyboardInterrupt
                for output in outputs:
                    finished[output.request_id] = output
                    tokens_in += len(output.prompt_token_ids)
                    tokens_out += sum(len(completion.token_ids) for completion in output.outputs)
                    elapsed = time.perf_counter() - begun
                    bar.update()
                    bar.set_postfix_str(
                        f"input {tokens_in / elapsed:,.0f} tok/s, output {tokens_out / elapsed:,.0f} tok/s",
                        refresh=False,
                    )
        reasons = [[completion.finish_reason for completion in output.outputs] for output in finished.values()]
        if num_failed := sum("error" in one for one in reasons):
            log.error("%d of %d requests ended with finish_reason 'error'. %s", num_failed, len(finished), NOT_FINITE)
        return finished


def _answered(output: RequestOutput) -> RequestOutput:
    """Raises NonFiniteLogitsError if the model's answer means nothing."""
    if output.outputs[0].finish_reason == "error":
        raise NonFiniteLogitsError()
    return output


def _embedding_output(output: RequestOutput) -> EmbeddingRequestOutput:
    vector = [] if output.embedding is None else output.embedding.tolist()
    return EmbeddingRequestOutput(
        output.request_id, EmbeddingOutput(vector), output.prompt_token_ids, output.num_cached_tokens
    )


def _scoring_output(first: RequestOutput, second: RequestOutput) -> ScoringRequestOutput:
    assert first.embedding is not None
    assert second.embedding is not None
    return ScoringRequestOutput(
        second.request_id,
        ScoringOutput(float(first.embedding @ second.embedding)),
        first.prompt_token_ids + second.prompt_token_ids,
        first.num_cached_tokens + second.num_cached_tokens,
    )


def _one_each(name: str, given: object, kind: type[_T], num_prompts: int) -> list[_T]:
    """Parameters for each prompt: those given are for all, or one for each.

    Raises:
        InvalidParameterError: they are of another type, or of another number.
    """
    if isinstance(given, kind):
        return [given] * num_prompts
    if not isinstance(given, Sequence) or not all(isinstance(one, kind) for one in given):
        raise InvalidParameterError(f"{name} must be {kind.__name__} or a list of them, got {shown(given)}.")
    if len(given) != num_prompts:
        raise InvalidParameterError(f"{name} has {len(given)} entries for {num_prompts} prompts; give one or as many.")
    return list(given)


def _start_engine(args: EngineArgs, weights: Any) -> LLMEngine | ReplicatedEngine:
    """One engine, or as many replicas as `data_parallel_size` asks for.

    Raises:
        InvalidParameterError: replicas are asked for of a model over several processes.
    """
    check_one_host(args)
    if args.data_parallel_size == 1:
        return LLMEngine(args, weights=weights)
    if weights is not None:
        raise UnsupportedParameterError(
            "weights is for data_parallel_size=1: replicas, in processes of their own, begin with a checkpoint or with"
            " load_format='dummy'."
        )
    return ReplicatedEngine(args)


@contextmanager
def _interruptible() -> Iterator[Interruptible]:
    """`Interruptible` for what its body does, at whose end a Ctrl-C that came meanwhile raises."""
    with Interruptible() as interrupt:
        yield interrupt
    if interrupt.requested:
        raise KeyboardInterrupt


class _Naming(Reworded):
    """Errors raised inside name prompts[i], unless it is the only prompt."""

    kinds = (InvalidPromptError, InvalidParameterError, OutOfMemoryError)

    def __init__(self, i: int, prompts: Sequence[Prompt]) -> None:
        self._i, self._number = i, len(prompts)

    def reword(self, said: str) -> str:
        return f"prompts[{self._i}]: {said}" if self._number > 1 else said


class _FairLock:
    """A lock that no thread takes twice in a row while another waits: the one that waits holds the next turn."""

    def __init__(self) -> None:
        self._next, self._held = threading.RLock(), threading.RLock()  # a signal handler may ask for metrics

    def __enter__(self) -> None:
        with self._next:
            self._held.acquire()

    def __exit__(self, *error: object) -> None:
        self._held.release()


def _known_tools(tokenizer: Tokenizer, tools: Any, chat_template: str | None) -> list[Mapping[str, Any]]:
    """Tools for a chat template. Raises InvalidParameterError: they are malformed, or it would not tell of them."""
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidParameterError(f'tools must be a list of {{"type": "function", ...}}, got {shown(tools)}.')
    try:
        template = tokenizer.hf.get_chat_template(chat_template, list(tools))
    except ValueError:  # there is none, or none by default, which rendering says
        return list(tools)
    if not takes_variable(template, "tools"):
        raise InvalidParameterError(
            "tools has no effect: the chat template has no such variable. Describe the tools in a message, or give a"
            " chat_template that knows them."
        )
    return list(tools)


def _template_variables(tokenizer: Tokenizer, variables: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Checks variables for a chat template: one that has the name of an option would be taken for the option."""
    variables = {} if variables is None else variables
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise InvalidParameterError(f"chat_template_kwargs must map names to values, got {shown(variables)}.")
    for name in variables:
        if name in tokenizer.template_options - {"tools", "documents"}:  # what every template may use
            raise InvalidParameterError(
                f"chat_template_kwargs has {name!r}, which is no variable of a template; give it beside them, or leave"
                " it out."
            )
    return variables
