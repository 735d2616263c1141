"""Those who watch requests: the spans that a collector gets, and the lines of the log."""

import datetime
import http.server
import sys
import threading

import numpy as np
import pytest

from jpaged.api.errors import EngineDeadError, InvalidParameterError, MissingPackageError
from jpaged.api.sampling_params import SamplingParams
from jpaged.engine.sequences.group import SequenceGroup
from jpaged.engine.sequences.request import Request, RequestStatus
from jpaged.processes.request_log import RequestLog
from jpaged.processes.request_record import RequestRecord
from jpaged.processes.traces import Traces, check_endpoint

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
NOW = datetime.datetime(2030, 1, 2, 3, 4, 5, 678901, datetime.UTC)


def record(**fields):
    """Of a request that arrived at 100 s, ran from 101, had its first token at 103, its last at 107, ended at 108."""
    request = Request("cmpl-1", np.arange(3, 9, dtype=np.int32), SamplingParams(n=2, seed=4, stop=["a secret"]))
    for member, length in zip(SequenceGroup.form(request).members, (4, 3), strict=True):
        member.output_token_ids.extend(range(10, 10 + length))
        member.status, member.finish_reason = RequestStatus.FINISHED, "stop"
    stats = request.stats
    stats.arrival_time, stats.first_scheduled_time, stats.num_preemptions = 100.0, 101.0, 2
    stats.first_token_time, stats.last_token_time = 103.0, 107.0
    request.num_cached_tokens = 4
    times = {"text_began": 103.5, "text_ended": 107.5, "text_busy_s": 0.25, "ended": 108.0}
    return RequestRecord(request, **({"headers": HEADERS, "replica": 1, "num_resumed": 1} | times | fields))


@pytest.fixture
def collector():
    """Takes OTLP over HTTP; `bodies` has what came."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            server.bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    server.bodies = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def spans_of(collector, *records):
    """The spans that a collector gets of requests, by name; and their resource's attributes."""
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    traces = Traces(f"http://127.0.0.1:{collector.server_port}", "a-model")
    for one in records:
        traces.ended(one)
    traces.close()
    ((path, body),) = collector.bodies
    assert path == "/v1/traces"
    (resource,) = service.ExportTraceServiceRequest.FromString(body).resource_spans
    (scope,) = resource.scope_spans
    return {span.name: span for span in scope.spans}, attributes(resource.resource)


def attributes(thing):
    def plain(value):
        kind = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {one.key: plain(one.value) for one in thing.attributes}


def test_a_request_has_a_span_for_each_stage_below_one_of_its_own_in_the_clients_trace(collector):
    one = record()
    spans, resource = spans_of(collector, one)
    whole = spans.pop("llm_request")
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, PARENT)
    assert one.trace_id == TRACE
    begun = whole.start_time_unix_nano
    seconds = {
        name: ((span.start_time_unix_nano - begun) / 1e9, (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9)
        for name, span in spans.items()
    }
    expected = {"queue": (0, 1), "prefill": (1, 2), "decode": (3, 4), "detokenize": (3.5, 4)}
    assert seconds.keys() == expected.keys()
    for name, times in expected.items():
        assert seconds[name] == pytest.approx(times, abs=1e-6)
        assert spans[name].parent_span_id == whole.span_id
    assert whole.end_time_unix_nano - whole.start_time_unix_nano == pytest.approx(8e9, abs=1e3)
    found = attributes(whole)
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (6, 7)
    assert (found["jpaged.request_id"], found["jpaged.resumed"], found["jpaged.preemptions"]) == ("mine", 1, 2)
    assert found["gen_ai.response.finish_reasons"] == ["stop", "stop"]
    assert attributes(spans["detokenize"])["jpaged.busy_s"] == 0.25
    assert resource["service.name"] == "jpaged"


def test_a_request_that_failed_in_the_queue_has_no_other_stages_and_says_why(collector):
    request = Request("cmpl-2", np.arange(3, 9, dtype=np.int32), SamplingParams(), arrival_time=100.0)
    SequenceGroup.form(request)
    spans, _ = spans_of(collector, RequestRecord(request, error=EngineDeadError("gone"), ended=104.0))
    assert spans.keys() == {"llm_request", "queue"}
    assert spans["queue"].end_time_unix_nano == spans["llm_request"].end_time_unix_nano
    assert spans["llm_request"].status.message == "EngineDeadError"
    assert not spans["llm_request"].parent_span_id


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "http://"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint):
    with pytest.raises(InvalidParameterError, match=f"otlp_traces_endpoint.*{endpoint}"):
        check_endpoint(endpoint)


def test_traces_name_the_extra_that_they_need(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'jpaged\[otel\]'"):
        check_endpoint("http://localhost:4318")


def test_a_line_of_the_log_has_all_but_prompts_and_answers_unless_these_are_asked_for():
    line = RequestLog().line(record(), NOW)
    assert line["time"] == "2030-01-02T03:04:05.678+00:00"
    assert (line["request_id"], line["id"], line["trace_id"]) == ("mine", "cmpl-1", TRACE)
    assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (6, 4, 7)
    assert [line[f"{name}_s"] for name in ("queue", "prefill", "decode", "detokenize", "total")] == [1, 2, 4, 0.25, 8]
    assert (line["engine"], line["resumed"], line["preemptions"], line["error"]) == (1, 1, 2, None)
    assert line["params"]["n"] == 2
    assert "a secret" not in str(line)
    assert "prompt" not in line
    told = RequestLog(prompts=True).line(record(), NOW)  # without a tokenizer: token ids
    assert (told["prompt"], told["answers"]) == ([3, 4, 5, 6, 7, 8], [[10, 11, 12, 13], [10, 11, 12]])
    assert told["params"]["stop"] == ("a secret",)
