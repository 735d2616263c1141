"""Chat templates of requests: their fields as arguments of a template."""

from typing import Any

from jpaged.serving.errors import ApiError
from jpaged.serving.protocol import ChatCompletionRequest, TokenizeRequest
from jpaged.serving.turns import Turn
from jpaged.text.tokenizer import Tokenizer


def template_arguments(
    body: ChatCompletionRequest | TokenizeRequest, turn: Turn, tokenizer: Tokenizer
) -> dict[str, Any]:
    """What a request asks of the chat template, as arguments of `Tokenizer.chat_prompt`.

    turn: the request's; its messages are what is rendered.
    Raises:
        ApiError: fields that contradict each other or a template; a variable that has the name of an option.
    """
    if body.add_generation_prompt and body.continue_final_message:
        raise ApiError(
            400,
            "continue_final_message contradicts add_generation_prompt; set one of them.",
            param="continue_final_message",
        )
    if isinstance(body, ChatCompletionRequest) and body.echo and not body.continue_final_message:
        raise ApiError(
            400, "echo is for continue_final_message: true, whose last message it repeats; leave it out.", param="echo"
        )
    variables = body.chat_template_kwargs or {}
    for name in variables:
        if name in tokenizer.template_options:
            said = f"chat_template_kwargs: {name!r} is an option, not a variable; leave it out."
            if name in ChatCompletionRequest.__struct_fields__:
                said += " Requests that have such a field, as those to /v1/chat/completions, take it beside them."
            raise ApiError(400, said, param="chat_template_kwargs")
    return (
        turn.variables
        | variables
        | {
            "tools": turn.template_tools,
            "chat_template": body.chat_template,
            "add_generation_prompt": body.add_generation_prompt is not False,
            "continue_final_message": bool(body.continue_final_message),
        }
    )
