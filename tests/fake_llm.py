"""A stand-in for `jpaged.llm` that answers at once, without a model: the command line is tested against it.

An answer is "You said: " and the prompt's last line, then how many tokens the prompt had; one character is one token,
and a step makes one for each request. Some prompts are special: "endless" never ends, "slow" takes time for each
token, "die" kills the engine, "escape" answers with a terminal's escape sequence.
"""

import json
import os
import sys
import time
import types

from jpaged.api.errors import EngineDeadError, InvalidPromptError, ModelNotFoundError
from jpaged.api.outputs import CompletionOutput, RequestOutput
from jpaged.api.sampling_params import RequestOutputKind, SamplingParams

created: list["LLM"] = []


class Tokenizer:
    """A character is a token."""

    def __init__(self, source: str, has_chat_template: bool) -> None:
        self.source = source
        self.has_chat_template = has_chat_template

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def check_chat_template(self) -> None:
        """It is never broken."""

    def apply_chat_template(self, messages) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}\n" for m in messages))


class Engine:
    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.requests: dict[str, tuple[SamplingParams, list[int], list[str], int]] = {}
        self.seen: list[tuple[str, SamplingParams]] = []
        self.aborted: list[str] = []

    def add_request(self, request_id, prompt, params):
        ids = prompt["prompt_token_ids"] if isinstance(prompt, dict) else self.tokenizer.encode(prompt)
        if not ids:
            raise InvalidPromptError("The prompt is empty; give at least one character.")
        if len(ids) >= self.max_model_len:
            raise InvalidPromptError(f"The prompt has {len(ids)} tokens; at most {self.max_model_len - 1} fit.")
        text = "".join(map(chr, ids))
        self.seen.append((text, params))
        last = text.rstrip("\n").rpartition("\n")[2].removeprefix("<user>")
        answer = {
            "escape": "\x1b[2Jwiped\x07",
            "endless": "endless " * 100_000,
            "silent": " " * 100_000,
        }.get(last, f"You said: {last} [{len(ids)}]")
        self.requests[request_id] = (params, ids, list(answer), 0)

    def step(self):
        outputs = []
        for request_id, (params, ids, answer, done) in list(self.requests.items()):
            text = "".join(map(chr, ids))
            if "slow" in text or "endless" in text or "silent" in text:
                time.sleep(0.01)
            if "die" in text:
                raise EngineDeadError("The engine failed: out of luck")
            done += 1
            if params.max_tokens is not None and done >= params.max_tokens:
                reason = "length"
            else:
                reason = "stop" if done == len(answer) else None
            if reason:
                del self.requests[request_id]
            else:
                self.requests[request_id] = (params, ids, answer, done)
            first = done - 1 if params.output_kind == RequestOutputKind.DELTA else 0
            if reason or params.output_kind != RequestOutputKind.FINAL_ONLY:
                part = answer[first:done]
                completion = CompletionOutput(0, "".join(part), [ord(c) for c in part], finish_reason=reason)
                outputs.append(RequestOutput(request_id, None, ids, [completion], bool(reason)))
        return outputs[::-1]  # not in the order of arrival

    def abort_request(self, request_ids):
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self.requests.pop(request_id, None)
            self.aborted.append(request_id)

    def has_unfinished_requests(self):
        return bool(self.requests)


class LLM:
    def __init__(self, model=None, **options):
        if model == "missing":
            raise ModelNotFoundError("missing does not exist;\n  give a directory.")
        if model == "defect":
            raise ZeroDivisionError("division by zero")
        self.model = model
        self.options = options
        self.tokenizer = Tokenizer(model or "the demo model", has_chat_template=model != "base")
        self.engine = Engine(self.tokenizer, options.get("max_model_len") or 4096)
        created.append(self)
        if options["verbose"]:
            print("start-up table", file=sys.stderr)

    def get_tokenizer(self):
        return self.tokenizer

    def get_default_sampling_params(self):
        return SamplingParams(temperature=0.6, top_k=20)


def install() -> None:
    """Puts this in the place of `jpaged.llm`."""
    module = types.ModuleType("jpaged.llm")
    module.LLM = LLM  # type: ignore[attr-defined]
    sys.modules["jpaged.llm"] = module


if __name__ == "__main__":  # python -m tests.fake_llm ARGUMENTS: the `jpaged` command on this
    install()
    from jpaged.cli import main

    code = main(sys.argv[1:])
    if os.environ.get("FAKE_LLM_REPORT"):
        with open(os.environ["FAKE_LLM_REPORT"], "w") as file:
            json.dump([text for llm in created for text, _ in llm.engine.seen], file)
    sys.exit(code)
