"""`Scorer`: log-likelihoods of given tokens under a model.

    rows --Encoder, in a thread ahead--> token sequences --windows--> score requests --engine--> packed scores --> rows

Rows are computed longest first; the choices of a row follow each other, so that all but the first find their prompt's
full blocks in the prefix cache. The engine is kept a few steps of work ahead. Nothing depends on the clock: the same
rows make the same steps, hence, on the same device and programs, the same bits.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from jpaged.api.checks import check_bool
from jpaged.api.config import EngineArgs
from jpaged.api.errors import NOT_FINITE, InvalidParameterError, MalformedRowError, shown
from jpaged.api.unknown_names import ENGINE, check_known
from jpaged.frontend.for_scoring import for_scoring
from jpaged.frontend.llm_engine import LLMEngine
from jpaged.host.interrupt import Interruptible
from jpaged.scoring.ahead import Ahead
from jpaged.scoring.encoding import Encoder, TokenSequence
from jpaged.scoring.progress import Progress, ProgressBar
from jpaged.scoring.rows import Row, RowScore, SequenceScore, parse_row
from jpaged.scoring.windows import check_window, windows

ROWS_PER_BATCH = 64
"""Rows tokenized at once."""
BATCHES_AHEAD = 8

Batch = list[tuple[int, list[TokenSequence] | MalformedRowError]]
"""Positions of rows, and their sequences."""


class Scorer:
    """Log-likelihoods of texts, completions and choices under a model.

        scorer = Scorer("path/to/model")
        [row] = scorer.score([{"prompt": "The capital of France is", "choices": [" Paris", " Rome"]}])
        print(row.best, row.sequences[0].logprob)

    Args:
        model: a directory in Hugging Face layout or a hub id; the embedded demo model by default.
        window: most tokens scored at once; longer sequences go in windows (see `windows`). max_model_len by default.
        stride: how far each window is ahead of the one before; half the window by default.
        add_special_tokens: let the tokenizer begin texts and prompts as its model expects.
        options: fields of `EngineArgs`, by name. Those left out are chosen for scoring rather than for generation.

    Attributes:
        engine: it runs nothing else while it scores.
        window, stride: in tokens.

    Raises:
        InvalidParameterError: an option that does not exist or is out of range.
        ModelNotFoundError, CheckpointError, UnsupportedModelError, OutOfMemoryError: as `LLMEngine`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        window: int | None = None,
        stride: int | None = None,
        add_special_tokens: bool = True,
        **options: Any,
    ) -> None:
        check_known("Scorer", "option", options, EngineArgs.__dataclass_fields__, ENGINE)
        check_bool("add_special_tokens", add_special_tokens)
        args = EngineArgs(model=model, **options)
        if args.reranker is not None:
            raise InvalidParameterError(
                f"reranker={args.reranker!r} judges pairs of texts, which LLM.score and the server's /v1/score take;"
                " leave it out."
            )
        if args.data_parallel_size != 1:
            raise InvalidParameterError(
                f"Scorer is one engine, got data_parallel_size={args.data_parallel_size}; score_files and `jpaged"
                f" score` spread their shards over as many workers."
            )
        if window is not None and args.max_model_len is not None:  # before anything is loaded
            check_window(window, stride, args.max_model_len)
        self.engine = LLMEngine(for_scoring(args))
        self.window, self.stride = check_window(window, stride, self.engine.max_model_len)
        startup = self.engine.startup
        vocab_size = startup.model.config.vocab_size
        self._encoder = Encoder(self.engine.tokenizer, vocab_size, add_special_tokens=add_special_tokens)
        # So much is queued that the next step is always full while those in flight run.
        self._tokens_ahead = (args.pipeline_depth + 3) * startup.config.token_buckets[-1]
        self._request_ids = map(str, count())

    def score(self, rows: Iterable[Mapping[str, Any]], use_tqdm: bool = True) -> list[RowScore]:
        """Scores rows (see `jpaged.scoring.rows` for what they are), in memory.

        Returns: a score for each row, in their order.
        Raises:
            MalformedRowError: a row that cannot be scored, named by its index; none has been returned.
            InvalidParameterError: rows is no list of anything.
            EngineDeadError: the engine failed.
        """
        if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
            raise InvalidParameterError(f"rows must be a list of rows, got {shown(rows)}.")
        check_bool("use_tqdm", use_tqdm)
        parsed = []
        for i, data in enumerate(rows):
            try:
                parsed.append(parse_row(data))
            except MalformedRowError as error:
                raise MalformedRowError(f"rows[{i}]: {error}") from error
        with ProgressBar(len(parsed), shown=use_tqdm) as bar:
            scores = self.score_encoded(parsed, Ahead(self.encode(parsed), BATCHES_AHEAD), bar.add)
        for i, score in enumerate(scores):
            if isinstance(score, MalformedRowError):
                raise MalformedRowError(f"rows[{i}]: {score}") from score
        return [score for score in scores if isinstance(score, RowScore)]

    def encode(self, rows: Sequence[Row]) -> Iterator[Batch]:
        """Encodes rows in the order in which they are to be computed, some at a time."""
        order = sorted(range(len(rows)), key=lambda i: -rows[i].size)
        for first in range(0, len(order), ROWS_PER_BATCH):
            part = order[first : first + ROWS_PER_BATCH]
            yield list(zip(part, self._encoder.encode([rows[i] for i in part]), strict=True))

    def score_encoded(
        self, rows: Sequence[Row], batches: Iterable[Batch], progress: Progress
    ) -> list[RowScore | MalformedRowError]:
        """Scores rows that `encode` has encoded. Starts from an empty prefix cache.

        Returns: for each row its score, or why it has none.
        Raises:
            EngineDeadError: the engine failed.
            KeyboardInterrupt: Ctrl-C, taken between steps; the engine stays usable.
        """
        results: list[RowScore | MalformedRowError | None] = [None] * len(rows)
        open_rows: dict[int, list[SequenceScore | None]] = {}

        def sequences() -> Iterator[tuple[tuple[int, int], TokenSequence]]:
            for batch in batches:
                for position, encoded in batch:
                    if isinstance(encoded, MalformedRowError):
                        results[position] = encoded
                        progress(1, 0)
                        continue
                    open_rows[position] = [None] * len(encoded)
                    for i, sequence in enumerate(encoded):
                        yield (position, i), sequence

        for (position, i), score in self._run(sequences(), progress):
            found = open_rows[position]
            found[i] = score
            complete = tuple(one for one in found if one is not None)
            if len(complete) == len(found):
                del open_rows[position]
                is_finite = all(np.isfinite(one.logprobs).all() for one in complete)
                results[position] = RowScore(rows[position], complete) if is_finite else MalformedRowError(NOT_FINITE)
                progress(1, 0)
        return [result for result in results if result is not None]

    def _run(
        self, sequences: Iterator[tuple[tuple[int, int], TokenSequence]], progress: Progress
    ) -> Iterator[tuple[tuple[int, int], SequenceScore]]:
        """Keeps the engine busy with the sequences' windows; yields each sequence when its last window is done."""
        engine = self.engine
        engine.reset_prefix_cache()
        requests: dict[str, tuple[_Sequence, slice, int]] = {}
        num_queued = 0
        exhausted = False
        with Interruptible() as interrupt:
            try:
                while True:
                    while num_queued < self._tokens_ahead and not exhausted:
                        item = next(sequences, None)
                        if item is None:
                            exhausted = True
                            break
                        for request_id, (sequence, part, size) in self._add(*item):
                            requests[request_id] = sequence, part, size
                            num_queued += size
                    if not requests:
                        return
                    outputs = engine.step()
                    if interrupt.requested:
                        raise KeyboardInterrupt
                    for output in outputs:
                        sequence, part, size = requests.pop(output.request_id)
                        num_queued -= size
                        progress(0, size)
                        if output.scores is not None:
                            sequence.store(part, output.scores.logprobs, output.scores.greedy)
                        if not sequence.num_open:
                            yield sequence.key, sequence.score
            finally:
                engine.abort_request(list(requests))

    def _add(self, key: tuple[int, int], tokens: TokenSequence) -> Iterator[tuple[str, tuple["_Sequence", slice, int]]]:
        """Queues a sequence's windows; yields each one's request id, and where among the scores its own belong."""
        sequence = _Sequence(key, tokens)
        for begin, first, end in windows(len(tokens.tokens), tokens.first_scored, self.window, self.stride):
            request_id = next(self._request_ids)
            self.engine.add_score_request(request_id, tokens.tokens[begin:end], first - begin)
            sequence.num_open += 1
            yield request_id, (sequence, slice(first - tokens.first_scored, end - tokens.first_scored), end - begin)


@dataclass
class _Sequence:
    """A sequence while its windows are out. num_open: windows whose scores are missing."""

    key: tuple[int, int]
    tokens: TokenSequence
    num_open: int = 0

    def __post_init__(self) -> None:
        targets = self.tokens.tokens[self.tokens.first_scored :]
        self.score = SequenceScore(targets, np.empty(len(targets), np.float32), np.empty(len(targets), np.bool_))

    def store(self, part: slice, logprobs: np.ndarray, greedy: np.ndarray) -> None:
        self.score.logprobs[part] = logprobs
        self.score.greedy_tokens[part] = greedy
        self.num_open -= 1
