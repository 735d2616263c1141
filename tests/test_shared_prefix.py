"""A prefix that requests share, read once a decode step for all of them: the same greedy float32 tokens as without.

What the engine gives without is compared with transformers in `test_generation.py`.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import BeamSearchParams, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from jpaged.api.errors import InvalidParameterError, UnsupportedModelError
from jpaged.executor import config
from jpaged.executor.buckets import fine_buckets
from jpaged.executor.cache import paged
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.start.started import Startup
from tests.tiny_models import TINY_ENGINE, VOCAB_SIZE, tiny_model, write_tiny_model

pytestmark = pytest.mark.xdist_group("shared prefix")  # one worker, which compiles once

NUM_SHARING, NUM_OTHERS = 20, 4
ARGS = EngineArgs(**TINY_ENGINE, shared_prefix_attention=True)


@pytest.fixture(autouse=True)
def pays_at_once(monkeypatch):
    """What tiny models share would not be worth it."""
    monkeypatch.setattr(config, "LEAST_SAVED_TOKENS", 1)


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> tuple[EngineArgs, Startup]:
    case = tiny_model("llama-gqa-d64-tied")
    args = replace(ARGS, model=str(write_tiny_model(case, tmp_path_factory.mktemp("model"), use_torch=False)))
    return args, LLMEngine(args).startup


def greedy(max_tokens: int = 12, **params) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY, **params
    )


def prompts(seed: int) -> list[list[int]]:
    """Those that begin with the same 41 tokens, ten blocks and one token, and others in between."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(3, VOCAB_SIZE, 41).tolist()
    own = [rng.integers(3, VOCAB_SIZE, n).tolist() for n in rng.integers(1, 30, NUM_SHARING + NUM_OTHERS)]
    return [tokens if i % 6 == 5 else prefix + tokens for i, tokens in enumerate(own)]


def finish(engine: LLMEngine, found: dict[str, list[list[int]]] | None = None) -> dict[str, list[list[int]]]:
    """Tokens of every sequence, by request."""
    found = {} if found is None else found
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = [completion.token_ids for completion in output.outputs]
    engine.core.check_integrity()
    return found


def with_and_without(started: tuple[EngineArgs, Startup], run, **changes) -> tuple[LLMEngine, LLMEngine]:
    """`run`s an engine that reads shared prefixes once and one that does not; both give the same tokens."""
    args, startup = started
    on = LLMEngine(replace(args, **changes), startup)
    off = LLMEngine(replace(args, shared_prefix_attention=False, **changes), startup)
    assert run(on) == run(off)
    assert on.get_metrics().num_shared_prefix_steps > 0
    assert off.get_metrics().num_shared_prefix_steps == 0
    return on, off


@pytest.mark.parametrize("pipeline_depth", [0, 2], ids=["plain-loop", "pipelined"])
def test_twenty_requests_that_share_a_prefix_get_the_same_tokens(started, pipeline_depth):
    def run(engine):
        for i, prompt in enumerate(prompts(0)):
            engine.add_request(str(i), prompt, greedy())
        return finish(engine)

    on, _ = with_and_without(started, run, pipeline_depth=pipeline_depth)
    # Four steps compute the prompts; in all others but the first requests' last many rows share.
    assert on.get_metrics().num_shared_prefix_steps >= 8


def test_requests_that_come_and_go_get_the_same_tokens(started):
    def run(engine):
        found: dict[str, list[list[int]]] = {}
        first, second = prompts(1), prompts(2)
        for i in range(16):
            engine.add_request(f"a {i}", first[i], greedy(3 + 2 * i))
            engine.add_request(f"b {i}", second[i], greedy(20))
            for output in engine.step() if i % 4 == 3 else ():
                found[output.request_id] = [completion.token_ids for completion in output.outputs]
        engine.abort_request(["a 15", "b 0"])
        return finish(engine, found)

    with_and_without(started, run)


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_preempted_requests_get_the_same_tokens(started, preemption_mode):
    def run(engine):
        for i, prompt in enumerate(prompts(3)):
            engine.add_request(str(i), prompt, greedy(24))
        return finish(engine)

    changes = {"num_gpu_blocks_override": 120, "watermark": 0.0, "preemption_mode": preemption_mode}
    for engine in with_and_without(started, run, **changes):
        assert engine.get_metrics().num_preemptions > 0


def test_samples_beams_and_copied_blocks_get_the_same_tokens(started):
    def run(engine):
        for i, prompt in enumerate(prompts(4)[:9]):
            match i % 3:
                case 0:
                    engine.add_request(str(i), prompt, BeamSearchParams(beam_width=3, max_tokens=8))
                case 1:
                    engine.add_request(str(i), prompt, replace(greedy(10), temperature=0.8, seed=i, n=3))
                case _:
                    engine.add_request(str(i), prompt, greedy(10, presence_penalty=0.5))
        return finish(engine)

    with_and_without(started, run)


def test_a_layer_with_a_sliding_window_reads_its_window_and_no_more(monkeypatch):
    monkeypatch.setattr(paged, "rope_and_write", lambda pool, qkv, *_, **__: (qkv, pool))
    monkeypatch.setattr(paged, "shared_prefix_attention", lambda *args, **_: ("shared", args[-2:]))
    monkeypatch.setattr(paged, "decode_attention", lambda *_, sliding_window, **__: ("decode", sliding_window))
    nothing, shared = jnp.zeros((1,)), (np.int32(3), np.int32(64))
    windowed, full = (
        paged.PagedAttention(nothing, nothing, nothing, nothing, None, shared, window, None) for window in (20, None)
    )
    options = {"rotation": None, "norms": None, "norm_eps": 0.0, "scale": 0.25}
    assert windowed(nothing, sliding_window=20, **options) == ("decode", 20)
    assert full(nothing, sliding_window=None, **options) == ("shared", shared)
    with pytest.raises(UnsupportedModelError, match=r"sliding_window=None, .* layer_windows .* say 20"):
        windowed(nothing, sliding_window=None, **options)


def test_an_engine_needs_a_runner_that_has_the_programs(started):
    args, startup = started
    assert startup.config.shared_prefix_buckets == (32,)
    without = replace(startup, args=replace(args, shared_prefix_attention=False))
    with pytest.raises(InvalidParameterError, match="shared_prefix_attention=True needs a runner"):
        LLMEngine(args, without)


def test_the_option_is_refused_where_it_could_do_nothing(tmp_path):
    directory = write_tiny_model(tiny_model("mistral-window"), tmp_path, use_torch=False)
    with pytest.raises(InvalidParameterError, match="shared_prefix_attention=True is of no use"):
        LLMEngine(replace(ARGS, model=str(directory)))
    with pytest.raises(InvalidParameterError, match="needs enable_prefix_caching=True"):
        replace(ARGS, enable_prefix_caching=False)
    with pytest.raises(InvalidParameterError, match="shared_prefix_attention must be True or False"):
        EngineArgs(shared_prefix_attention="yes")  # type: ignore[arg-type]


def test_few_sizes_of_programs_and_a_threshold_that_pays_for_their_padding(monkeypatch):
    monkeypatch.setattr(config, "LEAST_SAVED_TOKENS", 16_384)
    shapes = ExecutorConfig(
        max_num_seqs=1024,
        max_model_len=4096,
        block_size=16,
        num_blocks=9999,
        decode_buckets=fine_buckets(8, 1024),
        token_buckets=(8192,),
        shared_prefix_attention=True,
    )
    assert shapes.shared_prefix_buckets == (64, 128, 256, 512, 1024)
    assert replace(shapes, shared_prefix_attention=False).shared_prefix_buckets == ()
    assert shapes.shared_prefix_bucket(512, 512, 2048) == 512
    assert shapes.shared_prefix_bucket(9, 9, 2048) == 64
    assert shapes.shared_prefix_bucket(9, 9, 2032) is None
    assert shapes.shared_prefix_bucket(300, 120, 1024) == 512  # 192 rows of padding, where decode[320] has 20
    assert shapes.shared_prefix_bucket(300, 110, 1024) is None
    assert shapes.shared_prefix_bucket(1000, 0, 0) is None
    assert replace(shapes, shared_prefix_attention=False).shared_prefix_bucket(512, 512, 2048) is None
