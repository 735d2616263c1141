"""`kv_cache_layout="virtual"`: whatever is shared, copied, swapped or computed again, the tokens are the same."""

from dataclasses import replace

import jax
import pytest

from jpaged import LLM, EngineArgs, LLMEngine, SamplingParams
from jpaged.api.errors import InvalidParameterError, OutOfMemoryError
from jpaged.executor.start.weights import CheckpointReader
from jpaged.executor.step import bundles
from tests import test_generation, test_pressure
from tests.support.quick_compilation import quick_compilation_of_module as quick_compilation_of_module
from tests.test_generation import assert_greedy, mixed_prompts, run
from tests.tiny_models import tiny_model, tiny_models, torch_model, write_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


NUM_ROWS = 16
FEW_TOKENS = 240
"""In each cache group; requests of twice the prompts of `mixed_prompts` need about 700."""

LIKE_OTHERS_TO_A_CACHE = {
    "llama-biases",
    "llama-rope-linear",
    "llama-rope-dynamic",
    "llama-rope-llama3",
    "llama-rope-llama3-new-style",
    "llama-rope-yarn",
    "qwen2-tied",
    "opt-350m-style",
    "opt-no-biases-untied",
    "llama-rope-longrope",
    "qwen3-tied-d64",
    "opt-125m-style",
    "gpt2",
    "qwen2-moe",
    "mixtral",
    "dots1",
}
"""Tiny models that differ from others in what is computed before keys and values are written, or after attention. That
all of them give transformers' tokens is `test_generation`'s claim."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((i, case), marks=pytest.mark.xdist_group(f"virtual {case.name}"), id=case.name)
        for i, case in enumerate(tiny_models())
        if case.name not in LIKE_OTHERS_TO_A_CACHE
    ],
)
def started(request, tmp_path_factory):
    """A tiny model of the family in one of the page layouts, and the same in transformers."""
    pytest.importorskip("torch")
    i, case = request.param
    directory = write_tiny_model(case, tmp_path_factory.mktemp(case.name))
    layout = ("sliced", "per-layer")[i % 2]
    sizes = {"max_num_seqs": NUM_ROWS, "decode_buckets": (NUM_ROWS,)}
    virtual = {"kv_cache_layout": "virtual", "virtual_page_layout": layout}
    args = replace(test_generation.ARGS, model=str(directory), **sizes, **virtual)
    return args, LLMEngine(args).startup, torch_model(case)


def test_greedy_tokens_are_those_of_transformers(started):
    args, startup, reference = started
    engine = LLMEngine(args, startup)
    prompts = mixed_prompts(0)
    assert_greedy(reference, prompts, run(engine, prompts))
    startup.runner.memory.mapper.check_integrity()
    assert startup.runner.memory.mapper.counts.num_mapped > 20


def test_preempted_requests_give_the_same_tokens(started):
    args, startup, reference = started
    groups, page_tokens = len(startup.cache_groups), startup.config.block_size
    num_pages = groups * -(-FEW_TOKENS // page_tokens) + 1
    engine = LLMEngine(replace(args, num_gpu_blocks_override=num_pages, watermark=0.0), startup)
    prompts = [prompt if i % 2 else prompt[:3] for i, prompt in enumerate(mixed_prompts(2) + mixed_prompts(6))]
    assert_greedy(reference, prompts, run(engine, prompts))
    assert engine.get_metrics().num_preemptions > 0


def test_prefix_cache_hits_give_the_same_tokens(started):
    args, startup, reference = started
    engine = LLMEngine(args, startup)
    shared = mixed_prompts(3)[5][:40]
    prompts = [shared + prompt[:20] for prompt in mixed_prompts(3)]
    run(engine, [shared])
    assert_greedy(reference, prompts, run(engine, prompts))
    page_tokens = startup.config.block_size
    assert engine.get_metrics().prefix_cache_hits >= len(prompts) * (len(shared) // page_tokens * page_tokens)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    case = tiny_model("llama-gqa-d64-tied")
    return str(write_tiny_model(case, tmp_path_factory.mktemp("model"), use_torch=False))


PRESSURE = {
    "dtype": "float32",
    "block_size": 4,
    "max_model_len": 64,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 64,
    "decode_buckets": (32,),
    "token_buckets": (64,),
    "skip_tokenizer_init": True,
    "verbose": False,
}


@pytest.fixture(scope="module")
def expected(model):
    """What mixed requests get in the paged layout, with room for all."""
    engine = LLMEngine(EngineArgs(**PRESSURE, model=model, num_gpu_blocks_override=2048))
    return test_pressure.run(engine)[0]


@pytest.mark.xdist_group("virtual under pressure")
@pytest.mark.parametrize("layout", ["sliced", "per-layer"])
def test_beams_samples_swaps_and_copies_give_the_paged_layouts_tokens(model, expected, layout):
    args = EngineArgs(
        **PRESSURE, model=model, num_gpu_blocks_override=512, kv_cache_layout="virtual", virtual_page_layout=layout
    )
    startup = LLMEngine(args).startup
    mapper = startup.runner.memory.mapper
    for mode, host_prefix_cache, num_pages in (("auto", False, 512), ("swap", True, 70), ("recompute", True, 70)):
        few = replace(
            args,
            num_gpu_blocks_override=num_pages,
            preemption_mode=mode,
            host_prefix_cache=host_prefix_cache,
            watermark=0.0,
        )
        engine = LLMEngine(few, startup)
        found, peak = test_pressure.run(engine)
        assert found == expected
        assert peak < num_pages
        mapper.check_integrity()
        metrics = engine.get_metrics()
        assert (metrics.num_preemptions > 10) == (num_pages == 70)
        assert (metrics.num_swapped_in > 0) == (mode == "swap")
    startup.close()
    assert startup.runner.memory.backed_bytes == 0


@pytest.mark.xdist_group("virtual under pressure")
@pytest.mark.parametrize("layout", ["paged", "virtual"])
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_goes_on_as_before(model, layout, level):
    with LLM(model, **PRESSURE, num_gpu_blocks_override=512, kv_cache_layout=layout) as llm:
        prompts = [{"prompt_token_ids": prompt[:40]} for prompt in mixed_prompts(5)[:8]]
        before = llm.generate(prompts, GREEDY, use_tqdm=False)
        startup = llm.engine.startup
        assert llm.sleep(level)
        assert llm.engine.is_asleep
        assert llm.sleep(1)  # less deep: it sleeps on as it does
        if layout == "virtual":
            assert startup.runner.memory.backed_bytes == startup.memory.block  # the null block's
        with pytest.raises(Exception, match="wake_up"):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        llm.wake_up()
        llm.wake_up()
        after = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in after] == [output.outputs[0].token_ids for output in before]
        assert llm.get_metrics().num_used_blocks == 0


@pytest.mark.xdist_group("virtual under pressure")
def test_an_engine_for_whose_weights_there_is_no_room_sleeps_on(model, monkeypatch):
    def no_room(_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    with LLM(model, **PRESSURE, num_gpu_blocks_override=512) as llm:
        assert llm.sleep(2)
        for owner, name in ((CheckpointReader, "__call__"), (bundles, "_bundle")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, no_room)
                with pytest.raises(OutOfMemoryError, match=r"no room for the weights of .* and the KV pool of"):
                    llm.wake_up()
            assert llm.engine.is_asleep
            assert llm.engine.startup.runner.weights is None
        llm.wake_up()
        assert llm.generate([{"prompt_token_ids": [5, 6, 7]}], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.xdist_group("virtual under pressure")
def test_an_engine_with_requests_does_not_sleep(model):
    args = EngineArgs(**PRESSURE, model=model, num_gpu_blocks_override=512, kv_cache_layout="virtual")
    engine = LLMEngine(args)
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, GREEDY)
    assert not engine.sleep()
    engine.step()
    assert not engine.sleep()
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.sleep()
    engine.close()


@pytest.mark.xdist_group("virtual under pressure")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_cache_layout": "contiguous"}, "kv_cache_layout must be one of"),
        ({"virtual_page_layout": "wide"}, "virtual_page_layout must be one of"),
    ],
)
def test_a_layout_that_does_not_exist_is_refused_by_name(model, options, said):
    with pytest.raises(InvalidParameterError, match=said):
        EngineArgs(model=model, **options)


@pytest.mark.xdist_group("virtual under pressure")
def test_a_level_that_does_not_exist_is_refused_by_name(model):
    engine = LLMEngine(EngineArgs(**PRESSURE, model=model, num_gpu_blocks_override=512))
    for level in (0, 3, True):
        with pytest.raises(InvalidParameterError, match="level must be"):
            engine.sleep(level)
