"""`run_batch`: answers files of OpenAI requests offline, with the jobs and shards of `score_files`.

    in.jsonl --shards of lines--> BatchShards, here or in workers --> shard files --> out.jsonl, a line for each line

Some requests take longer than others, so shards overlap: the engine gets the next lines as soon as it has room, and a
shard is written when the last of its requests is done.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from jpaged.api.checks import check_bool, check_integer
from jpaged.api.config import EngineArgs
from jpaged.api.errors import InvalidParameterError, InvalidPromptError, NonFiniteLogitsError, OutOfMemoryError
from jpaged.api.outputs import RequestOutput
from jpaged.api.sampling_params import SamplingParams
from jpaged.frontend.llm_engine import LLMEngine
from jpaged.frontend.reranking import Reranker
from jpaged.host.interrupt import Interruptible
from jpaged.scoring.ahead import Ahead
from jpaged.scoring.inputs import Record, checked_inputs, read_records
from jpaged.scoring.jobs import Job, JobSummary, checked_options, checked_output, engine_fields, run_job
from jpaged.scoring.json_lines import json_lines, merge_json_lines
from jpaged.scoring.progress import Progress
from jpaged.scoring.shards import write_shard
from jpaged.scoring.workers import Done, Shard
from jpaged.serving.batch_requests import BadLine, BadRequest, BatchRequest, bad_line, parse_request, response_line
from jpaged.serving.embeddings import PoolingBody
from jpaged.serving.options import check_parsers
from jpaged.serving.sampling import InWordsOf
from jpaged.text.tokenizer import Tokenizer

SHARD_SIZE = 64
"""Requests in a shard."""


def run_batch(
    inputs: str | Path,
    output: str | Path,
    *,
    model: str | None = None,
    overwrite: bool = False,
    shard_size: int = SHARD_SIZE,
    data_parallel_size: int = 1,
    worker_process: bool = False,
    use_tqdm: bool = True,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    **options: Any,
) -> JobSummary:
    """Answers a file of OpenAI requests. After a crash, the same call resumes the work.

    A request without a seed gets one from the engine's `seed` and its line, so its answer does not depend on when, and
    beside what, it was run.

    Args:
        inputs: .jsonl, a request a line, for /v1/completions, /v1/chat/completions, /v1/embeddings, /v1/score or
            /v1/rerank.
        output: .jsonl; a line for each line of the input, in order. Lines that could not be served hold the error.
        model, options: as for `LLM`.
        overwrite: replace an output of this name, and drop unfinished work on it.
        shard_size: requests between two commits to the disk.
        data_parallel_size: worker processes, each with the model on a GPU of its own.
        worker_process: a single worker, too, has a process of its own. A worker process that ends, or whose engine
            fails, is started again with the shards that it had, as long as it gets on.
        use_tqdm: show a progress bar.
        tool_parser, reasoning_parser: how the model writes tool calls and reasoning, by the names of `jpaged serve`;
            by default both are found from its chat template.
    Returns: `num_errors` counts lines that were not answered with status 200.
    Raises:
        InvalidParameterError: an argument out of range; the output exists; unfinished work of another job is there.
        OutputError: the output cannot be written. EngineDeadError: an engine failed. Finished shards are kept.
    """
    paths = checked_inputs([inputs], (".jsonl", ".ndjson"))
    check_integer("shard_size", shard_size, 1, sys.maxsize)
    check_bool("overwrite", overwrite)
    check_bool("worker_process", worker_process)
    check_bool("use_tqdm", use_tqdm)
    check_parsers(tool_parser, reasoning_parser)
    parsers = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
    job = Job(
        task="batch",
        processor=BatchShards,
        inputs=paths,
        output=checked_output(output, paths, (".jsonl",)),
        settings={name: value for name, value in parsers.items() if value is not None},
        engine=checked_options({"model": model, **options}, data_parallel_size=data_parallel_size),
        shard_size=int(shard_size),
        size_of=lambda record: 1,
        merge=merge_json_lines,
    )
    num_rows = sum(1 for _ in read_records(paths))
    return run_job(
        job,
        num_rows,
        lambda entry: None,
        overwrite=overwrite,
        num_workers=data_parallel_size,
        worker_process=worker_process,
        use_tqdm=use_tqdm,
    )


class BatchShards:
    """Answers shards of requests with one engine (`ShardProcessor`)."""

    def __init__(self, options: dict[str, Any], directory: Path) -> None:
        self._directory = directory
        self._parsers = {name: options.get(name) for name in ("tool_parser", "reasoning_parser")}
        self._args = EngineArgs(**engine_fields(options))
        self._engine = LLMEngine(self._args)
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise InvalidParameterError("run-batch needs a tokenizer; leave skip_tokenizer_init out.")
        self._tokenizer: Tokenizer = tokenizer
        self._reranker = None if self._args.reranker is None else Reranker(tokenizer)
        self._model = self._args.model or "jpaged-demo"
        # Enough that the engine never lacks work; more would only wait in its queue.
        self._max_open = 2 * self._engine.startup.config.max_num_seqs

    def run(self, shards: Iterable[Shard], done: Done, progress: Progress) -> None:
        """Answers every request of the shards; `done` gets each shard's entry when its last request is done."""
        source = Ahead(shards, 2)
        lines: deque[_OpenLine] = deque()
        open_prompts: dict[str, tuple[_OpenLine, int]] = {}
        request_ids = map(str, count())
        more = True
        with Interruptible() as interrupt:
            try:
                while more or open_prompts:
                    while more and len(open_prompts) < self._max_open:
                        if not lines:
                            # The next shard may come only when one of these is done: never wait for it beside work.
                            if open_prompts and not source.ready():
                                break
                            shard = next(source, None)
                            if shard is None:
                                more = False
                                break
                            lines.extend(_lines_of(shard))
                        line = lines.popleft()
                        self._start(line, open_prompts, request_ids)
                        self._report_if_done(line, done, progress)
                    if not open_prompts:
                        continue
                    outputs = self._engine.step()
                    if interrupt.requested:
                        raise KeyboardInterrupt
                    for output in outputs:
                        line, number = open_prompts.pop(output.request_id)
                        if self._take(line, number, output):
                            self._report_if_done(line, done, progress)
                        else:
                            open_prompts[self._ask_again(line, number, next(request_ids))] = line, number
            finally:
                self._engine.abort_request(list(open_prompts))

    def _start(
        self, line: "_OpenLine", open_prompts: dict[str, tuple["_OpenLine", int]], request_ids: Iterator[str]
    ) -> None:
        """Queues a line's prompts, all of them or, if one is refused, none."""
        added = []
        try:
            if line.record.error is not None:
                raise BadLine(line.record.error)
            request = parse_request(
                line.record.data,
                self._tokenizer,
                self._engine.default_sampling_params,
                self._engine.embeddings,
                self._reranker,
                **self._parsers,
            )
            line.request = request
            line.outputs = [None] * len(request.prompts)
            for number, prompt in enumerate(request.prompts):
                params = request.params
                if isinstance(params, SamplingParams) and params.seed is None:
                    params = replace(params, seed=(self._args.seed + line.record.index + (number << 32)) % 2**63)
                try:
                    request_id = next(request_ids)
                    with _in_words_of(request):
                        self._engine.add_request(request_id, prompt, params, cache_salt=request.body.cache_salt)
                except (InvalidParameterError, InvalidPromptError, OutOfMemoryError) as error:
                    raise BadRequest(request.custom_id, error, type(request.body)) from error
                added.append(request_id)
                open_prompts[request_id] = line, number
        except BadLine as error:
            line.answer = bad_line(error)
        except BadRequest as error:
            line.answer = error.response
            self._engine.abort_request(added)
            for request_id in added:
                del open_prompts[request_id]

    def _take(self, line: "_OpenLine", number: int, output: RequestOutput) -> bool:
        """Takes what came of a prompt. Returns whether that is all: a reranker may have told one answer of two."""
        reranker = None if line.request is None else line.request.reranker
        if reranker is not None and not _has_failed(output):
            line.found[number] = found = line.found.get(number, {}) | reranker.found(output)
            if reranker.missing(found) is not None:
                return False
        line.outputs[number] = output
        return True

    def _ask_again(self, line: "_OpenLine", number: int, request_id: str) -> str:
        """Asks a reranker for the answer that it has not told. Returns the request's id."""
        request = line.request
        assert request is not None
        assert request.reranker is not None
        params = request.reranker.params(request.reranker.missing(line.found[number]))
        self._engine.add_request(request_id, request.prompts[number], params, cache_salt=request.body.cache_salt)
        return request_id

    def _report_if_done(self, line: "_OpenLine", done: Done, progress: Progress) -> None:
        """Puts the line's answer into its shard, and writes the shard if that was the last."""
        outputs = [output for output in line.outputs if output is not None]
        if line.answer is None:
            if line.request is None or len(outputs) < len(line.outputs):
                return
            if any(_has_failed(output) for output in outputs):
                error = BadRequest(line.request.custom_id, NonFiniteLogitsError(), type(line.request.body))
                line.answer = error.response
            else:
                reranker, scores = line.request.reranker, None
                if reranker is not None:
                    scores = [reranker.score(line.found[number]) for number in range(len(outputs))]
                line.answer = response_line(line.request, self._model, outputs, self._tokenizer, scores)
        tokens = sum(len(output.prompt_token_ids) for output in outputs)
        tokens += sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        progress(1, tokens)
        shard = line.shard
        shard.answers[line.position] = line.answer
        shard.tokens += tokens
        answers = [answer for answer in shard.answers if answer is not None]
        if len(answers) == len(shard.answers):
            failed = sum(not (answer["response"] and answer["response"]["status_code"] == 200) for answer in answers)
            entry = write_shard(self._directory, shard.number, ".jsonl", json_lines(answers))
            done(entry | {"rows": len(answers), "tokens": shard.tokens, "errors": [], "failed": failed})


@dataclass
class _OpenShard:
    number: int
    answers: list[dict[str, Any] | None]
    tokens: int = 0


@dataclass
class _OpenLine:
    """A line that is not answered yet. outputs: its prompts' outputs. found: what a reranker has told of its prompts.
    answer: the line to write, once it is known.
    """

    shard: _OpenShard
    position: int
    record: Record
    request: BatchRequest | None = None
    outputs: list[RequestOutput | None] = field(default_factory=list)
    found: dict[int, dict[int, float]] = field(default_factory=dict)
    answer: dict[str, Any] | None = None


def _lines_of(shard: Shard) -> Iterator[_OpenLine]:
    opened = _OpenShard(shard.number, [None] * len(shard.records))
    for position, record in enumerate(shard.records):
        yield _OpenLine(opened, position, record)


def _in_words_of(request: BatchRequest) -> AbstractContextManager[None]:
    """Errors raised inside speak of the fields of the request's body."""
    if isinstance(request.body, PoolingBody):
        return nullcontext()
    return InWordsOf(request.body, request.constraint)


def _has_failed(output: RequestOutput) -> bool:
    """Whether the model's logits or hidden states were not finite."""
    if not output.outputs:
        return output.embedding is None
    return any(completion.finish_reason == "error" for completion in output.outputs)
