"""Text in, text out, on the embedded model: chat templates, stop strings, streaming, and transformers' own output."""

from dataclasses import replace

import pytest

from jpaged import LLM, RequestOutputKind, SamplingParams
from jpaged.api.errors import InvalidParameterError, InvalidPromptError
from jpaged.assets import demo_model_path
from tests.tiny_models import DEMO_ENGINE

pytestmark = pytest.mark.xdist_group("text")  # one worker, which compiles once

REQUEST = [{"role": "user", "content": "Tell me a story about a fox and a lantern."}]
GREEDY = SamplingParams(temperature=0, max_tokens=300)


@pytest.fixture(scope="module")
def llm():
    return LLM(**DEMO_ENGINE, verbose=False)


@pytest.fixture(scope="module")
def story(llm):
    return llm.chat(REQUEST, GREEDY, use_tqdm=False)[0]


def test_the_embedded_model_tells_the_story_that_was_asked_for(story):
    text = story.outputs[0].text
    assert "fox" in text
    assert "lantern" in text
    assert len(text.split()) > 60
    assert text.rstrip()[-1] in '.!"'
    assert (story.outputs[0].finish_reason, story.outputs[0].stop_reason) == ("stop", None)


def test_greedy_text_is_that_of_transformers(llm, story):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    prompts = [
        REQUEST,
        [{"role": "user", "content": "Hello!"}],
        [*REQUEST, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Why not?"}],
    ]
    outputs = llm.chat(prompts, GREEDY, use_tqdm=False)
    for messages, output in zip(prompts, outputs, strict=True):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert output.prompt_token_ids == list(ids)
        with torch.no_grad():
            generated = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=300)[0, len(ids) :]
        assert output.outputs[0].token_ids == generated.tolist()
        assert output.outputs[0].text == tokenizer.decode(generated, skip_special_tokens=True)
    assert outputs[0].outputs[0].text == story.outputs[0].text


@pytest.mark.parametrize(
    "pick",
    [
        lambda text: ["lantern"],
        lambda text: [text[43:61]],  # across words and tokens
        lambda text: ["zebra", text[120:130], text[100:104]],
        lambda text: ["."],
        lambda text: [text[:1]],
    ],
    ids=["word", "span", "several", "period", "first-character"],
)
def test_a_stop_string_cuts_the_text_before_its_first_occurrence(llm, story, pick):
    text = story.outputs[0].text
    stop = pick(text)
    cut = min((text.index(s), s) for s in stop if s in text)
    completion = llm.chat(REQUEST, replace(GREEDY, stop=stop), use_tqdm=False)[0].outputs[0]
    assert completion.text == text[: cut[0]]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", cut[1])
    assert completion.token_ids == story.outputs[0].token_ids[: len(completion.token_ids)]
    kept = replace(GREEDY, stop=stop, include_stop_str_in_output=True)
    assert llm.chat(REQUEST, kept, use_tqdm=False)[0].outputs[0].text == text[: cut[0]] + cut[1]


def test_each_of_several_samples_is_cut_at_its_own_stop_string(llm):
    params = SamplingParams(n=4, seed=3, max_tokens=60, temperature=1.2)
    free = llm.chat(REQUEST, params, use_tqdm=False)[0]
    stopped = llm.chat(REQUEST, replace(params, stop=[" the"]), use_tqdm=False)[0]
    assert len({completion.text for completion in free.outputs}) == 4
    assert any(" the" in completion.text for completion in free.outputs)
    for before, after in zip(free.outputs, stopped.outputs, strict=True):
        assert after.text == before.text.split(" the")[0]
        assert after.stop_reason == (" the" if " the" in before.text else None)
    llm.engine.core.check_integrity()
    assert llm.get_metrics().num_used_blocks == 0


def test_after_a_stop_string_everything_is_free_again(llm):
    llm.chat([REQUEST] * 5, replace(GREEDY, stop="the"), use_tqdm=False)
    llm.engine.core.check_integrity()
    assert llm.get_metrics().num_used_blocks == 0
    assert not llm.engine.has_unfinished_requests()


def test_streamed_text_joins_to_the_whole_and_never_shows_a_stop_string(llm, story):
    prompt = {"prompt_token_ids": story.prompt_token_ids}
    text = story.outputs[0].text
    stop = text[200:209]
    streaming = replace(GREEDY, output_kind=RequestOutputKind.DELTA)
    llm.engine.add_request("whole", prompt, streaming)
    llm.engine.add_request("cut", prompt, replace(streaming, stop=stop))
    pieces = {"whole": [], "cut": []}
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            pieces[output.request_id].append(output.outputs[0].text)
    assert "".join(pieces["whole"]) == text
    assert "".join(pieces["cut"]) == text[: text.index(stop)]
    assert len(pieces["whole"]) > 20


def test_bad_words_do_not_occur(llm, story):
    words = ["fox", story.outputs[0].text.split()[-1].strip('.!"')]
    assert all(word in story.outputs[0].text for word in words)
    text = llm.chat(REQUEST, replace(GREEDY, bad_words=words), use_tqdm=False)[0].outputs[0].text
    assert len(text) > 20
    assert not any(f" {word} " in text for word in words)


def test_logprobs_carry_the_tokens_text(llm, story):
    output = llm.chat(REQUEST, replace(GREEDY, logprobs=1, max_tokens=20), use_tqdm=False)[0].outputs[0]
    spoken = "".join(
        position[token].decoded_token for token, position in zip(output.token_ids, output.logprobs, strict=True)
    )
    assert spoken.strip() == output.text.strip()


def test_without_detokenize_only_tokens_come_back(llm, story):
    output = llm.chat(REQUEST, replace(GREEDY, detokenize=False), use_tqdm=False)[0].outputs[0]
    assert output.text == ""
    assert output.token_ids == story.outputs[0].token_ids


def test_generate_takes_text_and_continue_final_message_goes_on_where_it_ends(llm):
    output = llm.generate("Once upon a time", replace(GREEDY, max_tokens=12), use_tqdm=False)[0]
    assert output.prompt == "Once upon a time"
    assert output.outputs[0].text
    begun = [*REQUEST, {"role": "assistant", "content": "Once upon a time, a fox"}]
    answer = llm.chat(begun, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)[
        0
    ].outputs[0]
    assert answer.text.strip()
    assert not answer.text.startswith("Once upon")


@pytest.mark.parametrize(
    "messages", [[], "hello", [{"role": "user"}], [{"role": 5, "content": "x"}], [REQUEST, [{"content": "x"}]]]
)
def test_malformed_messages_are_refused(llm, messages):
    with pytest.raises(InvalidPromptError):
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()


def test_an_empty_prompt_is_refused(llm):
    with pytest.raises(InvalidPromptError, match="empty"):
        llm.generate("", GREEDY, use_tqdm=False)


def test_too_many_bad_words_are_refused(llm):
    with pytest.raises(InvalidParameterError, match="bad_words"):
        llm.generate("Once", SamplingParams(bad_words=[f"word{i}" for i in range(200)]), use_tqdm=False)
