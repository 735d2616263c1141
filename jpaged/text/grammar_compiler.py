"""Compiles constraints and follows them, in the processes of `grammar_process.py`.

    StructuredOutputsParams --compile--> CompiledGrammar --begin--> guide    cached by content
    guides, tokens --advance--> tokens that must follow, and who needs a mask
    guides --make_masks--> masks of what may follow                          each shard makes those of its sequences
    jobs --follower--> both, without waiting                                 `grammar_follower.py`

The processes start with the first constraint, or with `prepare`. If one dies, others are started, and the sequences
are moved past their tokens there. What ends those, too, while it is taken up, fails that sequence.
"""

import select
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

import numpy as np

from jpaged.api.errors import InvalidParameterError, JPagedError
from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.text.grammar_follower import Follower
from jpaged.text.grammar_guides import CompiledGrammar, Guide, changes_of
from jpaged.text.grammar_process import Follow, Followed, MakeMasks, Place, Resume, Start
from jpaged.text.grammar_shards import ENDED, Answer, Masks, Processes, Shard
from jpaged.text.grammars import LARGE_VOCABULARY, GrammarTokenizer

_MOST_COMPILED = 256
_COMPILER_THREADS = 4
_TURN_MS = 20.0
"""After which who waits for an answer looks whether another thread has taken it."""


class GrammarCompiler:
    """Compiles constraints and follows them; as `jpaged.engine.constraints.following.Grammars`.

    Args:
        tokenizer: called in a thread, once for each start of the processes.
        vocab_size: of the model's logits. num_shards: processes.

    Attributes:
        num_words: uint32 words of a mask.
    """

    def __init__(self, tokenizer: Callable[[], GrammarTokenizer], vocab_size: int, num_shards: int = 1) -> None:
        self.num_words = -(-vocab_size // 32)
        self._get_tokenizer, self._num_shards = tokenizer, num_shards
        self._process: Processes | None = None
        self._known_process: Processes | None = None  # by the constraints that are compiled
        self._start_lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutputsParams, Future[CompiledGrammar]] = OrderedDict()
        self._revive_lock = threading.Lock()
        self._is_closed = False
        self._lock = threading.Lock()
        self._work: deque[tuple[StructuredOutputsParams, Future[CompiledGrammar]] | CompiledGrammar] = deque()
        self._num_compiling = 0

    def prepare(self) -> None:
        """Starts the process in the background if the first constraint would wait long for it."""
        if 32 * self.num_words >= LARGE_VOCABULARY:
            threading.Thread(target=self._try_to_start, name="jpaged-grammars", daemon=True).start()

    def compile(self, params: StructuredOutputsParams) -> "Future[CompiledGrammar]":
        """Compiles in the process, unless it is known already. The future may raise InvalidParameterError."""
        process = self._process
        if process is not None:
            if not process.is_alive or self._known_process not in (None, process):
                self._compiled.clear()  # what a process has compiled keeps its sockets open
            self._known_process = process
        found = self._compiled.get(params)
        if found is not None:
            self._compiled.move_to_end(params)
            return found
        future: Future[CompiledGrammar] = Future()
        self._compiled[params] = future
        while len(self._compiled) > _MOST_COMPILED:
            self._compiled.popitem(last=False)
        self._put((params, future))
        return future

    def follower(self) -> Follower:
        """What follows grammars for an engine."""
        return Follower(self)

    def knows(self, guide: Guide) -> bool:
        """Whether the processes run in which a guide is."""
        return guide.grammar.process is self._process and guide.is_alive

    def advance(
        self,
        guides: Sequence[Guide],
        tokens: np.ndarray,
        guessed: Sequence[bool],
        last: Sequence[int],
    ) -> list[Place]:
        """Moves each guide past a token, and past what this forces. Waits.

        tokens: int32 [guides, most]; of each guide the one that was sampled under its mask, first; or, where it is
        guessed, some in order of preference, of which the first that may follow counts.
        last: a bit for each of them that ends its sequence.

        Returns: where each guide stands.
        """
        places = [ENDED] * len(guides)
        by_shard: dict[Shard, list[int]] = {}
        for i, guide in enumerate(guides):
            if self.knows(guide):
                by_shard.setdefault(guide.shard, []).append(i)
        for shard, some in by_shard.items():
            own = [guides[i] for i in some]
            waiting: deque[Guide] = deque()

            def answer(
                message: Followed | Masks | None,
                own: list[Guide] = own,
                some: list[int] = some,
                waiting: deque[Guide] = waiting,
            ) -> bool:
                if isinstance(message, Followed):
                    for i, guide, place in zip(some, own, message.places, strict=True):
                        places[i] = place
                        if place.waits:
                            waiting.append(guide)
                elif message is not None:
                    for made in message:
                        waiting.popleft().made = made
                return message is None or not waiting

            numbers = [guide.number for guide in own]
            of_own = [guessed[i] for i in some], [last[i] for i in some]
            message = Follow.of(changes_of(shard, own), numbers, tokens[some], *of_own)
            _ask(shard, message, answer)
        every = zip(guides, tokens.tolist(), places, guessed, last, strict=True)
        return [self._followed(*one) for one in every]

    def resume(self, guide: Guide, token_ids: Sequence[int]) -> Place:
        """Moves a guide past many tokens at once, of which some were forced; as `advance`. Waits."""
        place = self._resume(guide, token_ids, (), 0)
        if place is ENDED:
            place = self._revived(guide, token_ids, (), 0)
        if not place.failure:
            guide.followed.extend(token_ids)
            guide.followed.extend(place.forced)
        return place

    def make_masks(self, guides: Sequence[Guide]) -> "list[np.ndarray | str]":
        """What may follow where guides stand. Waits.

        Returns: for each guide its mask, uint32 [words]; or the tokens that it allows, int32 [n], if these are at most
            FEW_TOKENS; or why it cannot go on.
        """
        return [self._make_mask(guide) for guide in guides]

    def close(self) -> None:
        """Ends the process."""
        with self._start_lock:
            self._is_closed = True
            if self._process is not None:
                self._process.is_alive = False
                self._process.end()

    def _make_mask(self, guide: Guide) -> "np.ndarray | str":
        """The mask of a guide, which takes up its tokens in other processes if its own have ended."""
        for _ in range(2):
            if guide.made is None and self.knows(guide):

                def answer(message: Followed | Masks | None) -> bool:
                    if isinstance(message, list):
                        (guide.made,) = message
                    return True

                _ask(guide.shard, MakeMasks(changes_of(guide.shard, [guide]), [guide.number]), answer)
            if guide.made is not None:
                made, guide.made = guide.made, None
                return made
            place = self._revived(guide, (), (), 0)
            if place.failure:
                return place.failure
            guide.followed.extend(place.forced)
        return ENDED.failure

    def _resume(self, guide: Guide, token_ids: Sequence[int], guesses: Sequence[int], last: int) -> Place:
        if not self.knows(guide):
            return ENDED
        places = [ENDED]

        def answer(message: Followed | Masks | None) -> bool:
            if isinstance(message, Followed):
                (places[0],) = message.places
            return True

        changes = changes_of(guide.shard, [guide])
        _ask(guide.shard, Resume(changes, guide.number, list(token_ids), list(guesses), last), answer)
        return places[0]

    def _followed(self, guide: Guide, tokens: list[int], place: Place, guessed: bool, last: int) -> Place:
        """Notes that a guide has been moved past a token; moves it in other processes if its own have ended.

        tokens: of the guide. place, and what is returned: where it stands.
        """
        if place is ENDED:
            place = self._revived(guide, () if guessed else tokens[:1], tokens if guessed else (), last)
        guide.note(tokens, place)
        return place

    def _revived(self, guide: Guide, token_ids: Sequence[int], guesses: Sequence[int], last: int) -> Place:
        """Moves a guide in other processes than its own, which have ended."""
        if self._is_closed:
            return ENDED
        try:
            guide.begin(self._alive(guide.grammar))
        except JPagedError as error:
            return Place(failure=str(error))
        return self._resume(guide, [*guide.followed, *token_ids], guesses, last)

    def _alive(self, grammar: CompiledGrammar) -> CompiledGrammar:
        """A grammar in the process that runs. Raises JPagedError if it cannot be compiled there."""
        with self._revive_lock:
            while grammar.process is not self._process or not grammar.process.is_alive:
                if grammar.successor is None:
                    grammar.successor = self._compile(grammar.params)
                grammar = grammar.successor
            return grammar

    def _put(self, work: "tuple[StructuredOutputsParams, Future[CompiledGrammar]] | CompiledGrammar") -> None:
        with self._lock:
            self._work.append(work)
            needs_thread = self._num_compiling < _COMPILER_THREADS
            self._num_compiling += needs_thread
        if needs_thread:
            threading.Thread(target=self._compile_all, name="jpaged-grammars", daemon=True).start()

    def _compile_all(self) -> None:
        """In a thread, until nothing is left to compile."""
        while True:
            with self._lock:
                if not self._work:
                    self._num_compiling -= 1
                    return
                work = self._work.popleft()
            if isinstance(work, CompiledGrammar):
                _grow(work)
                continue
            params, future = work
            try:
                future.set_result(self._compile(params))
            except JPagedError as error:
                future.set_exception(error)
            except BaseException as error:  # of the tokenizer: a panic of its library is no Exception
                future.set_exception(JPagedError(f"structured_outputs.{params.kind} cannot be compiled: {error}"))

    def _compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Compiles in the processes; in others, once, if these end meanwhile."""
        for _ in range(2):
            process = self._started()
            number = next(process.numbers)
            answer = process.compile(number, params)
            if answer is not None:
                break
        if answer is None:
            raise JPagedError(f"structured_outputs.{params.kind} cannot be compiled: {ENDED.failure}.")
        shard, compiled = answer
        if compiled.error:
            raise (InvalidParameterError if compiled.is_refused else JPagedError)(compiled.error)
        # Not by a method: what is compiled would keep this object, which keeps it.
        return CompiledGrammar(process, number, shard, compiled, params, partial(_grow_in, weakref.ref(self)))

    def _started(self) -> Processes:
        """The processes, which are started if there are none. Raises JPagedError once this is closed."""
        with self._start_lock:
            if self._is_closed:
                raise JPagedError("structured_outputs cannot be used: the engine has been closed.")
            if self._process is None or not self._process.is_alive:
                if self._process is not None:
                    self._process.end()
                tokenizer = self._get_tokenizer()
                process = Processes(self._num_shards, self.num_words)
                wrong = process.start(Start(tokenizer.json, tokenizer.vocab_size, tokenizer.eos_token_ids))
                if wrong is None:
                    raise JPagedError("The process that follows grammars did not start.")
                if wrong:
                    process.end()
                    raise InvalidParameterError(wrong)
                self._process = process
            return self._process

    def _try_to_start(self) -> None:
        with suppress(Exception):  # the first constraint is told
            self._started()


def _grow_in(compiler: "weakref.ref[GrammarCompiler]", grammar: CompiledGrammar) -> None:
    """Has a thread of the compiler, if it is still there, compile a constraint in one more shard."""
    found = compiler()
    if found is not None:
        found._put(grammar)


def _ask(shard: Shard, message: object, answer: Answer) -> None:
    """As `Shard.ask`; waits until the answer has been taken, by this thread or another one."""
    done = []

    def take(message: Followed | Masks | None) -> bool:
        is_last = answer(message)
        if is_last or message is None:
            done.append(True)
        return is_last

    shard.ask(message, take)
    while not done:
        poll = select.poll()
        if shard.register(poll):
            poll.poll(_TURN_MS)
        shard.pump()


def _grow(grammar: CompiledGrammar) -> None:
    """Compiles a grammar in one more shard."""
    process = grammar.process
    others = [shard for shard in process.shards if shard not in grammar.shards]
    if others and process.is_alive:
        shard = min(others, key=lambda shard: shard.num_live)
        answer = process.compile(grammar.number, grammar.params, shard)
        if answer is not None and not answer[1].error:
            grammar.shards.add(shard)
