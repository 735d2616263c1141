"""Chat templates under a time limit. transformers renders them in Jinja's sandbox, which limits what they reach but not
how long they take, so each runs in a thread that is ended when its time is up.
"""

import asyncio
import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import ChatCompletionRequest, TokenizeRequest
from jpaged.text.tokenizer import Tokenizer


class _TimeUp(BaseException):
    """Raised inside a template's thread; no handler for errors in the template takes it for one."""


def template_arguments(body: ChatCompletionRequest | TokenizeRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a request asks of the chat template, as arguments of `Tokenizer.render_chat`.

    Raises:
        ApiError: fields that contradict each other or a template; a variable that has the name of an option.
    """
    if body.add_special_tokens:
        raise ApiError(
            400,
            "add_special_tokens is for text; a chat template writes special tokens itself. Leave it out.",
            param="add_special_tokens",
        )
    if body.add_generation_prompt and body.continue_final_message:
        raise ApiError(
            400,
            "continue_final_message contradicts add_generation_prompt; set one of them.",
            param="continue_final_message",
        )
    variables = body.chat_template_kwargs or {}
    for name in variables:
        if name in tokenizer.template_options:
            raise ApiError(
                400,
                f"chat_template_kwargs: {name!r} is an option of the request, not a variable; give it beside them.",
                param="chat_template_kwargs",
            )
    return variables | {
        "chat_template": body.chat_template,
        "add_generation_prompt": body.add_generation_prompt is not False,
        "continue_final_message": bool(body.continue_final_message),
    }


async def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], timeout_s: float, arguments: Mapping[str, Any]
) -> str:
    """A conversation to the text of its prompt. arguments: of `Tokenizer.render_chat`.

    Raises:
        InvalidPromptError, InvalidParameterError: as `Tokenizer.render_chat`. ApiError: the template takes longer than
            timeout_s.
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
    except TimeoutError:
        if arguments.get("chat_template") is None:
            message, param = f"messages: the chat template took longer than {timeout_s:g} s; send less.", "messages"
        else:
            message, param = f"chat_template took longer than {timeout_s:g} s; let it do less.", "chat_template"
        raise ApiError(400, message, param=param) from None
    finally:
        if done.cancelled() and thread.is_alive() and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_TimeUp))
