"""OpenTelemetry traces of requests, sent to a collector as OTLP over HTTP. Needs `jpaged[otel]`.

    client's span (its `traceparent` header)
      `-- llm_request   one for each prompt
            |-- queue       until it first ran
            |-- prefill     until its first token
            |-- decode      until its last token
            `-- detokenize  in the API process, from the first text to the last; `jpaged.busy_s` of it at work

Spans are made when a request has ended, of the times that it has anyway, so a running request pays nothing. A thread
sends them in batches (OpenTelemetry's SDK, with its environment variables: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER,
OTEL_EXPORTER_OTLP_HEADERS, ...). A collector that is not there costs spans, and no requests.
"""

import os
import time
from typing import Any
from urllib.parse import urlsplit

from jpaged.api.errors import InvalidParameterError, MissingPackageError
from jpaged.processes.request_record import RequestRecord

_PATH = "/v1/traces"
_SERVICE = "jpaged"


def check_endpoint(endpoint: str) -> str:
    """The whole URL of a collector that `otlp_traces_endpoint` names, which may leave out the path.

    Raises:
        InvalidParameterError: it is no URL. MissingPackageError: OpenTelemetry is not installed.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidParameterError(
            f"otlp_traces_endpoint must be the URL of a collector that takes OTLP over HTTP, such as"
            f" http://localhost:4318{_PATH}, got {endpoint!r}."
        )
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            f"otlp_traces_endpoint needs OpenTelemetry: pip install 'jpaged[otel]'. ({error})"
        ) from error
    return endpoint if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}{_PATH}"


class Traces:
    """Makes and sends the spans of requests (`RequestObserver`).

    endpoint: of a collector, as `check_endpoint` takes it. model: what clients call the model.

    Raises: as `check_endpoint`.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        url = check_endpoint(endpoint)
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        self._provider = TracerProvider(resource=Resource.create({} if named else {"service.name": _SERVICE}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
        self._tracer = self._provider.get_tracer("jpaged")
        self._propagator = TraceContextTextMapPropagator()
        self._trace: Any = trace
        self._model = model

    def ended(self, record: RequestRecord) -> None:
        """Makes the spans of a request."""
        trace, stages = self._trace, record.stages()
        ahead_ns = time.time_ns() - time.monotonic_ns()  # noqa: TID251  # spans have dates

        def wall_ns(seconds: float) -> int:
            return int(seconds * 1e9) + ahead_ns

        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(record.headers),
            kind=trace.SpanKind.SERVER,
            start_time=wall_ns(record.request.stats.arrival_time),
            attributes=self._attributes(record),
        )
        record.trace_id = trace.format_trace_id(span.get_span_context().trace_id)
        inside = trace.set_span_in_context(span)
        for name, (begin, end) in stages.items():
            attributes = {"jpaged.busy_s": record.text_busy_s} if name == "detokenize" else None
            child = self._tracer.start_span(name, context=inside, start_time=wall_ns(begin), attributes=attributes)
            child.end(wall_ns(end))
        if record.error is not None:
            span.set_status(trace.Status(trace.StatusCode.ERROR, type(record.error).__name__))
        span.end(wall_ns(max(record.ended, *(end for _, end in stages.values()))))

    def close(self) -> None:
        """Sends what has not been sent."""
        self._provider.shutdown()

    def _attributes(self, record: RequestRecord) -> dict[str, Any]:
        """Of the whole request: no prompts and no text. Names are OpenTelemetry's where it has them."""
        request, sampling = record.request, record.request.sampling
        found: dict[str, Any] = {
            "gen_ai.request.model": self._model,
            "gen_ai.request.choice.count": sampling.n,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.usage.input_tokens": request.prompt_len,
            "gen_ai.usage.output_tokens": record.num_generated(),
            "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
            "gen_ai.response.finish_reasons": record.finish_reasons(),
            "gen_ai.response.id": request.request_id,
            "jpaged.replica": record.replica,
            "jpaged.preemptions": request.stats.num_preemptions,
            "jpaged.resumed": record.num_resumed,
        }
        if sampling.max_tokens is not None:
            found["gen_ai.request.max_tokens"] = sampling.max_tokens
        if "x-request-id" in record.headers:
            found["jpaged.request_id"] = record.headers["x-request-id"]
        return found
