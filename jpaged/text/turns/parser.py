"""Reads a turn as it arrives: reasoning, text and calls, each as soon as it is certain.

"So <thi"                content "So "                     "<thi" may begin a marker, and is held back
"rd>: <tool_call>{..."   content "<third>: "               what begins a call is held back until its name is known
'...": {"a'              call 0, its name; arguments '{"a'

Of a turn that is cut off, what is left of a mark or of a call without a name is neither content nor reasoning.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from jpaged.text.turns.arguments import held_back
from jpaged.text.turns.declarations import (
    ARGUMENTS,
    NAME,
    NUMBER,
    Maybe,
    Mismatch,
    Part,
    ReasoningFormat,
    Scanner,
    Tool,
    ToolFormat,
)
from jpaged.text.turns.grammar import Reasons

_SPACES = " \t\r\n"
_MAX_DIGITS = 6
"""Of a call's number."""
_SHOWS_MARK = 4
"""Characters of a mark at the end of a turn that is cut off, which are taken for its beginning; fewer are text."""


@dataclass
class CallDelta:
    """News of a call. index: of the call in its turn. name: with the first news of a call, else None. arguments: more
    of the JSON. id: with the name, if the model wrote one."""

    index: int
    name: str | None
    arguments: str
    id: str | None = None


@dataclass
class TurnDelta:
    """What is new in a turn, in the order in which it was written. places: where each piece of content begins and ends,
    in characters of all that was fed."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class _NeedsMore(Exception):
    """What is there may be the beginning of what is expected."""


class TurnParser:
    """Reads one turn. Text that is not what a format says is content.

    Args:
        tool_format: None if no calls are expected.
        tools: that may be called.
        reasoning: None if none is expected.
        reasons: where the prompt leaves the turn.
        required: whether there must be calls, and nothing else behind the reasoning.
        continues: the turn has begun before, so that white space at its beginning is part of it.

    Attributes:
        num_calls: that have begun. is_inside_call: whether the last of them is incomplete.
        may_reason: whether reasoning goes on, or may still begin.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None = None,
        tools: Iterable[Tool] = (),
        reasoning: ReasoningFormat | None = None,
        reasons: Reasons = "over",
        required: bool = False,
        continues: bool = False,
    ) -> None:
        self._form = tool_format
        self._required = required
        self._tools = {tool.name: tool for tool in tools}
        self._reasoning = reasoning
        self._buffer = ""
        self._num_fed = 0
        self._ended = False
        self._delta = TurnDelta()
        self.num_calls = 0
        # What the text at the beginning of the buffer is.
        self._state: Callable[[], None] = self._before
        self._channel_end = ""
        if reasoning is not None and reasons == "open":
            self._state = self._inside_reasoning
        elif reasons == "said" and not required:  # else a call follows at once
            self._state = self._in_content
            self._channel_end = reasoning.channels[0][1] if reasoning is not None and reasoning.channels else ""
        self._may_begin_reasoning = reasoning is not None and reasons == "free"
        self._thoughts: list[tuple[int, int]] = []
        self._thinks_from = 0  # of the reasoning that has not ended
        self._drops_space = reasons == "open" and not continues
        self._parts: tuple[Part, ...] = ()  # of the call that is being read, what is left of it
        self._held = ""  # of a call that has no name yet, what was read
        self._tool: Tool | None = None
        self._number = ""
        self._ids: set[str] = set()
        self._scanner: Scanner | None = None

    @property
    def is_inside_call(self) -> bool:
        return self._state == self._in_call and self._scanner is not None

    @property
    def may_reason(self) -> bool:
        return self._may_begin_reasoning or self._state == self._inside_reasoning

    @property
    def thoughts(self) -> list[tuple[int, int]]:
        """Where each piece of reasoning that was read begins and ends, between its marks, in characters of all that was
        fed.
        """
        if self._state == self._inside_reasoning:
            return [*self._thoughts, (self._thinks_from, self.num_read)]
        return self._thoughts

    @property
    def num_read(self) -> int:
        """Characters of all that was fed that have become news or been dropped."""
        return self._num_fed - len(self._held) - len(self._buffer)

    def feed(self, text: str, final: bool = False, cut: bool = False) -> TurnDelta:
        """Takes more text; `final` says that no more will come, and `cut` that it was not the model that ended it.
        Returns what has become certain.
        """
        self._buffer += text
        self._num_fed += len(text)
        self._ended = final and not cut
        self._delta = TurnDelta()
        try:
            while self._buffer:
                self._state()
        except _NeedsMore:
            pass
        if final:
            if cut and self._scanner is None:
                self._leave_off()
            self._say(self._held + self._buffer if self._scanner is None else "", self.num_read)
            self._held = self._buffer = ""
        return self._delta

    def _leave_off(self) -> None:
        """The turn is cut off: begins the call whose name is known, and drops what is left of marks."""
        if self._state == self._in_call and NAME in self._parts:
            longer = [name for name in self._tools if name.startswith(self._buffer)]
            if self._parts[0] is NAME and longer == [self._buffer]:
                self._tool = self._tools[self._buffer]
        if self._state == self._in_call and self._tool is not None:
            self._begin_call(self._tool)
        if self._is_left_of_mark():
            self._held = self._buffer = ""

    def _is_left_of_mark(self) -> bool:
        """Whether what could not be read is the beginning of a mark or of a call."""
        form = self._form
        if self._state == self._inside_reasoning or form is None:
            in_calls = False
        elif self._state == self._in_call and form.at_start and not self.num_calls:
            in_calls = NAME not in self._parts or (self._parts[0] is NAME and self._buffer != "")
        else:
            in_calls = self._state in (self._in_call, self._behind_call)
        if in_calls or (self._required and self._state != self._inside_reasoning):
            return True
        marks: list[str] = []
        if form is not None and form.at_start:
            marks += [part.text for part in form.opening if isinstance(part, Maybe)]
        elif form is not None:
            marks += [form.marker, *map(str, form.first_call[:1])]
        marks += [] if self._reasoning is None else self._reasoning.texts
        left = (self._held + self._buffer).lstrip(_SPACES)
        return len(left) >= _SHOWS_MARK and any(mark.startswith(left) for mark in marks)

    def _say(self, text: str, place: int) -> None:
        """News of the reasoning or the content. place: of the text in all that was fed."""
        if self._state == self._inside_reasoning:
            self._delta.reasoning += text
        elif text:
            self._delta.content += text
            self._delta.places.append((place, place + len(text)))

    def _before(self) -> None:
        """Nothing has been said yet, or a part of the turn has been closed."""
        if self._drops_space:
            self._drop_space()
        form = self._reasoning
        waits = False
        if form is not None:
            openings: list[tuple[str, str | None]] = [(form.opening, None)] if self._may_begin_reasoning else []
            for opening, closing in (*openings, *form.channels):
                found = self._begins(opening)
                if found:
                    self._buffer = self._buffer[len(opening) :]
                    self._may_begin_reasoning = bool(form.channels)
                    self._drops_space = closing is None
                    self._channel_end = closing or ""
                    self._state = self._inside_reasoning if closing is None else self._in_content
                    self._thinks_from = self.num_read
                    return
                waits |= found is None
            stripped = self._buffer.lstrip(_SPACES)
            if self._may_begin_reasoning and stripped != self._buffer and not form.channels:
                if not stripped or form.opening.startswith(stripped):
                    waits = True
                elif stripped.startswith(form.opening):
                    self._buffer = stripped
                    return
        if self._form is not None and self._form.at_start:
            self._expect((*self._form.opening, *self._form.call))
            spaces = len(self._buffer) - len(self._buffer.lstrip(_SPACES))
            self._held, self._buffer = self._buffer[:spaces], self._buffer[spaces:]
            if waits and not self._ended:
                self._buffer, self._held = self._held + self._buffer, ""
                raise _NeedsMore
            self._state = self._in_call
            return
        if self._form is not None and self._form.first_call:
            marker, *parts = self._form.first_call
            found = self._begins(str(marker))
            if found:
                self._held, self._buffer = str(marker), self._buffer[len(str(marker)) :]
                self._expect(tuple(parts))
                self._state = self._in_call
                return
            waits |= found is None
        if waits and not self._ended:
            raise _NeedsMore
        self._state = self._in_content

    def _begins(self, marker: str) -> bool | None:
        """Whether the buffer begins with a marker; None if it may yet."""
        if self._buffer.startswith(marker):
            return True
        return None if marker.startswith(self._buffer) else False

    def _drop_space(self) -> None:
        self._buffer = self._buffer.lstrip(_SPACES)
        if not self._buffer:
            raise _NeedsMore
        self._drops_space = False

    def _inside_reasoning(self) -> None:
        assert self._reasoning is not None
        if self._drops_space:
            self._drop_space()
        if self._take_until(self._reasoning.closing):
            self._thoughts.append((self._thinks_from, self.num_read - len(self._reasoning.closing)))
            self._drops_space = not self._reasoning.channels
            self._state = self._before

    def _in_content(self) -> None:
        """Up to what begins calls, or closes this part of the turn."""
        form = self._form
        markers = [self._channel_end] if self._channel_end else []
        if form is not None and not form.at_start:
            markers.append(form.marker)
        found = self._take_until(*markers)
        if found and found == self._channel_end:
            self._channel_end = ""
            self._state = self._before
        elif found:
            assert form is not None
            self._held = found
            self._expect((*form.opening, *form.call)[1:])
            self._state = self._in_call

    def _take_until(self, *markers: str) -> str:
        """Says the text up to the first of some markers, drops that and returns it; "" if there is none yet."""
        found = [(at, marker) for marker in markers if (at := self._buffer.find(marker)) >= 0]
        if not found:
            held = 0 if self._ended else max((held_back(self._buffer, marker) for marker in markers), default=0)
            end = len(self._buffer) - held
            self._say(self._buffer[:end], self.num_read)
            self._buffer = self._buffer[end:]
            if held:
                raise _NeedsMore
            return ""
        at, marker = min(found)
        self._say(self._buffer[:at], self.num_read)
        self._buffer = self._buffer[at + len(marker) :]
        return marker

    def _expect(self, parts: tuple[Part, ...]) -> None:
        self._parts, self._tool, self._scanner, self._number = parts, None, None, ""

    def _in_call(self) -> None:
        """Reads the parts of a call. Its news begin with its arguments; until then its text is held."""
        try:
            while self._parts:
                self._part(self._parts[0])
                self._parts = self._parts[1:]
        except Mismatch:
            self._say(self._held, self.num_read)
            self._held = ""
            self._state = self._in_rest if self.num_calls else self._in_content  # nothing stands behind calls
            return
        self._scanner = None
        self._state = self._behind_call

    def _part(self, part: Part) -> None:
        """Reads one part. Raises Mismatch, _NeedsMore."""
        if part is ARGUMENTS:
            self._read_arguments()
        elif part is NAME:
            self._read_name()
        elif part is NUMBER:
            self._read_number()
        else:
            text = part.text if isinstance(part, Maybe) else str(part)
            found = self._begins(text)
            if found is None and self._ended and self._scanner is not None:  # the end of a call, cut off
                self._buffer = ""
            if found is None and (not self._ended or self._scanner is not None):
                raise _NeedsMore
            if found:
                self._use(len(text))
            elif not isinstance(part, Maybe):
                raise Mismatch

    def _use(self, length: int) -> None:
        """Text of a call; it is held until the call has begun."""
        if self._scanner is None:
            self._held += self._buffer[:length]
        self._buffer = self._buffer[length:]

    def _read_name(self) -> None:
        for name in sorted(self._tools, key=len, reverse=True):
            found = self._begins(name)
            if found is None and not self._ended:
                raise _NeedsMore
            if found and self._may_stand_behind_name(rest := self._buffer[len(name) :]):
                if not rest and not self._ended:
                    raise _NeedsMore
                self._tool = self._tools[name]
                self._use(len(name))
                return
        raise Mismatch

    def _read_number(self) -> None:
        digits = self._buffer[: len(self._buffer) - len(self._buffer.lstrip("0123456789"))]
        if digits == self._buffer and len(digits) <= _MAX_DIGITS and not self._ended:
            raise _NeedsMore
        if not 0 < len(digits) <= _MAX_DIGITS:
            raise Mismatch
        self._number = digits
        self._use(len(digits))

    def _may_stand_behind_name(self, text: str) -> bool:
        behind = self._parts[1]
        if behind is ARGUMENTS:
            return not text or text[0] == "<"
        return str(behind).startswith(text) or text.startswith(str(behind))

    def _read_arguments(self) -> None:
        assert self._tool is not None
        if self._scanner is None:
            if not self._buffer:
                raise _NeedsMore
            self._begin_call(self._tool)
            assert self._scanner is not None
        json_text, self._buffer = self._scanner.feed(self._buffer)
        if json_text:
            self._more_arguments(json_text)
        if not self._scanner.done:
            raise _NeedsMore

    def _begin_call(self, tool: Tool) -> None:
        assert self._form is not None
        self._scanner = self._form.arguments.scanner(tool)
        self._delta.calls.append(CallDelta(self.num_calls, tool.name, "", self._written_id(tool)))
        self.num_calls += 1
        self._held = ""

    def _written_id(self, tool: Tool) -> str | None:
        """The id that the model wrote; None if it wrote none, or that of an earlier call."""
        if self._form is None or not self._form.id_pattern or not self._number:
            return None
        written = self._form.id_pattern.format(name=tool.name, number=self._number)
        if written in self._ids:
            return None
        self._ids.add(written)
        return written

    def _more_arguments(self, json_text: str) -> None:
        index = self.num_calls - 1
        if not self._delta.calls or self._delta.calls[-1].index != index:
            self._delta.calls.append(CallDelta(index, None, ""))
        self._delta.calls[-1].arguments += json_text

    def _behind_call(self) -> None:
        """Another call, or the closing, or text that belongs to no call."""
        form = self._form
        assert form is not None
        if form.closing:
            found = self._begins(form.closing)
            if found:
                self._buffer = self._buffer[len(form.closing) :]
                self._state = self._in_rest
                return
            if found is None and not self._ended:
                raise _NeedsMore
        self._expect((form.between, *form.call) if form.between else form.call)
        self._state = self._in_call

    def _in_rest(self) -> None:
        """No call can follow."""
        self._say(self._buffer, self.num_read)
        self._buffer = ""
