"""Constraints on a text, compiled for a tokenizer and followed token by token, by llguidance.

    StructuredOutputsParams --check--> refused, or known to be good          in a process apart, within limits
                            --compile--> CompiledGrammar --begin--> guide    in threads, cached by content
    guides, tokens --advance--> masks of what may follow, tokens that must   on all cores

A constraint comes from a stranger, and few bytes can make a compiler take minutes and gigabytes, or overflow its stack.
So each is first compiled in a process of its own (`grammar_check.py`), which is ended if it takes too much.
"""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jpaged.api.errors import InvalidParameterError, JPagedError
from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.text import grammar_check
from jpaged.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CHECK_S = 2.0
"""The longest that compiling a constraint may take."""
_START_S = 60.0
_MOST_VERDICTS, _MOST_COMPILED = 4096, 256
_COMPILER_THREADS = 4
_COMPILER_STACK_BYTES = 4 * grammar_check.STACK_BYTES
"""Of virtual memory; what the checking process could compile can be compiled here."""
_WHITESPACE = r" |\n {0,24}|\n\t{0,8}"
"""What may stand between JSON's tokens."""
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
        return cls(tokenizer.to_json(), vocab_size, tuple(eos_token_ids))

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
            added = {str(token["id"]) for token in json.loads(text)["added_tokens"]}
            if not set(config.get("added_tokens_decoder", {})) - added:
                return cls(text, vocab_size, tuple(eos_token_ids))
        except (OSError, ValueError, LookupError):
            pass
        return cls.of(load(), vocab_size, eos_token_ids)

    def make(self) -> "LLTokenizer":
        """The tokenizer.

        Raises:
            InvalidParameterError: it is none that llguidance can use, or the model has no end-of-sequence token.
        """
        from llguidance import LLTokenizer

        if not self.eos_token_ids:
            raise InvalidParameterError("structured_outputs needs a model with an end-of-sequence token.")
        try:
            return LLTokenizer(self.json, self.vocab_size, list(self.eos_token_ids))
        except Exception as error:  # whatever the bindings raise
            raise InvalidParameterError(f"structured_outputs cannot be used with this tokenizer: {error}") from error


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
        _tags_as_lark(str(params.structural_tag)) if kind == "structural_tag" else _as_lark(str(params.grammar))
    )


def grammar_expression(params: StructuredOutputsParams) -> str:
    """A constraint as an expression within a grammar in Lark, for a part of a text.

    Raises:
        InvalidParameterError: a GBNF grammar that is malformed, or a structural tag.
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
        raise InvalidParameterError(
            "structured_outputs.structural_tag is not supported beside tools or reasoning; leave one of them out."
        )
    return f"%lark {{\n{_as_lark(str(params.grammar))}\n}}"


def _json_options(params: StructuredOutputsParams) -> Any:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {"whitespace_pattern": params.whitespace_pattern or _WHITESPACE}


def _as_lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except (Exception, RecursionError) as error:
        raise InvalidParameterError(f"structured_outputs.grammar is no GBNF: {error}") from error


def _tags_as_lark(text: str) -> str:
    from llguidance import StructTag

    name = "structured_outputs.structural_tag"
    given = json.loads(text)
    structures, triggers = given.get("structures"), given.get("triggers")
    if given.get("type") != "structural_tag" or not isinstance(structures, list) or not isinstance(triggers, list):
        raise InvalidParameterError(
            f'{name} must be {{"type": "structural_tag", "structures": [...], "triggers": [...]}}; other forms are not'
            " supported."
        )
    tags = []
    for i, structure in enumerate(structures):
        fields = structure if isinstance(structure, dict) else {}
        begin, schema, end = fields.get("begin"), fields.get("schema"), fields.get("end")
        if not isinstance(begin, str) or not isinstance(schema, dict) or not isinstance(end, str):
            raise InvalidParameterError(f'{name}: structures[{i}] needs "begin", "schema" and "end".')
        trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
        if trigger is None:
            raise InvalidParameterError(f"{name}: structures[{i}] begins with none of the triggers.")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    if not tags:
        raise InvalidParameterError(f"{name} has no structures; give at least one.")
    return StructTag.to_grammar(tags, assume_special=False)


class GrammarCheck:
    """Compiles constraints in processes that are limited in time and memory, and remembers what came of it.

    Thread safe. As many processes are started as there are checks at once.
    """

    def __init__(self, tokenizer: Callable[[], GrammarTokenizer]) -> None:
        self._tokenizer = tokenizer
        self._verdicts: OrderedDict[StructuredOutputsParams, str] = OrderedDict()
        self._lock = threading.Lock()
        self._idle: list[_Checker] = []

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
            raise InvalidParameterError(f"structured_outputs.{params.kind} cannot be used: {verdict}")

    def _ask(self, grammar: str) -> str:
        with self._lock:
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
        tokenizer.make()  # what is wrong with it is raised here
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", grammar_check.__name__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.is_alive = True
        if self._exchange(json.dumps(asdict(tokenizer)).encode(), _START_S) is None:
            self._end()
            raise JPagedError("The process that checks structured_outputs did not start.")

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
            with self._socket.makefile("rwb") as stream:
                grammar_check.send(stream, message)
                return grammar_check.receive(stream)
        except OSError:  # a timeout, or the process has ended
            return None

    def _end(self) -> None:
        self.is_alive = False
        self._socket.close()
        self._process.kill()
        self._process.wait()


@dataclass(eq=False, slots=True)
class _Guide:
    """Where a sequence stands. ends_late: the end of sequence is allowed only where nothing else is."""

    matcher: "LLMatcher"
    ends_late: bool


class CompiledGrammar:
    """A constraint that sequences can follow; as `jpaged.engine.constraints.grammars.Grammar`.

    forced: tokens that come first. mask: uint32 [words]; what may follow these.
    """

    def __init__(self, matcher: "LLMatcher", mask: np.ndarray) -> None:
        self.forced = tuple(matcher.compute_ff_tokens())
        matcher.consume_tokens(list(self.forced))
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.mask = mask
        self._matcher = matcher
        self._lock = threading.Lock()

    def begin(self, ignore_eos: bool) -> _Guide:
        """A guide for a new sequence, behind the forced tokens."""
        with self._lock:
            return _Guide(self._matcher.deep_copy(), ignore_eos)


class GrammarCompiler:
    """Compiles constraints and follows them; as `jpaged.engine.constraints.grammars.Grammars`.

    Args:
        tokenizer: called once, in a thread.
        vocab_size: of the model's logits. eos_token_ids: tokens that end a sequence.

    Attributes:
        num_words: uint32 words of a mask.
    """

    def __init__(
        self, tokenizer: Callable[[], GrammarTokenizer], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self.num_words = -(-vocab_size // 32)
        self._get_tokenizer = tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._not_eos = np.full((self.num_words,), 0xFFFFFFFF, np.uint32)
        for token in eos_token_ids:
            self._not_eos[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
        self._compiled: OrderedDict[StructuredOutputsParams, Future[CompiledGrammar]] = OrderedDict()
        self._lock = threading.Lock()
        self._work: deque[tuple[StructuredOutputsParams, Future[CompiledGrammar]]] = deque()
        self._num_threads = 0
        self._executor: Any = None

    def compile(self, params: StructuredOutputsParams) -> "Future[CompiledGrammar]":
        """Compiles in a thread, unless it is known already. The future may raise InvalidParameterError."""
        found = self._compiled.get(params)
        if found is not None:
            self._compiled.move_to_end(params)
            return found
        future: Future[CompiledGrammar] = Future()
        self._compiled[params] = future
        while len(self._compiled) > _MOST_COMPILED:
            self._compiled.popitem(last=False)
        with self._lock:
            self._work.append((params, future))
            needs_thread = self._num_threads < _COMPILER_THREADS
            self._num_threads += needs_thread
        if needs_thread:
            before = threading.stack_size(_COMPILER_STACK_BYTES)
            try:
                threading.Thread(target=self._compile_all, name="jpaged-grammars", daemon=True).start()
            finally:
                threading.stack_size(before)
        return future

    def advance(
        self, guides: Sequence[_Guide], token_ids: Sequence[int], masks: np.ndarray
    ) -> list[tuple[int, ...] | str]:
        """Moves each guide past a token, and past what this forces.

        masks: uint32 [n, words], contiguous; what may follow is written here.
        Returns: for each guide the forced tokens, or why it cannot go on.
        """
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        matchers = [guide.matcher for guide in guides]
        self._executor.consume_token_par(list(zip(matchers, token_ids, strict=True)))
        forced = []
        for matcher in matchers:
            tokens = matcher.compute_ff_tokens()
            if tokens:
                matcher.consume_tokens(tokens)
            forced.append(tuple(tokens))
        pairs = [(matcher, i) for i, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, masks.shape[1] * 4, len(masks))
        for i, guide in enumerate(guides):
            if guide.ends_late:
                others = masks[i] & self._not_eos
                if others.any():
                    masks[i] = others
        return [
            matcher.get_error().partition("\n")[0] if matcher.is_error() else tokens
            for matcher, tokens in zip(matchers, forced, strict=True)
        ]

    def _compile_all(self) -> None:
        """In a thread, until nothing is left to compile."""
        while True:
            with self._lock:
                if not self._work:
                    self._num_threads -= 1
                    return
                params, future = self._work.popleft()
            try:
                future.set_result(self._compile(params))
            except JPagedError as error:
                future.set_exception(error)
            except Exception as error:  # of the tokenizer's files or llguidance
                future.set_exception(JPagedError(f"structured_outputs.{params.kind} cannot be compiled: {error}"))

    def _compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        from llguidance import LLMatcher

        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = self._get_tokenizer().make()
        matcher = LLMatcher(self._tokenizer, grammar_text(params), log_level=0)
        compiled = CompiledGrammar(matcher, np.zeros((self.num_words,), np.uint32))
        if matcher.is_error():
            raise InvalidParameterError(f"structured_outputs.{params.kind} cannot be used: {matcher.get_error()}")
        return compiled
