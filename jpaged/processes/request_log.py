"""A line of JSON for each request that has ended, on the logger `jpaged.requests`; prompts only on demand."""

import datetime
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from jpaged.processes.request_record import RequestRecord
from jpaged.text.tokenizer import Tokenizer

log = logging.getLogger("jpaged.requests")

_PARAMETERS = ("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")


class RequestLog:
    """Writes the lines (`RequestObserver`), in a thread.

    prompts: with prompts, answers and stop strings. tokenizer: for their texts; without one they are token ids.
    """

    def __init__(self, prompts: bool = False, tokenizer: Tokenizer | None = None) -> None:
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jpaged-request-log")
        if not log.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(message)s"))
            log.addHandler(handler)
            log.propagate = False
        log.setLevel(logging.INFO)

    def ended(self, record: RequestRecord) -> None:
        """Has a request's line written."""
        self._thread.submit(self._write, record, datetime.datetime.now(datetime.UTC))

    def close(self) -> None:
        """Writes what has not been written."""
        self._thread.shutdown()

    def _write(self, record: RequestRecord, now: datetime.datetime) -> None:
        log.info("%s", msgspec.json.encode(self.line(record, now)).decode())

    def line(self, record: RequestRecord, now: datetime.datetime) -> dict[str, Any]:
        """What is written of a request. now: when it ended."""
        request, sampling = record.request, record.request.sampling
        line: dict[str, Any] = {
            "time": now.isoformat(timespec="milliseconds"),
            "id": request.request_id,
            "request_id": record.headers.get("x-request-id"),
            "trace_id": record.trace_id or _trace_id(record.headers.get("traceparent", "")),
            "engine": record.replica,
            "finish_reasons": record.finish_reasons(),
            "error": None if record.error is None else type(record.error).__name__,
            "prompt_tokens": request.prompt_len,
            "cached_tokens": request.num_cached_tokens,
            "completion_tokens": record.num_generated(),
            "preemptions": request.stats.num_preemptions,
            "resumed": record.num_resumed,
            "total_s": round(record.ended - request.stats.arrival_time, 6),
        }
        line |= {f"{name}_s": round(end - begin, 6) for name, (begin, end) in record.stages().items()}
        line["detokenize_s"] = round(record.text_busy_s, 6)
        line["params"] = {name: getattr(sampling, name) for name in _PARAMETERS}
        line["params"]["beam_width"] = None if request.beam is None else request.beam.beam_width
        if self._prompts:
            line["prompt"] = self._text(request.prompt_token_ids.tolist())
            line["answers"] = [self._text(member.output_token_ids) for member in request.group.members]
            line["params"]["stop"] = sampling.stop
        return line

    def _text(self, token_ids: list[int]) -> str | list[int]:
        return token_ids if self._tokenizer is None else self._tokenizer.decode(token_ids)


def _trace_id(traceparent: str) -> str | None:
    """The trace that a W3C `traceparent` header names: version, trace, parent and flags, with hyphens between."""
    found = re.match(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-", traceparent)
    return found and found[1]
