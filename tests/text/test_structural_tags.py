"""Structural tags: which texts they take whole, as llguidance follows their grammars."""

import pytest
from llguidance import LLMatcher

from jpaged.api.errors import InvalidParameterError
from jpaged.api.structured_outputs import StructuredOutputsParams as Structured
from jpaged.assets import demo_model_path
from jpaged.text.grammars import GrammarTokenizer, grammar_text
from jpaged.text.tokenizer import Tokenizer

VOCAB_SIZE, EOS = 2816, 2


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(demo_model_path())


@pytest.fixture(scope="module")
def takes(tokenizer):
    made = GrammarTokenizer.of(tokenizer, VOCAB_SIZE, (EOS,)).make()

    def takes(tag, text):
        """Whether a text may be the whole answer."""
        matcher = LLMatcher(made, grammar_text(Structured(structural_tag=tag)))
        assert not matcher.is_error(), matcher.get_error()
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return matcher.validate_tokens([*tokens, EOS]) == len(tokens) + 1

    return takes


def formatted(given):
    return {"type": "structural_tag", "format": given}


def const(value):
    return {"type": "const_string", "value": value}


ONE = {"type": "json_schema", "json_schema": {"const": 1}}
TEXT = {"type": "any_text"}
CALL = {"begin": "<call=f>", "content": ONE, "end": "</call>"}
THINK = {"type": "tag", "begin": "<think>", "content": TEXT, "end": "</think>"}


def triggered(**fields):
    return {"type": "triggered_tags", "triggers": ["<call="], "tags": [CALL], **fields}


def separated(**fields):
    return {"type": "tags_with_separator", "tags": [CALL], "separator": ", ", **fields}


F1 = "<call=f>1</call>"


@pytest.mark.parametrize(
    ("given", "taken", "refused"),
    [
        (const("A cat."), ["A cat."], ["A cat", "A dog.", ""]),
        (const('"\\\x7f\n\x07'), ['"\\\x7f\n\x07'], ['"']),
        (ONE | {"style": "json"}, ["1"], ["2"]),
        (TEXT | {"excludes": []}, ["any"], []),
        (ONE, ["1"], ["2", ""]),
        ({"type": "regex", "pattern": "[ab]{2}/"}, ["ab/"], ["a/", "ab"]),
        ({"type": "grammar", "grammar": 'root ::= "x" | "yy"'}, ["x", "yy"], ["y"]),
        (TEXT, ["", "any <call= thing"], []),
        ({"type": "or", "elements": [const("a"), ONE]}, ["a", "1"], ["b", "a1"]),
        ({"type": "sequence", "elements": [const("a"), ONE, TEXT]}, ["a1", "a1 and on"], ["a", "1"]),
        ({"type": "sequence", "elements": [THINK, ONE]}, ["<think>so <b> it</think>1"], ["<think>so1", "1"]),
        ({"type": "tag", **CALL}, [F1], ["<call=f>1", "<call=f>2</call>", "1"]),
        (triggered(), ["", "no call", f"so {F1} and {F1}."], ["<call=g>", "<call=f>2</call>", "a <call=f>1"]),
        (triggered(at_least_one=True), [f"so {F1}."], ["", "no call"]),
        (triggered(stop_after_first=True), ["no call", f"so {F1}"], [f"{F1}."]),
        (triggered(stop_after_first=True, at_least_one=True), [F1, f"a{F1}"], ["no call", f"{F1}{F1}"]),
        (separated(), ["", F1, f"{F1}, {F1}"], [f"{F1}{F1}", f"{F1}, "]),
        (separated(at_least_one=True), [F1], [""]),
        (separated(stop_after_first=True), ["", F1], [f"{F1}, {F1}"]),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else None,
)
def test_a_format_takes_the_texts_that_it_means(takes, given, taken, refused):
    for text in taken:
        assert takes(formatted(given), text), text
    for text in refused:
        assert not takes(formatted(given), text), text


def test_the_older_form_means_the_same_as_triggered_tags(takes):
    older = {"begin": "<call=f>", "schema": {"const": 1}, "end": "</call>"}
    tag = {"type": "structural_tag", "structures": [older], "triggers": ["<call="]}
    assert takes(tag, f"so {F1} and {F1}.")
    assert not takes(tag, "<call=f>2</call>")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "format.type is 'None', which is not supported"),
        ({}, "format.type is 'None', which is not supported"),
        ({"type": "qwen_xml_parameter"}, "format.type is 'qwen_xml_parameter', which is not supported"),
        ({"type": "const_string"}, "format.value is missing or not of its type"),
        ({"type": "json_schema", "json_schema": True}, "format.json_schema is missing or not of its type"),
        ({"type": "regex", "pattern": 5}, "format.pattern is missing or not of its type"),
        ({"type": "or", "elements": []}, "format.elements is empty"),
        ({"type": "sequence", "elements": [TEXT, ONE]}, "format.elements[0]: any_text is supported at the end"),
        ({"type": "sequence", "elements": [ONE, 5]}, "format.elements[1].type is 'None'"),
        ({"type": "tag", **CALL, "content": triggered()}, "format.content: triggered_tags is supported at the end"),
        ({"type": "tag", **CALL, "end": 5}, "format.end is missing or not of its type"),
        ({"type": "tag", **CALL, "content": TEXT, "end": ""}, "format: a tag with any_text needs an end"),
        (triggered(triggers=["<other"]), "format.tags[0] begins with none of the triggers"),
        (triggered(triggers=[5]), "format.tags[0] begins with none of the triggers"),
        (triggered(tags=[]), "format.tags is empty"),
        (triggered(tags=[5]), "format.tags[0].begin is missing or not of its type"),
        (triggered(at_least_one=5), "format.at_least_one is missing or not of its type"),
        (separated(tags=[]), "format.tags is empty"),
        (TEXT | {"excludes": ["<call="]}, "format.excludes is not supported; leave it out"),
        (triggered(excludes=["<think>"]), "format.excludes is not supported"),
        (triggered(tags=[CALL | {"strict": True}]), "format.tags[0].strict is not supported"),
        ({**THINK, "content": TEXT | {"excludes": ["a"]}}, "format.content.excludes is not supported"),
        (ONE | {"style": "qwen_xml"}, "format.style is not supported"),
        ({"type": ["or"]}, "format.type is \"['or']\", which is not supported"),
        (separated(separator=None), "format.separator is missing or not of its type"),
    ],
)
def test_what_is_no_format_is_refused_by_place(given, said):
    with pytest.raises(InvalidParameterError) as caught:
        grammar_text(Structured(structural_tag=formatted(given)))
    assert str(caught.value).startswith(f"structured_outputs.structural_tag: {said}")


@pytest.mark.parametrize(
    ("tag", "said"),
    [
        ({"type": "other"}, 'must be {"type": "structural_tag"'),
        ({"type": "structural_tag"}, 'needs "format", or "structures" and "triggers"'),
        ({"type": "structural_tag", "structures": [], "triggers": []}, "has no structures"),
        ({"type": "structural_tag", "structures": [], "triggers": [], "at_least_one": 1}, ": at_least_one is not supp"),
        ({"type": "structural_tag", "structures": [{"style": "xml"}], "triggers": []}, ": structures[0].style is not"),
        (formatted(TEXT) | {"triggers": []}, ": triggers is not supported"),
        ({"type": "structural_tag", "structures": [5], "triggers": []}, ": structures[0] needs"),
    ],
)
def test_what_is_no_tag_at_all_is_refused(tag, said):
    with pytest.raises(InvalidParameterError) as caught:
        grammar_text(Structured(structural_tag=tag))
    assert str(caught.value).removeprefix("structured_outputs.structural_tag").lstrip().startswith(said)
