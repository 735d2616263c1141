"""Embeddings through the whole engine, against transformers' hidden states in float32."""

import json
from dataclasses import replace

import numpy as np
import pytest

from jpaged import EngineArgs, LLMEngine, PoolingParams, SamplingParams
from jpaged.api.errors import InvalidParameterError
from jpaged.engine.sequences.request import Request
from jpaged.frontend.embedding_config import EmbeddingConfig
from tests.tiny_models import TINY_ENGINE, VOCAB_SIZE, tiny_model, torch_model, write_tiny_model

torch = pytest.importorskip("torch")

FAMILIES = ("qwen3-tied-d64", "gpt2")
LAST, MEAN = PoolingParams(normalize=False), PoolingParams(pooling="mean", normalize=False)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(name), id=name) for name in FAMILIES]
)
def started(request, tmp_path_factory):
    case = tiny_model(request.param)
    args = EngineArgs(**TINY_ENGINE, model=str(write_tiny_model(case, tmp_path_factory.mktemp(case.name))))
    return args, LLMEngine(args).startup, torch_model(case)


def embed(engine, prompts, params):
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.finished
            found[output.request_id] = output
    return [found[str(i)] for i in range(len(prompts))]


def expected(model, prompt, params):
    with torch.no_grad():
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0].double().numpy()
    vector = states[-1] if params.pooling == "last" else states.mean(0)
    vector = vector[: params.dimensions]
    return vector / np.linalg.norm(vector) if params.normalize else vector


def prompts_of(seed, lengths):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]


@pytest.mark.parametrize("params", [LAST, MEAN], ids=["last", "mean"])
@pytest.mark.parametrize(("budget", "depth"), [(128, 2), (37, 2), (37, 0)], ids=["whole", "chunked", "plain-loop"])
def test_embeddings_are_those_of_transformers_hidden_states(started, params, budget, depth):
    args, startup, model = started
    engine = LLMEngine(replace(args, max_num_batched_tokens=budget, pipeline_depth=depth), startup=startup)
    prompts = prompts_of(budget, [1, 3, 4, 5, 70, 127, *range(8, 60, 5)])
    for prompt, output in zip(prompts, embed(engine, prompts, params), strict=True):
        np.testing.assert_allclose(output.embedding, expected(model, prompt, params), atol=1e-4, rtol=0)
        assert output.embedding.dtype == np.float32
        assert output.outputs == []
    engine.core.check_integrity()


@pytest.mark.parametrize("params", [LAST, MEAN], ids=["last", "mean"])
def test_a_cached_prefix_changes_no_embedding_and_is_not_used_for_a_mean(started, params):
    args, startup, model = started
    engine = LLMEngine(args, startup=startup)
    start, *ends = prompts_of(5, [40, 3, 9])
    for tail in ([], *ends, ends[0]):
        (output,) = embed(engine, [start + tail], params)
        np.testing.assert_allclose(output.embedding, expected(model, start + tail, params), atol=1e-4, rtol=0)
    assert output.num_cached_tokens == (40 if params.pooling == "last" else 0)


@pytest.mark.parametrize("params", [LAST, MEAN], ids=["last", "mean"])
def test_embeddings_survive_preemption_beside_requests_that_generate(started, params):
    """Requests that generate take the blocks of those that are pooled, which begin again."""
    args, startup, model = started
    engine = LLMEngine(
        replace(args, num_gpu_blocks_override=40, max_num_batched_tokens=40, enable_prefix_caching=False),
        startup=startup,
    )
    prompts = prompts_of(9, [90, 33, 90, 20, 90])
    generates = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    kinds = [params if len(prompt) != 33 and len(prompt) != 20 else generates for prompt in prompts]

    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, kinds[i])
    found, preempted = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[int(output.request_id)] = output
                preempted += output.metrics.num_preemptions
    for i, prompt in enumerate(prompts):
        if kinds[i] is params:
            np.testing.assert_allclose(found[i].embedding, expected(model, prompt, params), atol=1e-4, rtol=0)
            assert found[i].outputs == []
        else:
            assert len(found[i].outputs[0].token_ids) == 60
            assert found[i].embedding is None
    engine.core.check_integrity()
    assert preempted


def test_what_is_not_finite_is_computed_again_without_the_cache_and_leaves_nothing_there(started, monkeypatch):
    args, startup, _ = started
    engine, prompts = LLMEngine(args, startup), prompts_of(21, [40])
    right = embed(engine, prompts, LAST)[0].embedding
    real, is_bad = Request.end_pooling, [True]
    monkeypatch.setattr(Request, "end_pooling", lambda request: real(request) and not (is_bad and is_bad.pop()))
    (again,) = embed(engine, prompts, LAST)
    assert not is_bad
    np.testing.assert_allclose(again.embedding, right, atol=1e-5)
    fresh = prompts_of(22, [40])
    is_bad.append(True)
    assert embed(engine, fresh, LAST)[0].embedding is None
    assert engine.get_metrics().num_used_blocks == 0
    assert embed(engine, fresh, LAST)[0].num_cached_tokens == 0
    assert embed(engine, fresh, LAST)[0].num_cached_tokens > 0


def test_each_prompt_of_a_step_is_pooled_as_it_asks(started):
    args, startup, model = started
    engine = LLMEngine(args, startup=startup)
    kinds = [LAST, MEAN, PoolingParams(), PoolingParams(pooling="mean")] * 3
    prompts = prompts_of(11, range(2, 2 + len(kinds)))
    for i, (prompt, params) in enumerate(zip(prompts, kinds, strict=True)):
        engine.add_request(str(i), prompt, params)
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.embedding for output in engine.step()}
    for i, (prompt, params) in enumerate(zip(prompts, kinds, strict=True)):
        np.testing.assert_allclose(found[str(i)], expected(model, prompt, params), atol=1e-4, rtol=0)


def write(directory, **files):
    for name, contents in files.items():
        path = directory / name.replace("__", "/").replace("_json", ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(contents))
    return directory


MODULES = [
    {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


def test_pooling_is_read_from_the_files_of_sentence_transformers(tmp_path):
    pooling = {"word_embedding_dimension": 64, "pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}
    model = {"hidden_size": 64, "matryoshka_dimensions": [16, 32]}
    write(tmp_path, config_json=model, modules_json=MODULES, **{"1_Pooling__config_json": pooling})
    config = EmbeddingConfig.load(tmp_path)
    assert config == EmbeddingConfig("mean", True, 64, (16, 32))
    assert config.params(dimensions=16) == PoolingParams(pooling="mean", dimensions=16)
    with pytest.raises(InvalidParameterError, match="16, 32"):
        config.params(dimensions=8)
    write(tmp_path, modules_json=MODULES[:2], **{"1_Pooling__config_json": {"pooling_mode_lasttoken": True}})
    assert EmbeddingConfig.load(tmp_path).params() == PoolingParams(normalize=False)
    assert EmbeddingConfig.load(tmp_path / "nowhere").params() == PoolingParams()


@pytest.mark.parametrize(
    ("modules", "pooling", "named"),
    [
        (MODULES, {"pooling_mode_cls_token": True}, "cls_token"),
        (MODULES, {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, "mean_tokens, lasttoken"),
        ([*MODULES, {"type": "sentence_transformers.models.Dense"}], {"pooling_mode_lasttoken": True}, "Dense"),
        (["?"], {}, "list of modules"),
        (MODULES, ["?"], "1_Pooling"),
    ],
)
def test_pooling_that_is_not_supported_is_refused_by_name(tmp_path, modules, pooling, named):
    write(tmp_path, modules_json=modules, **{"1_Pooling__config_json": pooling})
    config = EmbeddingConfig.load(tmp_path)
    with pytest.raises(InvalidParameterError, match=named):
        config.params()


def test_an_embedding_is_cut_before_it_is_normalised_and_only_where_the_model_may_be(started, tmp_path):
    args, startup, model = started
    engine = LLMEngine(args, startup=startup)
    (prompt,) = prompts_of(3, [12])
    with pytest.raises(InvalidParameterError, match="matryoshka"):
        engine.add_request("cut", prompt, PoolingParams(dimensions=8))
    write(tmp_path, config_json={"hidden_size": startup.model.config.hidden_size, "is_matryoshka": True})
    engine._inputs.embeddings = EmbeddingConfig.load(tmp_path)
    with pytest.raises(InvalidParameterError, match="hidden size"):
        engine.add_request("long", prompt, PoolingParams(dimensions=4096))
    params = PoolingParams(dimensions=8)
    (output,) = embed(engine, [prompt], params)
    np.testing.assert_allclose(output.embedding, expected(model, prompt, params), atol=1e-4, rtol=0)
    assert len(output.embedding) == 8


@pytest.mark.parametrize("wrong", [{"pooling": "max"}, {"dimensions": 0}, {"dimensions": True}, {"normalize": 1}])
def test_wrong_pooling_parameters_are_named(wrong):
    with pytest.raises(InvalidParameterError, match=next(iter(wrong))):
        PoolingParams(**wrong)
