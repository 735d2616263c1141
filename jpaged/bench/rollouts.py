"""`jpaged bench rollouts`: what an engine costs a training loop on the same device: new weights, and sleep.

The trainer is played by copies of the weights that change before each round: twice the weights' memory beside the
engine's --gpu-memory-utilization.

  update     `update_weights` of all weights, by the form in which they come; of half of them; and bytes in use on the
             device, and programs compiled, between the second round and the last
  sleep      `sleep` and `wake_up`, of the KV cache alone and with the weights
  streams    an update in the midst of many requests: how many were lost

Greedy tokens are compared: those of the first weights must come back with these weights, and after each sleep.

--engine-process measures updates of an engine in a process of its own instead. The arrays come from this process,
which has them on the same device. Updates come without and with a copy to keep for a process that is started again.
Each figure says which way the arrays went ("on the device", "through the host"), and has the parts of an update:

  ready      this process waits until the arrays are computed, which they are here
  copy       it copies them to host memory, to keep or because they cannot go on the device
  export     it exports their device memory
  open       the engine process maps the device memory, or the host's
  write      it copies the arrays into its parameters
  close      it unmaps the memory
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.api.config import EngineArgs
from jpaged.api.errors import InvalidParameterError
from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.assets import demo_model_path
from jpaged.bench.arguments import bench_parser, check_least
from jpaged.bench.engine_options import add_engine_options, engine_options, make_llm
from jpaged.bench.report import write_report
from jpaged.bench.workloads import make_requests
from jpaged.frontend.llm_engine import LLMEngine
from jpaged.llm import LLM
from jpaged.models import Model, ModelConfig, build, load, resolve
from jpaged.processes.async_llm_engine import AsyncLLMEngine

_FORMS = ("huggingface", "parameters", "module")
_FEW = 10
"""Rounds of what is not measured `--rounds` times."""

_FRACTION_VARIABLE, _FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92"
"""Of the device's memory, for engine and trainer together."""

_STREAMS, _OUTPUT_LEN = 200, 64
"""Of the requests that run when weights come, by default."""

_PROMPTS, _PROMPT_LEN, _TOKENS = 8, 24, 16
"""Of the greedy requests whose tokens are compared."""


def parser() -> argparse.ArgumentParser:
    example = "--model llama-3.1-8b --load-format dummy --max-model-len 2048 --gpu-memory-utilization 0.5"
    result = bench_parser("rollouts", __doc__, example)
    add_engine_options(result)
    result.add_argument(
        "--rounds",
        type=int,
        default=100,
        help="updates by Hugging Face's names; at most 10 of other kinds, 5 with --engine-process",
    )
    result.add_argument("--streams", type=int, default=_STREAMS, help="requests that run when weights come")
    result.add_argument("--output-len", type=int, default=_OUTPUT_LEN, help="tokens of each of these requests")
    result.add_argument("--engine-process", action="store_true", help="have the engine in a process of its own")
    return result


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    check_least(args, rounds=3, streams=1, output_len=8)
    if args.data_parallel_size != 1:
        raise InvalidParameterError("--data-parallel-size must be 1: weights are measured on one device.")
    if args.engine_process and (args.streams, args.output_len) != (_STREAMS, _OUTPUT_LEN):
        raise InvalidParameterError("--streams and --output-len go with an engine in this process alone.")
    begun = time.perf_counter()
    if args.engine_process:
        figures, startup_s = asyncio.run(_measure_process(args))
    else:
        os.environ.setdefault(_FRACTION_VARIABLE, _FRACTION)  # else JAX would have --gpu-memory-utilization and no more
        jax.devices()
        llm = make_llm(args)
        startup_s = time.perf_counter() - begun
        figures = []
        for figure in measure(llm, args):
            print(_line(figure), flush=True)
            figures.append(figure)
        llm.close()
    if args.json:
        write_report(args.json, "rollouts", vars(args) | {"startup_s": startup_s}, figures)
    broken = [figure["part"] for figure in figures if not figure.get("tokens_are_the_same", True) or figure.get("lost")]
    if broken:
        print(f"not as it should be: {', '.join(broken)}", file=sys.stderr)
    return bool(broken)


def measure(llm: LLM, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The figures of an engine in this process, one after the other."""
    prompts = _greedy_prompts(llm, args.seed)
    with _Counted() as compiled:
        expected = _greedy(llm, prompts)
        first = llm.weights_as("huggingface")
        for form in _FORMS:
            rounds = args.rounds if form == "huggingface" else min(args.rounds, _FEW)
            yield _updates(llm, form, rounds, prompts, compiled)
        half = {name: _changed(array, 1) for name, array in list(first.items())[::2]}
        yield _partial_updates(llm, half, min(args.rounds, _FEW), compiled)
        del half
        llm.update_weights(first)
        same = _greedy(llm, prompts) == expected
        yield {"part": "the first weights again", "tokens_are_the_same": same}
        for level in (1, 2):
            yield _sleeps(llm, level, first, prompts, expected, min(args.rounds, _FEW), compiled)
        yield _streams(llm, first, args, compiled)


class _Counted:
    """How many programs JAX has compiled, or read from its cache of compiled ones, in a `with` block."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "_Counted":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: Any) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


def _updates(llm: LLM, form: Any, rounds: int, prompts: list[list[int]], compiled: _Counted) -> dict[str, Any]:
    """Rounds of: the trainer's weights change, and the engine takes them."""
    weights = llm.weights_as(form)
    bytes_ = sum(array.nbytes for array in jax.tree.leaves(_arrays(weights)))
    seconds: list[float] = []
    in_use: list[int] = []
    compiled_then, seen = 0, set()
    for number in range(rounds + 2):
        weights = jax.block_until_ready(_each_changed(weights, number))
        with _timed(seconds):
            llm.update_weights(weights)
        if number % 10 < 3:  # a few steps of each are enough to see that they go on
            seen.add(str(_greedy(llm, prompts)))
        if number == 1:  # the first two rounds compile what changes, writes and reads weights
            compiled_then = compiled.count
        in_use.append(_bytes_in_use())
    return {
        "part": f"update, {form}",
        "arrays": len(jax.tree.leaves(_arrays(weights))),
        "bytes": bytes_,
        "rounds": rounds,
        **_spread(seconds[2:]),
        "first_ms": 1000 * seconds[0],
        "compiled_after_round_2": compiled.count - compiled_then,
        "bytes_in_use_after_round_2": in_use[1],
        "bytes_in_use_at_the_end": in_use[-1],
        "different_outputs": len(seen),
    }


def _partial_updates(llm: LLM, half: dict[str, jax.Array], rounds: int, compiled: _Counted) -> dict[str, Any]:
    seconds: list[float] = []
    compiled_then = 0
    for number in range(rounds + 2):
        if number == 2:
            compiled_then = compiled.count
        with _timed(seconds):
            llm.update_weights(half, partial=True)
    return {
        "part": "update, every second tensor",
        "arrays": len(half),
        "bytes": sum(array.nbytes for array in half.values()),
        "rounds": rounds,
        **_spread(seconds[2:]),
        "first_ms": 1000 * seconds[0],
        "compiled_after_round_2": compiled.count - compiled_then,
    }


def _sleeps(
    llm: LLM,
    level: int,
    weights: Mapping[str, jax.Array],
    prompts: list[list[int]],
    expected: list[list[int]],
    rounds: int,
    compiled: _Counted,
) -> dict[str, Any]:
    """Rounds of: sleep, (weights again,) wake up, and the same tokens as ever."""
    asleep: list[float] = []
    awake: list[float] = []
    updated: list[float] = []
    freed, differing, compiled_then = 0, 0, 0
    for number in range(rounds + 1):
        before = _bytes_in_use()
        with _timed(asleep):
            done = llm.sleep(level)
        if not done:
            raise RuntimeError("the engine has unfinished requests, and does not sleep.")
        freed = before - _bytes_in_use()
        if level == 2:
            with _timed(updated):
                llm.update_weights(weights)
        with _timed(awake):
            llm.wake_up()
        differing += _greedy(llm, prompts) != expected
        if number == 0:
            compiled_then = compiled.count
    figure = {
        "part": f"sleep({level})",
        "rounds": rounds,
        "bytes_given_back": freed,
        **_spread(asleep[1:], "sleep"),
        **_spread(awake[1:], "wake_up"),
        "compiled_after_the_first": compiled.count - compiled_then,
        "tokens_are_the_same": not differing,
    }
    return figure | (_spread(updated[1:], "update") if level == 2 else {})


def _streams(
    llm: LLM, weights: Mapping[str, jax.Array], args: argparse.Namespace, compiled: _Counted
) -> dict[str, Any]:
    """Requests that run when weights come, at a quarter and at half of their tokens, in both ways."""
    engine = llm.engine
    assert isinstance(engine, LLMEngine)
    other = {name: _changed(array, 1) for name, array in weights.items()}
    params = SamplingParams(
        temperature=0, max_tokens=args.output_len, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    requests = make_requests(
        "random",
        args.streams,
        engine.vocab_size,
        input_len=_PROMPT_LEN,
        output_len=args.output_len,
        seed=args.seed + 1,
    )
    for number, request in enumerate(requests):
        engine.add_request(str(number), request.prompt_token_ids, params)
    compiled_then, steps, updates = compiled.count, 0, 0
    seconds: list[float] = []
    lengths: list[int] = []
    while engine.has_unfinished_requests():
        lengths += [len(output.outputs[0].token_ids) for output in engine.step() if output.finished]
        steps += 1
        if steps in (args.output_len // 4, args.output_len // 2):
            with _timed(seconds):
                engine.update_weights(other if updates == 0 else weights, in_flight=("recompute", "continue")[updates])
            updates += 1
    engine.core.check_integrity()
    complete = sum(length == args.output_len for length in lengths)
    return {
        "part": "update in the midst of streams",
        "streams": args.streams,
        "updates": updates,
        "recompute_ms": 1000 * seconds[0],
        "continue_ms": 1000 * seconds[1],
        "lost": args.streams - complete,
        "compiled": compiled.count - compiled_then,
    }


async def _measure_process(args: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """Updates of an engine in another process, from arrays that this process has on the device."""
    engine_args = EngineArgs(**engine_options(args))
    with _bit_by_bit():
        model, weights = _trainers_weights(engine_args)
    named = dict(zip(model.parameter_names, weights, strict=True))
    begun = time.perf_counter()
    figures, way = [], ""
    async with AsyncLLMEngine(engine_args) as engine:
        await engine.ready()
        startup_s = time.perf_counter() - begun
        for keep in (False, True):
            seconds: list[float] = []
            parts: list[dict[str, float]] = []
            for number in range(min(args.rounds, 5)):
                named = jax.block_until_ready({name: _changed(array, number) for name, array in named.items()})
                with _timed(seconds):
                    await engine.update_weights(named, keep=keep)
                parts.append(engine.update_seconds)
            if not keep:  # else there is a copy whichever way they went
                way = "through the host" if "copy" in parts[-1] else "on the device"
            num_bytes = sum(array.nbytes for array in named.values())
            figure = {
                "part": "update of an engine in another process" + (", with a copy to keep" if keep else ""),
                "way": way,
                "arrays": len(named),
                "bytes": num_bytes,
                "rounds": len(seconds) - 1,
                **_spread(seconds[1:]),
                "first_ms": 1000 * seconds[0],
                **{f"{part}_ms": 1000 * statistics.median(one[part] for one in parts[1:]) for part in parts[-1]},
                "gib_per_s": num_bytes / 2**30 / statistics.median(seconds[1:]),
            }
            print(_line(figure), flush=True)
            figures.append(figure)
    return figures, startup_s


@contextmanager
def _bit_by_bit() -> Iterator[None]:
    """In which JAX, if it starts here, takes no more of the device than it needs; processes started later do not see
    that."""
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
        jax.devices()
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _trainers_weights(args: EngineArgs) -> tuple[Model, tuple[jax.Array, ...]]:
    directory = resolve(args.model or demo_model_path(), load_format=args.load_format)
    model = build(ModelConfig.from_directory(directory), args.dtype)
    if args.load_format == "dummy":
        return model, jax.block_until_ready(model.init(args.seed))
    return model, jax.block_until_ready(load(model, directory))


def _arrays(weights: Any) -> Any:
    """The arrays of weights in any form, as a tree."""
    return nnx.to_pure_dict(nnx.state(weights, nnx.Param)) if isinstance(weights, nnx.Module) else weights


def _each_changed(weights: Any, number: int) -> Any:
    """A module is changed in place, as an optimizer does it."""
    if not isinstance(weights, nnx.Module):
        return {name: _changed(weights.pop(name), number, donate=True) for name in list(weights)}
    state = nnx.state(weights, nnx.Param)
    nnx.update(weights, jax.tree.map(lambda array: _changed(array, number, donate=True), state))
    return weights


def _changed(array: jax.Array, number: int, donate: bool = False) -> jax.Array:
    """Other weights, as large as these: by turns a little more and less."""
    factor = np.float32(1.25 if number % 2 else 0.8)
    return (_scaled_in_place if donate else _scaled)(array, factor)


def _scale(array: jax.Array, factor: jax.Array) -> jax.Array:
    places = jnp.arange(array.size, dtype=jnp.uint32).reshape(array.shape) % 3  # else the scores would only be scaled
    return jnp.where(places == 0, array * factor, array).astype(array.dtype)


_scaled = jax.jit(_scale)
_scaled_in_place = jax.jit(_scale, donate_argnums=0)


def _greedy_prompts(llm: LLM, seed: int) -> list[list[int]]:
    drawn = make_requests(
        "random", _PROMPTS, llm.engine.vocab_size, input_len=_PROMPT_LEN, output_len=_TOKENS, seed=seed
    )
    return [request.prompt_token_ids for request in drawn]


def _greedy(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    llm.reset_prefix_cache()
    outputs = llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True, detokenize=False), use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def _bytes_in_use() -> int:
    """Of the first device; where it does not say (CPU), of all arrays."""
    stats = jax.devices()[0].memory_stats() if jax.default_backend() == "gpu" else None
    return int(stats["bytes_in_use"]) if stats else sum(array.nbytes for array in jax.live_arrays())


@contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - begun)


def _spread(seconds: list[float], name: str = "update") -> dict[str, float]:
    """Median, least and most, in ms."""
    points: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "least": min, "most": max}
    return {f"{name}_ms_{point}": 1000 * of(seconds) for point, of in points.items()}


def _line(figure: Mapping[str, Any]) -> str:
    cells = [f"{name} {_shown(name, value)}" for name, value in figure.items() if name != "part"]
    return f"{figure['part']}: {', '.join(cells)}"


def _shown(name: str, value: Any) -> str:
    if name.startswith("bytes"):
        return f"{value / 2**30:.3f} GiB"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
