"""The virtual layout under whatever users do at once, in pools that are too small: the paged layout's tokens."""

from dataclasses import replace

import numpy as np
import pytest

from jpaged import BeamSearchParams, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from jpaged.api.errors import OutOfMemoryError
from tests.tiny_models import VOCAB_SIZE, tiny_model, write_tiny_model

pytestmark = pytest.mark.xdist_group("virtual at random")

NUM_REQUESTS, LONGEST, SLOTS = 50, 93, 12
Asked = tuple[str, list[int], SamplingParams | BeamSearchParams]


def requests(rng: np.random.Generator) -> list[Asked]:
    """Beams, five samples, random and greedy requests, with and without one of two long prefixes."""
    prefixes = [rng.integers(3, VOCAB_SIZE, 24).tolist() for _ in range(2)]
    made: list[Asked] = []
    for i in range(NUM_REQUESTS):
        own = rng.integers(3, VOCAB_SIZE, rng.integers(1, 24)).tolist()
        prompt = prefixes[i % 2] + own if rng.random() < 0.5 else own
        common = {"max_tokens": int(rng.integers(1, 20)), "ignore_eos": True}
        common |= {"output_kind": RequestOutputKind.FINAL_ONLY}
        kinds = (
            BeamSearchParams(beam_width=4, max_tokens=8),
            SamplingParams(n=5, seed=i, **common),
            SamplingParams(seed=i, temperature=0.8, top_k=20, **common),
            SamplingParams(temperature=0.0, **common),
        )
        made.append((str(i), prompt, kinds[rng.integers(len(kinds))]))
    return made


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tiny_model("gemma2"), tmp_path_factory.mktemp("model"), use_torch=False))


@pytest.fixture(scope="module")
def paged(directory: str) -> LLMEngine:
    """With room for all. Windowed layers and full ones."""
    return LLMEngine(
        EngineArgs(
            model=directory,
            dtype="float32",
            block_size=4,
            num_gpu_blocks_override=1024,
            max_model_len=LONGEST,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=48,
            decode_buckets=(SLOTS,),
            token_buckets=(48,),
            watermark=0.0,
            skip_tokenizer_init=True,
            verbose=False,
        )
    )


def act_at_random(engine: LLMEngine, rng: np.random.Generator, todo: list[Asked]) -> dict[str, list[list[int]]]:
    """Tokens of the requests that were not aborted; those that the pool is too small for are left out."""
    found: dict[str, list[list[int]]] = {}
    live, aborted = set[str](), set[str]()
    pages = engine.startup.runner.memory.mapper
    while todo or engine.has_unfinished_requests():
        match rng.integers(20):
            case 0 | 1 | 2 | 3 if todo:
                for request in [todo.pop() for _ in range(min(len(todo), int(rng.integers(1, 6))))]:
                    try:
                        engine.add_request(*request)
                        live.add(request[0])
                    except OutOfMemoryError:
                        assert isinstance(request[2], BeamSearchParams)
            case 4 if live:
                gone = str(rng.choice(sorted(live)))
                engine.abort_request(gone)
                live.discard(gone)
                aborted.add(gone)
            case 5 if rng.random() < 0.3:
                in_flight = "recompute" if rng.random() < 0.5 else "continue"
                engine.update_weights(engine.weights_as("parameters"), in_flight=in_flight)
            case 6 if engine.sleep():
                engine.wake_up()
            case 7:
                engine.reset_prefix_cache()
            case 8 if not engine.has_unfinished_requests():
                engine.rest()
            case 9 if rng.random() < 0.2:
                engine.core.check_integrity()
                pages.check_integrity()
            case _:
                for output in engine.step():
                    live.discard(output.request_id)
                    if output.request_id not in aborted:
                        found[output.request_id] = [list(sample.token_ids) for sample in output.outputs]
    assert not live
    engine.core.check_integrity()
    pages.check_integrity()
    assert engine.get_metrics().num_used_blocks == 0
    return found


@pytest.mark.parametrize(("layout", "idle_s"), [("sliced", 0.01), ("per-layer", None)])
def test_whatever_is_aborted_swapped_updated_and_put_to_sleep_the_others_get_the_paged_layouts_tokens(
    paged: LLMEngine, layout: str, idle_s: float | None
) -> None:
    args = replace(paged.args, kv_cache_layout="virtual", virtual_page_layout=layout, kv_idle_release_s=idle_s)
    startup = LLMEngine(args).startup
    page, groups = startup.config.block_size, len(startup.cache_groups)
    few = groups * (-(-LONGEST // page) + 3) + 1
    preemptions = 0
    for seed, mode in ((1, "auto"), (2, "swap"), (3, "recompute")):
        rng = np.random.default_rng(seed)
        asked = requests(rng)
        for request in asked:
            paged.add_request(*request)
        expected = {}
        while paged.has_unfinished_requests():
            expected |= {out.request_id: [list(one.token_ids) for one in out.outputs] for out in paged.step()}
        engine = LLMEngine(replace(args, num_gpu_blocks_override=few, preemption_mode=mode), startup)
        found = act_at_random(engine, rng, asked)
        assert found == {name: expected[name] for name in found}
        assert len(found) > NUM_REQUESTS / 2
        preemptions += engine.get_metrics().num_preemptions
    assert preemptions > 10
    startup.close()
    assert startup.runner.memory.backed_bytes == 0
