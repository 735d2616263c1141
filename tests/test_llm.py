"""The Python API on a tiny random model: what a user may pass, what comes back, and what is refused."""

import copy
import gc
import json
import os
import pickle
import signal
import threading
import time
from dataclasses import replace

import jax
import jax.monitoring
import numpy as np
import pytest

from jpaged import LLM, EngineArgs, LLMEngine, PoolingParams, RequestOutputKind, SamplingParams
from jpaged.api.errors import (
    CheckpointError,
    EngineDeadError,
    InvalidParameterError,
    InvalidPromptError,
    JPagedError,
    ModelNotFoundError,
    OutOfMemoryError,
    UnsupportedModelError,
    UnsupportedParameterError,
)
from jpaged.assets import demo_model_path
from jpaged.frontend import llm_engine
from jpaged.processes import replicas
from tests.tiny_models import DEMO_ENGINE, MAX_LENGTH, TINY_ENGINE, VOCAB_SIZE, tiny_model, write_tiny_model

pytestmark = pytest.mark.xdist_group("llm")  # one worker, which compiles once

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

_compiled: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **kwargs: _compiled.append(event) if event == COMPILE_EVENT else None
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(write_tiny_model(tiny_model("llama-gqa-d64-tied"), tmp_path_factory.mktemp("model"), use_torch=False))


@pytest.fixture(scope="module")
def options(directory):
    return {"model": directory, **TINY_ENGINE}


@pytest.fixture(scope="module")
def llm(options):
    return LLM(**options)


@pytest.fixture
def engine(llm, options):
    """An engine of its own on the module's runner."""
    return LLMEngine(EngineArgs(**options), llm.engine.startup)


def test_a_full_collection_does_not_visit_what_the_tokenizer_imported(options, llm):
    args = replace(EngineArgs(**options), skip_tokenizer_init=False, tokenizer=str(demo_model_path()))
    engine = LLMEngine(args, llm.engine.startup)
    assert engine.tokenizer is not None
    assert len(gc.get_objects()) < 10_000


def test_what_ends_a_text_is_said_by_the_generation_config_then_by_the_model_then_by_the_tokenizer(
    options, llm, tmp_path, monkeypatch
):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 10**6], "temperature": 0.3}))
    args, startup = EngineArgs(**options, generation_config=str(tmp_path)), llm.engine.startup
    engine = LLMEngine(args, startup)
    assert (engine.eos_token_ids, engine.default_sampling_params.temperature) == ((9,), 0.3)
    (tmp_path / "generation_config.json").write_text("{}")
    assert LLMEngine(args, startup).eos_token_ids == startup.model.config.eos_token_ids == (2,)
    monkeypatch.setattr(startup.model, "config", replace(startup.model.config, eos_token_ids=()))
    assert LLMEngine(args, startup).eos_token_ids == ()
    with_tokenizer = replace(args, skip_tokenizer_init=False, tokenizer=str(demo_model_path()))
    assert LLMEngine(with_tokenizer, startup).eos_token_ids == (2,)
    of_clients = LLMEngine(with_tokenizer, startup, with_tokenizer=False)  # as engine processes have it
    assert (of_clients.tokenizer, of_clients.eos_token_ids) == (None, (2,))


def test_a_generation_config_that_is_not_there_is_named_before_anything_starts(options, tmp_path, monkeypatch):
    monkeypatch.setattr(llm_engine, "_start", None)
    monkeypatch.setattr(replicas, "EngineProcesses", None)
    args = EngineArgs(**options, generation_config=str(tmp_path / "absent"))
    for start in (lambda: LLMEngine(args), lambda: replicas.ReplicatedEngine(replace(args, data_parallel_size=2))):
        with pytest.raises(InvalidParameterError, match=r"absent' is no directory that has a generation_config"):
            start()


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, rng.integers(1, 50)).tolist() for _ in range(count)]


def tokens_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_idle(llm: LLM) -> None:
    llm.engine.core.check_integrity()
    metrics = llm.get_metrics()
    assert (metrics.num_running, metrics.num_waiting, metrics.num_used_blocks) == (0, 0, 0)


# --- what can be asked ------------------------------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_prompts_with_their_own_parameters(llm):
    prompts = prompts_of(5)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5, 3, 7)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(tokens) for tokens in tokens_of(outputs)] == [9, 1, 5, 3, 7]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert_idle(llm)


@pytest.mark.parametrize("form", [list, np.array, lambda p: {"prompt_token_ids": p}], ids=["list", "array", "dict"])
def test_token_ids_may_come_in_any_form(llm, form):
    prompt = prompts_of(1)[0]
    expected = tokens_of(llm.generate([prompt], GREEDY, use_tqdm=False))
    assert tokens_of(llm.generate([form(prompt)], GREEDY, use_tqdm=False)) == expected


def test_a_list_of_integers_is_one_prompt_and_no_prompts_give_no_outputs(llm):
    assert len(llm.generate([5, 6, 7], GREEDY, use_tqdm=False)) == 1
    assert len(llm.generate(np.array([5, 6, 7]), GREEDY, use_tqdm=False)) == 1
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=7, max_tokens=12, ignore_eos=True),
        SamplingParams(seed=-3, max_tokens=12, temperature=1.7, top_p=0.9, ignore_eos=True),
        SamplingParams(seed=2**62, max_tokens=12, top_k=20, frequency_penalty=0.5, repetition_penalty=1.3),
        SamplingParams(seed=0, max_tokens=12, min_p=0.02, min_tokens=5, logit_bias={5: 4.0}, logprobs=2),
    ],
    ids=["plain", "top-p", "penalties", "min-p"],
)
def test_a_seeded_request_gives_the_same_tokens_alone_and_among_31_others(llm, params):
    prompt, *others = prompts_of(32, seed=1)
    alone = tokens_of(llm.generate([prompt], params, use_tqdm=False))[0]
    crowd = [SamplingParams(temperature=t % 3, max_tokens=5 + t, seed=t if t % 2 else None) for t in range(31)]
    among = tokens_of(llm.generate([*others, prompt], [*crowd, params], use_tqdm=False))[-1]
    assert among == alone
    other_seed = tokens_of(llm.generate([prompt], replace(params, seed=params.seed + 1), use_tqdm=False))[0]
    assert other_seed != alone


def test_equal_engines_give_unseeded_requests_equal_tokens_and_other_seeds_other_ones(llm, options):
    params = SamplingParams(max_tokens=10, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)

    def run(seed: int) -> list[int]:
        engine = LLMEngine(EngineArgs(**options, seed=seed), llm.engine.startup)
        engine.add_request("a", [3, 4, 5], params)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        return outputs[0].outputs[0].token_ids

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_allowed_tokens_stand_where_other_constraints_leave_none(llm):
    params = SamplingParams(temperature=0, allowed_token_ids=[9], stop_token_ids=[9], min_tokens=4, max_tokens=8)
    assert tokens_of(llm.generate([[3]], params, use_tqdm=False)) == [[9] * 5]


def test_logprobs_are_of_the_model_and_in_order(llm):
    prompt = prompts_of(1, seed=2)[0]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    output = llm.generate([prompt], params, use_tqdm=False)[0]
    completion = output.outputs[0]
    assert len(completion.logprobs) == 6
    for token, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert position[token].rank == 1  # greedy takes the most likely
        assert len(position) == 3
        values = [entry.logprob for entry in position.values()]
        assert values == sorted(values, reverse=True)
    sampled = sum(p[t].logprob for t, p in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(sampled)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    assert all(token in position for token, position in zip(prompt[1:], output.prompt_logprobs[1:], strict=True))
    # Scoring the whole text as a prompt gives the same figures.
    again = llm.generate(
        [prompt + completion.token_ids], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False
    )[0]
    for token, position, scored in zip(
        completion.token_ids, completion.logprobs, again.prompt_logprobs[len(prompt) :], strict=True
    ):
        assert scored[token].logprob == pytest.approx(position[token].logprob, abs=1e-4)


def test_a_stop_token_ends_the_output_and_is_reported(llm):
    prompt = prompts_of(1, seed=3)[0]
    greedy = tokens_of(llm.generate([prompt], GREEDY, use_tqdm=False))[0]
    stop = greedy[3]
    params = replace(GREEDY, stop_token_ids=[stop])
    completion = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    assert completion.token_ids == greedy[: greedy.index(stop) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    later = llm.generate([prompt], replace(params, min_tokens=6), use_tqdm=False)[0].outputs[0]
    assert len(later.token_ids) >= 6
    assert stop not in later.token_ids[:6]


def test_streamed_deltas_join_to_the_whole(engine):
    prompt = prompts_of(1, seed=4)[0]
    for kind in RequestOutputKind:
        engine.add_request(kind.name, prompt, replace(GREEDY, output_kind=kind))
    seen: dict[str, list] = {kind.name: [] for kind in RequestOutputKind}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id].append(output.outputs[0].token_ids)
    whole = seen["FINAL_ONLY"][0]
    assert len(seen["FINAL_ONLY"]) == 1
    assert [token for tokens in seen["DELTA"] for token in tokens] == whole
    assert seen["CUMULATIVE"] == [whole[: i + 1] for i in range(len(whole))]


def test_an_aborted_request_frees_everything_and_the_others_go_on(engine):
    prompts = prompts_of(6, seed=5)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, replace(GREEDY, max_tokens=20, output_kind=RequestOutputKind.FINAL_ONLY))
    for _ in range(4):
        engine.step()
    engine.abort_request(["1", "4", "unknown"])
    finished = {}
    while engine.has_unfinished_requests():
        finished.update((output.request_id, output) for output in engine.step())
    assert sorted(finished) == ["0", "2", "3", "5"]
    assert all(len(output.outputs[0].token_ids) == 20 for output in finished.values())
    engine.core.check_integrity()
    assert engine.get_metrics().num_used_blocks == 0


def test_nothing_compiles_after_a_start_that_compiles_all(options):
    llm = LLM(**options, compile_programs="at_start")
    prompts = prompts_of(20, seed=6)
    kinds = [
        GREEDY,
        SamplingParams(max_tokens=9, top_p=0.9, top_k=30),
        SamplingParams(max_tokens=5, presence_penalty=1.0, logprobs=4, prompt_logprobs=1),
        SamplingParams(max_tokens=3, logit_bias={3: 5.0}, allowed_token_ids=[3, 4, 5], min_tokens=2),
    ]
    before = len(_compiled)
    llm.generate(prompts, [kinds[i % 4] for i in range(20)], use_tqdm=False)
    llm.generate(prompts[:1], GREEDY, use_tqdm=False)
    assert len(_compiled) == before
    jax.jit(lambda x: x * 3 + before)(np.float32(1))  # the counter counts
    assert len(_compiled) > before


def test_rare_parameters_give_the_same_in_sizes_that_their_programs_do_not_exist_for(llm, options):
    uneven = {"max_num_seqs": 8, "decode_buckets": (6, 8), "token_buckets": (48, 64), "max_num_batched_tokens": 64}
    other = LLM(**{**options, **uneven})
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, presence_penalty=1.0, logprobs=2, prompt_logprobs=1)
    prompts = prompts_of(5, seed=12)
    for expected, output in zip(
        llm.generate(prompts, params, use_tqdm=False), other.generate(prompts, params, use_tqdm=False), strict=True
    ):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        ours, theirs = (
            [
                entry.logprob
                for position in (o.prompt_logprobs[1:], o.outputs[0].logprobs)
                for d in position
                for entry in d.values()
            ]
            for o in (output, expected)
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def generate_for_ever(llm, prompts):
    while True:
        llm.generate(prompts, replace(GREEDY, max_tokens=60), use_tqdm=False)
        time.sleep(0)


def test_an_interrupt_in_the_middle_leaves_the_llm_usable(llm):
    prompts = prompts_of(8, seed=8)
    expected = tokens_of(llm.generate(prompts, replace(GREEDY, max_tokens=60), use_tqdm=False))
    for delay_s in (0.02, 0.03, 0.05, 0.08):
        timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            generate_for_ever(llm, prompts)
        timer.join()
        assert_idle(llm)
        assert tokens_of(llm.generate(prompts, replace(GREEDY, max_tokens=60), use_tqdm=False)) == expected


def test_threads_that_call_one_llm_take_turns_and_each_gets_its_own(llm):
    prompts = prompts_of(6, seed=9)
    alone = [tokens_of(llm.generate([prompt], GREEDY, use_tqdm=False)) for prompt in prompts]
    found = {}

    def call(i: int) -> None:
        found[i] = tokens_of(llm.generate([prompts[i]], GREEDY, use_tqdm=False))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(6)] == alone
    assert_idle(llm)


def test_generate_takes_no_outputs_of_requests_that_were_added_to_the_engine_directly(llm):
    llm.engine.add_request("mine", {"prompt_token_ids": [1, 2, 3]}, GREEDY)
    with pytest.raises(JPagedError, match="added to it directly"):
        llm.generate([[4, 5, 6]], GREEDY, use_tqdm=False)
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    assert outputs[-1].request_id == "mine"
    assert outputs[-1].finished
    assert_idle(llm)


@pytest.mark.parametrize("priority", [1.5, "1", b"1"])
def test_a_priority_that_is_no_integer_nor_a_list_is_refused(llm, priority):
    with pytest.raises(InvalidParameterError, match="priority must be an integer or a list"):
        llm.generate([[1, 2]], GREEDY, use_tqdm=False, priority=priority)


@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("generate", "lora_request"),
        ("generate", "tokenization_kwargs"),
        ("chat", "lora_request"),
        ("chat", "tokenization_kwargs"),
        ("chat", "mm_processor_kwargs"),
        ("embed", "lora_request"),
        ("embed", "tokenization_kwargs"),
    ],
)
def test_options_of_vllm_that_are_not_supported_are_refused_by_name(llm, method, option):
    prompts = [{"role": "user", "content": "Hi"}] if method == "chat" else [[1, 2]]
    with pytest.raises(UnsupportedParameterError, match=f"^{option} is not supported: .* Got {{'a': 1}}"):
        getattr(llm, method)(prompts, **{option: {"a": 1}})


def test_an_option_that_is_not_supported_and_asks_for_nothing_is_taken(llm):
    asked = llm.generate([[1, 2]], GREEDY, lora_request=None, tokenization_kwargs=None)
    assert asked[0].outputs == llm.generate([[1, 2]], GREEDY)[0].outputs
    with pytest.raises(UnsupportedParameterError, match="tokenization_kwargs is not supported"):
        llm.engine.add_request("a", [1, 2], GREEDY, lora_request=None, tokenization_kwargs={})
    assert_idle(llm)


def test_one_priority_is_that_of_all_prompts(llm, monkeypatch):
    seen = []
    check = llm.engine.check_request
    monkeypatch.setattr(llm.engine, "check_request", lambda *a, **kw: seen.append(kw["priority"]) or check(*a, **kw))
    for priority in (5, [5, 5, 5], None):
        outputs = llm.generate([[1, 2]] * 3, GREEDY, use_tqdm=False, priority=priority)
        assert len(outputs) == 3
    assert seen == [5] * 6 + [0] * 3


def test_methods_that_only_vllm_has_are_named_with_what_takes_their_place(llm):
    with pytest.raises(AttributeError, match=r"LLM has no 'encode'; `embed` gives vectors"):
        llm.encode(["a"])
    with pytest.raises(AttributeError, match=r"LLM has no 'llm_engine'; the engine is `engine`"):
        _ = llm.llm_engine
    with pytest.raises(AttributeError, match=r"LLM has no 'generat'\.$"):
        _ = llm.generat
    assert not hasattr(llm, "classify")
    with pytest.raises(AttributeError, match=r"LLMEngine has no 'vllm_config'; `args` has the options\.$"):
        _ = llm.engine.vllm_config


def test_a_progress_bar_that_is_none_is_refused(llm):
    with pytest.raises(InvalidParameterError, match="use_tqdm"):
        llm.generate([[1, 2]], GREEDY, use_tqdm=5)
    assert_idle(llm)


@pytest.mark.parametrize("arrival_time", ["now", float("nan"), float("inf"), True])
def test_an_arrival_time_that_is_no_time_is_refused(llm, arrival_time):
    with pytest.raises(InvalidParameterError, match="arrival_time"):
        llm.engine.add_request("a", [1, 2], GREEDY, arrival_time=arrival_time)
    assert_idle(llm)


def test_aborting_what_is_no_request_changes_nothing(llm):
    with pytest.raises(InvalidParameterError, match="request_ids"):
        llm.engine.abort_request(5)
    llm.engine.abort_request([None, ["a"], "unknown"])
    assert_idle(llm)


def test_a_second_round_hits_the_prefix_cache_until_it_is_reset(llm):
    prompt = list(range(3, 43))
    llm.reset_prefix_cache()
    assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == 39
    assert llm.reset_prefix_cache()
    assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_a_prompt_with_a_salt_shares_blocks_only_with_those_of_that_salt(llm):
    llm.reset_prefix_cache()
    prompt = list(range(3, 43))
    salted = {"prompt_token_ids": prompt, "cache_salt": "a"}
    assert llm.pin_prefix(salted) == 40
    outputs = llm.generate([prompt, salted], GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 39]
    assert not llm.unpin_prefix(prompt)
    assert llm.unpin_prefix(salted)


def test_a_pinned_prefix_outlives_a_pool_full_of_other_prompts(llm, options):
    few = LLM(**options | {"num_gpu_blocks_override": 48})
    prompt = list(range(3, 43))
    assert few.pin_prefix(prompt) == 40
    few.generate(prompts_of(30, seed=9), GREEDY, use_tqdm=False)
    output = few.generate([[*prompt, 50]], GREEDY, use_tqdm=False)[0]
    assert output.num_cached_tokens == 40
    assert tokens_of([output]) == tokens_of(llm.generate([[*prompt, 50]], GREEDY, use_tqdm=False))
    assert few.get_metrics().num_used_blocks == 10
    assert few.unpin_prefix(prompt)
    assert_idle(few)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([[]], "no tokens"),
        ([[1, VOCAB_SIZE]], rf"prompt_token_ids\[1\] is {VOCAB_SIZE}"),
        ([[-1]], "outside the vocabulary"),
        ([[5] * 128], "128 tokens.*max_model_len=128"),
        ([[1.5]], "must be an integer"),
        ([[True]], "must be an integer"),
        ([[3, 4, True]], r"prompt_token_ids\[2\] must be an integer"),
        (["text"], "skip_tokenizer_init"),
        ([{"text": "x"}], "prompt_token_ids"),
        ([{"prompt_token_ids": "12"}], "list of integers"),
        ([None], "must be a string"),
        (7, "prompts must be"),
    ],
)
def test_a_bad_prompt_is_refused_by_name_and_nothing_runs(llm, prompt, says):
    with pytest.raises(InvalidPromptError, match=says):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert_idle(llm)


def test_one_bad_prompt_among_good_ones_is_named_and_none_has_run(llm):
    steps = llm.get_metrics().num_steps
    with pytest.raises(InvalidPromptError, match=r"prompts\[2\]"):
        llm.generate([[3], [4], [VOCAB_SIZE + 5], [6]], GREEDY, use_tqdm=False)
    assert_idle(llm)
    assert llm.get_metrics().num_steps == steps
    assert len(llm.generate([[3], [4]], GREEDY, use_tqdm=False)) == 2


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (SamplingParams(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids"),
        (SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias"),
        (SamplingParams(allowed_token_ids=[0, VOCAB_SIZE]), "allowed_token_ids"),
        (SamplingParams(stop="end"), "stop needs a tokenizer"),
        (SamplingParams(bad_words=["no"]), "bad_words needs a tokenizer"),
    ],
)
def test_parameters_that_do_not_fit_the_model_are_refused_by_name(llm, params, says):
    with pytest.raises(InvalidParameterError, match=says):
        llm.generate([[3]], params, use_tqdm=False)
    assert_idle(llm)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens=20 is above max_tokens=10"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": "x", "detokenize": False}, "detokenize"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(65))}, "at most 64"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "at most 300"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": ["\ud800"]}, "bad_words holds a lone surrogate"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"output_kind": 9}, "output_kind"),
        ({"n": 0}, "n must be"),
        ({"n": 3, "best_of": 2}, "best_of=2 is below n=3"),
        ({"best_of": 0}, "best_of=0 is below n=1"),
        ({"best_of": 1.5}, "best_of must be an integer"),
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused_by_name(fields, says):
    with pytest.raises(InvalidParameterError, match=says):
        SamplingParams(**fields)


def test_parameters_with_another_output_kind_are_equal_in_all_else():
    params = SamplingParams(n=2, temperature=0.5, stop=["x"], logit_bias={3: 1.0}, seed=4)
    final = params.reporting(RequestOutputKind.FINAL_ONLY)
    assert final == replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
    assert params.output_kind == RequestOutputKind.CUMULATIVE


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"max_model_len": MAX_LENGTH + 1}, InvalidParameterError, f"max_model_len={MAX_LENGTH + 1}"),
        ({"num_gpu_blocks_override": 16}, OutOfMemoryError, "max_model_len=128 does not fit"),
        ({"max_model_len": 1}, InvalidParameterError, "max_model_len"),
        ({"num_gpu_blocks_override": 2**26}, OutOfMemoryError, "Lower num_gpu_blocks_override"),
        ({"block_size": 3}, InvalidParameterError, "block_size"),
        ({"num_gpu_blocks_override": 10**12}, InvalidParameterError, "num_gpu_blocks_override must be at most"),
        ({"max_num_batched_tokens": 10**12}, InvalidParameterError, "max_num_batched_tokens must be at most"),
        ({"max_num_seqs": 10**7}, InvalidParameterError, "max_num_seqs must be at most"),
        ({"pipeline_depth": 10**9}, InvalidParameterError, "pipeline_depth must be at most"),
        ({"seed": 2**64}, InvalidParameterError, "seed must be at most"),
        ({"model": "x" * 5000}, ModelNotFoundError, "cannot be a path"),
        ({"gpu_memory_utilization": 1.5}, InvalidParameterError, "gpu_memory_utilization"),
        ({"dtype": "int8"}, InvalidParameterError, "dtype"),
        ({"load_format": "pt"}, InvalidParameterError, "load_format"),
        ({"scheduling_policy": "random"}, InvalidParameterError, "scheduling_policy"),
        (
            {"kernel_backend": "cutlass"},
            InvalidParameterError,
            "kernel_backend must be None or one of 'hopper', 'triton', 'cudnn', 'xla', got 'cutlass'. Correct the name",
        ),
        ({"kernel_backend": ""}, InvalidParameterError, "kernel_backend must be the name of a backend"),
        ({"kernel_backend": 5}, InvalidParameterError, "kernel_backend must be the name of a backend"),
        ({"kernel_backend": "hopper"}, InvalidParameterError, "kernel_backend='hopper' cannot serve this"),
        ({"kernel_backend": "mosaic"}, InvalidParameterError, "kernel_backend='hopper' cannot serve this"),
        ({"kernel_backend": "triton"}, InvalidParameterError, "kernel_backend='triton' cannot serve this"),
        ({"preemption_mode": "kill"}, InvalidParameterError, "preemption_mode must be one of"),
        ({"swap_space": -1}, InvalidParameterError, "swap_space must be a number of GiB"),
        ({"swap_space": 1e9}, InvalidParameterError, "swap_space=1000000000.0 exceeds the .* GiB of memory"),
        ({"decode_buckets": (4,)}, InvalidParameterError, "decode_buckets must end with max_num_seqs=32"),
        ({"token_buckets": (8, 4)}, InvalidParameterError, "token_buckets must ascend"),
        ({"enforce_eager": True}, InvalidParameterError, "enforce_eager"),
        ({"model": "/no/such/directory"}, ModelNotFoundError, "/no/such/directory"),
    ],
)
def test_an_engine_option_that_cannot_be_is_refused_by_name(options, changes, error, says):
    with pytest.raises(error, match=says):
        LLM(**(options | changes))


def test_a_checkpoint_of_an_unknown_architecture_or_without_weights_is_refused(options, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    with pytest.raises(UnsupportedModelError, match="NoSuchModel"):
        LLM(**(options | {"model": str(tmp_path)}))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LLM(**(options | {"model": str(empty)}))


@pytest.mark.parametrize(
    "fields",
    [{"priority": "high"}, {"priority": 2**70}, {"priority": 1.5}, {"cache_salt": 5}, {"cache_salt": "\ud800"}],
    ids=str,
)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_bad_request_field_is_refused_by_name_and_another_request_finishes(llm, options, policy, fields):
    engine = LLMEngine(EngineArgs(**options, scheduling_policy=policy), llm.engine.startup)
    engine.add_request("good", [3, 4], GREEDY)
    with pytest.raises(InvalidParameterError, match=next(iter(fields))):
        engine.add_request("bad", [3, 4], GREEDY, **fields)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].finished
    assert {output.request_id for output in outputs} == {"good"}


def test_an_engine_on_a_used_runner_must_ask_for_the_same(llm, options):
    for changes in ({"block_size": 8}, {"dtype": "bfloat16"}, {"kernel_backend": "xla"}, {"max_num_seqs": 33}):
        with pytest.raises(InvalidParameterError, match=next(iter(changes))):
            LLMEngine(EngineArgs(**options | changes), llm.engine.startup)


def run(engine: LLMEngine, prompts: list[list[int]], output_len: int) -> dict[str, list[int]]:
    """Greedy tokens by request."""
    params = replace(GREEDY, max_tokens=output_len, output_kind=RequestOutputKind.FINAL_ONLY)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    tokens = {}
    while engine.has_unfinished_requests():
        tokens |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    return tokens


def test_engines_that_take_turns_on_one_runner_know_nothing_of_each_others_blocks(llm, options):
    one, other = (LLMEngine(EngineArgs(**options), llm.engine.startup) for _ in range(2))
    prompt = list(range(3, 43))
    expected = run(one, [prompt], 8)
    one.add_request("left", prompt, GREEDY)
    for _ in range(3):
        one.step()
    one.abort_request("left")  # steps are in flight for it
    run(other, prompts_of(8, seed=3), 40)
    assert run(one, [prompt], 8) == expected
    one.add_request("lost", prompt, GREEDY)
    run(other, [prompt], 8)
    with pytest.raises(EngineDeadError, match="1 unfinished requests were lost when another engine ran"):
        one.step()
    one.abort_request("lost")
    assert run(one, [prompt], 8) == expected
    one.core.check_integrity()


def test_a_second_request_of_the_same_id_is_refused_and_the_first_goes_on(engine):
    engine.add_request("a", [3, 4], GREEDY)
    with pytest.raises(InvalidParameterError, match="'a'"):
        engine.add_request("a", [5], GREEDY)
    last = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            last = output
    assert last.prompt_token_ids == [3, 4]
    assert len(last.outputs[0].token_ids) == 8


def test_an_engine_whose_device_fails_says_so_from_then_on(engine, monkeypatch):
    engine.add_request("a", [3, 4], GREEDY)
    monkeypatch.setattr(engine.core, "_executor", None)
    with pytest.raises(EngineDeadError):
        engine.step()
    assert not engine.has_unfinished_requests()
    with pytest.raises(EngineDeadError):
        engine.add_request("b", [3], GREEDY)
    monkeypatch.setattr(engine.core, "abort", None)  # its scheduler may be in the middle of something
    engine.abort_request("a")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of JAX, at a fork
def test_an_engine_is_refused_in_a_forked_process(engine):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            engine.add_request("a", [3, 4], GREEDY)
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with open(read, "rb") as answer:
        assert answer.read().startswith(b"EngineDeadError: The engine belongs to the process that this one was forked")


def test_a_closed_llm_has_freed_its_device_and_says_so(options):
    prompts, others = prompts_of(3), jax.live_arrays()
    with LLM(**options) as llm:
        llm.generate(prompts, GREEDY, use_tqdm=False)
        startup = llm.engine.startup
        other = LLMEngine(EngineArgs(**options), startup)
        llm.engine.add_request("a", [3, 4], GREEDY)
        llm.engine.step()  # is under way when it closes
        known = set(map(id, others))
        held = [array for array in jax.live_arrays() if id(array) not in known]
        assert sum(array.nbytes for array in held) > startup.memory.pool + startup.memory.weights
    assert sum(array.nbytes for array in held if not array.is_deleted()) < 10_000  # what steps under way bring
    llm.close()
    llm.engine.abort_request("a")
    assert not llm.engine.has_unfinished_requests()
    for call in (
        lambda: llm.generate(prompts, GREEDY, use_tqdm=False),
        lambda: llm.engine.add_score_request("b", [3, 4]),
        lambda: llm.pin_prefix([3, 4]),
        lambda: llm.unpin_prefix([3, 4]),
        llm.reset_prefix_cache,
        llm.get_metrics,
        llm.engine.step,
    ):
        with pytest.raises(EngineDeadError, match=r"The engine was closed; start another one\."):
            call()
    other.add_request("a", [3, 4], GREEDY)
    with pytest.raises(EngineDeadError, match="The runner was closed"):
        other.step()
    with pytest.raises(InvalidParameterError, match=r"startup .* was closed"):
        LLMEngine(EngineArgs(**options), startup)


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda function: function.__name__)
def test_an_llm_can_be_neither_pickled_nor_copied_and_says_what_to_do(llm, duplicate):
    with pytest.raises(JPagedError, match=r"An LLM cannot be pickled or copied.* make one where it is to run"):
        duplicate(llm)


def test_the_tokenizer_is_that_of_transformers():
    with LLM(**DEMO_ENGINE, verbose=False) as demo:
        hf = demo.get_tokenizer()
        assert hf.bos_token_id == 1
        assert len(hf.get_vocab()) == len(hf)
        messages = [{"role": "user", "content": "A snail"}]
        text = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == demo.engine.tokenizer.render_chat(messages)
        changed = demo.get_default_sampling_params()
        changed.max_tokens = 3
        assert demo.get_default_sampling_params().max_tokens != 3


def test_tools_of_a_chat_reach_a_template_that_knows_them_and_no_other():
    tools = [{"type": "function", "function": {"name": "clock", "description": "Tells the time."}}]
    messages = [{"role": "user", "content": "A snail"}]
    template = "{{ tools[0].function.name }}: {{ messages[0].content }}<|end|>"
    with LLM(**DEMO_ENGINE, verbose=False) as demo:
        params = SamplingParams(max_tokens=1)
        (output,) = demo.chat(messages, params, use_tqdm=False, tools=tools, chat_template=template)
        assert demo.get_tokenizer().decode(output.prompt_token_ids) == "clock: A snail<|end|>"
        with pytest.raises(InvalidParameterError, match="tools has no effect"):
            demo.chat(messages, params, use_tqdm=False, tools=tools)
        with pytest.raises(InvalidParameterError, match="tools must be a list"):
            demo.chat(messages, params, use_tqdm=False, tools=[5], chat_template=template)


def test_prompts_are_embedded_and_scored_in_order(llm):
    prompts = prompts_of(5)
    found = llm.embed(prompts, use_tqdm=False)
    assert [output.prompt_token_ids for output in found] == prompts
    vectors = np.array([output.outputs.embedding for output in found])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(5), abs=1e-5)
    for queries, expected in ((prompts[0], vectors @ vectors[0]), (prompts[::-1], (vectors * vectors[::-1]).sum(1))):
        scores = llm.score(queries, prompts, use_tqdm=False)
        assert [one.outputs.score for one in scores] == pytest.approx(expected.tolist(), abs=1e-5)
    plain = llm.embed(prompts[0], pooling_params=PoolingParams(normalize=False), use_tqdm=False)[0].outputs.embedding
    assert np.array(plain) / np.linalg.norm(plain) == pytest.approx(vectors[0], abs=1e-5)
    each = [PoolingParams(normalize=i > 0) for i in range(5)]
    vectors[0] = plain
    mixed = [one.outputs.embedding for one in llm.embed(prompts, pooling_params=each, use_tqdm=False)]
    assert np.array(mixed) == pytest.approx(vectors, abs=1e-5)


def test_what_cannot_be_embedded_is_named(llm):
    with pytest.raises(InvalidParameterError, match="2 entries for 3 documents"):
        llm.score([[3], [4]], [[3], [4], [5]])
    with pytest.raises(InvalidParameterError, match="0 entries for 0 documents"):
        llm.score([], [])
    with pytest.raises(InvalidParameterError, match="pooling_params"):
        llm.embed([3], pooling_params=SamplingParams())
    with pytest.raises(InvalidParameterError, match="pooling_params has 1 entries for 2 prompts"):
        llm.embed([[3], [4]], pooling_params=[PoolingParams()])
    with pytest.raises(InvalidPromptError, match="prompts\\[1\\]"):
        llm.embed([[3], [10**6]])
