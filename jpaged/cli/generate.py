"""`jpaged generate`: one prompt, streamed; or a file of prompts, one a line, answered in order."""

import argparse
import json
import sys
import time
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any, TextIO

from jpaged.api.errors import InvalidParameterError, InvalidPromptError, JPagedError, NonFiniteLogitsError
from jpaged.api.outputs import RequestOutput
from jpaged.api.sampling_params import RequestOutputKind
from jpaged.cli.options import add_generation_options, generation_options, sampling_params
from jpaged.cli.terminal import Screen
from jpaged.host.interrupt import Interruptible

if TYPE_CHECKING:
    from jpaged.frontend.inputs import Prompt
    from jpaged.llm import LLM

SMALL_BATCH = 64
"""Up to this many prompts the engine gets one slot a prompt, so that fewer sizes are compiled."""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "generate",
        help="answer a prompt, or a file of prompts",
        description="Answer a prompt, or a file of prompts. The text goes to standard output as it is generated.",
        epilog=dedent("""\
            examples:
              jpaged generate "A story about a brave snail"
              echo "A story about the sea" | jpaged generate --temperature 0
              jpaged generate --raw "Once upon a time" --max-tokens 100 --seed 1
              jpaged generate --file prompts.txt --json > answers.jsonl"""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help='the prompt; "-", or nothing: standard input')
    parser.add_argument("-f", "--file", metavar="FILE", help='prompts, one a line, blank lines left out; "-": stdin')
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument("--json", action="store_true", help="one JSON object a line for each prompt, when it is done")
    add_generation_options(parser, max_tokens=512)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns the exit code: 1 if a prompt of several could not be answered."""
    if args.raw and args.system is not None:
        raise InvalidParameterError("--system needs the chat template, which --raw leaves out; drop one of them.")
    screen = Screen(args.quiet)
    options = generation_options(args, verbose=screen.shows_progress)
    prompts = _read_prompts(args)
    if not prompts[0][1].strip() and args.file is None and not args.raw:
        raise InvalidPromptError("The prompt is empty; give at least one character.")
    if len(prompts) <= SMALL_BATCH:
        options.setdefault("max_num_seqs", len(prompts))

    from jpaged.llm import LLM

    llm = LLM(**options)
    if args.file is None and not args.json:
        return _stream(llm, prompts[0][1], args, screen)
    return _answer_all(llm, prompts, args, screen)


def _read_prompts(args: argparse.Namespace) -> list[tuple[int, str]]:
    """Line numbers and prompts."""
    if args.file is not None:
        if args.prompt is not None:
            raise InvalidParameterError("Give either PROMPT or --file, not both.")
        try:
            text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InvalidPromptError(
                f"{args.file} is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}; convert it."
            ) from error
        prompts = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
        if not prompts:
            raise InvalidPromptError(f"{args.file} has no prompts; write one on each line.")
        return [(i, line.removesuffix("\r")) for i, line in prompts]
    if args.prompt not in (None, "-"):
        return [(1, args.prompt)]
    if args.prompt is None and sys.stdin.isatty():
        raise InvalidParameterError('No prompt: write `jpaged generate "your prompt"`, use --file, or pipe text in.')
    return [(1, sys.stdin.read().removesuffix("\n"))]


def _as_prompt(llm: "LLM", text: str, args: argparse.Namespace) -> "Prompt":
    """The text in the chat template, if the model has one."""
    if args.raw:
        return text
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None  # no option of this command leaves it out
    if not tokenizer.has_chat_template:
        if args.system is not None:
            raise InvalidParameterError(f"--system needs a chat template, which {tokenizer.source} does not have.")
        return text
    if not text.strip():
        raise InvalidPromptError("The prompt is empty; give at least one character.")
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages = [*system, {"role": "user", "content": text}]
    return {"prompt_token_ids": tokenizer.apply_chat_template(messages)}


def _stream(llm: "LLM", text: str, args: argparse.Namespace, screen: Screen) -> int:
    params = sampling_params(llm, args, RequestOutputKind.DELTA)
    num_tokens = 0
    begun = time.perf_counter()
    with Interruptible() as interrupt:
        llm.engine.add_request("0", _as_prompt(llm, text, args), params)
        while llm.engine.has_unfinished_requests() and not interrupt.requested:
            for output in llm.engine.step():
                screen.write(output.outputs[0].text)
                num_tokens += len(output.outputs[0].token_ids)
                if output.outputs[0].finish_reason == "error":
                    screen.end_line()
                    raise NonFiniteLogitsError
    screen.end_line()
    if interrupt.requested:
        llm.engine.abort_request("0")
        raise KeyboardInterrupt
    elapsed = time.perf_counter() - begun
    screen.note(f"{num_tokens} tokens in {elapsed:.2f} s, {num_tokens / max(elapsed, 1e-9):,.0f} tokens/s")
    return 0


def _answer_all(llm: "LLM", prompts: list[tuple[int, str]], args: argparse.Namespace, screen: Screen) -> int:
    """Answers in the prompts' order, each as soon as it and all before it are done. A bad prompt fails alone."""
    from tqdm import tqdm

    waiting: dict[str, RequestOutput | str] = {}  # finished, or the error, until those before are written
    written = failed = 0
    for i, (_, text) in enumerate(prompts):
        try:
            params = sampling_params(llm, args, RequestOutputKind.FINAL_ONLY, request_index=i)
            llm.engine.add_request(str(i), _as_prompt(llm, text, args), params)
        except InvalidPromptError as error:
            waiting[str(i)] = str(error)
            failed += 1
    bar = tqdm(total=len(prompts), desc="prompts", disable=not screen.shows_progress or screen.is_terminal)
    with bar, Interruptible() as interrupt:
        while True:
            while str(written) in waiting:
                _write_result(screen, *prompts[written], waiting.pop(str(written)), args.json, is_first=written == 0)
                written += 1
                bar.update()
            if written == len(prompts):
                break
            if interrupt.requested:
                llm.engine.abort_request([str(i) for i in range(written, len(prompts))])
                raise KeyboardInterrupt
            if not llm.engine.has_unfinished_requests():
                raise JPagedError(f"The answer to line {prompts[written][0]} never came.")
            for output in llm.engine.step():
                is_wrong = output.outputs[0].finish_reason == "error"
                waiting[output.request_id] = str(NonFiniteLogitsError()) if is_wrong else output
                failed += is_wrong
    return 1 if failed else 0


def _write_result(
    screen: Screen, line: int, prompt: str, result: RequestOutput | str, as_json: bool, is_first: bool
) -> None:
    if as_json:
        fields: dict[str, Any] = {"line": line, "prompt": prompt}
        if isinstance(result, str):
            fields["error"] = result
        else:
            completion = result.outputs[0]
            fields |= {
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "num_prompt_tokens": len(result.prompt_token_ids),
                "num_output_tokens": len(completion.token_ids),
            }
        screen.write(json.dumps(fields, ensure_ascii=not _speaks_unicode(sys.stdout)) + "\n")
        return
    if not is_first:
        screen.write("\n")
    if isinstance(result, str):
        screen.warn(f"line {line}: {result}")
    else:
        screen.write(result.outputs[0].text)
    screen.end_line()


def _speaks_unicode(stream: TextIO) -> bool:
    """Whether stdout can write every character; JSON escapes the others."""
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "").startswith("utf")
