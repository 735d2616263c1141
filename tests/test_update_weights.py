"""Weights that a running engine is given: the tokens of a fresh engine, nothing compiled, nothing lost."""

import gc
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged import LLM, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from jpaged.api.errors import EngineAsleepError, InvalidParameterError, JPagedError, UnsupportedParameterError
from jpaged.models import Model, ModelConfig, Weights, build, dense_causal_attend, load, registry, save_pretrained
from tests.tiny_models import TINY_ENGINE, tiny_model, write_tiny_model

NAME = "llama-biases"
PROMPTS = [[5, 9, 2], [17, 3, 88, 41, 6, 7, 100, 23, 55]]
LENGTH = 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_tiny_model(tiny_model(NAME), tmp_path_factory.mktemp("tiny"), use_torch=False)


def args_of(directory: Path, **options: Any) -> EngineArgs:
    return EngineArgs(model=str(directory), **TINY_ENGINE | options)


@pytest.fixture(scope="module")
def shared(directory) -> Iterator[LLMEngine]:
    engine = LLMEngine(args_of(directory))
    yield engine
    engine.close()


@pytest.fixture
def engine(shared) -> LLMEngine:
    """On the programs of one start, with the weights of seed 0 and nothing cached."""
    if shared.startup.asleep:
        shared.update_weights(model_of(shared).init(0))
        shared.wake_up()
    engine = LLMEngine(shared.args, shared.startup)
    engine.update_weights(model_of(engine).init(0))
    return engine


def model_of(engine: LLMEngine) -> Model:
    return engine.startup.model


def params(num_tokens: int) -> SamplingParams:
    final = RequestOutputKind.FINAL_ONLY
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, output_kind=final)


def greedy(engine: LLMEngine, prompts: list[list[int]] = PROMPTS, num_tokens: int = 5) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params(num_tokens))
    return finish(engine, len(prompts))


def finish(engine: LLMEngine, num_requests: int) -> list[list[int]]:
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert output.request_id not in found
                found[output.request_id] = output.outputs[0].token_ids
    assert len(found) == num_requests
    return [list(found[str(i)]) for i in range(num_requests)]


class Reference:
    """Greedy tokens by attention over whole sequences, without an engine."""

    def __init__(self, model: Model) -> None:
        positions = jnp.arange(LENGTH, dtype=jnp.int32)

        @jax.jit
        def best(weights: Weights, tokens: jax.Array) -> jax.Array:
            return jnp.argmax(model.logits(weights, model.forward(weights, tokens, positions, dense_causal_attend)), -1)

        self._best = best

    def greedy(self, weights: Weights, prompts: list[list[int]] = PROMPTS, num_tokens: int = 5) -> list[list[int]]:
        return [self.after(weights, prompt, num_tokens) for prompt in prompts]

    def after(self, weights: Weights, known: list[int], num_tokens: int) -> list[int]:
        tokens = list(known)
        for _ in range(num_tokens):
            padded = np.zeros(LENGTH, np.int32)
            padded[: len(tokens)] = tokens
            tokens.append(int(self._best(weights, padded)[len(tokens) - 1]))
        return tokens[len(known) :]


@pytest.fixture(scope="module")
def reference(shared) -> Reference:
    return Reference(model_of(shared))


class CountedCompilations:
    count = 0

    def __call__(self, event: str, duration: float, **_: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def compilations() -> Iterator[CountedCompilations]:
    counted = CountedCompilations()
    jax.monitoring.register_event_duration_secs_listener(counted)
    yield counted
    jax.monitoring.unregister_event_duration_listener(counted)


def test_after_each_of_a_hundred_updates_the_tokens_are_those_of_the_new_weights(engine, reference, compilations):
    """In turn in each form that weights come in. From the second round on nothing is compiled, and no array is left."""
    model, seen = model_of(engine), set()
    forms = (
        lambda weights: engine.startup.updater.read(weights, "huggingface"),
        lambda weights: engine.startup.updater.read(weights, "parameters"),
        lambda weights: engine.startup.updater.read(weights, "state"),
        lambda weights: engine.startup.updater.read(weights, "module"),
        lambda weights: weights,
    )
    pointers = [array.unsafe_buffer_pointer() for array in engine.startup.runner.weights]
    compiled = arrays = None
    for i in range(100):
        if i == 2 * len(forms):
            gc.collect()
            compiled, arrays = compilations.count, len(jax.live_arrays())
        weights = model.init(i)
        engine.update_weights(forms[i % len(forms)](weights))
        found = greedy(engine, num_tokens=3)
        assert found == reference.greedy(weights, num_tokens=3), i
        seen.add(str(found))
        del weights
    assert len(seen) > 90
    assert pointers == [array.unsafe_buffer_pointer() for array in engine.startup.runner.weights]
    gc.collect()
    assert len(jax.live_arrays()) == arrays
    assert compilations.count == compiled
    fresh = LLMEngine(engine.args, weights=model.init(99))
    assert greedy(fresh, num_tokens=3) == found
    fresh.close()


def test_the_arrays_stay_the_callers(engine, reference):
    weights = model_of(engine).init(3)
    engine.update_weights(weights)
    for array in weights:
        array.delete()
    assert greedy(engine) == reference.greedy(model_of(engine).init(3))


def test_weights_read_back_are_those_that_were_given_and_copies(engine):
    weights = model_of(engine).init(4)
    engine.update_weights(weights)
    module = engine.weights_as("module")
    assert isinstance(module, nnx.Module)
    read = model_of(engine).flatten(module)
    assert all((one == other).all() for one, other in zip(read, weights, strict=True))
    engine.update_weights(model_of(engine).init(5))
    assert all((one == other).all() for one, other in zip(read, weights, strict=True))
    with pytest.raises(InvalidParameterError, match="form must be 'huggingface'"):
        engine.weights_as("torch")


def test_a_trainers_types_are_rounded_to_the_models(engine, reference):
    weights = tuple(np.asarray(array, jnp.bfloat16) for array in model_of(engine).init(6))
    engine.update_weights(weights)
    assert greedy(engine) == reference.greedy(tuple(array.astype(np.float32) for array in weights))


def test_a_partial_update_keeps_the_other_parts_of_a_fused_parameter(engine, reference):
    model = model_of(engine)
    read = engine.startup.updater.read
    old, new = read(model.init(0), "huggingface"), read(model.init(7), "huggingface")
    chosen = [name for name in old if "k_proj" in name or "up_proj.weight" in name or name == "lm_head.weight"]
    assert len(chosen) > 4
    engine.update_weights({name: new[name] for name in chosen}, partial=True)
    mixed = engine.startup.updater
    weights = mixed.apply(model.init(1), mixed.match(old | {name: new[name] for name in chosen}))
    assert greedy(engine) == reference.greedy(weights) != reference.greedy(model.init(0))


def names_of(engine: LLMEngine) -> dict[str, jax.Array]:
    return engine.startup.updater.read(model_of(engine).init(8), "huggingface")


def wrong_weights(tensors: dict[str, jax.Array]) -> dict[str, tuple[Any, str]]:
    name, gone = "model.norm.weight", jnp.zeros(3)
    gone.delete()
    without = {key: array for key, array in tensors.items() if key != name}
    return {
        "missing": (without, f"missing are '{name}'; give them, or partial=True"),
        "surplus": (tensors | {"extra.weight": tensors[name]}, "no place for 'extra.weight'; leave them out"),
        "shape": (without | {name: jnp.zeros((3, 2))}, rf"'{name}' has shape \(3, 2\), the model implies"),
        "integers": (without | {name: tensors[name].astype(int)}, f"'{name}' has type int32, not a floating-point"),
        "deleted": (without | {name: gone}, f"'{name}' was deleted or donated"),
        "bytes": (without | {name: np.asarray(tensors[name], ">f4")}, f"'{name}' cannot become an array of JAX: .*>f4"),
        "masked": (without | {name: np.ma.masked_array(tensors[name])}, f"'{name}' cannot become .*masked"),
        "list": (without | {name: [1.0]}, f"'{name}' is a list, not an array"),
        "nothing": ({}, "weights holds no array"),
        "text": ("model", "weights must map names to arrays, got str"),
        "twice": ({"a": {"b": gone}, "a.b": gone}, "weights holds 'a.b' twice"),
        "collections": (
            {"params": without, "batch_stats": {}},
            r"holds 'batch_stats' beside 'params'; give weights\['p",
        ),
        "too few": ([tensors[name]], "weights is a sequence of 1 arrays, but the model has"),
    }


WRONG = (
    "missing",
    "surplus",
    "shape",
    "integers",
    "deleted",
    "bytes",
    "masked",
    "list",
    "nothing",
    "text",
    "twice",
    "collections",
    "too few",
)


def test_what_does_not_fit_is_named_and_the_engine_goes_on_with_its_old_weights(engine, reference):
    before = reference.greedy(model_of(engine).init(0))
    cases = wrong_weights(names_of(engine))
    assert set(cases) == set(WRONG)
    for weights, message in cases.values():
        with pytest.raises(InvalidParameterError, match=message):
            engine.update_weights(weights)
    with pytest.raises(InvalidParameterError, match="in_flight must be one of 'recompute', 'continue'"):
        engine.update_weights(names_of(engine), in_flight="abort")
    assert greedy(engine) == before


def test_settings_that_a_trainer_has_made_of_jax_do_not_stop_the_engine(engine, reference):
    weights = model_of(engine).init(2)
    with jax.transfer_guard("disallow"), jax.disable_jit():
        engine.update_weights(weights)
        found = greedy(engine)
        assert engine.sleep()
        engine.wake_up()
        engine.weights_as("huggingface")
    assert found == reference.greedy(weights)


def test_the_engines_own_arrays_are_refused_by_name(engine, reference):
    with pytest.raises(InvalidParameterError, match="'embedding' is the engine's own array, which is written over"):
        engine.update_weights(engine.startup.runner.weights)
    assert greedy(engine) == reference.greedy(model_of(engine).init(0))


def test_what_is_called_while_jax_traces_says_so_and_changes_nothing(engine, reference):
    weights, module = model_of(engine).init(1), engine.weights_as("module")
    for name, call in (
        ("update_weights", lambda: engine.update_weights(weights)),
        ("weights_as", lambda: engine.weights_as("parameters")),
        ("sleep", engine.sleep),
    ):
        with pytest.raises(InvalidParameterError, match=f"{name} was called in a function that JAX traces"):
            jax.eval_shape(call)
    with pytest.raises(InvalidParameterError, match="update_weights was called in a function that JAX traces"):
        nnx.jit(engine.update_weights)(module)
    assert greedy(engine) == reference.greedy(model_of(engine).init(0))


def test_cached_and_pinned_prefixes_are_forgotten(engine, reference):
    prompt = list(range(20, 33))
    greedy(engine, [prompt], 1)
    assert engine.pin_prefix(prompt) == 12
    weights = model_of(engine).init(9)
    engine.update_weights(weights)
    assert greedy(engine, [prompt], 3) == reference.greedy(weights, [prompt], 3)
    assert not engine.unpin_prefix(prompt)
    engine.core.check_integrity()


@pytest.mark.parametrize("in_flight", ["recompute", "continue"])
def test_an_update_in_the_midst_of_many_requests_loses_none(engine, reference, in_flight):
    """Recomputed, each goes on from its tokens as it would in an engine that has had the new weights all along."""
    rng = np.random.default_rng(11)
    prompts = [rng.integers(3, 150, rng.integers(1, 8)).tolist() for _ in range(60)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params(8))
    for _ in range(4):
        assert engine.step() == []
    weights, old = model_of(engine).init(12), model_of(engine).init(0)
    engine.update_weights(weights, in_flight=in_flight)
    slots, queued = engine.core.scheduler.slots, {}
    for group in engine.core.scheduler._tenants.groups.values():
        request = group.leader
        known = request.known_token_ids() if request.slot < 0 else slots.known(request.slot)
        queued[int(request.request_id)] = known[request.prompt_len :].tolist()
    assert sum(map(len, queued.values())) > 20
    found = finish(engine, len(prompts))
    engine.core.check_integrity()
    for i, prompt in enumerate(prompts):
        before = queued[i]
        assert found[i][: len(before)] == before == reference.after(old, prompt, len(before))
        if in_flight == "recompute" or not before:
            assert found[i][len(before) :] == reference.after(weights, prompt + before, 8 - len(before))
    # And no prefix finds what the old weights have computed.
    again = [prompt + tokens[:7] for prompt, tokens in zip(prompts, found, strict=True)]
    assert greedy(engine, again, 1) == reference.greedy(weights, again, 1)


def test_an_aborted_request_brings_nothing_after_an_update(engine):
    engine.add_request("0", PROMPTS[0], params(3))
    engine.add_request("1", PROMPTS[1], params(3))
    for _ in range(3):
        engine.step()
    engine.update_weights(model_of(engine).init(1))
    engine.abort_request("0")
    outputs = [output for _ in range(10) for output in engine.step()]
    assert [output.request_id for output in outputs] == ["1"]
    assert not engine.has_unfinished_requests()


def test_an_engine_that_sleeps_takes_new_weights_and_never_has_both(engine, reference):
    weights = model_of(engine).init(14)
    assert engine.sleep(2)
    with pytest.raises(InvalidParameterError, match="call update_weights before wake_up"):
        engine.wake_up()
    with pytest.raises(InvalidParameterError, match="sleeps at level 2 and has no weights; wake it up"):
        engine.weights_as("state")
    with pytest.raises(InvalidParameterError, match="no weights to keep the others of; give all"):
        engine.update_weights({"norm.scale": weights[-1]}, partial=True)
    engine.update_weights(weights)
    with pytest.raises(EngineAsleepError):
        greedy(engine)
    engine.wake_up()
    assert greedy(engine) == reference.greedy(weights)
    assert engine.sleep(1)
    newer = model_of(engine).init(15)
    engine.update_weights(newer)
    engine.wake_up()
    assert greedy(engine) == reference.greedy(newer)


def test_weights_that_are_given_back_leave_an_engine_that_wakes_with_those_of_before(directory):
    with LLM(str(directory), **TINY_ENGINE) as llm:
        engine = llm.engine
        checkpoint, weights = greedy(engine), model_of(engine).init(19)
        assert engine.sleep(2)
        engine.update_weights(weights)
        assert engine.startup.give_back_weights()
        assert engine.startup.asleep == 2
        assert not engine.startup.give_back_weights()
        engine.wake_up()
        assert greedy(engine) == checkpoint

        engine.update_weights(weights)  # awake, so there is no memory to give back
        assert not engine.startup.give_back_weights()
        assert engine.sleep(2)
        engine.update_weights(weights)
        assert engine.startup.give_back_weights()
        with pytest.raises(InvalidParameterError, match="call update_weights before wake_up"):
            engine.wake_up()  # it had such weights before, too
        engine.update_weights(weights)
        engine.wake_up()
        assert not engine.startup.give_back_weights()


def test_arrays_of_numpy_and_names_with_params_before_them_are_taken(engine, reference):
    weights = model_of(engine).init(16)
    tree: dict[str, Any] = {}
    for path, array in zip(model_of(engine).module_paths, weights, strict=True):
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = np.asarray(array)
    engine.update_weights({"params": tree})
    assert greedy(engine) == reference.greedy(weights)


def test_an_llm_takes_weights_from_another_thread_between_its_steps(directory):
    llm = LLM(str(directory), **TINY_ENGINE)
    weights = llm.engine.startup.model.init(17)
    reference = Reference(llm.engine.startup.model)
    updated = threading.Event()

    def update() -> None:
        while llm.get_metrics().num_running == 0:
            pass
        llm.update_weights(weights)
        updated.set()

    thread = threading.Thread(target=update)
    thread.start()
    outputs = llm.generate(PROMPTS * 8, params(100), use_tqdm=False)
    thread.join()
    assert updated.is_set()
    assert all(len(output.outputs[0].token_ids) == 100 for output in outputs)
    outputs = llm.generate(PROMPTS, params(5), use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == reference.greedy(weights)
    assert set(llm.weights_as("parameters")) == set(llm.engine.startup.model.parameter_names)
    llm.close()


def test_a_paused_llm_takes_no_steps_until_it_is_resumed(directory):
    llm = LLM(str(directory), **TINY_ENGINE)
    want = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params(100), use_tqdm=False)]
    counts: list[int] = []

    def pause_and_resume() -> None:
        until = time.monotonic() + 60
        while llm.get_metrics().num_running == 0 and time.monotonic() < until:
            time.sleep(0.001)
        llm.pause()
        for _ in range(2):
            counts.append(llm.get_metrics().num_steps)
            time.sleep(0.2)
        llm.resume()

    before = llm.get_metrics().num_steps
    thread = threading.Thread(target=pause_and_resume)
    thread.start()
    outputs = llm.generate(PROMPTS, params(100), use_tqdm=False)
    thread.join()
    assert [output.outputs[0].token_ids for output in outputs] == want
    assert before < counts[0] == counts[1] < llm.get_metrics().num_steps
    llm.pause()
    with pytest.raises(JPagedError, match="paused: call resume first"):
        llm.generate(PROMPTS, params(2), use_tqdm=False)
    llm.resume()
    assert llm.generate(PROMPTS[:1], params(2), use_tqdm=False)[0].outputs[0].token_ids == want[0][:2]
    llm.close()


class Config:
    """As transformers' configurations are: objects that give their contents."""

    def to_dict(self) -> dict[str, Any]:
        return tiny_model(NAME).config


@pytest.mark.parametrize("kind", ["contents", "transformers", "jpaged", "directory"])
def test_an_llm_begins_from_a_configuration_and_arrays_alone(reference, shared, tmp_path, kind):
    contents = tiny_model(NAME).config
    (tmp_path / "config.json").write_text(json.dumps(contents))
    kinds = {"contents": contents, "transformers": Config(), "jpaged": ModelConfig.from_dict(contents)}
    weights = model_of(shared).init(18)
    with LLM(kinds.get(kind, tmp_path), weights=weights, **TINY_ENGINE) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params(5), use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == reference.greedy(weights)
        assert llm.sleep(2)
        with pytest.raises(InvalidParameterError, match="call update_weights before wake_up"):
            llm.wake_up()
    assert not weights[0].is_deleted()


def test_what_is_no_configuration_and_weights_that_do_not_fit_are_refused_before_anything_starts(shared):
    weights, contents = model_of(shared).init(0), tiny_model(NAME).config
    options = TINY_ENGINE | {"skip_tokenizer_init": False}
    for model, given, message in (
        (7, weights, "model must be a directory, a hub id, the contents of a config.json, .* got 7"),
        ({}, weights, "was read from no config.json"),
        (contents | {"x": object()}, weights, "cannot be written as a config.json: .*not JSON serializable"),
        (contents, None, "model is a configuration, which has no weights; give weights=..., or load_format='dummy'"),
        (contents, weights[1:], "weights is a sequence of"),
    ):
        with pytest.raises(InvalidParameterError, match=message):
            LLM(model, weights=given, **options)
    with pytest.raises(UnsupportedParameterError, match="weights is for data_parallel_size=1"):
        LLM(contents, weights=weights, data_parallel_size=2, **TINY_ENGINE)


def test_an_engine_that_rounds_to_fp8_takes_a_trainers_weights_and_compiles_nothing(tmp_path, compilations):
    """They get the bits that loading gives a checkpoint of them; those that cannot be rounded change nothing."""
    contents = tiny_model(NAME).config | {"num_hidden_layers": 1}
    plain = build(ModelConfig.from_dict(contents), "float32")

    def trained(seed: int) -> Weights:
        return tuple(array.astype(jnp.bfloat16) for array in plain.init(seed))

    with LLM(contents, weights=trained(0), quantization="fp8", **TINY_ENGINE) as llm:

        def tokens() -> list[list[int]]:
            return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS[:1], params(5), use_tqdm=False)]

        seen, compiled = [tokens()], 0
        for seed in range(1, 5):
            compiled = compilations.count if seed == 2 else compiled
            llm.update_weights(dict(zip(plain.parameter_names, trained(seed), strict=True)))
            seen.append(tokens())
        assert compilations.count == compiled
        assert len({str(one) for one in seen}) == 5
        save_pretrained(plain, trained(4), tmp_path, "bfloat16")
        startup = llm.engine.startup
        for ours, theirs in zip(startup.runner.weights, load(startup.model, tmp_path), strict=True):
            assert ours.dtype == theirs.dtype
            assert np.array_equal(np.asarray(ours).view(np.uint8), np.asarray(theirs).view(np.uint8))

        name = "layers.0.mlp.down"
        bad = trained(4)[plain.parameter_names.index(name)].at[3, 5].set(np.nan)
        with pytest.raises(InvalidParameterError, match=f"'{name}' has NaN or infinity, which cannot be quantized"):
            llm.update_weights({name: bad}, partial=True)
        assert tokens() == seen[4]
        assert llm.sleep(2)
        llm.update_weights(trained(3))
        llm.wake_up()
        assert tokens() == seen[3]


PHI = {
    "architectures": ["PhiForCausalLM"],
    "vocab_size": 157,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 112,
    "max_position_embeddings": 128,
}


@pytest.fixture
def phi(tmp_path) -> Iterator[Model]:
    """Of the family in docs/adding_a_model.md."""
    page = (Path(__file__).parents[1] / "docs" / "adding_a_model.md").read_text(encoding="utf-8")
    found = re.search(r'```python title="phi.py"\n(.*?)```', page, re.DOTALL)
    assert found is not None
    (tmp_path / "phi_of_the_page.py").write_text(found[1], encoding="utf-8")
    with mock.patch.dict(registry._families), mock.patch.dict(registry._abouts), mock.patch.dict(sys.modules):
        registry._import_file(tmp_path / "phi_of_the_page.py")
        yield build(ModelConfig.from_dict(PHI), "float32")


def test_a_family_from_outside_the_package_takes_weights_in_every_form(phi):
    reference, first = Reference(phi), phi.init(0)
    with LLM(PHI, weights=first, **TINY_ENGINE) as llm:
        for i, form in enumerate(("huggingface", "parameters", "state", "module")):
            weights = phi.init(i)
            llm.update_weights(llm.engine.startup.updater.read(weights, form))
            outputs = llm.generate(PROMPTS, params(5), use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == reference.greedy(weights)
