"""`jpaged chat`: a conversation at the terminal (or from a pipe, one message a line)."""

import argparse
import contextlib
import sys
from importlib import import_module
from textwrap import dedent
from typing import TYPE_CHECKING

from jpaged.api.errors import InvalidPromptError, NonFiniteLogitsError
from jpaged.api.sampling_params import RequestOutputKind
from jpaged.cli.options import add_generation_options, generation_options, sampling_params
from jpaged.cli.terminal import Screen
from jpaged.host.interrupt import Interruptible

if TYPE_CHECKING:
    from jpaged.llm import LLM

HELP = """\
/reset          forget the conversation (the system message stays)
/retry          answer the last message again
/system [TEXT]  show the system message, or set it and start anew
/help           this
/quit           leave; so does Ctrl-D
Ctrl-C interrupts an answer, twice the program. A line that ends in \\ goes on in the next."""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model.\n\n" + HELP,
        epilog=dedent("""\
            examples:
              jpaged chat
              jpaged chat --model Qwen/Qwen3-0.6B --system "Answer in one sentence."
              printf 'Hello\\nTell me a story\\n' | jpaged chat"""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    add_generation_options(parser, max_tokens=1024)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    screen = Screen(args.quiet)
    options = generation_options(args, verbose=screen.shows_progress)
    options.setdefault("max_num_seqs", 1)  # one conversation needs one program size

    from jpaged.llm import LLM

    llm = LLM(**options)
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None  # no option of this command leaves it out
    if not tokenizer.has_chat_template:
        raise InvalidPromptError(f"{tokenizer.source} has no chat template; use `jpaged generate`, which needs none.")
    tokenizer.check_chat_template()
    Chat(llm, args, screen).run()
    return 0


class Chat:
    """The conversation and its loop.

    messages: user's and assistant's in turn, without the system message; between turns the last is the assistant's.
    """

    def __init__(self, llm: "LLM", args: argparse.Namespace, screen: Screen) -> None:
        self._llm = llm
        assert llm.engine.tokenizer is not None
        self._tokenizer = llm.engine.tokenizer
        self._args = args
        self._screen = screen
        self._system: str | None = args.system
        self._num_requests = 0
        self.messages: list[dict[str, str]] = []
        self._interactive = sys.stdin.isatty()

    def run(self) -> None:
        """Reads and answers until /quit or the end of the input."""
        if self._interactive:
            _enable_line_editing()
            self._screen.note("/help lists commands; /quit or Ctrl-D leaves.")
        interrupted = False
        while True:
            try:
                line = self._read()
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                self._say("\n(Ctrl-C again, Ctrl-D or /quit leaves)")
                continue
            interrupted = False
            if line is None:
                if self._interactive:
                    self._screen.write("\n")
                return
            if line.startswith("/"):
                if not self._obey(line):
                    return
            elif line.strip():
                self.messages.append({"role": "user", "content": line})
                self._answer()

    def _read(self) -> str | None:
        """The next message, or None at the end of the input."""
        lines: list[str] = []
        while True:
            try:
                line = self._read_line("... " if lines else "> ")
            except EOFError:
                return "\n".join(lines) if lines else None
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _read_line(self, prompt: str) -> str:
        if not self._interactive:
            return input()
        if self._screen.is_terminal:
            return input(self._screen.input_prompt(prompt))
        print(prompt, end="", file=sys.stderr, flush=True)  # only answers go to the file or pipe
        return input()

    def _obey(self, line: str) -> bool:
        """Carries out a command; returns False to leave."""
        command, _, rest = line.partition(" ")
        if command in ("/quit", "/exit"):
            return False
        if command == "/help":
            self._say(HELP)
        elif command == "/reset":
            self.messages.clear()
            self._say("(conversation forgotten)")
        elif command == "/system":
            self._set_system(rest.strip())
        elif command == "/retry":
            self._retry()
        else:
            self._say(f"There is no command {command}. /help lists those there are.")
        return True

    def _set_system(self, text: str) -> None:
        if not text:
            self._say("(no system message)" if self._system is None else self._system)
            return
        self._system = text
        self.messages.clear()
        self._say("(system message set; conversation forgotten)")

    def _retry(self) -> None:
        if not self.messages:
            self._say("(nothing to answer yet)")
            return
        self.messages.pop()
        self._answer()

    def _answer(self) -> None:
        """Answers the last message. On Ctrl-C a partial answer stays; if there is none, the message is dropped, too."""
        engine = self._llm.engine
        request_id = str(self._num_requests)
        params = sampling_params(self._llm, self._args, RequestOutputKind.DELTA, self._num_requests)
        self._num_requests += 1
        parts: list[str] = []
        finish_reason = None
        with Interruptible() as interrupt:
            try:
                prompt = self._prompt(params.max_tokens)
                engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
            except InvalidPromptError as error:
                self.messages.pop()
                self._screen.warn(str(error))
                return
            while engine.has_unfinished_requests() and not interrupt.requested:
                for output in engine.step():
                    parts.append(output.outputs[0].text)
                    finish_reason = output.outputs[0].finish_reason
                    if finish_reason == "error":
                        self._screen.end_line()
                        raise NonFiniteLogitsError
                    self._screen.write(parts[-1])
            if interrupt.requested:
                engine.abort_request(request_id)
        self._screen.end_line()
        answer = "".join(parts)
        if answer.strip() or not interrupt.requested:
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.messages.pop()
        if interrupt.requested:
            self._say("(interrupted)")
        elif finish_reason == "length":
            self._screen.note("(cut short by --max-tokens or the model's context)")

    def _prompt(self, max_tokens: int | None) -> list[int]:
        """Token ids of the conversation; the oldest turns are dropped if they leave no room for an answer."""
        limit = self._llm.engine.max_model_len
        room = min(max_tokens or limit, limit // 4)
        num_forgotten = 0
        while True:
            system = [] if self._system is None else [{"role": "system", "content": self._system}]
            token_ids = self._tokenizer.apply_chat_template([*system, *self.messages])
            if len(token_ids) + room <= limit or len(self.messages) <= 2:
                break
            del self.messages[:2]
            num_forgotten += 1
        if num_forgotten:
            self._screen.note(f"(the context is full: {num_forgotten} of the oldest turns forgotten)")
        return token_ids

    def _say(self, text: str) -> None:
        """Writes a message of the program itself, which is not part of a piped conversation's output."""
        if self._interactive:
            self._screen.end_line()
            print(self._screen.dim(text), flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


def _enable_line_editing() -> None:
    """Arrow keys and history in `input`, where Python has readline."""
    with contextlib.suppress(ImportError):
        import_module("readline")  # importing it is what enables it
