"""The grammar of a turn, in llguidance's Lark syntax, made of the declarations.

    start:     reasoning, in states that the prompt leaves open; then the body
    body:      text; or text and then calls; or calls alone, where they are required

A marker that is a control token of the tokenizer stands in the grammar as this token; others as text. Text cannot hold
control tokens, so what begins calls is never in doubt.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jpaged.api.errors import InvalidParameterError
from jpaged.text.turns.arguments import regex
from jpaged.text.turns.declarations import ARGUMENTS, NAME, NUMBER, Maybe, Part, ReasoningFormat, Tool, ToolFormat

TEXT = "/(?s:.*)/"
_NO_SPACE_YET = r"[ \t\r\n]{0,8}"
"""What may stand in front of calls that have no marker."""

Reasons = Literal["open", "free", "over", "said"]
"""Where a prompt leaves the turn: inside the reasoning, where that may begin, behind it, or inside the answer's text
(of a format with channels: of the first of them).
"""


@dataclass(frozen=True, kw_only=True)
class TurnRules:
    """What one turn must keep to.

    Args:
        tools, tool_format: that may be called, and how; none and None without.
        calls: "auto": text, calls or both; "required": calls and no text.
        parallel: more than one call.
        reasoning, reasons: how reasoning is written, and where the prompt leaves the turn.
        budget: tokens of the reasoning; None: any number.
        content: the expression that the text must keep to; None: any text.
    """

    tools: Sequence[Tool] = ()
    tool_format: ToolFormat | None = None
    calls: Literal["auto", "required"] = "auto"
    parallel: bool = True
    reasoning: ReasoningFormat | None = None
    reasons: Reasons = "over"
    budget: int | None = None
    content: str | None = None


class Rules:
    """A grammar in the making. control_tokens: ids by their texts (`control_tokens`)."""

    def __init__(self, control_tokens: Mapping[str, int]) -> None:
        self._control_tokens = control_tokens
        longest_first = sorted(control_tokens, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        self._lines: list[str] = []
        self._num_names = 0

    def literal(self, text: str) -> str:
        """The expression for a text."""
        parts = [text] if self._pattern is None else self._pattern.split(text)
        written = [
            f"<[{self._control_tokens[part]}]>" if part in self._control_tokens else json.dumps(part)
            for part in parts
            if part
        ]
        return " ".join(written) or '""'

    def first(self, text: str) -> tuple[str, str, str] | None:
        """The text before the first control token, the expression for that token, and the rest; None if there is no
        control token.
        """
        found = self._pattern.search(text) if self._pattern is not None else None
        return None if found is None else (text[: found.start()], self.literal(found[0]), text[found.end() :])

    def name(self, name: str) -> str:
        """A unique name, for a rule that is written later and may stand in its own body."""
        self._num_names += 1
        return f"{name}_{self._num_names}"

    def write(self, unique: str, body: str, options: str = "") -> None:
        """Adds the rule of this name."""
        self._lines.append(f"{unique}{f'[{options}]' if options else ''}: {body}")

    def add(self, name: str, body: str, options: str = "") -> str:
        """Adds a rule; returns its name, which is unique. A name in capitals is a terminal's."""
        unique = self.name(name)
        self.write(unique, body, options)
        return unique

    def grammar(self, start: str) -> str:
        """All of it."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._lines])


def control_tokens(hf: Any) -> dict[str, int]:
    """Ids by text of the tokens that llguidance takes for control tokens: text never spells them. Of the added tokens
    these are the special ones and those in angle brackets.

    hf: a transformers tokenizer.
    """
    added = {index: token for index, token in hf.added_tokens_decoder.items() if token.content}
    return {
        token.content: index
        for index, token in added.items()
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }


def turn_grammar(turn: TurnRules, control_tokens: Mapping[str, int]) -> str:
    """The grammar of a turn.

    Raises:
        InvalidParameterError: a tool's schema asks for what this format of calls cannot enforce, or there is a budget
            and the end of reasoning is no control token. It begins with "tools" or "thinking_token_budget".
    """
    rules = Rules(control_tokens)
    reasoning = _reasoning(turn, rules)
    calls = None if turn.tool_format is None else _Calls(turn, turn.tool_format, rules)
    content = turn.content
    channels = () if turn.reasoning is None else turn.reasoning.channels
    has_begun = turn.reasons == "said"
    if calls is not None and turn.calls == "required":
        body = calls.alone()
    elif channels:
        opening, closing = channels[0]
        said = f"{content or TEXT} {rules.literal(closing) if closing else ''}"
        if closing and content is None and rules.first(closing) is None:  # which any text would swallow
            said = rules.add("said", f"{TEXT} {json.dumps(closing)}", "lazy")
        body = said if has_begun else f"{rules.literal(opening)} {said}"
    elif calls is not None and content is None and not (calls.at_start and has_begun):
        body = calls.behind_text()
    else:
        body = content or TEXT
    if calls is not None and turn.calls == "auto" and has_begun:
        if channels and channels[0][1]:
            body = f"{body} ({calls.alone()})?"
        elif not channels and content is not None and not calls.at_start:
            body = f"{body} | {calls.alone()}"
    elif calls is not None and turn.calls == "auto" and (channels or content is not None):
        preamble = [f"({rules.literal(a)} {TEXT} {rules.literal(b)})?" for a, b in channels if b]
        body = f"{body} | {' '.join(preamble)} {calls.alone()}"
    gap = "" if turn.reasoning is None or (turn.calls == "auto" and content is None) else turn.reasoning.gap
    return rules.grammar(f"{reasoning(gap)} {rules.add('body', body)}")


def _reasoning(turn: TurnRules, rules: Rules) -> Callable[[str], str]:
    """A function that makes the expression for the reasoning, given what must stand behind it."""
    form = turn.reasoning
    if form is None or turn.reasons not in ("open", "free"):
        return lambda gap: ""
    token = rules.first(form.closing)
    if token is not None and not token[0]:
        limit = "" if turn.budget is None else f"max_tokens={turn.budget}"
        thought = "" if turn.budget == 0 else rules.add("reasoning", TEXT, limit) + " "
        thought += rules.literal(form.closing)
    elif turn.budget is None:
        thought = rules.add("reasoning", f"{TEXT} {json.dumps(form.closing)}", "lazy")
    else:
        raise InvalidParameterError(
            f"thinking_token_budget is not supported for this model: {form.closing} is no token of its tokenizer."
        )

    def expression(gap: str) -> str:
        behind = f"{thought} {rules.literal(gap)}" if gap else thought
        if turn.reasons == "open":
            return behind
        if form.channels:
            return f"({rules.literal(form.opening)} {behind})*"
        lead = f"{rules.literal(form.lead)}? " if form.lead else ""
        return f"({lead}{rules.literal(form.opening)} {behind})?"

    return expression


class _Calls:
    """The expressions for the calls of a turn."""

    def __init__(self, turn: TurnRules, form: ToolFormat, rules: Rules) -> None:
        self._form = form
        self._rules = rules
        self._tools = turn.tools
        self._arguments = []
        for tool in turn.tools:
            try:
                self._arguments.append(form.arguments.grammar(tool, rules))
            except InvalidParameterError as error:
                raise InvalidParameterError(f"tools: the parameters of {tool.name}: {error}") from None
        self._is_single = not turn.parallel or form.most == 1
        self.at_start = form.at_start

    def alone(self) -> str:
        """Calls and nothing else."""
        heads = [self._sequence((*self._form.opening, *self._form.call), i) for i in range(len(self._tools))]
        return f"({' | '.join(heads)}) {self._rest()}"

    def behind_text(self) -> str:
        """Text, and calls if there are any."""
        if self._form.at_start:
            return self._instead_of_text()
        marker, rules = self._form.marker, self._rules
        behind = (*self._form.opening, *self._form.call)[1:]
        token = rules.first(marker)
        if token is not None:
            before, opened, rest = token
            # One expression for the text and what stands before the token, which the text's would swallow.
            opened = f"/(?s:.*){regex(before)}/ {opened}"
            behind = (rest, *behind) if rest else behind
        else:
            opened = rules.add("opened", f"{TEXT} {json.dumps(marker)}", "lazy")
        heads = [self._sequence(behind, i) for i in range(len(self._tools))]
        return f"{TEXT} | {opened} ({' | '.join(heads)}) {self._rest()}"

    def _instead_of_text(self) -> str:
        """Calls, or a text that begins unlike a call: up to the literal behind the tool's name."""
        rules, parts = self._rules, (*self._form.opening, *self._form.call)
        optional = [rules.literal(part.text) + "?" for part in parts if isinstance(part, Maybe)]
        parts = tuple(part for part in parts if not isinstance(part, Maybe))
        end = parts.index(NAME) + 2
        heads, calls = [], []
        for i, tool in enumerate(self._tools):
            head = "".join(regex(tool.name if part is NAME else str(part)) for part in parts[:end])
            heads.append(head)
            name = rules.add("HEAD", f"/{_NO_SPACE_YET}{head}/")
            calls.append(f"{name} {self._sequence(parts[end:], i)}")
        text = rules.add("TEXT", f"{TEXT} & ~/{_NO_SPACE_YET}({'|'.join(heads)})(?s:.*)/")
        return f"{text} | {' '.join(optional)} ({' | '.join(calls)}) {self._rest()}"

    def _rest(self) -> str:
        """Further calls, and the closing."""
        closing = self._rules.literal(self._form.closing) if self._form.closing else ""
        if self._is_single:
            return closing
        more = [self._sequence(self._form.call, i) for i in range(len(self._tools))]
        between = self._rules.literal(self._form.between) if self._form.between else ""
        return f"({between} ({' | '.join(more)}))* {closing}"

    def _sequence(self, parts: Sequence[Part], i: int) -> str:
        """Parts of a call of one tool; literals that follow each other as one, which is fewer pieces to scan."""
        expressions, text = [], ""
        for part in parts:
            if part is ARGUMENTS or part is NUMBER or isinstance(part, Maybe):
                expressions += [self._rules.literal(text)] if text else []
                if isinstance(part, Maybe):
                    expressions.append(self._rules.literal(part.text) + "?")
                else:
                    expressions.append(self._arguments[i] if part is ARGUMENTS else "/[0-9]{1,6}/")
                text = ""
            else:
                text += self._tools[i].name if part is NAME else str(part)
        return " ".join([*expressions, self._rules.literal(text)] if text else expressions)
