"""What a chat's answer may consist of: reasoning, text and calls, as the request asks and the chat template shows.

tools, tool_choice, ...  --turn_of-->  Turn  --messages, arguments--> chat template --> prompt
constraint, prompt       --constraint-->  grammar, for SamplingParams.structured_outputs
text of the answer       --Reading-->  reasoning, content, calls
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.api.errors import InvalidParameterError, InvalidPromptError
from jpaged.api.sampling_params import SamplingParams
from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.serving.constraints import Constraint, constraint_of
from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import ChatCompletionRequest, TokenizeRequest
from jpaged.text.grammars import grammar_expression
from jpaged.text.rendering import takes_variable
from jpaged.text.tokenizer import Tokenizer, check_messages
from jpaged.text.turns.arguments import JSON
from jpaged.text.turns.declarations import ReasoningFormat, Tool, ToolFormat
from jpaged.text.turns.formats import GENERIC, REASONING_FORMATS, TOOL_FORMATS, format_of
from jpaged.text.turns.generic import with_calls_as_text, without_tools
from jpaged.text.turns.grammar import Reasons, TurnRules, turn_grammar
from jpaged.text.turns.parser import TurnParser

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_SWITCHES = ("enable_thinking", "thinking")
"""Variables with which templates switch reasoning on and off."""


@dataclass(frozen=True)
class Turn:
    """A chat's answer to be.

    Args:
        messages: as the chat template takes them: arguments of calls are dictionaries, or strings where their JSON was
            cut and the template writes them as JSON.
        template_tools: for the chat template; None without.
        variables: further ones for it.
        tools, calls: that may be called, and whether they must be. parallel: several at once.
        tool_format, reasoning: how the model writes them; None where it may not call, or where reasoning is left in the
            text.
        budget: tokens of the reasoning; None: any number.
    """

    messages: list[dict[str, Any]]
    template_tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    tools: tuple[Tool, ...] = ()
    calls: Literal["auto", "required"] = "auto"
    parallel: bool = True
    tool_format: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    budget: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the answer's text is its content."""
        return self.tool_format is None and self.reasoning is None

    def reasons(self, prompt: str, continues: bool = False) -> Reasons:
        """Where a prompt leaves the turn. continues: the answer goes on from the last message.

        Raises:
            ApiError: how the last message goes on cannot be told.
        """
        form, end = self.reasoning, prompt.rstrip()
        said = (check_messages(self.messages[-1:])[0]["content"] or "").strip() if continues else ""
        if form is None:
            return "said" if said else "over"
        if form.channels:
            return self._reasons_in_channels(form, end, said)
        if said:
            behind = said.rpartition(form.closing)[2].lstrip()
            return "open" if behind.startswith(form.opening) else "said" if behind else "over"
        if end.endswith(form.opening):
            return "open"
        return "over" if end.endswith(form.closing) else "free"

    def _reasons_in_channels(self, form: ReasoningFormat, end: str, said: str) -> Reasons:
        """`reasons` where the answer's text stands in a channel. end: of the prompt. said: of the last message."""
        before = end.removesuffix(said).rstrip()
        if before.endswith(form.channels[0][0]) and not any(text in said for text in form.texts if text):
            if self.calls != "required":
                return "said"
            raise ApiError(
                400,
                "messages: the prompt ends in an answer's text, behind which this model cannot be made to call tools."
                " Leave tool_choice out, or end with a user's message.",
                param="messages",
            )
        if said and self.messages[-1].get("role") == "assistant":
            raise ApiError(
                400,
                "messages: this model cannot go on with the last one, as the prompt does not end in an answer's text."
                " End with a user's message.",
                param="messages",
            )
        return "open" if end.endswith(form.opening) else "free"

    def constraint(self, request: ChatCompletionRequest, reasons: Reasons, tokenizer: Tokenizer) -> Constraint | None:
        """The constraint on the whole answer; None if there is none.

        Raises:
            ApiError, InvalidParameterError: it cannot be enforced.
        """
        given = constraint_of(request)
        may_reason = reasons in ("open", "free")
        if self.budget is not None and not may_reason:
            raise ApiError(
                400,
                "thinking_token_budget needs a model that reasons, and reasoning that is not switched off.",
                param="thinking_token_budget",
            )
        if self.tool_format is None and not (may_reason and (given is not None or self.budget is not None)):
            return given
        content = None
        if given is not None and self.calls == "auto":
            params = StructuredOutputsParams(**given.params)
            has_channels = self.reasoning is not None and bool(self.reasoning.channels)
            if params.kind == "structural_tag" and (self.tool_format is not None or has_channels):
                raise InvalidParameterError(
                    "structured_outputs.structural_tag is not supported beside tools, nor where the answer stands in a"
                    " channel; leave it out."
                )
            content = grammar_expression(params)
        rules = TurnRules(
            tools=self.tools,
            tool_format=self.tool_format,
            calls=self.calls,
            parallel=self.parallel,
            reasoning=self.reasoning,
            reasons=reasons,
            budget=self.budget,
            content=content,
        )
        field = "tools" if self.tools else "thinking_token_budget" if given is None else given.field
        return Constraint(field, {"grammar": turn_grammar(rules, tokenizer.control_tokens)})

    def applied(
        self, params: SamplingParams | BeamSearchParams, constraint: Constraint | None, tokenizer: Tokenizer
    ) -> SamplingParams | BeamSearchParams:
        """The parameters for an answer that is read by a parser."""
        texts = [text for form in (self.tool_format, self.reasoning) if form is not None for text in form.texts]
        shows = any(token in text for token in tokenizer.special_texts for text in texts)
        skips = params.skip_special_tokens and not shows
        if isinstance(params, BeamSearchParams):
            return replace(params, skip_special_tokens=skips)
        given: Any = None if constraint is None else constraint.params
        return replace(params, structured_outputs=given, skip_special_tokens=skips)


@dataclass(frozen=True)
class Reading:
    """How the answer to a chat is read.

    reasons: where the prompt leaves its reasoning. shows_reasoning: reasoning is part of the answer. continues: it goes
    on from the last message. apart: reasoning is read apart from content; False: it stays there, with its marks.
    """

    turn: Turn
    reasons: Reasons
    shows_reasoning: bool = True
    continues: bool = False
    apart: bool = True

    def parser(self) -> TurnParser:
        """What reads one choice."""
        turn = self.turn
        if not self.apart:
            return TurnParser(turn.tool_format, turn.tools, continues=self.continues)
        required = turn.calls == "required"
        return TurnParser(turn.tool_format, turn.tools, turn.reasoning, self.reasons, required, self.continues)

    def prefix(self, said: str) -> tuple[str, str]:
        """Reasoning and content of the message that the answer continues. Reasoning that is left out is empty."""
        form = self.turn.reasoning
        if form is None or form.channels or not self.apart:
            return "", said
        news = TurnParser(reasoning=form, reasons="free", continues=True).feed(said, final=True)
        return news.reasoning if self.shows_reasoning else "", news.content

    def call_id(self) -> str:
        """An id for a call."""
        length = 0 if self.turn.tool_format is None else self.turn.tool_format.id_length
        return secrets.token_hex(length)[:length] if length else f"call_{secrets.token_hex(12)}"


def reading_of(turn: Turn, request: ChatCompletionRequest, prompt: str) -> Reading:
    """How the answer to a request's turn is read. prompt: its text. Raises ApiError as `Turn.reasons`."""
    continues, apart = bool(request.continue_final_message), request.separate_reasoning is not False
    form = turn.reasoning
    is_bare = form is None or (not form.channels and turn.calls == "auto" and request.include_reasoning is not False)
    if not apart and not is_bare:
        raise ApiError(
            400,
            "separate_reasoning: false needs a model whose reasoning stands in its text, a tool_choice that forces no"
            " call, and include_reasoning; leave it out.",
            param="separate_reasoning",
        )
    return Reading(turn, turn.reasons(prompt, continues), request.include_reasoning is not False, continues, apart)


def turn_of(
    request: ChatCompletionRequest | TokenizeRequest,
    tokenizer: Tokenizer,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> Turn:
    """The turn that a request asks for. tool_parser, reasoning_parser: as of `AppOptions`.

    Raises:
        ApiError, InvalidPromptError: tools, or calls in messages, that are malformed; fields that contradict each other
            or have no effect.
    """
    given = [{"type": "function"} | tool for tool in request.tools or []]
    tools = _tools(given)
    template = _template(request, tokenizer, given)
    messages = [_message(f"messages[{i}]", message) for i, message in enumerate(request.messages or [])]
    if "developer" not in template:  # it would be lost, or refused
        messages = [m | {"role": "system"} if m.get("role") == "developer" else m for m in messages]
    reasoning = None
    if reasoning_parser is not None:
        reasoning = next((form for form in REASONING_FORMATS if form.name == reasoning_parser), None)
    else:
        reasoning = format_of(template, REASONING_FORMATS)
    choice: str | Tool = "auto"
    callable_tools = tools
    variables: dict[str, Any] = {}
    budget, parallel = None, True
    if isinstance(request, ChatCompletionRequest):
        choice, callable_tools = _choice(request, tools)
        variables = _effort(request, template, reasons=reasoning is not None)
        if request.documents:
            if not takes_variable(template, "documents"):
                raise ApiError(
                    400,
                    "documents has no effect: the model's chat template has no such variable. Put them in a message.",
                    param="documents",
                )
            variables["documents"] = request.documents
        budget, parallel = _budget(request), request.parallel_tool_calls is not False
    if reasoning is not None:
        for message in messages:
            said = message.get("reasoning_content") or message.pop("reasoning", None)
            if said is not None:
                message[reasoning.history_key] = said
                if reasoning.plan_key and reasoning.plan_key in template and "tool_calls" in message:
                    message.setdefault(reasoning.plan_key, said)
    elif budget is not None:
        raise ApiError(
            400,
            "thinking_token_budget needs a model that reasons, in a way that the server knows; leave it out.",
            param="thinking_token_budget",
        )
    form = next((form for form in TOOL_FORMATS if form.name == tool_parser), None)
    form = form or format_of(template, TOOL_FORMATS) or GENERIC
    if form.arguments is not JSON:
        messages = [_without_cut_arguments(message) for message in messages]
    may_call = bool(tools) and choice != "none"
    shown = given if may_call else []
    has_calls = any("tool_calls" in message for message in messages)
    tells = bool(shown) or has_calls or any(message.get("role") == "tool" for message in messages)
    template_tools: list[dict[str, Any]] | None = None
    if form is GENERIC and tells and not takes_variable(template, "tools"):
        messages = without_tools(check_messages(messages), shown)
    else:
        if has_calls and form is not GENERIC and "tool_calls" not in template:  # LFM2's would leave them out
            try:
                messages = with_calls_as_text(check_messages(messages), form)
            except RecursionError:
                raise InvalidPromptError("The arguments of a call in messages nest too deeply.") from None
        template_tools = shown or None
    if isinstance(choice, Tool):
        callable_tools, parallel = (choice,), False
    return Turn(
        messages,
        template_tools,
        variables,
        tools=callable_tools if may_call else (),
        calls="auto" if choice in ("auto", "none") else "required",
        parallel=parallel,
        tool_format=form if may_call else None,
        reasoning=reasoning,
        budget=budget,
    )


def _template(request: ChatCompletionRequest | TokenizeRequest, tokenizer: Tokenizer, tools: list[Any]) -> str:
    if request.chat_template is not None:
        return request.chat_template
    try:
        return tokenizer.hf.get_chat_template(None, tools or None) if tokenizer.has_chat_template else ""
    except ValueError:  # several templates and no default, which rendering says
        return ""


def _tools(given: Sequence[Any]) -> tuple[Tool, ...]:
    tools: dict[str, Tool] = {}
    for i, one in enumerate(given):
        where = f"tools[{i}]"
        kind = one["type"]
        if kind != "function":
            raise _bad_tool(f'{where}.type must be "function", got {str(kind)[:80]!r}; other tools are not supported.')
        function = one.get("function")
        if not isinstance(function, Mapping):
            raise _bad_tool(f'{where}.function must be {{"name": ..., "description": ..., "parameters": ...}}.')
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _bad_tool(
                f"{where}.function.name must have 1 to 128 letters, digits and _ . : / -, got {str(name)[:80]!r}."
            )
        if name in tools:
            raise _bad_tool(f"{where}.function.name is {name!r}, as that of another tool; names must differ.")
        parameters = function.get("parameters")
        parameters = _NO_ARGUMENTS if parameters is None else parameters
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            raise _bad_tool(f"{where}.function.parameters must be the JSON schema of an object.")
        if not isinstance(parameters.get("properties", {}), Mapping):
            raise _bad_tool(f"{where}.function.parameters.properties must be an object.")
        if not isinstance(parameters.get("required", []), list):
            raise _bad_tool(f"{where}.function.parameters.required must be a list.")
        try:
            StructuredOutputsParams(json=parameters)  # its limits
        except InvalidParameterError as error:
            raise _bad_tool(str(named_tool(error, f"{where}.function.parameters"))) from None
        strict = function.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise _bad_tool(f"{where}.function.strict must be true or false.")
        tools[name] = Tool(name, parameters, bool(strict))
    return tuple(tools.values())


def _bad_tool(message: str) -> ApiError:
    return ApiError(400, message, param="tools")


def _choice(request: ChatCompletionRequest, tools: tuple[Tool, ...]) -> tuple[str | Tool, tuple[Tool, ...]]:
    """The tool that must be called, or one of none, auto and required; and the tools that may be."""
    choice = request.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, tools = _allowed(choice.get("allowed_tools"), tools)
    if choice is None:
        choice = "auto"
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise ApiError(
                400,
                f"tool_choice must be none, auto, required or a function, got {choice[:80]!r}.",
                param="tool_choice",
            )
        if choice == "required" and not tools:
            raise ApiError(400, "tool_choice is required, but there are no tools; give some.", param="tool_choice")
        found: str | Tool = choice
    else:
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise ApiError(
                400,
                'tool_choice must be {"type": "function", "function": {"name": ...}} or of type "allowed_tools"; other'
                " forms are not supported.",
                param="tool_choice",
            )
        found = _named(name, tools)
    if tools and found != "none":
        for name in ("use_beam_search", "ignore_eos"):
            if getattr(request, name):
                raise ApiError(400, f"{name} is not supported beside tools; leave it out.", param=name)
    constraint = constraint_of(request)
    if found not in ("none", "auto") and constraint is not None:
        name = constraint.field.partition(".")[0]
        if name != "response_format":  # OpenAI's, which is for content, if there is any
            raise ApiError(400, f"{name} has no effect where tool_choice requires a call; leave it out.", param=name)
    return found, tools


def _named(name: str, tools: Sequence[Tool]) -> Tool:
    named = next((tool for tool in tools if tool.name == name), None)
    if named is None:
        raise ApiError(400, f"tool_choice names {name[:80]!r}, which is none of the tools.", param="tool_choice")
    return named


def _allowed(given: Any, tools: Sequence[Tool]) -> tuple[str, tuple[Tool, ...]]:
    """The mode, and the tools that may be called, of those that the model is told of."""
    mode, listed = (given.get("mode"), given.get("tools")) if isinstance(given, Mapping) else (None, None)
    listed = listed if isinstance(listed, list) else []
    for i, one in enumerate(listed):
        function = one.get("function") if isinstance(one, Mapping) and one.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ApiError(
                400,
                f'tool_choice.allowed_tools.tools[{i}] must be {{"type": "function", "function": {{"name": ...}}}}.',
                param="tool_choice",
            )
    if mode not in ("auto", "required") or not listed:
        raise ApiError(
            400,
            'tool_choice.allowed_tools must be {"mode": "auto" or "required", "tools": [{"type": "function",'
            ' "function": {"name": ...}}, ...]}.',
            param="tool_choice",
        )
    allowed = {one["function"]["name"]: _named(one["function"]["name"], tools) for one in listed}
    return mode, tuple(allowed.values())


def _effort(request: ChatCompletionRequest, template: str, *, reasons: bool) -> dict[str, Any]:
    """Variables of the template that say how much the model shall reason. reasons: the model reasons at all."""
    effort = _asked_effort(request)
    if effort is None:
        return {}
    known = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
    if effort not in known:
        raise ApiError(
            400,
            f"reasoning_effort must be one of {', '.join(known)}, got {str(effort)[:80]!r}.",
            param="reasoning_effort",
        )
    variables: dict[str, Any] = {name: effort != "none" for name in _SWITCHES if name in template}
    if "reasoning_effort" in template:
        variables["reasoning_effort"] = effort
    asks_for_nothing = effort == "medium" or (effort == "none" and not reasons)  # medium is the API's default
    if not variables and not asks_for_nothing:
        raise ApiError(
            400,
            "reasoning_effort has no effect: the model's chat template has no such variable. Leave it out.",
            param="reasoning_effort",
        )
    return variables


def _asked_effort(request: ChatCompletionRequest) -> Any:
    """The effort that a request asks for: its `reasoning_effort`, or `reasoning` as SGLang and others take it, by its
    "effort", or by "enabled" medium or none.

    Raises:
        ApiError: `reasoning` has other fields, or `enabled` is no boolean; the fields contradict each other.
    """
    reasoning, effort = request.reasoning or {}, request.reasoning_effort
    other, enabled = reasoning.get("effort"), reasoning.get("enabled")
    if reasoning.keys() - {"effort", "enabled"} or not (enabled is None or isinstance(enabled, bool)):
        raise ApiError(
            400,
            f'reasoning must be {{"effort": ...}} or {{"enabled": true or false}}, got {str(dict(reasoning))[:80]}.'
            " thinking_token_budget bounds it, and include_reasoning leaves it out.",
            param="reasoning",
        )
    asked = {"reasoning_effort": effort, "reasoning.effort": other}
    asked = {name: value for name, value in asked.items() if value is not None}
    contradict = len(asked) == 2 and effort != other
    if enabled is not None and asked and (enabled is False) != (next(iter(asked.values())) == "none"):
        asked["reasoning.enabled"], contradict = enabled, True
    if contradict:
        said = " and ".join(f"{name} is {json.dumps(value)[:80]}" for name, value in asked.items())
        raise ApiError(400, f"{said}, which contradict each other; leave all but one out.", param="reasoning")
    if asked:
        return next(iter(asked.values()))
    return None if enabled is None else "medium" if enabled else "none"


def _budget(request: ChatCompletionRequest) -> int | None:
    budget = request.thinking_token_budget
    if budget is not None and request.use_beam_search:
        raise ApiError(
            400, "thinking_token_budget is not supported in a beam search; leave it out.", param="thinking_token_budget"
        )
    if budget is not None and budget < -1:
        raise ApiError(
            400,
            f"thinking_token_budget must be at least 0, or -1 for any number, got {budget}.",
            param="thinking_token_budget",
        )
    return None if budget == -1 else budget


def _message(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as dictionaries, which is what chat templates want. Those that are no
    JSON stay strings.
    """
    calls = message.get("tool_calls")
    if calls is None or calls == []:
        said = {key: value for key, value in message.items() if key != "tool_calls"}
        if said.get("role") == "assistant" and said.get("content") is None:  # a refusal, or nothing but reasoning
            said["content"] = said.get("refusal") or ""
        return said
    if not isinstance(calls, list):
        raise InvalidPromptError(f"{where}.tool_calls must be a list.")
    return {**message, "tool_calls": [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]}


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidPromptError(f'{where} must be {{"id": ..., "function": {{"name": ..., "arguments": ...}}}}.')
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except RecursionError:
            raise InvalidPromptError(f"{where}.function.arguments nests too deeply.") from None
        except ValueError:  # max_tokens has cut it; the conversation shall go on
            return dict(call)
    if not isinstance(arguments, Mapping):
        raise InvalidPromptError(f"{where}.function.arguments must be a JSON object.")
    return {**call, "function": {**function, "arguments": dict(arguments)}}


def _without_cut_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message for a template that writes arguments one by one, and has no form for those that are no JSON."""
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    functions = [one | {"arguments": {}} if isinstance(one["arguments"], str) else one for one in functions]
    calls = [call | {"function": one} for call, one in zip(message["tool_calls"], functions, strict=True)]
    return message | {"tool_calls": calls}


def named_tool(error: InvalidParameterError, where: str) -> InvalidParameterError:
    """The error of a tool's schema, in words that name the tool."""
    return InvalidParameterError(re.sub(r"^structured_outputs(\.\w+)?", where, str(error)))
