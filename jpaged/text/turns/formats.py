"""The formats. To add one, add a declaration here; a test runs over all of them.

A format is found from the chat template, by the texts in `in_template`: the first of the list that has them all. What
has to be found out about a new one: what a call looks like to the byte (render a conversation with a call through the
model's chat template), and which text no other models' templates have.
"""

from collections.abc import Sequence
from typing import TypeVar

from jpaged.text.turns.arguments import (
    JSON,
    KEYWORDS,
    NAMED_PARAMETERS,
    PARAMETERS,
    SEED_PARAMETERS,
    TAGS,
    TAGS_IN_LINE,
    ParameterArguments,
)
from jpaged.text.turns.braces import ESCAPED_BRACES, QUOTED_BRACES
from jpaged.text.turns.declarations import ARGUMENTS, NAME, NUMBER, Maybe, ReasoningFormat, ToolFormat

_JSON_CALL = ('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}")

HARMONY = ToolFormat(  # GPT-OSS
    name="harmony",
    call=("<|channel|>commentary to=functions.", NAME, " <|constrain|>json<|message|>", ARGUMENTS),
    # As the chat template writes earlier calls: the recipient stands in the header's role.
    first_call=(
        *(" to=functions.", NAME, "<|channel|>commentary ", Maybe("<|constrain|>"), "json<|message|>"),
        ARGUMENTS,
    ),
    arguments=JSON,
    most=1,
    in_template=("<|channel|>", "<|call|>"),
)
QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    call=("<tool_call>", "\n<function=", NAME, ">\n", ARGUMENTS, "</function>\n</tool_call>"),
    arguments=PARAMETERS,
    between="\n",
    in_template=("<tool_call>", "<function=", "<parameter="),
)
DEEPSEEK_V3 = ToolFormat(  # and R1-0528
    name="deepseek_v3",
    opening=("<｜tool▁calls▁begin｜>",),
    call=(
        *("<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>", NAME, "\n```json\n"),
        *(ARGUMENTS, "\n```<｜tool▁call▁end｜>"),
    ),
    arguments=JSON,
    between="\n",
    closing="<｜tool▁calls▁end｜>",
    in_template=("<｜tool▁calls▁begin｜>", "```json"),
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    opening=("<｜tool▁calls▁begin｜>",),
    call=("<｜tool▁call▁begin｜>", NAME, "<｜tool▁sep｜>", ARGUMENTS, "<｜tool▁call▁end｜>"),
    arguments=JSON,
    closing="<｜tool▁calls▁end｜>",
    in_template=("<｜tool▁calls▁begin｜>",),
)
DEEPSEEK_V32 = ToolFormat(
    name="deepseek_v32",
    opening=("<｜DSML｜function_calls>", "\n"),
    # Of a call without arguments the model's encoder writes an empty line.
    call=('<｜DSML｜invoke name="', NAME, '">\n', ARGUMENTS, Maybe("\n"), "</｜DSML｜invoke>\n"),
    arguments=ParameterArguments(
        '<｜DSML｜parameter name="', '" string="false">', "</｜DSML｜parameter>\n", '" string="true">'
    ),
    closing="</｜DSML｜function_calls>",
    in_template=("DSML", "function_calls>"),
)
KIMI_K2 = ToolFormat(  # and K2 Thinking
    name="kimi_k2",
    opening=("<|tool_calls_section_begin|>",),
    call=(
        *("<|tool_call_begin|>", "functions.", NAME, ":", NUMBER),
        *("<|tool_call_argument_begin|>", ARGUMENTS, "<|tool_call_end|>"),
    ),
    arguments=JSON,
    closing="<|tool_calls_section_end|>",
    in_template=("<|im_middle|>", "tool_declare"),
    id_pattern="functions.{name}:{number}",
)
MISTRAL_ARGS = ToolFormat(  # tokenizers from version 11 on: Devstral, Magistral
    name="mistral_args",
    call=("[TOOL_CALLS]", NAME, "[ARGS]", ARGUMENTS),
    arguments=JSON,
    in_template=("[TOOL_CALLS]", "[ARGS]"),
    id_length=9,
)
MISTRAL = ToolFormat(
    name="mistral",
    opening=("[TOOL_CALLS]", Maybe(" "), "["),
    call=_JSON_CALL,
    arguments=JSON,
    between=", ",
    closing="]",
    in_template=("[TOOL_CALLS]",),
    id_length=9,
)
LLAMA4_PYTHONIC = ToolFormat(
    name="llama4_pythonic",
    opening=("<|python_start|>", "["),
    call=(NAME, "(", ARGUMENTS, ")"),
    arguments=KEYWORDS,
    between=", ",
    closing="]<|python_end|>",
    in_template=("<|python_start|>",),
)
PYTHONIC = ToolFormat(  # Llama 3.2, ToolACE
    name="pythonic",
    opening=("[",),
    call=(NAME, "(", ARGUMENTS, ")"),
    arguments=KEYWORDS,
    between=", ",
    closing="]",
    at_start=True,
    in_template=("[func_name1(",),
)
LLAMA3_JSON = ToolFormat(  # Llama 3.1 to 3.3, and 4 with a chat template that asks for JSON
    name="llama3_json",
    opening=(Maybe("<|python_tag|>"),),
    call=('{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}"),
    arguments=JSON,
    between="; ",
    at_start=True,
    in_template=('{"name": function name, "parameters": dictionary',),
)
COHERE = ToolFormat(  # Command R7B and A
    name="cohere",
    opening=("<|START_ACTION|>", "["),
    call=(
        *('\n    {"tool_call_id": "', NUMBER, '", "tool_name": "', NAME, '", "parameters": '),
        *(ARGUMENTS, "}"),
    ),
    arguments=JSON,
    between=",",
    closing="\n]<|END_ACTION|>",
    in_template=("<|START_ACTION|>",),
)
GEMMA4 = ToolFormat(
    name="gemma4",
    call=("<|tool_call>", "call:", NAME, "{", ARGUMENTS, "}<tool_call|>"),
    arguments=QUOTED_BRACES,
    in_template=("<|tool_call>call:",),
)
FUNCTIONGEMMA = ToolFormat(
    name="functiongemma",
    call=("<start_function_call>", "call:", NAME, "{", ARGUMENTS, "}<end_function_call>"),
    arguments=ESCAPED_BRACES,
    in_template=("<start_function_call>",),
)
APERTUS = ToolFormat(
    name="apertus",
    opening=("<|tools_prefix|>", "["),
    call=('{"', NAME, '": ', ARGUMENTS, "}"),
    arguments=JSON,
    between=", ",
    closing="]<|tools_suffix|>",
    in_template=("<|tools_prefix|>",),
)
HUNYUAN = ToolFormat(  # A13B
    name="hunyuan",
    opening=("<tool_calls>", "["),
    call=_JSON_CALL,
    arguments=JSON,
    between=", ",
    closing="]</tool_calls>",
    in_template=("<tool_calls>[",),
)
LFM2 = ToolFormat(  # and LFM2.5
    name="lfm2",
    opening=("<|tool_call_start|>", "["),
    call=(NAME, "(", ARGUMENTS, ")"),
    arguments=KEYWORDS,
    between=", ",
    closing="]<|tool_call_end|>",
    in_template=("List of tools: ", "<|im_start|>"),
)
XLAM = ToolFormat(  # xLAM 2
    name="xlam",
    opening=("[",),
    call=_JSON_CALL,
    arguments=JSON,
    between=", ",
    closing="]",
    at_start=True,
    in_template=('[{"name": "tool_call_name", "arguments": {',),
)
GRANITE = ToolFormat(  # Granite 3; Granite 4 writes as Hermes
    name="granite",
    opening=("<|tool_call|>", Maybe(" "), "["),
    call=_JSON_CALL,
    arguments=JSON,
    between=", ",
    closing="]",
    in_template=("<|tool_call|>",),
)
PHI4_MINI = ToolFormat(  # where the template asks for it
    name="phi4_mini",
    opening=("functools[",),
    call=_JSON_CALL,
    arguments=JSON,
    between=", ",
    closing="]",
    in_template=("functools[",),
)
NEMOTRON = ToolFormat(  # Llama-Nemotron
    name="nemotron",
    opening=("<TOOLCALL>", "["),
    call=_JSON_CALL,
    arguments=JSON,
    between=", ",
    closing="]</TOOLCALL>",
    in_template=("<TOOLCALL>",),
)
OLMO3 = ToolFormat(
    name="olmo3",
    opening=("<function_calls>", "\n"),
    call=(NAME, "(", ARGUMENTS, ")"),
    arguments=KEYWORDS,
    between="\n",
    closing="\n</function_calls>",
    in_template=("<function_calls>",),
)
SEED_OSS = ToolFormat(
    name="seed_oss",
    call=("<seed:tool_call>", "\n<function=", NAME, ">\n", ARGUMENTS, "</function>\n</seed:tool_call>"),
    arguments=SEED_PARAMETERS,
    between="\n",
    in_template=("<seed:tool_call>",),
)
MINIMAX_M2 = ToolFormat(
    name="minimax_m2",
    opening=("<minimax:tool_call>", "\n"),
    call=('<invoke name="', NAME, '">\n', ARGUMENTS, "</invoke>\n"),
    arguments=NAMED_PARAMETERS,
    closing="</minimax:tool_call>",
    in_template=("<minimax:tool_call>",),
)
GLM45 = ToolFormat(  # GLM-4.5 and 4.6
    name="glm45",
    call=("<tool_call>", NAME, "\n", ARGUMENTS, "</tool_call>"),
    arguments=TAGS,
    between="\n",
    in_template=("<tool_call>", "<arg_key>"),
)
GLM47 = ToolFormat(
    name="glm47",
    call=("<tool_call>", NAME, ARGUMENTS, "</tool_call>"),
    arguments=TAGS_IN_LINE,
    in_template=("<tool_call>", "</arg_key><arg_value>"),
)
HERMES = ToolFormat(  # Hermes, Qwen2.5, Qwen3
    name="hermes",
    call=("<tool_call>", '\n{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}\n</tool_call>"),
    arguments=JSON,
    between="\n",
    in_template=("<tool_call>",),
)
GENERIC = ToolFormat(  # for templates that know no tools; `generic.py` tells the model of it
    name="generic",
    call=("<tool_call>", '{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}</tool_call>"),
    arguments=JSON,
    between="\n",
)

TOOL_FORMATS = (
    *(HARMONY, SEED_OSS, QWEN3_CODER, MINIMAX_M2, GLM47, GLM45, KIMI_K2, COHERE, GRANITE, NEMOTRON),
    *(DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32, OLMO3, PHI4_MINI, MISTRAL_ARGS, MISTRAL),
    *(GEMMA4, FUNCTIONGEMMA, APERTUS, HUNYUAN, XLAM),
    *(LLAMA3_JSON, LLAMA4_PYTHONIC, PYTHONIC, HERMES, LFM2, GENERIC),
)

REASONING_FORMATS = (
    ReasoningFormat(
        name="harmony",
        opening="<|channel|>analysis<|message|>",
        closing="<|end|><|start|>assistant",
        channels=(
            ("<|channel|>final<|message|>", ""),
            ("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
        ),
        in_template=("<|channel|>analysis<|message|>",),
        history_key="thinking",
    ),
    ReasoningFormat(name="seed", opening="<seed:think>", closing="</seed:think>", in_template=("<seed:think>",)),
    ReasoningFormat(  # Command R7B and A
        name="cohere",
        opening="<|START_THINKING|>",
        closing="<|END_THINKING|>",
        channels=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"),),
        in_template=("<|START_THINKING|>", "<|START_RESPONSE|>"),
        plan_key="tool_plan",
    ),
    ReasoningFormat(  # K2 Thinking, whose template writes nothing behind the mark
        name="kimi_k2", opening="<think>", closing="</think>", in_template=("</think>", "<|im_middle|>")
    ),
    ReasoningFormat(  # Granite 3.2
        name="granite",
        opening="Here is my thought process:",
        closing="Here is my response:",
        in_template=("Here is my thought process:", "Here is my response:"),
    ),
    ReasoningFormat(
        name="gemma4", opening="<|channel>thought", closing="<channel|>", in_template=("<|channel>thought",)
    ),
    ReasoningFormat(
        name="apertus", opening="<|inner_prefix|>", closing="<|inner_suffix|>", in_template=("<|inner_prefix|>",)
    ),
    ReasoningFormat(name="mistral", opening="[THINK]", closing="[/THINK]", in_template=("[THINK]",)),
    ReasoningFormat(  # GLM-4.5 and 4.6
        name="glm45",
        opening="<think>",
        closing="</think>",
        lead="\n",
        gap="\n",
        in_template=("</think>", "</arg_key>\n<arg_value>"),
    ),
    ReasoningFormat(  # whose template writes nothing between reasoning and calls
        name="glm47", opening="<think>", closing="</think>", in_template=("</think>", "</arg_key><arg_value>")
    ),
    ReasoningFormat(
        name="think", opening="<think>", closing="</think>", gap="\n\n", in_template=("</think>",)
    ),  # Qwen3, DeepSeek R1 and many others
)

_Format = TypeVar("_Format", ToolFormat, ReasoningFormat)


def format_of(template: str, formats: Sequence[_Format]) -> _Format | None:
    """The first of the formats that a chat template shows."""
    for one in formats:
        if one.in_template and all(text in template for text in one.in_template):
            return one
    return None
