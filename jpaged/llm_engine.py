"""`LLMEngine`: requests in, outputs out, one step at a time.

add_request --> InputProcessor --> EngineCore (scheduler + executor) --> OutputProcessor --> step() returns
"""

import sys
from collections.abc import Iterable

from jpaged.assets import demo_model_path
from jpaged.config import EngineArgs, SchedulerConfig
from jpaged.engine.generation_config import get_default_sampling_params
from jpaged.engine.loop import EngineCore
from jpaged.engine.request import Request
from jpaged.engine.scheduler import Scheduler
from jpaged.engine.stats import EngineStats
from jpaged.engine.tokenizer import Tokenizer
from jpaged.errors import EngineDeadError, InvalidParameterError
from jpaged.executor.startup import Startup, start
from jpaged.inputs import InputProcessor, Prompt
from jpaged.models import resolve
from jpaged.output_processor import OutputProcessor
from jpaged.outputs import RequestOutput
from jpaged.sampling_params import SamplingParams


class LLMEngine:
    """A model on a device, serving requests that come and go.

        engine = LLMEngine(EngineArgs(model="path/to/model"))
        engine.add_request("a", "Once upon a time", SamplingParams(max_tokens=64))
        while engine.has_unfinished_requests():
            for output in engine.step():
                ...

    Not thread-safe: one thread calls it.

    Args:
        args: what to run and how.
        startup: what an engine that is done with was running on, to use again with other scheduling options and
            without loading and compiling anew. args may use less of its pool, slots and budget than it has; whatever
            else it was started with must be the same.

    Attributes:
        max_model_len: the longest a sequence may grow, prompt and output, in tokens.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError: the model cannot be loaded.
        OutOfMemoryError: the model, or one sequence of max_model_len, does not fit the device.
        InvalidParameterError: max_model_len exceeds what the model can do.
    """

    def __init__(self, args: EngineArgs, startup: Startup | None = None) -> None:
        directory = demo_model_path() if args.model is None else resolve(args.model, args.revision, args.load_format)
        self.args = args
        self.startup = start(args, directory) if startup is None else _same_start(args, startup)
        self.tokenizer = None
        if not args.skip_tokenizer_init:
            self.tokenizer = Tokenizer.load(args.tokenizer or directory)
        self.default_sampling_params = get_default_sampling_params(directory)
        config, model = self.startup.config, self.startup.model.config
        self._eos_token_ids = model.eos_token_ids
        scheduler_config = SchedulerConfig(
            block_size=config.block_size,
            num_blocks=_at_most("num_gpu_blocks_override", args.num_gpu_blocks_override, config.num_blocks),
            max_num_seqs=_at_most("max_num_seqs", args.max_num_seqs, config.max_num_seqs),
            max_num_batched_tokens=_at_most(
                "max_num_batched_tokens", args.max_num_batched_tokens, config.token_buckets[-1]
            ),
            max_model_len=_at_most("max_model_len", args.max_model_len, config.max_model_len),
            enable_prefix_caching=args.enable_prefix_caching,
            policy=args.scheduling_policy,
            watermark=args.watermark,
            pipeline_depth=args.pipeline_depth,
        )
        self._core = EngineCore(Scheduler(scheduler_config, args.seed), self.startup.runner)
        self.max_model_len = scheduler_config.max_model_len
        self._inputs = InputProcessor(self.tokenizer, model.vocab_size, self.max_model_len)
        self._outputs = OutputProcessor(self._core, self.tokenizer)
        self._failure: BaseException | None = None
        if args.verbose:
            print(self.startup.table(args.model or "the embedded demo model"), file=sys.stderr, flush=True)

    @property
    def core(self) -> EngineCore:
        """Scheduler and executor, for a caller that processes inputs and outputs itself (`jpaged.serving`)."""
        return self._core

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's end-of-sequence tokens."""
        return tuple(self._eos_token_ids)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
    ) -> None:
        """Queues a request. One that is refused leaves nothing behind.

        Args:
            request_id: not that of an unfinished request.
            prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.
            params: how to sample; the model's defaults if None.
            priority: with scheduling_policy "priority", lower runs first.
            cache_salt: prefixes are shared only among requests of equal salt.
            arrival_time: seconds of `time.monotonic()`, for the output's metrics; now by default.
        Raises:
            InvalidPromptError, InvalidParameterError, OutOfMemoryError: the input cannot be served; the message says
                why.
            EngineDeadError: the engine failed earlier.
        """
        self._check_alive()
        if not isinstance(request_id, str) or not request_id:
            raise InvalidParameterError(f"request_id must be a non-empty string, got {request_id!r}.")
        params = self.default_sampling_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidParameterError(f"params must be SamplingParams, got {type(params).__name__}.")
        checked = self._inputs.process(prompt, params)
        request = Request(
            request_id,
            checked.prompt_token_ids,
            params,
            eos_token_ids=self._eos_token_ids,
            bad_words_token_ids=checked.bad_words_token_ids,
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=arrival_time,
        )
        self._core.add_request(request)
        self._outputs.add(request, checked.prompt, checked.prompt_token_ids)

    def step(self) -> list[RequestOutput]:
        """One turn of the loop: dispatches a step and returns outputs of an earlier one.

        Raises:
            EngineDeadError: something inside failed; the engine is of no more use.
        """
        self._check_alive()
        try:
            return self._outputs.process(self._core.step())
        except BaseException as error:
            self._failure = error
            if not isinstance(error, Exception):
                raise  # an interrupt in the middle of a step; `LLM.generate` and the commands hold it back
            raise EngineDeadError(f"The engine failed: {type(error).__name__}: {error}") from error

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests and frees what they hold; no output will come for them. Unknown ids are passed over."""
        request_ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._core.abort(request_ids)
        for request_id in request_ids:
            self._outputs.forget(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do."""
        return self._failure is None and self._core.has_unfinished()

    def get_metrics(self) -> EngineStats:
        """Counters and occupancy, now."""
        return self._core.stats()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. Returns False, and does nothing, while requests run."""
        return self._core.reset_prefix_cache()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError("The engine failed earlier and must be started anew.") from self._failure


_FREE_TO_DIFFER = {
    "tokenizer",
    "max_model_len",
    "num_gpu_blocks_override",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "scheduling_policy",
    "watermark",
    "pipeline_depth",
    "seed",
    "skip_tokenizer_init",
    "verbose",
}
"""Options that an engine on a runner started before may have of its own."""


def _same_start(args: EngineArgs, startup: Startup) -> Startup:
    for name in EngineArgs.__dataclass_fields__:
        if name not in _FREE_TO_DIFFER and getattr(args, name) != getattr(startup.args, name):
            raise InvalidParameterError(
                f"{name}={getattr(args, name)!r} differs from the {getattr(startup.args, name)!r} that the runner was "
                f"started with; start a new one."
            )
    return startup


def _at_most(name: str, asked: int | None, available: int) -> int:
    """What was asked for, which a runner started before may not have."""
    if asked is not None and asked > available:
        raise InvalidParameterError(f"{name}={asked} exceeds the {available} that the runner was started with.")
    return available if asked is None else asked
