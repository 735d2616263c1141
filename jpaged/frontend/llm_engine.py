"""`LLMEngine`: requests in, outputs out, one step at a time.

add_request --> InputProcessor --> EngineCore (scheduler + executor) --> OutputProcessor --> step() returns
"""

import os
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from jpaged.api.checks import check_bool, check_choice, check_integer
from jpaged.api.config import EngineArgs
from jpaged.api.errors import EngineAsleepError, EngineDeadError, InvalidParameterError, OutOfMemoryError
from jpaged.api.outputs import RequestOutput
from jpaged.api.sampling_params import SamplingParams
from jpaged.api.unknown_names import ExplainsMissing
from jpaged.api.weights import InFlight
from jpaged.engine.config import SchedulerConfig
from jpaged.engine.constraints.grammars import ConstrainedRows
from jpaged.engine.constraints.searches import Searches
from jpaged.engine.interface import SWAP_CHUNK_BLOCKS
from jpaged.engine.limits import RequestLimits
from jpaged.engine.loop import EngineCore
from jpaged.engine.scheduler.scheduler import Scheduler
from jpaged.engine.sequences.request import Request
from jpaged.engine.stats import EngineStats
from jpaged.executor.distributed import Cluster, LeadingRunner, lead
from jpaged.executor.start.shapes import refuse_for_hybrids
from jpaged.executor.start.started import Startup
from jpaged.executor.start.startup import start, with_known_backend
from jpaged.executor.step.expert_load import ExpertLoadReader
from jpaged.frontend.embedding_config import EmbeddingConfig
from jpaged.frontend.generation_config import GenerationConfig
from jpaged.frontend.inputs import InputProcessor, ProcessedInput, Prompt, request_ids_to_abort
from jpaged.frontend.intake import RequestIntake
from jpaged.frontend.output_processor import OutputProcessor
from jpaged.host.cores import usable_cores
from jpaged.host.garbage import set_objects_apart
from jpaged.host.hub import model_directory
from jpaged.models.loading.live import WeightsForm
from jpaged.text.grammar_compiler import GrammarCompiler
from jpaged.text.grammars import GrammarTokenizer
from jpaged.text.tokenizer import Tokenizer

_MOST_GRAMMAR_SHARDS = 6
"""Processes that follow grammars, at most. The engine's thread takes some 35 us to ask one, and 256 sequences keep each
of six busy for a third of the time (measured beside an H200).
"""

_ELSEWHERE = {
    "add_lora": "adapters are not loaded; merge the adapter into the checkpoint",
    "cache_config": "`args` has the options",
    "collective_rpc": "`update_weights` and `weights_as` reach the weights",
    "do_log_stats": "`get_metrics` has the counters",
    "get_model_config": "`args` has the options, `max_model_len` and `vocab_size` what the model has",
    "get_num_unfinished_requests": "`get_metrics` says how many sequences run and wait",
    "get_tokenizer": "it is `tokenizer`, and transformers' own is `tokenizer.hf`",
    "is_sleeping": "it is `is_asleep`",
    "model_config": "`args` has the options, `max_model_len` and `vocab_size` what the model has",
    "scheduler_config": "`args` has the options",
    "shutdown": "it is `close`",
    "start_profile": "JAX's profiler traces steps",
    "stop_profile": "JAX's profiler traces steps",
    "vllm_config": "`args` has the options",
}
"""Of vLLM's methods and properties, what does the same here, or why there is none."""


class LLMEngine(RequestIntake, ExplainsMissing):
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
            else it was started with must be the same. The engines may take turns: each forgets its cached prefixes
            when another has run since, and its requests, if it left some unfinished, are lost.
        weights: instead of those of a checkpoint, as `update_weights` takes them; the model's directory then needs a
            config.json only.
        with_tokenizer: False takes and gives token ids only, as args.skip_tokenizer_init does, for a caller that has
            the tokenizer. Its end-of-sequence token still ends texts where the model names none.

    Attributes:
        max_model_len: the longest a sequence may grow, prompt and output, in tokens.
        vocab_size: token ids that the model knows.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError: the model cannot be loaded.
        OutOfMemoryError: the model, or one sequence of max_model_len, does not fit the device.
        InvalidParameterError: max_model_len exceeds what the model can do.
    """

    _elsewhere = _ELSEWHERE

    def __init__(
        self,
        args: EngineArgs,
        startup: Startup | None = None,
        *,
        weights: Any = None,
        with_tokenizer: bool = True,
    ) -> None:
        if args.data_parallel_size != 1:
            raise InvalidParameterError(
                f"LLMEngine is one replica, got data_parallel_size={args.data_parallel_size}; use LLM, or"
                f" ReplicatedEngine from jpaged.processes.replicas."
            )
        args = with_known_backend(args)
        directory = model_directory(args)
        self.args = args
        if startup is not None and weights is not None:
            raise InvalidParameterError("startup has weights already; leave weights out, and call update_weights.")
        generation = GenerationConfig.chosen(args.generation_config, directory)  # before anything that takes long
        self.default_sampling_params = generation.sampling_params()
        self.startup = _start(args, directory, weights) if startup is None else _same_start(args, startup)
        self.tokenizer = None
        if with_tokenizer and not args.skip_tokenizer_init:
            self.tokenizer = self._load_tokenizer(directory)
        config, model = self.startup.config, self.startup.model.config
        self._eos_token_ids = self._ends(generation, directory)
        chunk_bytes = SWAP_CHUNK_BLOCKS * self.startup.memory.block * args.tensor_parallel_size
        scheduler_config = SchedulerConfig(
            block_size=config.block_size,
            num_blocks=_at_most("num_gpu_blocks_override", args.num_gpu_blocks_override, self.startup.num_blocks),
            max_num_seqs=_at_most("max_num_seqs", args.max_num_seqs, config.max_num_seqs),
            max_num_batched_tokens=_at_most(
                "max_num_batched_tokens", args.max_num_batched_tokens, config.token_buckets[-1]
            ),
            max_model_len=_at_most("max_model_len", args.max_model_len, config.max_model_len),
            policy=args.scheduling_policy,
            num_swap_chunks=int(args.swap_space * 2**30 / chunk_bytes),
            cache_groups=self.startup.cache_groups,
            plans_ahead=self.startup.runner.memory is not None,
            kv_idle_release_s=args.kv_idle_release_s,
            **self._scheduling(args),
        )
        shards = min(max(1, 3 * usable_cores() // 8), _MOST_GRAMMAR_SHARDS)
        self._grammars = GrammarCompiler(self._grammar_tokenizer(directory), model.vocab_size, shards)
        goes_back = not scheduler_config.keeps_states
        runs_ahead = goes_back and not scheduler_config.plans_ahead and not args.expert_load
        rows = partial(ConstrainedRows, grammars=self._grammars, guesses=goes_back, runs_ahead=runs_ahead)
        kinds = (Searches, rows)
        scheduler = Scheduler(scheduler_config, args.seed, kinds=kinds, memory=self.startup.runner)
        self._core = EngineCore(scheduler, self.startup.leader or self.startup.runner)
        counts = self.startup.runner.copy_expert_tokens if args.expert_load else None
        self._expert_load = None if counts is None else ExpertLoadReader(self.startup.model.config, counts)
        self.max_model_len = scheduler_config.max_model_len
        self.vocab_size = model.vocab_size
        self._inputs = InputProcessor(
            self.tokenizer,
            model.vocab_size,
            self._core.scheduler.limits,
            self._eos_token_ids,
            EmbeddingConfig.load(directory),
        )
        self._outputs = OutputProcessor(self._core, self.tokenizer)
        self._failure: BaseException | None = None
        self._closed = False
        self._pid = os.getpid()
        self._reference = weakref.ref(self)
        if args.verbose:
            print(self.startup.table(args.model or "the embedded demo model"), file=sys.stderr, flush=True)

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        """The same as the constructor, under vLLM's name."""
        return cls(args)

    def _scheduling(self, args: EngineArgs) -> dict[str, Any]:
        """Options of the scheduler. Models with recurrent layers have a prefix cache if there are snapshots for it."""
        if not self.startup.setup.states:
            return args.scheduling()
        refuse_for_hybrids(args, self.startup.model.config)
        count = 0
        if args.enable_prefix_caching:
            available = self.startup.config.num_state_snapshots
            count = _at_most("num_state_snapshots", args.num_state_snapshots, available)
        return args.scheduling() | {
            "enable_prefix_caching": count > 0,
            "keeps_states": True,
            "num_state_snapshots": count,
        }

    @property
    def has_prefix_cache(self) -> bool:
        """Whether prefixes of requests that have ended are kept."""
        return self._core.scheduler.pool.cache is not None

    @property
    def core(self) -> EngineCore:
        """Scheduler and executor, for a caller that processes inputs and outputs itself (`jpaged.processes`)."""
        return self._core

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's end-of-sequence tokens."""
        return tuple(self._eos_token_ids)

    def prepare_structured_outputs(self) -> None:
        """Starts what the first constrained request would wait for, in the background."""
        self._grammars.prepare()

    def queue(self, request: Request, checked: ProcessedInput) -> None:
        """The second half of `add_request`; as `RequestIntake.queue`."""
        self._check_ready()
        self._core.add_request(request)
        self._outputs.add(request, checked.prompt, checked.prompt_token_ids)

    def step(self) -> list[RequestOutput]:
        """One turn of the loop: dispatches a step and returns outputs of an earlier one.

        Raises:
            EngineDeadError: something inside failed; the engine is of no more use.
        """
        self._check_ready()
        try:
            return self._outputs.process(self._core.step())
        except BaseException as error:
            self._failure = error
            if not isinstance(error, Exception):
                raise  # an interrupt in the middle of a step; `LLM.generate` and the commands hold it back
            raise EngineDeadError(f"The engine failed: {type(error).__name__}: {error}") from error

    def rest(self) -> bool:
        """To be called again and again while no request is unfinished, a few times a second: gives back memory of the
        KV cache that has been idle for `kv_idle_release_s`. A server does.

        Returns: whether there is more that can go back at once.
        """
        is_mine = self.startup.user is self._reference
        return is_mine and not self._closed and not self.is_asleep and self._core.rest()

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests and frees what they hold. They bring no more outputs. Unknown ids are ignored."""
        ids = request_ids_to_abort(request_ids)
        if self._failure is None:  # else nothing runs, and the scheduler may be in the middle of something
            self._core.abort(ids)
        for request_id in ids:
            self._outputs.forget(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do."""
        return not self._closed and self._failure is None and self._core.has_unfinished()

    def request_limits(self) -> RequestLimits:
        """The current limits of a request. Pinned prefixes lower them."""
        return self._core.scheduler.limits

    def get_metrics(self, *, expert_load: bool = True) -> EngineStats:
        """Counters and occupancy, now. While requests run, `EngineStats.expert_load` lags by a call: it has what the
        call before asked the device for.

        expert_load: read that, too, where the engine counts it.
        """
        self._check_open()
        stats = replace(self._core.stats(), asleep=self.startup.asleep)
        if self._expert_load is None or not expert_load or self._failure is not None:
            return stats
        return replace(stats, expert_load=self._expert_load.read(wait=not self._core.has_unfinished()))

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes, pinned ones included. Returns False, and does nothing, while requests run, those
        that are preempted and swapped out included.
        """
        self._check_open()
        return self._core.reset_prefix_cache()

    def pin_prefix(self, prompt: Prompt, cache_salt: str | None = None) -> int:
        """Keeps the beginning of a prompt in the prefix cache, until `unpin_prefix` or `reset_prefix_cache`: its full
        blocks that are in the cache, so a request with it must have run (`LLM.pin_prefix` sees to that).

        Returns: the number of tokens kept.

        Raises:
            InvalidPromptError: as `add_request`. InvalidParameterError: there is no prefix cache.
            OutOfMemoryError: too little of the pool would be left, or the free blocks are reserved for prompts that are
                being computed.
        """
        self._check_ready()
        if self.startup.setup.states:
            raise InvalidParameterError(
                "Prefixes of models with recurrent layers cannot be pinned: a pin would keep their blocks, but not the"
                " states behind them."
            )
        return self._core.pin_prefix(*self._prefix(prompt, cache_salt))

    def unpin_prefix(self, prompt: Prompt, cache_salt: str | None = None) -> bool:
        """Lets a pinned prefix be reused again. Returns whether it was pinned."""
        self._check_open()
        return self._core.unpin_prefix(*self._prefix(prompt, cache_salt))

    def sleep(self, level: int = 1) -> bool:
        """Gives memory back while the engine lives: 1 that of the KV cache, 2 that of the weights, too. Cached prefixes
        are forgotten, and requests are refused until `wake_up`.

        Returns: False, and nothing is done, while requests are unfinished.

        Raises:
            InvalidParameterError: another level, or a model over several hosts.
        """
        check_integer("level", level, 1, 2)
        self._check_started()
        self._core.drain()
        if self._core.has_unfinished() or not self._core.reset_prefix_cache():
            return False
        self.startup.sleep(level)
        return True

    def wake_up(self) -> None:
        """Takes the memory again; weights are read from the checkpoint again, if these were given back. Nothing if the
        engine is awake.

        Raises:
            OutOfMemoryError: others have the memory. The engine sleeps on.
            InvalidParameterError: the weights that it gave back came from the caller; `update_weights` gives it new
                ones.
        """
        self._check_started()
        if self.is_asleep:
            self.startup.wake_up()
            self._core.scheduler.take_memory_anew()

    def update_weights(self, weights: Any, *, partial: bool = False, in_flight: InFlight = "recompute") -> None:
        """Gives the model other weights, in place: nothing is compiled but, the first time, the programs that write
        them. The arrays are copied on the device and stay the caller's. Cached prefixes are forgotten, pinned ones
        included.

        An engine that sleeps takes them, too; one that has given its weights back, then has them again, and
        `wake_up` takes the rest.

        Args:
            weights: a module of the model (`weights_as("module")`), an `nnx.State` of one, or a mapping, nested or
                flat, to arrays, by the names of a Hugging Face checkpoint or of our own parameters. Of any floating
                type of at least 16 bits; rounded to the model's, or to 8 bits with `quantization="fp8"` or "int8". On
                any devices; those that are elsewhere are brought here.
            partial: what is not given stays as it is; otherwise it is an error that names what is missing.
            in_flight: what running requests do. "recompute": they keep their tokens, and compute the keys and values of
                these again. "continue": they go on with the keys and values that the old weights have computed.
        Raises:
            InvalidParameterError: arrays are missing or surplus, or of another shape or type, or have NaN or infinity
                and are to be quantized; the message names them. Or an array is the engine's own, or JAX is tracing, or
                the engine's checkpoint is quantized. The engine goes on with the weights that it has.
            OutOfMemoryError: the engine sleeps at level 2 and others have the memory. It sleeps on.
            EngineDeadError: the device failed in the middle, for want of memory say; the engine is of no more use.
        """
        check_choice("in_flight", in_flight, InFlight)
        check_bool("partial", partial)
        self._check_started()
        update = self.startup.check_weights(weights, partial=partial)
        try:
            self._core.take_new_weights(in_flight)
            self.startup.update_weights(update)
        except OutOfMemoryError:
            raise
        except BaseException as error:
            self._failure = error
            if not isinstance(error, Exception):
                raise
            raise EngineDeadError(
                f"The engine failed while its weights were replaced: {type(error).__name__}: {error}"
            ) from error

    def pause(self) -> None:
        """Dispatches no step until `resume`: the device is idle when it returns. Requests keep what they have, and
        others may be added. `step` returns what was in flight, then nothing.
        """
        self._check_started()
        self._core.pause()

    def resume(self) -> None:
        """Goes on where `pause` left off."""
        self._check_started()
        self._core.resume()

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called, and `resume` not since."""
        return self._core.is_paused

    def weights_as(self, form: WeightsForm) -> Any:
        """Copies of the weights on their devices, in a form that `update_weights` takes.

        form: "huggingface": a dictionary by the names of a Hugging Face checkpoint, in its shapes; "parameters": by our
            own names; "state": the `nnx.State` of the model's module; "module": the module, to train it.

        Raises:
            InvalidParameterError: there is no such form, or `sleep` has given the weights back.
        """
        self._check_started()
        return self.startup.weights_as(form)

    @property
    def is_asleep(self) -> bool:
        """Whether it gave memory back, and serves nothing until `wake_up`."""
        return self.startup.asleep > 0

    def close(self) -> None:
        """Frees what the engine holds on the device: weights, KV pool and state. What ran is given up, and the engine
        is of no more use, as are others on its `startup`. Other processes of its model end. The second time it does
        nothing.
        """
        if not self._closed and os.getpid() == self._pid:  # in a forked process nothing of the device is its own
            self.startup.close()
            self._core.close()
        self._closed = True

    def _ends(self, generation: GenerationConfig, directory: Path) -> tuple[int, ...]:
        """The end-of-sequence tokens: of the generation config, else of the model, else of the tokenizer, which is
        loaded for that if need be.
        """
        model = self.startup.model.config
        named = tuple(token for token in generation.eos_token_ids if token < model.vocab_size) or model.eos_token_ids
        if named or self.args.skip_tokenizer_init:
            return named
        own = (self.tokenizer or self._load_tokenizer(directory)).eos_token_id
        return () if own is None or own >= model.vocab_size else (own,)

    def _load_tokenizer(self, directory: Path) -> Tokenizer:
        tokenizer = Tokenizer.load(self.args.tokenizer or directory)
        set_objects_apart()
        return tokenizer

    def _grammar_tokenizer(self, directory: Path) -> Callable[[], GrammarTokenizer]:
        """Gives the tokenizer for constraints, when it is first asked for. It holds nothing of the engine: without a
        cycle that is freed as soon as nobody has it.
        """
        vocab_size, eos_token_ids = self.startup.model.config.vocab_size, self._eos_token_ids
        tokenizer, source = self.tokenizer, self.args.tokenizer or directory
        if tokenizer is not None:
            return lambda: GrammarTokenizer.of(tokenizer, vocab_size, eos_token_ids)
        return lambda: GrammarTokenizer.read(source, lambda: Tokenizer.load(source), vocab_size, eos_token_ids)

    def _prefix(self, prompt: Prompt, cache_salt: str | None) -> tuple[np.ndarray, str | None]:
        """A prompt's tokens, int32 [n], and its salt."""
        checked = self._inputs.process(prompt, SamplingParams())
        return np.array(checked.prompt_token_ids, np.int32), checked.salt(cache_salt)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("The engine was closed; start another one.")

    def check_awake(self) -> None:
        """Raises EngineAsleepError while it sleeps."""
        if self.is_asleep:
            raise EngineAsleepError("The engine sleeps: it has given its memory back. Call wake_up first.")

    def _check_ready(self) -> None:
        self._check_started()
        self.check_awake()

    def _check_started(self) -> None:
        self._check_open()
        if self._failure is not None:
            raise EngineDeadError("The engine failed earlier and must be started anew.") from self._failure
        if os.getpid() != self._pid:  # JAX's threads are not here, and a step would wait for them for ever
            raise EngineDeadError("The engine belongs to the process that this one was forked from; start one here.")
        if self.startup.user is None:  # no other engine has run
            self.startup.user = self._reference
        elif self.startup.user is not self._reference:
            self._take_turn()

    def _take_turn(self) -> None:
        """Another engine has run on the same startup since, and has written over this one's blocks."""
        if self._core.has_unfinished():
            raise EngineDeadError(
                f"{self._core.scheduler.num_unfinished} unfinished requests were lost when another engine ran on this "
                f"one's startup; let one finish before the other begins, or start each by itself."
            )
        self._core.drain()
        forgotten = self._core.reset_prefix_cache()
        assert forgotten  # nothing runs
        if not self.is_asleep:
            self._core.scheduler.take_memory_anew()
        self.startup.user = self._reference


def check_one_host(args: EngineArgs) -> None:
    """Raises InvalidParameterError if replicas are asked for of a model over several processes."""
    if args.data_parallel_size > 1 and Cluster.find(args) is not None:
        raise InvalidParameterError(
            f"data_parallel_size={args.data_parallel_size} is for one host; with num_processes, use"
            f" tensor_parallel_size, or start one engine a host."
        )


def _start(args: EngineArgs, directory: Path, weights: Any) -> Startup:
    """Starts a runner here and, where there are several processes, in all of them."""
    cluster = Cluster.find(args)
    if cluster is None:
        return start(args, directory, weights)
    if weights is not None:
        raise InvalidParameterError("weights are for a model on one host; write a checkpoint for one of several.")
    workers = lead(args, cluster)
    try:
        startup = start(args, directory)
    except BaseException:
        workers.close()
        raise
    startup.leader = LeadingRunner(startup.runner, workers)
    return startup


def _same_start(args: EngineArgs, startup: Startup) -> Startup:
    name = args.differs_from(startup.args)
    if name is not None:
        raise InvalidParameterError(
            f"{name}={getattr(args, name)!r} differs from the {getattr(startup.args, name)!r} that the runner was "
            f"started with; start a new one."
        )
    if startup.runner.closed:
        raise InvalidParameterError("startup was that of an engine that was closed; start a new one.")
    if args.shared_prefix_attention and not startup.args.shared_prefix_attention:
        raise InvalidParameterError("shared_prefix_attention=True needs a runner that was started with it.")
    return startup


def _at_most(name: str, asked: int | None, available: int) -> int:
    """The value asked for, or all there is. Raises InvalidParameterError if the runner has less."""
    if asked is not None and asked > available:
        raise InvalidParameterError(f"{name}={asked} exceeds the {available} that the runner was started with.")
    return available if asked is None else asked
