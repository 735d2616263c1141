"""Programs that call tools, through the clients that others write, against a server that `agents.py` has started.

openai        tools in a loop, streamed tools, `parse`, responses with functions and with what came before
anthropic     a message, a stream of one, tools in a loop, the count of tokens
instructor    a model of pydantic, by tools and by JSON schema
langchain     `bind_tools` and `with_structured_output`
pydantic-ai   an agent with an output type
litellm       tools, whole and streamed

Every call is required, as the demo model would make none by itself. A client that is not installed is left out.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import BaseModel, Field

MESSAGES: list[Any] = [{"role": "user", "content": "A story about a fox"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
NAMES = ("get_weather", "get_time")


class Animal(BaseModel):
    """An animal."""

    name: str = Field(max_length=8)
    kind: Literal["fox", "snail"]


def check_openai(url: str, key: str, model: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
    messages = list(MESSAGES)
    for name in NAMES:
        named: Any = {"type": "function", "function": {"name": name}}
        fields: Any = {"model": model, "messages": messages, "tools": tools, "tool_choice": named, "max_tokens": 100}
        answer = client.chat.completions.create(**fields, seed=1)
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name == name
        assert list(json.loads(call.function.arguments)) == ["city"]
        with client.chat.completions.stream(**fields, seed=1) as stream:
            for _ in stream:
                pass
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
        assert streamed.function == call.function or streamed.function.arguments == call.function.arguments
        messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "20"}]
    parsed = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Animal, max_tokens=100, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Animal)
    first = client.responses.create(
        model=model,
        input="Hello",
        tools=[{"type": "function", "name": "get_time", "parameters": SCHEMA, "strict": True}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=100,
    )
    call = first.output[0]
    assert call.type == "function_call"
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "noon"}]
    second = client.responses.create(model=model, input=result, previous_response_id=first.id, max_output_tokens=9)
    assert second.output_text
    told = client.responses.parse(model=model, input="Hello", text_format=Animal, max_output_tokens=100)
    assert isinstance(told.output_parsed, Animal)


def check_anthropic(url: str, key: str, model: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    fields: Any = {"model": model, "messages": MESSAGES, "max_tokens": 100, "temperature": 0}
    text = client.messages.create(**fields).content[0].text
    with client.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == text
    tools: Any = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
    messages = list(MESSAGES)
    for name in NAMES:
        fields |= {"messages": messages, "tools": tools, "tool_choice": {"type": "tool", "name": name}}
        answer = client.messages.create(**fields)
        (call,) = answer.content
        assert (call.type, call.name, list(call.input), answer.stop_reason) == ("tool_use", name, ["city"], "tool_use")
        with client.messages.stream(**fields) as stream:
            (streamed,) = stream.get_final_message().content
        assert streamed.input == call.input
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "20"}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert client.messages.count_tokens(model=model, messages=messages, tools=tools).input_tokens > 0


def check_instructor(url: str, key: str, model: str) -> None:
    import instructor
    import openai

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=key), mode=mode)
        found = client.chat.completions.create(
            model=model, messages=MESSAGES, response_model=Animal, max_tokens=150, temperature=0
        )
        assert isinstance(found, Animal)


def check_langchain(url: str, key: str, model: str) -> None:
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=model, max_tokens=150, temperature=0)
    (call,) = chat.bind_tools([Animal], tool_choice="Animal").invoke(MESSAGES).tool_calls
    assert Animal(**call["args"])
    for method in ("function_calling", "json_schema"):
        assert isinstance(chat.with_structured_output(Animal, method=method).invoke(MESSAGES), Animal)


def check_pydantic_ai(url: str, key: str, model: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    served = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))
    agent: Any = Agent(served, output_type=Animal, model_settings={"max_tokens": 150, "temperature": 0})
    assert isinstance(asyncio.run(agent.run("A story about a fox")).output, Animal)


def check_litellm(url: str, key: str, model: str) -> None:
    import litellm

    tools = [{"type": "function", "function": {"name": NAMES[0], "parameters": SCHEMA}}]
    fields: Any = {"model": f"openai/{model}", "messages": MESSAGES, "tools": tools, "tool_choice": "required"}
    fields |= {"api_base": f"{url}/v1", "api_key": key, "max_tokens": 100, "parallel_tool_calls": False, "seed": 1}
    call = litellm.completion(**fields).choices[0].message.tool_calls[0]
    assert list(json.loads(call.function.arguments)) == ["city"]
    chunks = list(litellm.completion(stream=True, **fields))
    built = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0]
    assert built.function.arguments == call.function.arguments


CHECKS: dict[str, tuple[str, Callable[[str, str, str], None]]] = {  # the module that each needs
    "openai": ("openai", check_openai),
    "anthropic": ("anthropic", check_anthropic),
    "instructor": ("instructor", check_instructor),
    "langchain-openai": ("langchain_openai", check_langchain),
    "pydantic-ai-slim": ("pydantic_ai", check_pydantic_ai),
    "litellm": ("litellm", check_litellm),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    args = parser.parse_args()
    failed = False
    for name, (module, check) in CHECKS.items():
        if find_spec(module) is None:
            print(f"left out  {name}: it is not installed", flush=True)
            continue
        try:
            check(args.url, "none", args.model)
            print(f"passed    {name} {version(name)}", flush=True)
        except Exception as error:  # of a client
            failed = True
            print(f"FAILED    {name}: {type(error).__name__}: {error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
