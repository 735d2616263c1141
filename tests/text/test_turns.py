"""Formats of turns: each is read as it is written, wherever its text is cut, and its grammar allows what it reads."""

import contextlib
import json
import random

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import AddedToken

from jpaged.api.errors import InvalidParameterError
from jpaged.assets import demo_model_path
from jpaged.text.grammars import GrammarTokenizer
from jpaged.text.tokenizer import Tokenizer
from jpaged.text.turns.arguments import json_expression
from jpaged.text.turns.declarations import Tool
from jpaged.text.turns.formats import REASONING_FORMATS, TOOL_FORMATS, format_of
from jpaged.text.turns.generic import with_calls_as_text, without_tools
from jpaged.text.turns.grammar import TurnRules, control_tokens, turn_grammar
from jpaged.text.turns.parser import TurnParser

EOS = 2
FORMATS = {form.name: form for form in TOOL_FORMATS}
KEYWORDS = [
    "type",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "items",
    "properties",
    "minLength",
    "maxLength",
    "pattern",
    "$ref",
]
"""Of schemas."""
REASONING = {form.name: form for form in REASONING_FORMATS}
WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "daily": {"type": "boolean"},
            "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "where": {"$ref": "#/$defs/place"},
        },
        "required": ["city", "daily"],
        "additionalProperties": False,
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"at": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
                "required": ["at"],
                "additionalProperties": False,
            }
        },
    },
)
CLOCK = Tool("get", {"type": "object", "properties": {}, "additionalProperties": False})  # its name begins the other's
TOOLS = (WEATHER, CLOCK)
PARIS = {"city": 'Pa"ris\\ }', "days": 3, "daily": True, "unit": "kelvin", "note": "a\nb", "where": {"at": [1, -2]}}
CALLS = [(WEATHER, PARIS), (CLOCK, {}), (WEATHER, {"city": "Bü—😀", "daily": False, "note": None})]


def loaded(special):
    """The demo model's tokenizer; special: with control tokens for what is in brackets in the formats."""
    tokenizer = Tokenizer.load(demo_model_path())
    if special:
        pieces = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
        pieces += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</parameter>"]
        pieces += ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"]
        pieces += [
            "<｜tool▁calls▁end｜>",
            "<|channel|>",
            "<|message|>",
            "<|constrain|>",
            "<|start|>",
            "<|python_start|>",
        ]
        pieces += ["<|python_end|>", "[THINK]", "[/THINK]", "｜DSML｜", "<seed:tool_call>", "</seed:tool_call>"]
        pieces += ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"]
        pieces += ["<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>"]
        pieces += ["<|START_RESPONSE|>", "<|END_RESPONSE|>"]
        pieces += ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|tools_prefix|>", "<escape>"]
        pieces += ["<|tools_suffix|>", "<start_function_call>", "<end_function_call>", "<|inner_prefix|>"]
        pieces += ["<|inner_suffix|>", "<|tool_call_start|>"]
        pieces += ["<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_call|>", "<minimax:tool_call>"]
        tokenizer.hf.add_special_tokens(
            {"additional_special_tokens": [AddedToken(piece, special=True, normalized=False) for piece in pieces[4:]]},
            replace_extra_special_tokens=False,
        )
        tokenizer.hf.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in pieces[:4]])
    return tokenizer


@pytest.fixture(scope="module", params=["text", "control tokens"])
def model(request):
    tokenizer = loaded(request.param != "text")
    size = tokenizer.vocab_size
    return tokenizer, GrammarTokenizer.of(tokenizer, size, (EOS,)).make(), size


@pytest.fixture(scope="module")
def with_tokens():
    tokenizer = loaded(True)
    size = tokenizer.vocab_size
    return tokenizer, GrammarTokenizer.of(tokenizer, size, (EOS,)).make(), size


def matcher(model, rules):
    tokenizer, ll, _ = model
    found = LLMatcher(ll, LLMatcher.grammar_from_lark(turn_grammar(rules, control_tokens(tokenizer.hf))), log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def accepts(model, rules, text) -> bool:
    ids = model[0].encode(text, add_special_tokens=False)
    found = matcher(model, rules)
    return found.validate_tokens(ids) == len(ids) and found.consume_tokens(ids) and found.is_accepting()


def sampled(model, rules, rng, most=400):
    """A text that a model without any idea writes under the grammar; None if it does not end."""
    tokenizer, _, size = model
    found, ids, mask = matcher(model, rules), [], np.zeros((1, -(-size // 32)), np.uint32)
    for _ in range(most):
        found.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little"))
        token = EOS if EOS in allowed and rng.random() < 0.1 else int(rng.choice(allowed))
        if token == EOS:
            return tokenizer.decode(ids)
        assert found.consume_token(token)
        ids.append(token)
    return None


def read(parser, pieces):
    """Reasoning, content, and calls as [name, arguments], of pieces of a text."""
    reasoning, content, calls = "", "", []
    for i, piece in enumerate(pieces):
        delta = parser.feed(piece, final=i == len(pieces) - 1)
        reasoning, content = reasoning + delta.reasoning, content + delta.content
        for news in delta.calls:
            if news.name is not None:
                assert news.index == len(calls)
                calls.append([news.name, ""])
            calls[news.index][1] += news.arguments
    return reasoning, content, calls


def parser_of(form, reasoning=None, reasons="over"):
    return TurnParser(form, TOOLS, reasoning, reasons)


def values(calls):
    return [(name, json.loads(arguments)) for name, arguments in calls]


EXPECTED = [(tool.name, arguments) for tool, arguments in CALLS]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_as_written_wherever_the_text_is_cut(name):
    form = FORMATS[name]
    calls = CALLS[: form.most]
    text = ("" if form.at_start else "Well <too. ") + form.render(calls)
    whole = read(parser_of(form), [text])
    assert whole[1] == ("" if form.at_start else "Well <too. ")
    assert values(whole[2]) == EXPECTED[: form.most]
    for at in range(len(text)):
        assert read(parser_of(form), [text[:at], text[at:]]) == whole, text[:at]
    assert read(parser_of(form), list(text)) == whole


@pytest.mark.parametrize("name", FORMATS)
def test_the_grammar_takes_what_is_written_and_nothing_cut_off(name, model):
    form = FORMATS[name]
    text = form.render(CALLS[: form.most])
    for calls in ("auto", "required"):
        rules = TurnRules(tools=TOOLS, tool_format=form, calls=calls)
        assert accepts(model, rules, text), calls
        assert accepts(model, rules, text[:-1]) is False
    assert accepts(model, TurnRules(tools=TOOLS, tool_format=form), "No call.")
    assert not accepts(model, TurnRules(tools=TOOLS, tool_format=form, calls="required"), "No call.")
    single = TurnRules(tools=TOOLS, tool_format=form, parallel=False)
    assert accepts(model, single, form.render(CALLS[:1]))
    if form.most is None:
        assert not accepts(model, single, text)
    wrong = form.render([(Tool("another", {}), {})])
    assert not accepts(model, TurnRules(tools=TOOLS, tool_format=form, calls="required"), wrong)


@pytest.mark.parametrize("calls", ["auto", "required"])
@pytest.mark.parametrize("name", FORMATS)
def test_whatever_the_grammar_allows_is_read_and_fits_the_schemas(name, calls, with_tokens):
    form, rng, num_calls = FORMATS[name], np.random.default_rng(7), 0
    for _ in range(12):
        text = sampled(with_tokens, TurnRules(tools=TOOLS, tool_format=form, calls=calls), rng)
        if text is None:
            continue
        _, content, found = read(parser_of(form), list(text))
        assert calls == "auto" or content == ""
        assert (found != []) or content == text
        for tool_name, arguments in values(found):
            num_calls += 1
            jsonschema.validate(arguments, {tool.name: tool for tool in TOOLS}[tool_name].parameters)
    assert num_calls or calls == "auto"


@pytest.mark.parametrize("name", FORMATS)
def test_grammar_and_parser_agree_on_what_is_nearly_a_call(name, with_tokens):
    form, rng = FORMATS[name], random.Random(5)
    num_calls = 1 if form.most == 1 else 2
    text = form.render([(CLOCK, {})] * num_calls)
    allowed = matcher(with_tokens, TurnRules(tools=TOOLS, tool_format=form, calls="required"))
    for at in rng.sample(range(1, len(text)), min(40, len(text) - 1)):
        for changed in (text[:at] + "x" + text[at:], text[:at] + "{" + text[at + 1 :], text[:at] + text[at + 1 :]):
            ids = with_tokens[0].encode(changed, add_special_tokens=False)
            follower = allowed.deep_copy()
            is_valid = follower.validate_tokens(ids) == len(ids) and follower.consume_tokens(ids)
            parser = parser_of(form)
            _, content, calls = read(parser, [changed, ""])
            is_read = content == "" and calls == [["get", "{}"]] * num_calls and not parser.is_inside_call
            if is_valid and follower.is_accepting():
                assert is_read, changed
            elif not is_valid:
                assert not is_read, changed


@pytest.mark.parametrize("name", FORMATS)
def test_text_that_is_no_call_is_content_to_the_byte(name):
    form, rng = FORMATS[name], random.Random(3)
    written = form.render(CALLS[:1])
    at = written.index("get_weather")
    texts = ["Hello", " \n {", written[:at], written[: at + 3], written[:at] + "nothing" + written[at + 11 :], ""]
    texts += [written[:at] + "gets(" * 3, "[" + written[:3] + "x", "<", "[T", "<<tool_call", "\n\n"]
    for text in texts:
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        pieces = [text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]]
        assert read(parser_of(form), pieces) == ("", text, [])


def test_a_call_that_is_cut_off_shows_its_beginning_and_none_of_its_closing():
    written = FORMATS["hermes"].render(CALLS[:1])
    for end in range(written.index('"arguments": ') + 14, len(written)):
        _, content, ((name, arguments),) = read(parser_of(FORMATS["hermes"]), list(written[:end]))
        assert (content, name) == ("", "get_weather")
        assert json.dumps(PARIS, ensure_ascii=False).startswith(arguments)


def read_cut(parser, text):
    """As `read`, of a text that something cut off."""
    deltas = [parser.feed(piece) for piece in text] + [parser.feed("", final=True, cut=True)]
    assert all(call.name is None for call in deltas[-1].calls[1:])
    news = [call for delta in deltas for call in delta.calls]
    names = [call.name for call in news if call.name is not None]
    return "".join(delta.content for delta in deltas), names, "".join(call.arguments for call in news)


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_wherever_a_call_is_cut_off_no_markup_is_content_and_a_known_name_is_told(name, required):
    form = FORMATS[name]
    said = "" if form.at_start or required else "Well. "
    written = said + form.render(CALLS[: min(2, form.most or 2)])
    first = written.index("get_weather")
    for end in range(len(said), len(written)):
        parser = TurnParser(form, TOOLS, required=required)
        content, names, arguments = read_cut(parser, written[:end])
        left = content.removeprefix(said)
        if required or end > first or (not form.at_start and end - len(said) >= 4):
            assert left == "", written[:end]
        else:
            assert written[len(said) : end] == left
        known = end >= first + len("get_weather")
        assert names[:1] == (["get_weather"] if known else []), written[:end]
        assert arguments == "" or known
        assert parser.num_calls == len(names)
        if len(names) == 1 and not arguments.endswith("}"):
            assert parser.is_inside_call


def test_a_mark_that_may_be_missing_is_no_text_when_it_is_cut_off():
    assert read_cut(parser_of(FORMATS["llama3_json"]), "<|python_ta") == ("", [], "")
    assert read_cut(parser_of(FORMATS["llama3_json"]), "<|p") == ("<|p", [], "")


def test_a_name_that_may_be_another_tools_is_not_told_when_it_is_cut_off():
    cut = '<tool_call>\n{"name": "get'
    assert read_cut(parser_of(FORMATS["hermes"]), cut) == ("", [], "")
    assert read_cut(parser_of(FORMATS["hermes"]), cut + '"') == ("", ["get"], "")


@pytest.mark.parametrize("name", REASONING)
def test_where_reasoning_is_cut_off_its_marks_are_no_text(name):
    form = REASONING[name]
    for text, said in ((form.opening[:-1], ""), (form.opening + "why " + form.closing[:-1], "why ")):
        parser = parser_of(None, form, "free")
        deltas = [parser.feed(piece) for piece in text] + [parser.feed("", final=True, cut=True)]
        assert ("".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)) == (said, "")


@pytest.mark.parametrize("name", REASONING)
@pytest.mark.parametrize("reasons", ["open", "free"])
def test_reasoning_comes_apart_wherever_the_text_is_cut(name, reasons):
    form = REASONING[name]
    answer = form.channels[0][0] if form.channels else ""
    text = ("" if reasons == "open" else form.opening) + "\n".join(["a", "b <th"]) + form.closing + answer + "Yes <th"
    whole = read(parser_of(None, form, reasons), [text])
    assert whole == ("a\nb <th", "Yes <th", [])
    for at in range(len(text)):
        assert read(parser_of(None, form, reasons), [text[:at], text[at:]]) == whole
    assert read(parser_of(None, form, reasons), list(text)) == whole


def test_a_turn_without_reasoning_is_content_and_white_space_around_reasoning_is_dropped():
    think = REASONING["think"]
    assert read(parser_of(None, think, "free"), list(" \n <b>")) == ("", " \n <b>", [])
    assert read(parser_of(None, think, "free"), list("\n<think>\n\nwhy</think>\n\nso")) == ("why", "so", [])
    assert read(parser_of(None, think, "open"), list("why")) == ("why", "", [])
    assert read(parser_of(None, think, "over"), list("<think>")) == ("", "<think>", [])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("calls", ["auto", "required"])
def test_calls_follow_reasoning(name, calls, with_tokens):
    form = FORMATS[name]
    think = REASONING["harmony" if name == "harmony" else "think"]
    text = think.opening + "hm" + think.closing + think.gap + form.render(CALLS[:1])
    rules = TurnRules(tools=TOOLS, tool_format=form, calls=calls, reasoning=think, reasons="free")
    if name != "harmony":  # whose <|end|> is the demo model's end of sequence
        assert accepts(with_tokens, rules, text)
        assert accepts(with_tokens, rules, form.render(CALLS[:1]))
    reasoning, content, found = read(parser_of(form, think, "free"), list(text))
    assert (reasoning, content, values(found)) == ("hm", "", EXPECTED[:1])


def test_harmony_has_channels_for_text_beside_calls():
    form, channels = FORMATS["harmony"], REASONING["harmony"]
    text = "<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>analysis<|message|>two<|end|><|start|>"
    text += "assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + form.render(CALLS[:1])
    for pieces in ([text], list(text)):
        reasoning, content, found = read(parser_of(form, channels, "free"), pieces)
        assert (reasoning, content, values(found)) == ("onetwo", "I look.", EXPECTED[:1])


@pytest.mark.parametrize("constrain", ["", "<|constrain|>"])
def test_harmony_understands_calls_whose_recipient_stands_before_the_channel(constrain):
    form, channels = FORMATS["harmony"], REASONING["harmony"]
    call = f' to=functions.weather<|channel|>commentary {constrain}json<|message|>{{"city": "Paris"}}'
    for tools in ([Tool("weather", {}), Tool("weather_at", {})], [Tool("weather", {"type": "object"})]):
        for before, said in (("", ("", "")), (channels.opening + "hm" + channels.closing, ("hm", ""))):
            for pieces in ([before + call], list(before + call)):
                reasoning, content, found = read(TurnParser(form, tools, channels, "free"), pieces)
                assert (reasoning, content) == said
                assert [(one[0], json.loads(one[1])) for one in found] == [("weather", {"city": "Paris"})]
    for text in (" to=functions.other<|channel|>commentary json<|message|>{}", " to=functions.weather, said I", " to"):
        for pieces in ([text], list(text)):
            assert read(TurnParser(form, [Tool("weather", {})], channels, "free"), pieces) == ("", text, [])


@pytest.mark.parametrize("calls", ["auto", "required"])
def test_a_line_break_in_front_of_reasoning_keeps_no_model_of_glm_from_it(calls, with_tokens):
    think, form = REASONING["glm45"], FORMATS["glm45"]
    template = (
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value></think>"
    )
    assert (format_of(template, REASONING_FORMATS), format_of(template, TOOL_FORMATS)) == (think, form)
    rules = TurnRules(tools=TOOLS, tool_format=form, calls=calls, reasoning=think, reasons="free")
    text = f"\n<think>hm</think>{think.gap}{form.render(CALLS[:1])}"
    assert accepts(with_tokens, rules, text)
    assert read(parser_of(form, think, "free"), list(text)) == (
        "hm",
        "",
        read(parser_of(form), [form.render(CALLS[:1])])[2],
    )


def test_the_calls_of_kimi_k2_keep_the_ids_that_the_model_wrote():
    form = FORMATS["kimi_k2"]

    def call(name, number):
        return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"

    def news_of(text):
        parser = parser_of(form)
        return [news for piece in text for news in parser.feed(piece).calls if news.name is not None]

    mark, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    found = news_of(mark + call("get", 7) + call("get_weather", 8) + end)
    assert [(news.name, news.id) for news in found] == [
        ("get", "functions.get:7"),
        ("get_weather", "functions.get_weather:8"),
    ]
    twice = news_of(mark + call("get", 0) * 2 + end)  # a client tells results apart by ids
    assert [news.id for news in twice] == ["functions.get:0", None]
    for number in ("", "x", "1234567"):
        text = mark + call("get", number) + end
        assert read(parser_of(form), list(text)) == ("", text, [])


def test_a_call_of_deepseek_v3_2_is_read_as_its_encoder_writes_it(model):
    form = FORMATS["deepseek_v32"]
    text = (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="daily" string="false">true</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="get">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    )
    expected = [("get_weather", {"city": "3", "daily": True}), ("get", {})]
    for said in ("", "I look.\n\n"):
        assert accepts(model, TurnRules(tools=TOOLS, tool_format=form), said + text)
        _, content, calls = read(parser_of(form), list(said + text))
        assert (content, values(calls)) == (said, expected)
    null = form.render([(WEATHER, {"city": "null", "daily": False, "note": None})])
    assert 'name="note" string="false">null<' in null
    assert accepts(model, TurnRules(tools=TOOLS, tool_format=form, calls="required"), null)
    as_text = null.replace('"note" string="false"', '"note" string="true"')
    assert values(read(parser_of(form), list(as_text))[2])[0][1]["note"] == "null"


@pytest.mark.parametrize("calls", ["auto", "required"])
def test_the_turns_of_cohere_are_thinking_and_an_action_or_a_response(calls, model):
    template = "<|START_THINKING|>{{ plan }}<|END_THINKING|><|START_ACTION|>[]<|END_ACTION|><|START_RESPONSE|>"
    form, think = format_of(template, TOOL_FORMATS), format_of(template, REASONING_FORMATS)
    assert (form, think) == (FORMATS["cohere"], REASONING["cohere"])
    rules = TurnRules(tools=TOOLS, tool_format=form, calls=calls, reasoning=think, reasons="free")
    action = (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get", "parameters": {}},\n'
        '    {"tool_call_id": "1", "tool_name": "get", "parameters": {}}\n]<|END_ACTION|>'
    )
    for before, said in (("", ""), ("<|START_THINKING|>I look.<|END_THINKING|>", "I look.")):
        assert accepts(model, rules, before + action)
        assert read(parser_of(form, think, "free"), list(before + action)) == (said, "", [["get", "{}"]] * 2)
    answer = "<|START_RESPONSE|>Noon.<|END_RESPONSE|>"
    assert accepts(model, rules, answer) is (calls == "auto")
    assert read(parser_of(form, think, "free"), list(answer)) == ("", "Noon.", [])
    assert accepts(model, TurnRules(reasoning=think, reasons="free"), answer)


def test_kimi_k2_calls_right_behind_its_reasoning(with_tokens):
    template = "<|im_system|>tool_declare<|im_middle|><think>{{rc}}</think>"
    form, think = format_of(template, TOOL_FORMATS), format_of(template, REASONING_FORMATS)
    assert (form, think) == (FORMATS["kimi_k2"], REASONING["kimi_k2"])
    rules = TurnRules(tools=TOOLS, tool_format=form, calls="required", reasoning=think, reasons="free")
    assert accepts(with_tokens, rules, "<think>hm</think>" + form.render(CALLS[:1]))


def test_a_seed_oss_call_is_read_as_its_template_shows_it(model):
    form = FORMATS["seed_oss"]
    text = (
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>a\nb</parameter>\n"
        "<parameter=daily>true</parameter>\n</function>\n</seed:tool_call>"
    )
    assert accepts(model, TurnRules(tools=TOOLS, tool_format=form, calls="required"), text)
    assert values(read(parser_of(form), list(text))[2]) == [("get_weather", {"city": "a\nb", "daily": True})]


def test_a_mistral_may_write_a_space_behind_its_mark(model):
    form = FORMATS["mistral"]
    text = form.render(CALLS[:2]).replace("[TOOL_CALLS]", "[TOOL_CALLS] ")
    assert accepts(model, TurnRules(tools=TOOLS, tool_format=form, calls="required"), text)
    assert values(read(parser_of(form), list(text))[2]) == EXPECTED[:2]


@pytest.mark.parametrize("budget", [0, 3])
def test_a_budget_ends_reasoning_after_so_many_tokens_and_the_answer_keeps_to_its_schema(budget, with_tokens):
    content = json_expression({"type": "object", "properties": {}, "additionalProperties": False}, lenient=False)
    think = REASONING["think"]
    rules = TurnRules(reasoning=think, reasons="open", budget=budget, content=content)
    text = sampled(with_tokens, rules, np.random.default_rng(1))
    reasoning, answer, _ = read(parser_of(None, think, "open"), [text])
    assert answer == "{}"
    assert len(with_tokens[0].encode(text.partition("</think>")[0], add_special_tokens=False)) <= budget + 1
    assert bool(reasoning) == bool(budget)


def test_a_budget_needs_a_token_that_ends_reasoning():
    with pytest.raises(InvalidParameterError, match=r"thinking_token_budget.*</think>"):
        turn_grammar(TurnRules(reasoning=REASONING["think"], reasons="open", budget=3), {})


def test_text_beside_calls_keeps_to_its_schema(model):
    content = json_expression({"enum": ["yes", "no"]}, lenient=False)
    for name in ("hermes", "mistral"):
        rules = TurnRules(tools=TOOLS, tool_format=FORMATS[name], content=content)
        assert accepts(model, rules, '"yes"')
        assert accepts(model, rules, FORMATS[name].render(CALLS[:2]))
        assert not accepts(model, rules, "perhaps")


def test_control_tokens_are_those_that_llguidance_takes_for_such():
    tokenizer = loaded(True)
    tokenizer.hf.add_tokens([AddedToken("[LATE]", special=False), AddedToken("<late", special=False)])
    ll = GrammarTokenizer.of(tokenizer, tokenizer.vocab_size, (EOS,)).make()
    found = control_tokens(tokenizer.hf)
    for index, token in tokenizer.hf.added_tokens_decoder.items():
        assert (token.content in found) == ll.is_special_token(index), token.content


UNSUPPORTED = [
    ("qwen3_coder", {"anyOf": []}, "anyOf at the top"),
    ("qwen3_coder", {"properties": {"a>b": {}}}, "a>b"),
    ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "b"}}}, "pattern cannot be enforced"),
    ("pythonic", {"properties": {}, "required": ["c"]}, "'c'"),
    ("gemma4", {"properties": {"a": {"type": "string", "pattern": "b"}}}, "properties.a: pattern cannot be enforced"),
    (
        "gemma4",
        {"properties": {"a": {"items": {"properties": {"b:": {}}}}}},
        r"properties\.a\.items\.properties\.b:: a",
    ),
    ("gemma4", {"properties": {"a": {"$ref": "#/$defs/b"}}}, "'#/\\$defs/b', which is not there"),
    ("gemma4", {"properties": {"a": {"enum": ['<|"|>']}}}, "no value that this model's format"),
]


@pytest.mark.parametrize(("name", "schema", "message"), UNSUPPORTED)
def test_a_schema_that_a_format_cannot_enforce_is_refused_by_name(name, schema, message):
    rules = TurnRules(tools=[Tool("f", schema, strict=True)], tool_format=FORMATS[name])
    with pytest.raises(InvalidParameterError, match=f"tools: the parameters of f: .*{message}"):
        turn_grammar(rules, {})


TEMPLATES = [
    ("hermes", '{{ "<tool_call>\\n{\\"name\\"" }}'),
    ("qwen3_coder", "<tool_call>\n<function= <parameter="),
    ("glm45", "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>"),
    ("glm47", "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>"),
    ("mistral", "[TOOL_CALLS] ["),
    ("mistral_args", "[TOOL_CALLS] [ARGS]"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>```json"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁sep｜>"),
    ("llama3_json", 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its'),
    ("llama3_json", '<|python_start|> {"name": function name, "parameters": dictionary of argument name'),
    ("llama4_pythonic", "<|python_start|>"),
    ("pythonic", "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]"),
    ("harmony", "<|start|>assistant<|channel|> <|call|>"),
    ("kimi_k2", "<|im_system|>tool_declare<|im_middle|>{{- tools | tojson -}}"),
    ("deepseek_v32", '{%- set dsml_token = "｜DSML｜" -%}<{{ dsml_token }}function_calls>'),
    ("cohere", "<|START_ACTION|>[ {% for tc in message.tool_calls %}"),
    ("seed_oss", "<seed:tool_call>\n<function=example>\n<parameter=example_1>value_1</parameter>"),
    ("minimax_m2", "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}"),
    ("granite", "respond with <|tool_call|> followed by a JSON list of tools used."),
    ("nemotron", "<TOOLCALL>[{}]</TOOLCALL>"),
    ("olmo3", "wrapped in <function_calls></function_calls> XML tags"),
    ("phi4_mini", 'formatted as functools[{"name": [function name], "arguments": [function arguments as JSON]}'),
    ("gemma4", "{{- '<|tool_call>call:' + function['name'] + '{' -}}"),
    ("functiongemma", "{{- '<start_function_call>call:' + function.name + '{' -}}"),
    ("apertus", "{%- set tool_calls_token = '<|tools_prefix|>' -%}"),
    ("hunyuan", '<tool_calls>[{"name": "func_name1", "arguments": {"argument1": "value1"}},...]</tool_calls>'),
    ("lfm2", '{%- set said = said + "List of tools: <|tool_list_start|>[" -%}{{- "<|im_start|>system" }}'),
    ("lfm2", '{%- set said = said + "List of tools: [" -%}{{- "<|im_start|>system" }}'),
    ("xlam", '[{"name": "tool_call_name", "arguments": {"arg1": "value1", "arg2": "value2"}}, ...]'),
    (None, "{{ messages }}"),
]


@pytest.mark.parametrize(("name", "template"), TEMPLATES)
def test_the_format_is_found_from_the_template(name, template):
    found = format_of(template, TOOL_FORMATS)
    assert (found and found.name) == name


def test_a_template_of_gpt_oss_shows_calls_and_reasoning():
    template = """
        {%- if message.tool_calls %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
            {{- call.arguments | tojson + "<|call|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- endif %}
    """
    tools, reasoning = format_of(template, TOOL_FORMATS), format_of(template, REASONING_FORMATS)
    assert tools is FORMATS["harmony"]
    assert reasoning is REASONING["harmony"]


def test_a_template_that_knows_no_tools_is_told_of_them_in_text():
    call = {"id": "1", "function": {"name": "clock", "arguments": {}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "I look. ", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
        {"role": "tool", "tool_call_id": "2", "content": "one"},
        {"role": "user", "content": "Sure?"},
    ]
    system, *others = without_tools(messages, [{"type": "function", "function": {"name": "clock"}}])
    assert system["content"].startswith("Be kind.\n\n")
    assert '{"name": "clock"}' in system["content"]
    written = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    assert others == [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": f"I look. {written}\n{written}"},
        {"role": "user", "content": "<tool_response>noon</tool_response>\n<tool_response>one</tool_response>"},
        {"role": "user", "content": "Sure?"},
    ]
    assert without_tools(messages[:2], []) == messages[:2]


def test_reasoning_of_glm_4_7_has_no_line_breaks_in_front_of_calls(with_tokens):
    template = "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value></think>"
    think, form = format_of(template, REASONING_FORMATS), FORMATS["glm47"]
    assert think is REASONING["glm47"]
    rules = TurnRules(tools=TOOLS, tool_format=form, calls="required", reasoning=think, reasons="open")
    assert accepts(with_tokens, rules, "hm</think>" + form.render(CALLS[:1]))
    assert "<arg_key>" in "".join(form.texts)


@pytest.mark.parametrize("name", ["olmo3", "pythonic", "llama4_pythonic"])
def test_strings_in_single_quotes_are_read_as_those_in_double_ones(name):
    form = FORMATS[name]
    given = r"""city='Pa"ris\\ }', daily=True, unit='it\'s', note='a\nb\u00fc\d', where={"at": [1]}"""
    text = form.render(CALLS[:1]).replace(form.arguments.render(*CALLS[0]), given)
    expected = {"city": 'Pa"ris\\ }', "daily": True, "unit": "it's", "note": "a\nbü\\d", "where": {"at": [1]}}
    for at in range(len(text)):
        _, content, found = read(parser_of(form), [text[:at], text[at:]])
        assert (content, values(found)) == ("", [("get_weather", expected)]), text[:at]
    assert values(read(parser_of(form), list(text))[2]) == [("get_weather", expected)]


def test_a_number_that_is_too_long_is_not_waited_for():
    form = FORMATS["kimi_k2"]
    parser, begun = parser_of(form), form.marker + "<|tool_call_begin|>functions.get:"
    assert parser.feed(begun + "123456").content == ""
    assert parser.feed("7").content == begun + "1234567"
    assert parser.feed("8").content == "8"


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_in_the_midst_of_a_text_a_call_that_stands_at_its_beginning_is_text(name, model):
    form = FORMATS[name]
    text = form.render(CALLS[1:2])
    rules = {"tools": TOOLS, "tool_format": form}
    for reasons in ("said", "over"):
        _, content, found = read(parser_of(form, reasons=reasons), list(text))
        assert (content, len(found)) == ((text, 0) if reasons == "said" else ("", 1))
        longer = text + ", for example"  # a call has nothing behind it
        assert accepts(model, TurnRules(**rules, reasons=reasons), longer) is (reasons == "said")
    required = TurnParser(form, TOOLS, None, "said", required=True)
    assert accepts(model, TurnRules(**rules, reasons="said", calls="required"), text)
    assert len(read(required, [text])[2]) == 1


def test_in_the_midst_of_a_text_other_calls_follow_as_ever(model):
    form = FORMATS["hermes"]
    text = " So." + form.render(CALLS[1:2])
    for content in (None, '"{" /[0-9]*/ "}"'):
        given = "{1}" if content else text
        rules = TurnRules(tools=TOOLS, tool_format=form, reasons="said", content=content)
        assert accepts(model, rules, given)
        assert accepts(model, rules, form.render(CALLS[1:2]))
    assert read(parser_of(form, reasons="said"), list(text)) == ("", " So.", [["get", "{}"]])


def test_in_the_midst_of_a_channel_its_end_is_no_text_and_its_opening_is_not_asked_for(model):
    form, think = FORMATS["cohere"], REASONING["cohere"]
    rules = TurnRules(tools=TOOLS, tool_format=form, reasoning=think, reasons="said")
    text, call = " is 4.<|END_RESPONSE|>", form.render(CALLS[1:2])
    for answer, calls in ((text, []), (text + call, [["get", "{}"]])):
        assert accepts(model, rules, answer)
        assert read(parser_of(form, think, "said"), list(answer)) == ("", " is 4.", calls)
    marked = "<|START_RESPONSE|>" in control_tokens(model[0].hf)  # else it is a text like others
    assert accepts(model, rules, "<|START_RESPONSE|>" + text) is not marked
    harmony = TurnRules(tools=TOOLS, tool_format=FORMATS["harmony"], reasoning=REASONING["harmony"], reasons="said")
    assert accepts(model, harmony, " is 4.")
    assert accepts(model, harmony, "<|channel|>final<|message|> is 4.") is not marked


NESTED = Tool(
    "plan",
    {
        "type": "object",
        "properties": {
            "Way": {"$ref": "#/$defs/way"},
            "at": {"type": "array", "items": {"type": ["number", "null"]}, "minItems": 1, "maxItems": 3},
            "by": {"type": "object", "additionalProperties": {"type": "boolean"}},
            "free": {},
            "none": {"type": "object", "additionalProperties": False},
            "one": {"anyOf": [{"enum": ["a", 2, None, [True]]}, {"const": {"k": "v"}}]},
        },
        "required": ["one", "at"],
        "$defs": {
            "way": {
                "type": "object",
                "properties": {"to": {"type": "string", "maxLength": 3}, "rest": {"$ref": "#/$defs/way"}},
                "required": ["to"],
            }
        },
    },
)
PLAN = {
    "at": [-0.5, None],
    "by": {"a.b": True, "Z": False},
    "free": {"k": [{}, [], "x", -1e-7, True, None]},
    "none": {},
    "one": {"k": "v"},
    "Way": {"to": "}<|", "rest": {"to": ",:]"}},
}


@pytest.mark.parametrize("name", ["gemma4", "functiongemma"])
def test_values_between_braces_are_read_wherever_they_are_cut_and_keep_to_their_schema(name, model):
    form, rng, num_read = FORMATS[name], np.random.default_rng(3), 0
    rules = TurnRules(tools=(NESTED,), tool_format=form, calls="required")
    text = form.render([(NESTED, PLAN)])
    assert accepts(model, rules, text)
    assert not accepts(model, rules, text.replace("-0.5,null", ""))
    for at in range(len(text)):
        _, content, found = read(TurnParser(form, (NESTED,)), [text[:at], text[at:]])
        assert (content, values(found)) == ("", [("plan", PLAN)]), text[:at]
    for _ in range(12):
        text = sampled(model, rules, rng)
        if text is None:
            continue
        for _, arguments in values(read(TurnParser(form, (NESTED,)), list(text))[2]):
            jsonschema.validate(arguments, NESTED.parameters)
            num_read += 1
    assert num_read


def test_arguments_between_braces_stand_in_the_order_of_the_chat_template():
    form = FORMATS["gemma4"]
    text = form.render([(NESTED, {"one": "x", "Way": {"to": "b"}, "at": [1]})])
    assert text == '<|tool_call>call:plan{at:[1],one:<|"|>x<|"|>,Way:{to:<|"|>b<|"|>}}<tool_call|>'
    assert values(read(TurnParser(form, (NESTED,)), [text.replace("at:[1]", '<|"|>at<|"|>:[None]')])[2]) == [
        ("plan", {"at": [None], "one": "x", "Way": {"to": "b"}})
    ]


def grammar_of(schema, definitions=None, strict=False):
    """Of a call with one argument."""
    parameters = {"properties": {"a": schema}, "$defs": definitions or {}}
    return turn_grammar(TurnRules(tools=(Tool("f", parameters, strict),), tool_format=FORMATS["gemma4"]), {})


def takes(model, schema, value):
    tool = Tool("f", {"properties": {"a": schema}, "required": ["a"]})
    rules = TurnRules(tools=(tool,), tool_format=FORMATS["gemma4"], calls="required")
    return accepts(model, rules, FORMATS["gemma4"].render([(tool, {"a": value})]))


def test_the_grammar_of_values_between_braces_is_no_larger_than_their_schema():
    deep = {"type": "integer"}
    for _ in range(60):
        deep = {"type": "array", "items": deep, "minItems": 1}
    assert len(grammar_of(deep)) < 10_000
    chain = {f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(255)}
    chain["d255"] = {"type": "null"}
    assert len(grammar_of({"$ref": "#/$defs/d0"}, chain)) < 50_000
    with pytest.raises(InvalidParameterError, match=r"\$ref is one of more than 256 different references"):
        grammar_of({"anyOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs"}]}, chain)


ENDLESS = [
    {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}},
    {"x": {"type": "object", "properties": {"next": {"$ref": "#/$defs/x"}}, "required": ["next"]}},
    {"x": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/x"}]}, "minItems": 1}},
]


@pytest.mark.parametrize("definitions", ENDLESS)
def test_a_schema_whose_values_never_end_is_refused(definitions):
    with pytest.raises(InvalidParameterError, match=r"#/\$defs/[xy] refers to itself without an end"):
        grammar_of({"$ref": "#/$defs/x"}, definitions)
    ending = {name: {"anyOf": [one, {"type": "null"}]} for name, one in definitions.items()}
    assert "referred" in grammar_of({"$ref": "#/$defs/x"}, ending)


UNHEEDED = [
    ({"$ref": "#/$defs/b", "minLength": 1}, "minLength"),
    ({"anyOf": [{"type": "string"}], "type": "string"}, "type"),
    ({"minLength": 3}, "minLength"),
    ({"type": "object", "minProperties": 1}, "minProperties"),
    ({"oneOf": [{"type": "string"}]}, "oneOf"),
]


@pytest.mark.parametrize(("schema", "keyword"), UNHEEDED)
def test_what_a_strict_schema_says_between_braces_is_enforced_or_refused(schema, keyword):
    definitions = {"b": {"type": "string"}}
    assert grammar_of(schema, definitions)
    with pytest.raises(InvalidParameterError, match=rf"properties\.a: {keyword} cannot be enforced here"):
        grammar_of(schema, definitions, strict=True)


def test_lists_and_choices_between_braces_keep_to_their_schema(model):
    pair = {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2}
    assert [takes(model, pair, one) for one in ([1, "x"], [1], [1, "x", 2], ["x", 1])] == [True, False, False, False]
    more = pair | {"maxItems": 3, "items": {"type": "null"}}
    assert [takes(model, more, one) for one in ([1, "x"], [1, "x", None], [1, "x", 2])] == [True, True, False]
    chosen = {"enum": [["a", "b"], {"k v": 1}, 2, 2.5, "c"], "type": ["array", "integer"]}
    assert [takes(model, chosen, one) for one in (["a", "b"], 2, 2.5, "c")] == [True, True, False, False]


@pytest.mark.parametrize("wrong", [(True, 2), (-1, 2), (3, 2), (0, 2**31), (0, "2"), (1.5, 2)])
@pytest.mark.parametrize("form", ["gemma4", "qwen3_coder"])
def test_bounds_that_cannot_be_are_refused(form, wrong):
    low, high = wrong
    parameters = {"properties": {"a": {"type": "string", "minLength": low, "maxLength": high}}}
    with pytest.raises(InvalidParameterError, match=r"properties\.a: minLength and maxLength must be integers from 0"):
        turn_grammar(TurnRules(tools=(Tool("f", parameters),), tool_format=FORMATS[form]), {})


@pytest.mark.parametrize("wrong", ["at:[1", "at:1.", "at:yes", "at", "at:[1]]", "at:{1}", ",at:1", "at:1,"])
def test_what_is_no_value_between_braces_is_no_call(wrong):
    text = f"<|tool_call>call:plan{{{wrong}}}<tool_call|>"
    parser = TurnParser(FORMATS["gemma4"], (NESTED,))
    _, content, found = read(parser, [text, ""])
    assert content or parser.is_inside_call
    assert all(not arguments.endswith("}") for _, arguments in found)


def test_an_lfm2_call_is_read_as_its_model_card_shows_it():
    status = Tool("get_candidate_status", {"type": "object", "properties": {"candidate_id": {"type": "string"}}})
    text = '<|tool_call_start|>[get_candidate_status(candidate_id="12345")]<|tool_call_end|>'
    _, content, found = read(TurnParser(FORMATS["lfm2"], (status,)), list(text))
    assert (content, values(found)) == ("", [("get_candidate_status", {"candidate_id": "12345"})])


def test_a_template_that_prints_no_calls_gets_them_as_text():
    calls = [{"function": {"name": "clock", "arguments": {"zone": "CET"}}}] * 2
    messages = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    said = '<|tool_call_start|>[clock(zone="CET"), clock(zone="CET")]<|tool_call_end|>'
    assert with_calls_as_text(messages, FORMATS["lfm2"]) == [
        messages[0],
        {"role": "assistant", "content": said},
        messages[2],
    ]


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45", "minimax_m2", "deepseek_v32", "pythonic", "gemma4"])
@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"properties": {"a": {}}, "required": ["a", {"b": 1}]}, "required must be a list of names"),
        ({"properties": {"a": 5}}, "properties.a must be a JSON schema"),
        ({"properties": {"a": {"type": 5}}}, "properties.a.type must be"),
        ({"properties": {"a": {"type": ["string", {}]}}}, "properties.a.type must be"),
        ({"properties": {"a": {"enum": 5}}}, "properties.a.enum must be"),
        ({"properties": {"a": {"anyOf": 5}}}, "properties.a.anyOf must be"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "enum": 5}]}}}, r"properties.a.anyOf\[0\].enum must be"),
    ],
)
def test_a_malformed_schema_of_an_argument_is_refused_by_place(form, parameters, said):
    rules = TurnRules(tools=(Tool("f", {"type": "object"} | parameters),), tool_format=FORMATS[form])
    with pytest.raises(InvalidParameterError, match=said):
        turn_grammar(rules, {})


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    properties=st.dictionaries(st.sampled_from(["a", "b c", "$ref"]), JUNK, max_size=2),
    more=st.dictionaries(st.sampled_from(KEYWORDS), JUNK, max_size=2),
    required=st.lists(JUNK, max_size=2),
    strict=st.booleans(),
)
def test_whatever_a_schema_says_there_is_a_grammar_or_an_error_of_ours(name, properties, more, required, strict):
    parameters = more | {"type": "object", "properties": properties, "required": required}
    rules = TurnRules(tools=(Tool("f", parameters, strict),), tool_format=FORMATS[name])
    with contextlib.suppress(InvalidParameterError):
        assert turn_grammar(rules, {})
