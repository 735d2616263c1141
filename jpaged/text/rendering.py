"""Chat templates rendered within bounds of time, memory and output, by a process that can be ended.

    render --Request--> render_process.py --Answer--> text
           takes too long: the process is killed, and the next rendering starts another

The process starts with the first rendering, which takes a second, and ends with its renderer or with this process.
"""

import os
import re
import socket
import subprocess
import time
import weakref
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from jpaged.text.frames import read_frame, write_frame
from jpaged.text.helper_process import start_helper

if TYPE_CHECKING:
    from jinja2 import nodes

RENDER_TIMEOUT_S = 10.0
"""For a rendering that nobody else waits for."""
MAX_BYTES = 512 << 20
"""Memory that a rendering may take, beside what the process has."""
MAX_CHARACTERS = 16 << 20
"""Of a rendered prompt."""
MAX_PARSED = 1 << 16
"""Characters of a template that is searched for what it reads, which takes less than a second."""

_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""Marks of transformers, which Jinja does not know."""
_MODULE = "jpaged.text.render_process"
_START_S = 60.0
"""For the process to start, on a machine that is busy."""


@lru_cache(maxsize=16)
def takes_variable(template: str, name: str) -> bool:
    """Whether a chat template reads a variable of that name that it is given. A text that only spells the name, a key,
    a parameter of a macro or what the template sets itself does not count. Of what cannot be parsed, or is longer than
    `MAX_PARSED`, any text that has the name does. Nothing of the template is computed.
    """
    from jinja2 import Environment, TemplateError

    if name not in template:
        return False
    if len(template) > MAX_PARSED:
        return True
    try:
        environment = Environment(extensions=["jinja2.ext.loopcontrols"])
        return _Reads(name).in_body(environment.parse(_GENERATION.sub("", template)).body)
    except (TemplateError, RecursionError, ValueError):  # ValueError: too long a number
        return True


class _Reads:
    """Looks in a parsed template for what reads a variable before the template has set it.

    Jinja's own search for such variables generates code, and computes constant expressions for that.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_set = False

    def in_body(self, body: "Sequence[nodes.Node]") -> bool:
        return any(map(self._in_node, body))

    def _in_node(self, node: "nodes.Node") -> bool:
        from jinja2 import nodes

        if isinstance(node, nodes.If):
            return self._in_branches(node)
        if isinstance(node, nodes.For):
            outside = [node.iter]
            inside = [*([node.test] if node.test else []), *node.body]
            return self.in_body(outside) or self._in_scope([node.target], inside) or self._in_scope([], node.else_)
        if isinstance(node, nodes.Macro | nodes.CallBlock):
            outside = [*node.defaults, *([node.call] if isinstance(node, nodes.CallBlock) else [])]
            found = self.in_body(outside) or self._in_scope(node.args, node.body)
            self._is_set |= isinstance(node, nodes.Macro) and node.name == self._name
            return found
        if isinstance(node, nodes.With):
            return self.in_body(node.values) or self._in_scope(node.targets, node.body)
        if isinstance(node, nodes.Assign | nodes.AssignBlock):
            value = [node.node] if isinstance(node, nodes.Assign) else [*([node.filter] if node.filter else [])]
            found = self.in_body(value)
            if isinstance(node, nodes.AssignBlock):
                found = found or self._in_scope([], node.body)
            self._is_set |= self._is_in([node.target], "store")
            return found
        if isinstance(node, nodes.Output | nodes.Expr | nodes.Helper | nodes.ExprStmt):
            return not self._is_set and self._is_in([node], "load")
        return self._in_scope([], list(node.iter_child_nodes()))

    def _in_branches(self, node: "nodes.If") -> bool:
        """Behind an `if` the variable is set if every branch sets it."""
        before, sets = self._is_set, []
        tests = [node, *node.elif_]
        for branch in (*([one.test, *one.body] for one in tests), list(node.else_)):
            self._is_set = before
            if self.in_body(branch):
                return True
            sets.append(self._is_set)
        self._is_set = all(sets)
        return False

    def _in_scope(self, targets: "Sequence[nodes.Node]", body: "Sequence[nodes.Node]") -> bool:
        """What is set in a scope counts in it alone."""
        before = self._is_set
        self._is_set |= self._is_in(targets, "store", "param")
        found = self.in_body(body)
        self._is_set = before
        return found

    def _is_in(self, expressions: "Sequence[nodes.Node]", *contexts: str) -> bool:
        """Whether the name stands in expressions, which may nest more deeply than calls can."""
        from jinja2 import nodes

        left = list(expressions)
        while left:
            node = left.pop()
            if isinstance(node, nodes.Name) and node.name == self._name and node.ctx in contexts:
                return True
            left.extend(node.iter_child_nodes())
        return False


class Request(msgspec.Struct, array_like=True):
    """A conversation to render: arguments of transformers' `render_jinja_template`, and bounds."""

    template: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]
    timeout_s: float
    max_bytes: int = MAX_BYTES
    max_characters: int = MAX_CHARACTERS


class Answer(msgspec.Struct, array_like=True):
    """The rendered text, or why there is none.

    kind: "text"; "refused": by the template's own `raise_exception`; "failed": at anything else; "memory", "long": it
    takes more than it may; "time": it takes too long; "ended": its process did. text: what it said.
    """

    kind: Literal["text", "refused", "failed", "memory", "long", "time", "ended"]
    text: str


class Renderer:
    """A process that renders. Thread-safe: renderings take turns."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._pid = 0
        self._finalizer: weakref.finalize | None = None

    def render(self, request: Request) -> Answer:
        """Renders within the request's bounds.

        Raises:
            TypeError, OverflowError: a value that JSON does not know. UnicodeEncodeError: a lone surrogate.
        """
        data = msgspec.msgpack.encode(request, enc_hook=_plain)
        with self._lock:
            if self._socket is None or self._pid != os.getpid():  # a forked process must not share its parent's
                self._start()
                timeout_s = _START_S + request.timeout_s
            else:
                timeout_s = request.timeout_s
            return self._ask(data, timeout_s)

    def close(self) -> None:
        """Ends the process; the next rendering starts another."""
        with self._lock:
            self._end()

    def _ask(self, data: bytes, timeout_s: float) -> Answer:
        assert self._socket is not None
        deadline = time.monotonic() + timeout_s
        try:
            self._socket.settimeout(timeout_s)
            write_frame(self._socket, data)
            frame = read_frame(self._socket, deadline)
        except TimeoutError:
            self._end()
            return Answer("time", "")
        except OSError:
            frame = None
        if frame is None:
            self._end()
            return Answer("ended", "")
        return msgspec.msgpack.decode(frame, type=Answer)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = start_helper(_MODULE, str(theirs.fileno()), fds=[theirs.fileno()])
        self._socket, self._pid = ours, os.getpid()
        self._finalizer = weakref.finalize(self, _end_process, self._process, ours, self._pid)

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._socket = self._finalizer = None


def _end_process(process: "subprocess.Popen[bytes]", sock: socket.socket, pid: int) -> None:
    sock.close()
    if os.getpid() == pid:  # else it is the parent's
        process.kill()
        process.wait()


def _plain(value: Any) -> Any:
    """Values that JSON does not know as ones that it does. Raises TypeError where there is none."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # numpy's scalars
        return value.item()
    if hasattr(value, "model_dump"):  # pydantic's models
        return value.model_dump()
    raise TypeError(f"a {type(value).__name__} is no JSON value")
