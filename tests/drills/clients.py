"""A served demo model, used through the clients that others write: do they work, and do they find what they should?

    jpaged serve --port 8000 &
    python -m venv clients            # an environment of their own: jpaged is not needed in it
    clients/bin/pip install openai litellm langchain-openai 'lm_eval[api,hf]' schemathesis
    clients/bin/python -m tests.drills.clients --url http://127.0.0.1:8000 --model-dir jpaged/assets/demo_model

openai, litellm, langchain   a completion and a chat, whole and streamed, must be the texts that plain HTTP gets
lm_eval                      `local-completions` on a local task of multiple choice must reach the accuracy of lm-eval's
                             own Hugging Face backend on the same checkpoint, and its log-likelihoods within 1e-3
schemathesis                 requests made up from /openapi.json must meet no 5xx

A client that is not installed is left out, and said to be. Exits with 1 if a check fails. `--only` picks some.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from tests.drills.lm_eval_stories import OPENINGS, StoriesTask, questions

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "A story about a brave snail"}]
SAMPLING = {"seed": 11, "max_tokens": 24}
LOGLIKELIHOOD_TOLERANCE = 1e-3


class Served:
    """The server, asked by plain HTTP for what the clients are to find."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.url = args.url.rstrip("/")
        self.key = args.api_key
        headers = {"authorization": f"Bearer {self.key}"}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=300, trust_env=False)
        self.model = self._http.get("/v1/models").json()["data"][0]["id"]

    def post(self, path: str, **body: Any) -> Any:
        response = self._http.post(path, json=body)
        response.raise_for_status()
        return response.json()

    def completion(self) -> str:
        text: str = self.post("/v1/completions", prompt=PROMPT, **SAMPLING)["choices"][0]["text"]
        return text

    def chat(self) -> str:
        answer = self.post("/v1/chat/completions", messages=MESSAGES, **SAMPLING)
        content: str = answer["choices"][0]["message"]["content"]
        return content


def check_openai(served: Served) -> str:
    import openai

    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0) as client:
        fields: dict[str, Any] = {"model": served.model, **SAMPLING}
        same(client.completions.create(prompt=PROMPT, **fields).choices[0].text, served.completion())
        parts = client.completions.create(prompt=PROMPT, stream=True, **fields)
        same("".join(part.choices[0].text for part in parts), served.completion())
        same(client.chat.completions.create(messages=MESSAGES, **fields).choices[0].message.content, served.chat())
        chunks = client.chat.completions.create(messages=MESSAGES, stream=True, **fields)
        same("".join(chunk.choices[0].delta.content or "" for chunk in chunks), served.chat())
        try:
            client.completions.create(model="another", prompt=PROMPT)
        except openai.NotFoundError as error:
            same(error.code, "model_not_found")
        else:
            raise SystemExit("openai: an unknown model was served.")
    return openai.__version__


def check_litellm(served: Served) -> str:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch prices
    import litellm

    fields = {"api_base": f"{served.url}/v1", "api_key": served.key, **SAMPLING}
    name = f"openai/{served.model}"
    same(litellm.completion(model=name, messages=MESSAGES, **fields).choices[0].message.content, served.chat())
    chunks = litellm.completion(model=name, messages=MESSAGES, stream=True, **fields)
    same("".join(chunk.choices[0].delta.content or "" for chunk in chunks), served.chat())
    text = litellm.text_completion(model=f"text-completion-openai/{served.model}", prompt=PROMPT, **fields)
    same(text.choices[0].text, served.completion())
    return version("litellm")


def check_langchain(served: Served) -> str:
    from langchain_openai import ChatOpenAI, OpenAI

    fields: dict[str, Any] = {"base_url": f"{served.url}/v1", "api_key": served.key, "model": served.model, **SAMPLING}
    chat = ChatOpenAI(**fields)
    same(chat.invoke(MESSAGES).content, served.chat())
    same("".join(str(chunk.content) for chunk in chat.stream(MESSAGES)), served.chat())
    completions = OpenAI(temperature=0.7, **fields)
    expected = served.post("/v1/completions", prompt=PROMPT, temperature=0.7, **SAMPLING)
    same(completions.invoke(PROMPT), expected["choices"][0]["text"])
    answers = asyncio.run(chat.abatch([MESSAGES] * 8))
    same({str(answer.content) for answer in answers}, {served.chat()})
    return version("langchain-openai")


def check_lm_eval(served: Served) -> str:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    if served.args.model_dir is None:
        raise SystemExit("lm_eval needs --model-dir, the checkpoint that is served.")
    directory = tempfile.TemporaryDirectory(prefix="client-checks-")  # gone with the function
    task = StoriesTask(Path(directory.name), questions(_stories(served, served.args.questions), seed=0))
    model_dir = str(served.args.model_dir)
    models = {
        "local-completions": LocalCompletionsAPI(
            model=served.model,
            base_url=f"{served.url}/v1/completions",
            tokenizer=model_dir,
            add_bos_token=True,
            num_concurrent=4,
            batch_size=8,
            max_length=1024,
            auth_token=served.key,
        ),
        "hf": HFLM(pretrained=model_dir, dtype="float32", device="cpu", batch_size=8, add_bos_token=True),
    }
    accuracies, sums = {}, {}
    for name, model in models.items():
        accuracies[name], of_rows = task.evaluate(model)
        sums[name] = [logprob for of_choices in of_rows for logprob in of_choices]
    print(f"  {accuracies}")
    pairs = list(zip(sums["local-completions"], sums["hf"], strict=True))
    worst = max(abs(a - b) / max(1, abs(b)) for a, b in pairs)
    print(f"  {len(pairs)} log-likelihoods differ by at most {worst:.1e}")
    same(accuracies["local-completions"], accuracies["hf"])
    if worst > LOGLIKELIHOOD_TOLERANCE:
        raise SystemExit(f"lm_eval: log-likelihoods differ by {worst:.1e}.")
    return version("lm_eval")


def check_schemathesis(served: Served) -> str:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json"]
    options = ["--checks", "not_a_server_error", "--max-examples", str(served.args.examples), "--request-timeout", "60"]
    key = ["--header", f"Authorization: Bearer {served.key}"]
    if subprocess.run([*command, *options, *key], check=False).returncode:
        raise SystemExit("schemathesis: it found something.")
    health = httpx.get(f"{served.url}/health", timeout=60, trust_env=False)
    same(health.status_code, 200)
    return version("schemathesis")


CHECKS: dict[str, tuple[str, Callable[[Served], str]]] = {  # the module that each needs
    "openai": ("openai", check_openai),
    "litellm": ("litellm", check_litellm),
    "langchain": ("langchain_openai", check_langchain),
    "lm_eval": ("lm_eval", check_lm_eval),
    "schemathesis": ("schemathesis", check_schemathesis),
}


def same(found: Any, expected: Any) -> None:
    if found != expected:
        raise SystemExit(f"found    {found!r}\nexpected {expected!r}")


def version(package: str) -> str:
    from importlib.metadata import version as installed

    return installed(package)


def _stories(served: Served, count: int) -> list[str]:
    """Stories that the model tells."""
    stories = []
    for i in range(count):
        opening = OPENINGS[i % len(OPENINGS)]
        body = {"prompt": opening, "seed": i, "max_tokens": 60, "temperature": 0.8, "ignore_eos": True}
        stories.append(opening + served.post("/v1/completions", **body)["choices"][0]["text"])
    return stories


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model-dir", type=Path, help="the checkpoint that is served, for lm_eval")
    parser.add_argument("--questions", type=int, default=100, help="of the task for lm_eval")
    parser.add_argument("--examples", type=int, default=200, help="requests a route and phase, for schemathesis")
    parser.add_argument("--only", choices=CHECKS, action="append", help="may be repeated")
    args = parser.parse_args()
    served, failed = Served(args), False
    for name in args.only or CHECKS:
        module, check = CHECKS[name]
        if find_spec(module) is None:
            print(f"left out  {name}: it is not installed", flush=True)
            continue
        try:
            print(f"passed    {name} {check(served)}", flush=True)
        except SystemExit as error:
            failed = True
            print(f"FAILED    {name}: {error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
