"""Constraints on a text in llguidance's language, and their check.

A constraint comes from a stranger, and few bytes can make a compiler take minutes and gigabytes, or overflow its stack.
So each is first compiled in a process of its own (`grammar_check.py`), which is ended if it takes too much. What has
passed is compiled for an engine by `grammar_compiler.py`.
"""

import json
import re
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jpaged.api.errors import InvalidParameterError, JPagedError
from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.text import grammar_check
from jpaged.text.frames import read_frame, write_frame
from jpaged.text.helper_process import start_helper
from jpaged.text.structural_tags import tags_as_lark
from jpaged.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

LARGE_VOCABULARY = 32_000
"""From so many tokens on a tokenizer for grammars takes so long to make that it is worth making ahead."""
CHECK_S = 2.0
"""The longest that compiling a constraint may take."""
_START_S = 60.0
_MOST_VERDICTS = 4096
WHITESPACE = r" |\n {0,24}|\n\t{0,8}"
"""What may stand between JSON's tokens."""
COMPACT_SEPARATORS = {"item_separator": ", ", "key_separator": ": "}
"""Of JSON without further white space (`disable_any_whitespace`)."""
_MOST_SHOWN = 200
_BAD_REGEX = re.compile(r'invalid regex (".*") \(in regex\): (.*)', re.DOTALL)
_OUR_LINES = re.compile(r"\n *\d+ \| .*", re.DOTALL)
"""What llguidance shows of a grammar, of which a user may have written a regex only."""
_NO_TEXT = "NoExtensionBias"
"""What it says of a grammar whose start leads nowhere."""
_TOKENIZER_FILE, _TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"


@dataclass(frozen=True)
class GrammarTokenizer:
    """A tokenizer as llguidance takes it. json: of the tokenizers library. vocab_size: of the model's logits."""

    json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> "GrammarTokenizer":
        """Of a tokenizer that is loaded."""
        text = tokenizer.to_json()
        return cls(_of_logits(text, json.loads(text), vocab_size), vocab_size, tuple(eos_token_ids))

    @classmethod
    def read(
        cls, source: str | Path, load: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> "GrammarTokenizer":
        """Of a directory's tokenizer.json, which takes no transformers; of what `load` loads if there is none, or if
        its configuration adds tokens to it.
        """
        directory = Path(source)
        try:
            text = (directory / _TOKENIZER_FILE).read_text()
            config = json.loads((directory / _TOKENIZER_CONFIG_FILE).read_text())
            whole = json.loads(text)
            added = {str(token["id"]) for token in whole["added_tokens"]}
            if not set(config.get("added_tokens_decoder", {})) - added:
                return cls(_of_logits(text, whole, vocab_size), vocab_size, tuple(eos_token_ids))
        except (OSError, ValueError, LookupError):
            pass
        return cls.of(load(), vocab_size, eos_token_ids)

    def make(self) -> "LLTokenizer":
        """The tokenizer. All other Python threads wait while it is made, for seconds if the vocabulary is large.

        Raises:
            InvalidParameterError: it is none that llguidance can use, or the model has no end-of-sequence token.
        """
        from llguidance import LLTokenizer

        self.check()
        try:
            return LLTokenizer(self.json, self.vocab_size, list(self.eos_token_ids))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # whatever the bindings raise: a panic is no Exception
            raise _unusable(str(error)) from error

    def check(self) -> None:
        """Raises InvalidParameterError if the model has no end-of-sequence token."""
        if not self.eos_token_ids:
            raise InvalidParameterError("structured_outputs needs a model with an end-of-sequence token.")


def _of_logits(text: str, whole: dict[str, Any], vocab_size: int) -> str:
    """A tokenizer.json as llguidance can use it. whole: what the text says.

    Added tokens that the model has no logits for are left out: Gemma 3's 1B has one, for images. Ids between those of
    tokens, as GPT-4's vocabulary has them, become special tokens, which never follow: llguidance counts the tokens, and
    takes ids to be less than that.
    """
    kept = [token for token in whole["added_tokens"] if token["id"] < vocab_size]
    model = whole["model"]
    vocab = model["vocab"] if isinstance(model.get("vocab"), dict) else {}  # Unigram's is a list, in the ids' order
    known = set(vocab.values()) | ({token["id"] for token in kept} if vocab else set())
    holes = {f"<|no token {i}|>": i for i in range(min(vocab_size, max(known, default=0))) if i not in known}
    if not holes and len(kept) == len(whole["added_tokens"]):
        return text
    if holes:
        kinds = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
        kept += [{"id": i, "content": content, **kinds} for content, i in holes.items()]
        kept.sort(key=lambda token: int(token["id"]))
        model = model | {"vocab": vocab | holes}
    return json.dumps(whole | {"added_tokens": kept, "model": model}, ensure_ascii=False)


def _unusable(error: str) -> InvalidParameterError:
    return InvalidParameterError(f"structured_outputs cannot be used with this tokenizer: {error}")


def grammar_text(params: StructuredOutputsParams) -> str:
    """A constraint in llguidance's language.

    Raises:
        InvalidParameterError: a structural tag or a GBNF grammar that is malformed.
    """
    from llguidance import LLMatcher

    kind = params.kind
    if kind in ("json", "json_object"):
        schema = str(params.json) if kind == "json" else '{"type": "object"}'
        return LLMatcher.grammar_from_json_schema(schema, overrides=_json_options(params))
    if kind == "regex":
        return LLMatcher.grammar_from_regex(str(params.regex))
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, params.choice or ())))
    return LLMatcher.grammar_from_lark(
        tags_as_lark(str(params.structural_tag), grammar_expression)
        if kind == "structural_tag"
        else _as_lark(str(params.grammar))
    )


def grammar_expression(params: StructuredOutputsParams) -> str:
    """A constraint as an expression within a grammar in Lark, for a part of a text.

    Raises:
        InvalidParameterError: a structural tag or a GBNF grammar that is malformed.
    """
    kind = params.kind
    if kind in ("json", "json_object"):
        schema = json.loads(str(params.json)) if kind == "json" else {"type": "object"}
        options = _json_options(params) | schema.get("x-guidance", {})
        return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
    if kind == "regex":
        regex = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", str(params.regex), flags=re.DOTALL)
        return f"/{regex}/".replace("\n", r"\n")
    if kind == "choice":
        return f"({' | '.join(map(json.dumps, params.choice or ()))})"
    if kind == "structural_tag":
        return f"%lark {{\n{tags_as_lark(str(params.structural_tag), grammar_expression)}\n}}"
    return f"%lark {{\n{_as_lark(str(params.grammar))}\n}}"


def refusal(params: StructuredOutputsParams, wrong: str) -> str:
    """Why a constraint cannot be used, given what llguidance says of its grammar. Of a bad regex that is the regex and
    what is wrong with it: the grammar around it may be ours.
    """
    found = _BAD_REGEX.search(wrong)
    if found is not None:
        regex = json.dumps(params.regex, ensure_ascii=False) if params.kind == "regex" else found[1]
        if len(regex) > _MOST_SHOWN:
            regex = regex[:_MOST_SHOWN] + '..."'
        reason = _OUR_LINES.sub("", found[2]).rpartition("\nerror: ")[2].strip()
        wrong = f"the regex {regex} is not valid: {reason}"
    wrong = wrong.partition("\n<state>")[0]  # the parser's insides, and the grammar again
    if wrong == _NO_TEXT:
        wrong = "no text fits it."
    return f"structured_outputs.{params.kind} cannot be used: {wrong}"


def _json_options(params: StructuredOutputsParams) -> Any:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False, **COMPACT_SEPARATORS}
    return {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}


def _as_lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except (Exception, RecursionError) as error:
        raise InvalidParameterError(f"structured_outputs.grammar is no GBNF: {error}") from error


class GrammarCheck:
    """Compiles constraints in processes that are limited in time and memory, and remembers what came of it.

    Thread safe. As many processes are started as there are checks at once.

    tokenizer: called once for each process. vocab_size: of the model's logits.
    """

    def __init__(self, tokenizer: Callable[[], GrammarTokenizer], vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._verdicts: OrderedDict[StructuredOutputsParams, str] = OrderedDict()
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._idle: list[_Checker] = []

    def prepare(self) -> None:
        """Starts a process in the background if the first check would wait long for it."""
        if self._vocab_size >= LARGE_VOCABULARY:
            threading.Thread(target=self._start_one, name="jpaged-grammar-check", daemon=True).start()

    def knows(self, params: StructuredOutputsParams) -> bool:
        """Whether `check` answers at once."""
        return params in self._verdicts

    def check(self, params: StructuredOutputsParams) -> None:
        """Raises InvalidParameterError for a constraint that cannot be compiled, or not within the limits."""
        with self._lock:
            verdict = self._verdicts.get(params)
            if verdict is not None:
                self._verdicts.move_to_end(params)
        if verdict is None:
            verdict = self._ask(grammar_text(params))
            with self._lock:
                self._verdicts[params] = verdict
                while len(self._verdicts) > _MOST_VERDICTS:
                    self._verdicts.popitem(last=False)
        if verdict:
            raise InvalidParameterError(refusal(params, verdict))

    def _start_one(self) -> None:
        with self._starting:
            try:
                checker = _Checker(self._tokenizer())
            except JPagedError:  # the first check is told
                return
            with self._lock:
                self._idle.append(checker)

    def _ask(self, grammar: str) -> str:
        with self._starting, self._lock:  # one that is being prepared is waited for
            checker = self._idle.pop() if self._idle else None
        checker = checker or _Checker(self._tokenizer())
        verdict = checker.ask(grammar)
        if checker.is_alive:
            with self._lock:
                self._idle.append(checker)
        return verdict


class _Checker:
    """A checking process. It ends with this object, and with this process, whose end of the socket it waits for."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        tokenizer.check()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = start_helper(grammar_check.__name__, str(theirs.fileno()), fds=[theirs.fileno()])
        self.is_alive = True
        wrong = self._exchange(json.dumps(asdict(tokenizer)).encode(), _START_S)
        if wrong is None:
            self._end()
            raise JPagedError("The process that checks structured_outputs did not start.")
        if wrong:
            self._end()
            raise _unusable(wrong.decode(errors="replace"))

    def ask(self, grammar: str) -> str:
        """What is wrong with a grammar; empty if nothing is."""
        begun = time.monotonic()
        answer = self._exchange(grammar.encode(), CHECK_S)
        if answer is not None:
            return answer.decode(errors="replace")
        self._end()
        if time.monotonic() - begun >= CHECK_S:
            return f"it takes more than {CHECK_S:g} s to compile. Simplify it."
        return "it takes too much memory, or refers too deeply from one part to the next. Simplify it."

    def _exchange(self, message: bytes, timeout_s: float) -> bytes | None:
        """The answer to a message; None if there is none within the time."""
        self._socket.settimeout(timeout_s)
        try:
            write_frame(self._socket, message)
            return read_frame(self._socket, time.monotonic() + timeout_s)
        except OSError:  # a timeout, or the process has ended
            return None

    def _end(self) -> None:
        self.is_alive = False
        self._socket.close()
        self._process.kill()
        self._process.wait()
