"""Fields that agents' clients send, in three dialects: what becomes of each in the chat that is asked for."""

import copy
import json

import pytest

from jpaged.api.outputs import CompletionOutput, RequestOutput
from jpaged.frontend.inputs import ProcessedInput
from jpaged.serving.answers import AnswerContext
from jpaged.serving.dialects import messages, responses
from jpaged.serving.dialects.messages import MessagesRequest
from jpaged.serving.dialects.response_store import ResponseStore
from jpaged.serving.dialects.responses import ResponsesRequest
from jpaged.serving.dialects.responses_answer import ResponsesAnswer
from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import ChatCompletionRequest, ModelCard, refuse_unsupported
from jpaged.serving.turns import Reading, turn_of
from jpaged.text.tokenizer import Tokenizer
from tests.text.tokenizers_for_tests import tokenizer

MODEL = Tokenizer(tokenizer("byte-level"), "some/model")
"""One for all tests: it starts a process when it renders first."""
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think></think>"


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def system(content):
    return {"role": "system", "content": content}


def text(*texts):
    return [{"type": "text", "text": one} for one in texts]


def asked_of_messages(**fields):
    return messages.chat_of(MessagesRequest(**({"max_tokens": 1, "messages": [user("hi")]} | fields)))


def asked_of_responses(store=None, **fields):
    return responses.chat_of(ResponsesRequest(**({"input": "hi"} | fields)), store or ResponseStore())


THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "20"}


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ([system("a"), user("b")], [system("a"), user("b")]),
        ([user("a"), system("b"), system("c")], [user("a\n\nb\n\nc")]),
        ([user("a"), user(text("b", "c"))], [user("a\n\nb\nc")]),
        ([user("a"), assistant("b"), system("c"), user("d")], [user("a"), assistant("b"), user("c\n\nd")]),
        ([assistant(text("a", "b")), assistant("c")], [assistant("ab\n\nc")]),
    ],
)
def test_turns_of_one_role_are_one_turn_and_a_systems_message_joins_its_neighbour(given, asked):
    assert asked_of_messages(messages=given).messages == asked


def test_a_systems_message_behind_a_result_joins_the_result():
    given = [user("a"), assistant([THOUGHT, CALL]), user([RESULT]), system("b")]
    *_, called, result = asked_of_messages(messages=given).messages
    assert result == {"role": "tool", "tool_call_id": "t1", "content": "20\n\nb"}
    assert called["reasoning_content"] == "hm"


def test_several_results_stay_apart_and_one_without_text_is_empty():
    results = [RESULT, {"type": "tool_result", "tool_use_id": "t2"}]
    asked = asked_of_messages(messages=[user("a"), assistant([CALL, CALL | {"id": "t2"}]), user(results)]).messages
    assert [(one.get("tool_call_id"), one["content"]) for one in asked[2:]] == [("t1", "20"), ("t2", "")]


@pytest.mark.parametrize(
    ("block", "field"),
    [
        *((CALL | {"id": None}, "id"), (CALL | {"id": ""}, "id"), (CALL | {"name": ""}, "name")),
        *((CALL | {"input": None}, "input"), (THOUGHT | {"thinking": None}, "thinking")),
        (RESULT | {"tool_use_id": ""}, "tool_use_id"),
    ],
)
def test_a_block_that_lacks_what_it_must_have_is_refused_by_place(block, field):
    given = [user("a"), (user if block["type"] == "tool_result" else assistant)([block])]
    with pytest.raises(ApiError, match=rf"^messages\[1\]\.content\[0\]\.{field} must be"):
        asked_of_messages(messages=given)


@pytest.mark.parametrize("kind", ["function_call", "function_call_output"])
def test_a_call_of_a_response_must_have_its_id(kind):
    item = {"type": kind, "name": "f", "arguments": "{}", "output": "20"}
    with pytest.raises(ApiError, match=r"^input\[0\].call_id must be"):
        asked_of_responses(input=[item])
    assert asked_of_responses(input=[item | {"call_id": "c"}]).messages


def test_a_salt_parts_the_cached_prefixes_of_messages():
    assert asked_of_messages(cache_salt="one").cache_salt == "one"


def test_a_block_that_says_whose_request_it_is_is_not_for_the_model():
    blocks = text("x-anthropic-billing-header: cc_version=2; cch=1f;", "Be kind.", "Be brief.")
    blocks[1]["cache_control"] = {"type": "ephemeral"}
    assert asked_of_messages(system=blocks).messages[0] == system("Be kind.\nBe brief.")


def test_tools_of_messages_may_be_strict_and_have_no_type():
    tool = {"type": None, "name": "f", "input_schema": {"type": "object"}, "strict": True, "cache_control": None}
    (asked,) = asked_of_messages(tools=[tool]).tools
    assert asked["function"] == {"name": "f", "parameters": {"type": "object"}, "strict": True}


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ({"keep": "all"}, ["a", "b", "c"]),
        ({"keep": {"type": "all"}}, ["a", "b", "c"]),
        ({"keep": {"type": "thinking_turns", "value": 2}}, ["b", "c"]),
        ({}, ["c"]),
    ],
)
def test_context_management_says_whose_thinking_is_kept(keep, kept):
    turns = []
    for name in "abc":
        turns += [user("u"), assistant([THOUGHT | {"thinking": name}, *text("so")])]
    edits = {"edits": [{"type": "clear_thinking_20251015", **keep}]}
    asked = asked_of_messages(messages=turns, context_management=edits).messages
    assert [m["reasoning_content"] for m in asked if "reasoning_content" in m] == kept


@pytest.mark.parametrize(
    "edit", [{"type": "clear_tool_uses_20250919"}, {"type": "clear_thinking_20251015", "keep": 0}, {}]
)
def test_other_edits_of_the_context_are_refused_by_place(edit):
    with pytest.raises(ApiError, match=r"context_management.edits\[0\]") as caught:
        asked_of_messages(context_management={"edits": [edit]})
    assert caught.value.param == "context_management"


def test_thinking_may_be_left_out_of_the_answer():
    assert asked_of_messages(thinking={"type": "adaptive"}).include_reasoning is True
    asked = asked_of_messages(thinking={"type": "adaptive", "display": "omitted"})
    assert (asked.include_reasoning, asked.chat_template_kwargs["enable_thinking"]) == (False, True)
    with pytest.raises(ApiError, match=r"thinking\.display"):
        asked_of_messages(thinking={"type": "adaptive", "display": "some"})


def test_a_model_as_anthropics_clients_expect_it():
    body = messages.model_list([ModelCard("m", 0, "root", 64)])
    assert (body["first_id"], body["last_id"], body["has_more"]) == ("m", "m", False)
    (model,) = body["data"]
    assert (model["type"], model["id"], model["created_at"]) == ("model", "m", "1970-01-01T00:00:00Z")
    assert model["max_input_tokens"] == 64


def reading_of(chat, **fields):
    return Reading(turn_of(chat, MODEL), "free", **fields)


def answer_of(body, store):
    """A response's answer, to a model that marks its reasoning."""
    chat = responses.chat_of(body, store)
    chat.chat_template = THINKS
    context = AnswerContext("chatcmpl-12", "m", [ProcessedInput("hi", [5], ())], None, reading_of(chat))
    return ResponsesAnswer(chat, context, body, store)


def output(said, *, reason="stop"):
    return RequestOutput("id", "hi", [5], [CompletionOutput(0, said, [1], None, None, reason)], reason is not None)


def events_in(data):
    return [json.loads(line.removeprefix("data: ")) for line in data.decode().splitlines() if line.startswith("data")]


@pytest.mark.parametrize("asked", [None, "auto", "detailed"])
def test_reasoning_comes_as_a_summary_where_one_is_asked_for(asked):
    body = ResponsesRequest(input="hi", reasoning={"effort": "medium", "summary": asked})
    whole = json.loads(answer_of(body, ResponseStore()).whole([output("<think>why</think>so")]))
    thought, said = whole["output"]
    part = {"type": "reasoning_text" if asked is None else "summary_text", "text": "why"}
    assert (thought["summary"], thought["content"]) == (([], [part]) if asked is None else ([part], []))
    assert said["content"][0]["text"] == "so"
    assert whole["reasoning"] == {"effort": "medium", "summary": asked}
    streamed = answer_of(body, ResponseStore())
    data = b"".join(streamed.chunk(0, output(piece, reason=None)) for piece in ("<think>w", "hy</thi", "nk>so"))
    events = events_in(data + streamed.chunk(0, output("")) + streamed.end())
    kinds = [event["type"].removeprefix("response.") for event in events]
    name = "reasoning" if asked is None else "reasoning_summary"
    part_name = "content_part" if asked is None else "reasoning_summary_part"
    begun = kinds.index("output_item.added")
    assert kinds[begun : begun + 7] == [
        *("output_item.added", f"{part_name}.added", f"{name}_text.delta", f"{name}_text.delta"),
        *(f"{name}_text.done", f"{part_name}.done", "output_item.done"),
    ]
    index = "content_index" if asked is None else "summary_index"
    assert all(event[index] == 0 for event in events[begun + 1 : begun + 6])
    assert events[-1]["response"]["output"][0]["summary"] == thought["summary"]


def test_a_summary_that_is_shorter_is_refused():
    with pytest.raises(ApiError, match=r"^reasoning\.summary must be auto or detailed") as caught:
        asked_of_responses(reasoning={"summary": "concise"})
    assert caught.value.param == "reasoning.summary"


def test_items_are_referred_to_and_a_conversation_is_kept_without_its_instructions():
    store = ResponseStore()
    body = ResponsesRequest(input=[{"role": "developer", "content": "B"}, user("hi")], instructions="A")
    answer = answer_of(body, store)
    assert answer._chat.messages == [system("A\n\nB"), user("hi")]
    items = json.loads(answer.whole([output("<think>why</think>so")]))["output"]
    assert store.get("resp_12") == [system("B"), user("hi"), assistant("so", reasoning_content="why")]
    references = [{"type": "item_reference", "id": items[0]["id"]}, {"id": items[1]["id"]}]
    asked = asked_of_responses(store, input=[user("hi"), *references, user("And?")]).messages
    assert asked == [user("hi"), assistant("so", reasoning_content="why"), user("And?")]
    for unknown in ("rs_12_9", "rs_1_0", "", "a"):
        with pytest.raises(ApiError) as caught:
            asked_of_responses(store, input=[{"type": "item_reference", "id": unknown}])
        assert (caught.value.status, caught.value.param, caught.value.code) == (404, "input", "item_not_found")


def test_items_of_every_kind_make_the_turns_that_they_were():
    reasoning = {"type": "reasoning", "id": "r", "content": None, "encrypted_content": "x"}
    given = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
        {**reasoning, "summary": [{"type": "summary_text", "text": "why"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "status": "x"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "20"}]},
    ]
    first, said, result = asked_of_responses(input=given).messages
    assert first == user("a\nb")
    assert (said["content"], said["reasoning_content"]) == ("No.", "why")
    assert said["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert result == {"role": "tool", "tool_call_id": "c", "content": "20"}
    image = user([{"type": "input_image", "image_url": "data:"}])
    with pytest.raises(ApiError, match=r"input\[0\]\.content\[0\] is of type 'input_image'"):
        asked_of_responses(input=[image])


FUNCTIONS = [{"type": "function", "function": {"name": name}} for name in ("a", "b", "c")]


def allowed(mode, *names):
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def chat_turn(**fields):
    fields = {"messages": [user("hi")], "chat_template": THINKS + "{{ tools }}", **fields}
    return turn_of(ChatCompletionRequest(**fields), MODEL)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_model_is_told_of_all_tools_and_may_call_those_that_are_allowed(mode):
    turn = chat_turn(tools=FUNCTIONS, tool_choice=allowed(mode, "c", "a"))
    assert ([tool.name for tool in turn.tools], turn.calls) == (["c", "a"], mode)
    assert turn.template_tools == FUNCTIONS
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "c"}]}
    assert asked_of_responses(tool_choice=choice).tool_choice == allowed(mode, "c")


@pytest.mark.parametrize("choice", [allowed("auto"), allowed("some", "a"), allowed("auto", "d"), allowed("auto", 1)])
def test_tools_that_cannot_be_allowed_are_refused(choice):
    with pytest.raises(ApiError) as caught:
        chat_turn(tools=FUNCTIONS, tool_choice=choice)
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")


def test_a_developers_message_is_a_systems_one_unless_the_template_knows_the_role():
    developer = {"role": "developer", "content": "Be kind."}
    assert chat_turn(messages=[developer, user("hi")]).messages == [system("Be kind."), user("hi")]
    knows = THINKS + "{% if message.role == 'developer' %}{% endif %}"
    assert chat_turn(messages=[developer], chat_template=knows).messages == [developer]


def test_an_assistant_that_said_nothing_or_refused_may_be_told_again():
    given = [assistant(None, reasoning_content="hm"), assistant(None, refusal="No."), {"role": "assistant"}]
    assert [message["content"] for message in chat_turn(messages=given).messages] == ["", "No.", ""]
    parts = [{"type": "refusal", "refusal": "No."}]
    prompt = MODEL.chat_prompt([assistant(parts)], chat_template=THINKS)
    assert prompt.text.startswith("No.")


def test_the_defaults_of_the_api_ask_for_nothing():
    assert chat_turn(reasoning_effort="medium", chat_template="{{ messages }}").variables == {}
    with pytest.raises(ApiError, match="no effect"):
        chat_turn(reasoning_effort="high", chat_template="{{ messages }}")
    refuse_unsupported(ChatCompletionRequest(messages=[], verbosity="medium", store=False))
    with pytest.raises(ApiError, match="verbosity"):
        refuse_unsupported(ChatCompletionRequest(messages=[], verbosity="low"))


def test_failures_that_a_request_brings_about_are_not_tried_again():
    assert ApiError(500, "a", code="answer_failed").headers == {"x-should-retry": "false"}
    assert ApiError(503, "a", code="aborted").headers == {}


BILLING = "x-anthropic-billing-header: cc_version=2;"


def test_what_looks_like_a_billing_header_is_left_out_of_the_systems_prompt_only():
    result = RESULT | {"content": text(BILLING)}
    asked = asked_of_messages(messages=[user(text(BILLING)), assistant([CALL]), user([result])], system=BILLING)
    assert [one["content"] for one in asked.messages if one["role"] in ("user", "tool")] == [BILLING, BILLING]
    assert not any(one["role"] == "system" for one in asked.messages)
    assert asked_of_messages(system=BILLING + "\nBe kind.").messages[0] == system("Be kind.")


def test_a_result_follows_its_call_whatever_a_system_says_in_between():
    given = [user("a"), assistant([CALL]), system("b"), user([RESULT, *text("c")]), assistant("d"), system("e")]
    asked = asked_of_messages(messages=given).messages
    assert [one["role"] for one in asked] == ["user", "assistant", "tool", "user", "assistant", "user"]
    assert [one["content"] for one in asked[2:]] == ["20\n\nb", "c", "d", "e"]


def test_developers_messages_in_the_midst_of_a_response_join_their_neighbours():
    call = {"type": "function_call", "call_id": "t1", "name": "f", "arguments": "{}"}
    developer = {"role": "developer", "content": "b"}
    given = [developer, user("a"), developer, call, developer, {"type": "function_call_output", "call_id": "t1"}]
    given[-1]["output"] = "20"
    given += [assistant("d"), developer, user("c")]
    asked = asked_of_responses(input=given, instructions="i").messages
    assert [one["role"] for one in asked] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert [one["content"] for one in asked] == ["i\n\nb", "a\n\nb", "", "20\n\nb", "d", "b\n\nc"]


def test_a_developers_message_between_calls_parts_none_from_its_result():
    calls = [{"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"} for name in "123"]
    results = [{"type": "function_call_output", "call_id": name, "output": f"of {name}"} for name in "123"]
    first, second = ({"role": "developer", "content": text} for text in ("first", "second"))
    given = [user("a"), calls[0], first, calls[1], second, calls[2], *results, user("b")]
    asked = asked_of_responses(input=given).messages
    assert [one["role"] for one in asked] == ["user", "assistant", "tool", "tool", "tool", "user"]
    assert [call["id"] for call in asked[1]["tool_calls"]] == [one["tool_call_id"] for one in asked[2:5]] == [*"123"]
    assert [one["content"] for one in asked[2:]] == ["of 1", "of 2", "of 3\n\nfirst\n\nsecond", "b"]


def test_a_system_message_between_turns_that_call_parts_none_from_its_result():
    other = CALL | {"id": "t2"}
    given = [user("a"), assistant(text("so")), assistant([CALL]), system("b"), assistant([*text("and"), other])]
    given.append(user([RESULT, RESULT | {"tool_use_id": "t2"}]))
    asked = asked_of_messages(messages=given).messages
    assert [one["role"] for one in asked] == ["user", "assistant", "tool", "tool"]
    assert [call["id"] for call in asked[1]["tool_calls"]] == [one["tool_call_id"] for one in asked[2:]]
    assert [one["content"] for one in asked[1:]] == ["so\n\nand", "20", "20\n\nb"]


@pytest.mark.parametrize("entry", ["f", {"type": "custom", "name": "f"}, {"type": "function"}])
def test_an_allowed_tool_that_is_no_function_is_refused_by_place(entry):
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}, entry]}
    with pytest.raises(ApiError, match=r"tool_choice.tools\[1\]") as caught:
        asked_of_responses(tool_choice=choice)
    assert caught.value.param == "tool_choice"


def test_an_allowed_tool_of_a_chat_must_be_a_function():
    tools = [{"type": "function", "function": {"name": "f"}}]
    allowed = {"mode": "auto", "tools": [*tools, {"type": "custom", "function": {"name": "f"}}]}
    chat = ChatCompletionRequest(
        messages=[user("a")], tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}
    )
    with pytest.raises(ApiError, match=r"tool_choice.allowed_tools.tools\[1\]"):
        turn_of(chat, MODEL)


CUT = '{"city": "Par'


def cut_chats():
    """A conversation with a call that max_tokens cut, in each dialect, as its client may send it back."""
    function = {"name": "f", "arguments": CUT}
    call = {"id": "t1", "type": "function", "function": function}
    yield ChatCompletionRequest(messages=[user("a"), {"role": "assistant", "tool_calls": [call]}, user("go on")])
    yield asked_of_messages(messages=[user("a"), assistant([CALL | {"input": CUT}]), user("go on")])
    item = {"type": "function_call", "call_id": "t1", **function}
    yield asked_of_responses(input=[user("a"), item, user("go on")])


@pytest.mark.parametrize("chat", cut_chats(), ids=["chat", "messages", "responses"])
@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("{{ messages[1].tool_calls[0].function.arguments | tojson }}<tool_call>{{ tools }}", json.dumps(CUT)),
        (
            "{% for k, v in messages[1].tool_calls[0].function.arguments.items() %}{{ k }}{% endfor %}{{ tools }}"
            "<tool_call><arg_key>",
            "<tool_call><arg_key>",
        ),
        ("{{ messages[1].content }}", CUT),
        ('{{ messages[1].content }}{{ tools }}<tool_call>{"name": ', f'"arguments": {CUT}'),
    ],
    ids=["JSON", "one by one", "no tools", "no calls"],
)
def test_a_call_whose_arguments_were_cut_may_be_sent_back(chat, template, written):
    chat.chat_template = template
    asked = turn_of(chat, MODEL)
    prompt = MODEL.chat_prompt(asked.messages, chat_template=template, tools=asked.template_tools)
    assert written in prompt.text


def test_a_template_that_only_spells_the_word_tools_is_told_of_them_in_a_message(tokenizer_with):
    hf = tokenizer_with("{% for m in messages %}{{ m.content }}{% if m.tools %}{{ m.tools }}{% endif %}{% endfor %}")
    tools = [{"type": "function", "function": {"name": "clock"}}]
    asked = turn_of(ChatCompletionRequest(messages=[user("When?")], tools=tools), hf)
    assert asked.template_tools is None
    assert '{"name": "clock"}' in asked.messages[0]["content"]
    knows = tokenizer_with("{{ messages }}{{ tools }}")
    assert turn_of(ChatCompletionRequest(messages=[user("When?")], tools=tools), knows).template_tools == tools


@pytest.mark.parametrize(
    ("said", "reasons"),
    [
        ("<think>First I", "open"),
        ("<think>hm</think>So", "said"),
        ("<think>hm</think>\n", "over"),
        ("<think>a</think>b<think>c", "said"),
        ("<think>a</think>\n<think>c", "open"),
        ("A model writes <think> first", "said"),
        ("So the", "said"),
        ([{"type": "text", "text": "<think>First"}], "open"),
        ("", "free"),
    ],
)
def test_an_answer_that_goes_on_knows_whether_its_beginning_was_still_reasoning(said, reasons):
    turn = chat_turn(
        messages=[user("When?"), assistant(said)], chat_template="{{ messages }}<think></think>", tools=None
    )
    assert turn.reasons("When?", continues=True) == reasons
    assert turn.reasons("When?") == "free"
    if reasons == "open":
        parser = Reading(turn, "open", continues=True).parser()
        news = parser.feed(" think.</think>Yes", final=True)
        assert (news.reasoning, news.content) == (" think.", "Yes")


@pytest.fixture
def tokenizer_with():
    def make(template):
        hf = copy.deepcopy(tokenizer("byte-level"))
        hf.chat_template = template
        return Tokenizer(hf, "some/model")

    return make
