"""Renders chat templates in a process of its own: `python -P -m jpaged.text.render_process FD`, started by `rendering`.

    requests and answers, one at a time: `frames.py`, msgpack

A template is a program that came with a model. Jinja's sandbox limits what it reaches, not what it takes: a single
operation such as 'x' * 10**10 cannot be interrupted. Here its memory is limited by the kernel, and so is its time; when
that is over, this process ends.
"""

import json
import resource
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from jpaged.text.frames import read_frame, write_frame
from jpaged.text.rendering import Answer, Request

_LATE_S = 1.0
"""The parent ends a rendering that takes too long; this much later it ends by itself, if the parent is no more."""


def main() -> None:
    """Answers until the other end is closed."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
    modules["torch"] = None  # transformers would import it for nothing, which takes seconds
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    from transformers.utils.chat_template_utils import render_jinja_template

    decoder = msgspec.msgpack.Decoder(Request)
    before = _address_space()
    while (frame := read_frame(sock)) is not None:
        request = decoder.decode(frame)
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (before + request.max_bytes + 4 * len(frame), most))
        signal.setitimer(signal.ITIMER_REAL, request.timeout_s + _LATE_S)
        answer = _answer(request, render_jinja_template)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(sock, msgspec.msgpack.encode(answer))


def _answer(request: Request, render) -> Answer:  # type: ignore[no-untyped-def]  # transformers' own
    from jinja2 import TemplateError

    def rendered(messages: list[dict[str, Any]]) -> str:
        texts, _ = render(
            conversations=[messages],
            chat_template=request.template,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **request.variables,
        )
        return texts[0]

    try:
        try:
            text = rendered(request.messages)
        except TypeError as error:
            # Templates want the arguments of calls as dictionaries; a few, such as DeepSeek V3's, join them to text.
            with_json = [_with_json_arguments(message) for message in request.messages]
            if with_json == request.messages:
                raise
            try:
                text = rendered(with_json)
            except Exception:
                raise error from None
        if len(text) > request.max_characters:
            return Answer("long", "")
        text.encode()  # a lone surrogate, which no message can carry
        return Answer("text", text)
    except MemoryError:
        return Answer("memory", "")
    except Exception as error:  # a template is a program, and raises what programs raise
        said = (str(error) or type(error).__name__)[:2000].encode(errors="replace").decode()
        is_own = type(error) is TemplateError  # by its `raise_exception`
        return Answer("refused" if is_own else "failed", said)


def _with_json_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as JSON."""
    calls = message.get("tool_calls")
    return message | {"tool_calls": [_with_json(call) for call in calls]} if isinstance(calls, list) else message


def _with_json(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
