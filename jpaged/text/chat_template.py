"""Chat templates under a time limit.

transformers renders a template in Jinja's sandbox, which limits what the template reaches but not how long it takes. So
each runs in a thread that is ended when its time is up.
"""

import asyncio
import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.text.tokenizer import Tokenizer


class _TimeUp(BaseException):
    """Raised inside a template's thread; no handler for errors in the template takes it for one."""


async def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], timeout_s: float, arguments: Mapping[str, Any]
) -> str:
    """The text of a conversation's prompt. arguments: of `Tokenizer.render_chat`.

    Raises:
        InvalidPromptError, InvalidParameterError: as `Tokenizer.render_chat`.
        TimeoutError: the template takes longer than timeout_s.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[str] = loop.create_future()

    def settle(result: str | Exception) -> None:
        if done.done():
            return  # nobody waits any longer
        if isinstance(result, Exception):
            done.set_exception(result)
        else:
            done.set_result(result)

    def work() -> None:
        try:
            text = tokenizer.render_chat(messages, **arguments)
        except _TimeUp:
            return
        except Exception as error:  # whatever it is, it is for the one who waits
            loop.call_soon_threadsafe(settle, error)
        else:
            loop.call_soon_threadsafe(settle, text)

    thread = threading.Thread(target=work, name="jpaged-chat-template", daemon=True)
    thread.start()
    try:
        return await asyncio.wait_for(done, timeout_s)
    finally:
        if done.cancelled() and thread.is_alive() and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_TimeUp))
