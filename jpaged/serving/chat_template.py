"""Chat templates under a time limit. transformers renders them in Jinja's sandbox, which limits what they reach but not
how long they take, so each runs in a thread that is ended when its time is up.
"""

import asyncio
import ctypes
import inspect
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.engine.tokenizer import Tokenizer
from jpaged.serving.errors import ApiError


class _TimeUp(BaseException):
    """Raised inside a template's thread; no handler for errors in the template takes it for one."""


async def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    timeout_s: float,
    *,
    variables: Mapping[str, Any],
    **options: Any,
) -> list[int]:
    """A conversation to the token ids of its prompt.

    variables: for the template, from the client. options: of `Tokenizer.apply_chat_template`.
    Raises:
        InvalidPromptError: as `Tokenizer.render_chat`.
        ApiError: a variable has the name of an option; the template takes longer than timeout_s.
    """
    for name in variables:
        if name in _reserved_names(tokenizer):
            raise ApiError(
                400,
                f"chat_template_kwargs: {name!r} is an option of the request, not a variable; give it beside them.",
                param="chat_template_kwargs",
            )
    loop = asyncio.get_running_loop()
    done: asyncio.Future[list[int]] = loop.create_future()

    def work() -> None:
        try:
            tokens = tokenizer.apply_chat_template(messages, **options, **variables)
        except _TimeUp:
            return
        except Exception as error:
            loop.call_soon_threadsafe(_fail, done, error)
        else:
            loop.call_soon_threadsafe(_succeed, done, tokens)

    thread = threading.Thread(target=work, name="jpaged-chat-template", daemon=True)
    thread.start()
    try:
        return await asyncio.wait_for(done, timeout_s)
    except TimeoutError:
        raise ApiError(
            400, f"messages: the chat template took longer than {timeout_s:g} s; send less.", param="messages"
        ) from None
    finally:
        if thread.is_alive() and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_TimeUp))


def _succeed(done: asyncio.Future[list[int]], tokens: list[int]) -> None:
    if not done.done():
        done.set_result(tokens)


def _fail(done: asyncio.Future[list[int]], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)


def _reserved_names(tokenizer: Tokenizer) -> set[str]:
    names = set(inspect.signature(tokenizer.render_chat).parameters) - {"variables"}
    signature = inspect.signature(tokenizer.hf.apply_chat_template)
    return names | {p.name for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD}
