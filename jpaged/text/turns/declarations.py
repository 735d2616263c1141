"""The language in which formats are declared.

    reasoning             text             calls
    <think> ... </think>  The weather ...  <tool_call> {"name": ..., "arguments": ...} </tool_call> ...

A turn is these three, in this order, each of which may be missing. A `ToolFormat` says how calls are written and a
`ReasoningFormat` how reasoning is. `grammar.py` makes the grammar of them and `parser.py` the parser, so that what the
grammar allows is what the parser understands. `formats.py` has the declarations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol


class Place:
    """A place in a call for what differs from call to call."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


NAME: Final = Place("NAME")
"""The name of the tool."""
ARGUMENTS: Final = Place("ARGUMENTS")
"""Its arguments, as the format's kind of arguments writes them."""
NUMBER: Final = Place("NUMBER")
"""A number that the model gives the call: one to six digits. It is part of the call's id."""


@dataclass(frozen=True)
class Maybe:
    """Text that may be there or not."""

    text: str


Part = str | Place | Maybe
"""A literal text, a place, or a text that may be missing."""


@dataclass(frozen=True, eq=False)
class Tool:
    """A tool that the model may call.

    parameters: JSON schema of its arguments, an object. strict: refuse a schema of which something cannot be enforced,
    instead of leaving that out.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


class Mismatch(Exception):
    """The text is not what the format says."""


class Scanner(Protocol):
    """Reads the arguments of one call as they arrive, and writes them as JSON.

    done: the arguments are complete.
    """

    done: bool

    def feed(self, text: str) -> tuple[str, str]:
        """Takes the text that follows what was used before.

        Returns: the JSON that has become certain, and the rest of `text`, which was not used: it belongs to what comes
        after the arguments, or must be given again with more behind it.
        Raises:
            Mismatch: this is no argument.
        """
        ...


class RuleWriter(Protocol):
    """The grammar in the making (`jpaged.text.turns.grammar.Rules`)."""

    def literal(self, text: str) -> str:
        """The expression for a text."""
        ...

    def first(self, text: str) -> tuple[str, str, str] | None:
        """The text before the first control token, the expression for that token, and the rest; None if there is no
        control token.
        """
        ...

    def add(self, name: str, body: str, options: str = "") -> str:
        """Adds a rule; returns its name, which is unique."""
        ...

    def name(self, name: str) -> str:
        """A unique name, for a rule that is written later and may stand in its own body."""
        ...

    def write(self, unique: str, body: str, options: str = "") -> None:
        """Adds the rule of this name."""
        ...


class Arguments(Protocol):
    """One way of writing the arguments of a call."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All that is literal in it and may have control tokens."""
        ...

    def grammar(self, tool: Tool, rules: RuleWriter) -> str:
        """Adds rules for a tool's arguments; returns the expression for them.

        Raises:
            InvalidParameterError: the schema asks for what cannot be enforced here. It begins with the JSON path.
        """
        ...

    def scanner(self, tool: Tool) -> Scanner:
        """What reads the arguments of a call."""
        ...

    def render(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        """The text that a model writes for these arguments."""
        ...


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a family of models writes calls: `opening`, calls with `between` between them, `closing`.

    Args:
        name: for `--tool-parser`.
        call: the parts of one call.
        arguments: how its arguments are written.
        first_call: another way in which a turn, or what follows a closed part of it, may begin with a call. It is
            understood and never asked for.
        at_start: calls have no marker of their own: they stand at the beginning of the text, or there are none.
        in_template: texts that the chat templates of these models have; all of them. Empty: of no template.
        id_length: characters of a call's id, letters and digits; 0: any id will do, such as call_1f2e...
        id_pattern: what a call's id is made of, where the model writes it: a text with {name} and {number}.
        most: calls of one turn; None: any number.
    """

    name: str
    call: tuple[Part, ...]
    arguments: Arguments
    opening: tuple[Part, ...] = ()
    between: str = ""
    closing: str = ""
    first_call: tuple[Part, ...] = ()
    at_start: bool = False
    in_template: tuple[str, ...] = ()
    id_length: int = 0
    id_pattern: str = ""
    most: int | None = None

    @property
    def marker(self) -> str:
        """The text with which the first call begins, and no other text does. Not with `at_start`."""
        first = (*self.opening, *self.call)[0]
        assert isinstance(first, str)
        return first

    @property
    def texts(self) -> list[str]:
        """All that is literal in it."""
        parts = [*self.opening, *self.call, self.between, self.closing, *self.arguments.texts]
        return [part if isinstance(part, str) else part.text for part in parts if not isinstance(part, Place)]

    def render(self, calls: Sequence[tuple[Tool, Mapping[str, Any]]]) -> str:
        """The text that a model writes for these calls. Texts that may be missing are."""
        written = ["".join(self._written(part, i, *call) for part in self.call) for i, call in enumerate(calls)]
        opening = "".join(part for part in self.opening if isinstance(part, str))
        return opening + self.between.join(written) + self.closing

    def _written(self, part: Part, number: int, tool: Tool, arguments: Mapping[str, Any]) -> str:
        if part is NAME:
            return tool.name
        if part is NUMBER:
            return str(number)
        if part is ARGUMENTS:
            return self.arguments.render(tool, arguments)
        return part if isinstance(part, str) else ""


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """How a family of models writes reasoning: `opening`, the reasoning, `closing`. White space behind both is dropped.

    Args:
        name: for `--reasoning-parser`.
        in_template: as of `ToolFormat`.
        lead: white space that these models may write in front of the opening.
        gap: what they write between the closing and an answer.
        channels: openings and closings of the answer's text, for models that mark that as well. The prompt ends where
            the first opening stands; a closing is followed by another opening, or by reasoning or calls. "" closes at
            the end of the turn.
        history_key: of an assistant's message, where chat templates look for its reasoning.
        plan_key: where they look for that of a message with calls, if they know this key; "" for none.
    """

    name: str
    opening: str
    closing: str
    in_template: tuple[str, ...] = ()
    lead: str = ""
    gap: str = ""
    channels: tuple[tuple[str, str], ...] = ()
    history_key: str = "reasoning_content"
    plan_key: str = ""

    @property
    def texts(self) -> list[str]:
        """All that is literal in it."""
        return [self.opening, self.closing, *(text for channel in self.channels for text in channel)]
