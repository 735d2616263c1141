"""Responses that run in the background: asked for, read as streams by several clients, cancelled, forgotten."""

import asyncio
import contextlib
import json
import signal
import threading
import time
from collections import deque
from types import SimpleNamespace

import openai
import pytest

from jpaged.api.outputs import CompletionOutput, Logprob, RequestOutput
from jpaged.frontend.inputs import ProcessedInput
from jpaged.serving.answers import AnswerContext
from jpaged.serving.dialects import background, responses
from jpaged.serving.dialects.background import BackgroundResponses
from jpaged.serving.dialects.event_record import EventRecord
from jpaged.serving.dialects.items import Item
from jpaged.serving.dialects.response_store import ResponseStore
from jpaged.serving.dialects.responses import ResponsesRequest
from jpaged.serving.dialects.responses_answer import ResponsesAnswer
from jpaged.serving.dialects.routes import _Handlers
from jpaged.serving.errors import ApiError, OverloadedError
from tests.serving.server_process import KEY, Server

pytestmark = pytest.mark.xdist_group("tools server")

STORY = "A story about a fox"
LONG = {"model": "model", "input": STORY, "background": True, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(thinking_server):
    return thinking_server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key=KEY)


def wait_until(client, response_id, *statuses):
    end = time.monotonic() + 120
    while (response := client.responses.retrieve(response_id)).status not in statuses:
        assert time.monotonic() < end, response
        time.sleep(0.05)
    return response


def events_of(answer):
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


def test_a_response_in_the_background_ends_as_one_that_is_waited_for(server, client):
    asked = {"model": "model", "input": STORY, "temperature": 0, "max_output_tokens": 20}
    waited = client.responses.create(**asked)
    with server.engines_standing_still():
        begun = client.responses.create(background=True, **asked)
        assert (begun.status, begun.background, begun.output, begun.usage) == ("queued", True, [], None)
        assert client.responses.retrieve(begun.id) == begun
        with pytest.raises(openai.BadRequestError, match="has not ended; wait"):
            client.responses.create(model="model", input="a", previous_response_id=begun.id)
    ended = wait_until(client, begun.id, "incomplete")
    assert ended.output_text == waited.output_text
    assert ended.usage.output_tokens == waited.usage.output_tokens
    further = client.responses.create(model="model", input="On", previous_response_id=begun.id, max_output_tokens=3)
    assert further.usage.input_tokens > ended.usage.input_tokens
    assert client.responses.cancel(begun.id) == ended  # too late, which is no error
    client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)


def test_a_cancelled_response_stays_cancelled_and_leaves_the_engine(server, client):
    begun = client.responses.create(**LONG)
    wait_until(client, begun.id, "in_progress")
    with server.engines_standing_still():  # so that it cannot end by itself
        cancelled = client.responses.cancel(begun.id)
    assert (cancelled.status, cancelled.completed_at) == ("cancelled", None)
    assert [item.status for item in cancelled.output] in ([], ["incomplete"])
    assert client.responses.retrieve(begun.id) == client.responses.cancel(begun.id) == cancelled
    with pytest.raises(openai.BadRequestError, match="was not finished, its status is cancelled"):
        client.responses.create(model="model", input="a", previous_response_id=begun.id)
    assert server.client.get("/debug/requests").json()["requests"] == []


def test_a_response_that_is_deleted_while_it_runs_leaves_the_engine(server, client):
    begun = client.responses.create(**LONG)
    with server.engines_standing_still():
        client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)
    assert server.client.get("/debug/requests").json()["requests"] == []


def test_a_stream_goes_on_without_its_reader_and_can_be_taken_up_again(server, client):
    body = {"model": "model", "input": STORY, "temperature": 0, "max_output_tokens": 60, "background": True}
    with server.client.stream("POST", "/v1/responses", json=body | {"stream": True}) as answer:
        lines = answer.iter_lines()
        first = [json.loads(line[6:]) for line in (next(lines) for _ in range(12)) if line.startswith("data: ")]
    kinds = [event["type"] for event in first]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert [event["response"]["status"] for event in first[:3]] == ["queued", "queued", "in_progress"]
    path = f"/v1/responses/{first[0]['response']['id']}"
    last = first[-1]["sequence_number"]
    rest = events_of(server.client.get(path, params={"stream": "true", "starting_after": last}))
    assert [event["sequence_number"] for event in first + rest] == list(range(len(first) + len(rest)))
    assert rest[-1]["response"] == server.client.get(path).json()
    text = "".join(e["delta"] for e in first + rest if e["type"] == "response.output_text.delta")
    assert text == rest[-1]["response"]["output"][0]["content"][0]["text"]
    assert events_of(server.client.get(path, params={"stream": "true"})) == first + rest
    assert events_of(server.client.get(path, params={"stream": "true", "starting_after": 10_000})) == []
    for query in ({"starting_after": 1}, {"stream": "true", "starting_after": "x"}):
        refused = server.client.get(path, params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "starting_after")


def test_a_stream_ends_with_what_becomes_of_the_response(server, client):
    body = {"model": "model", "input": STORY, "background": True, "stream": True, "ignore_eos": True}
    with server.client.stream("POST", "/v1/responses", json=body) as answer:
        lines = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
        begun = next(lines)["response"]["id"]
        wait_until(client, begun, "in_progress")
        with server.engines_standing_still():
            assert client.responses.cancel(begun).status == "cancelled"
        *_, last = lines
    assert (last["type"], last["response"]["status"]) == ("response.cancelled", "cancelled")


def test_what_cannot_run_in_the_background_is_refused_at_once(server):
    for body, param in (
        ({"input": "a", "store": False}, "background"),
        ({"input": "a", "temperature": -1}, "temperature"),
        ({"input": "word " * 3000}, "input"),
    ):
        answer = server.client.post("/v1/responses", json=body | {"background": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_response_that_fails_says_so_and_can_be_asked_for():
    store = ResponseStore()
    body = ResponsesRequest(input="hi", background=True)
    answer = ResponsesAnswer(responses.chat_of(body, store), context("chatcmpl-1"), body, store)
    events = answer.queued() + answer.failed(ApiError(500, "The engine failed."))
    answer.keep()
    kinds = [line[7:] for line in events.decode().splitlines() if line.startswith("event")]
    assert kinds == ["response.created", "response.queued", "response.failed"]
    kept = store.response("resp_1")
    assert (kept["status"], kept["error"]["message"]) == ("failed", "The engine failed.")
    with pytest.raises(ApiError, match="its status is failed"):
        store.get("resp_1")


def context(request_id):
    return AnswerContext(request_id, "m", [ProcessedInput("hi", [1], ())], tokenizer=None)


def test_a_record_is_bounded_and_a_reader_that_falls_behind_is_told():
    async def trial():
        record = EventRecord(20)
        read = record.read()
        record.add(b"event: a\n\nevent: b\n\n")
        assert await anext(read) == b"event: a\n\nevent: b\n\n"
        waiting = asyncio.ensure_future(anext(read))
        await asyncio.sleep(0)
        record.add(b"event: c\n\n")
        assert await waiting == b"event: c\n\n"
        record.add(b"event: d\n\nevent: e\n\nevent: f\n\n")
        assert record.num_bytes == 20
        with pytest.raises(ApiError, match="up to 3 are not kept"):
            await anext(read)
        record.end()
        assert [chunk async for chunk in record.read(5)] == [b"event: f\n\n"]

    asyncio.run(trial())


def test_a_reader_that_keeps_up_is_not_slower_the_more_has_come():
    """The reader looks at what is new alone: a walk over all events for each would take half a million steps."""
    steps = 0

    class Counted(deque):
        def __iter__(self):
            return counted(super().__iter__())

        def __reversed__(self):
            return counted(super().__reversed__())

    def counted(events):
        nonlocal steps
        for event in events:
            steps += 1
            yield event

    async def trial():
        record = EventRecord(1 << 20)
        record._events = Counted()
        read = record.read()
        for number in range(1000):
            record.add(b"event: %d\n\n" % number)
            assert await anext(read) == b"event: %d\n\n" % number

    asyncio.run(trial())
    assert steps <= 2000


def test_a_response_whose_events_find_no_room_is_kept_without_them():
    store, record = ResponseStore(200), EventRecord(1000)
    record.add(b"event: a\n\n" * 50)
    store.put(None, {"id": "resp_1", "status": "completed"}, record)
    assert store.response("resp_1")["status"] == "completed"
    assert store.record("resp_1") is None


def test_a_response_is_cancelled_behind_the_events_that_a_thread_is_making():
    """Large outputs become events in a thread; the numbers of events still have no gap."""
    begun, may_end = threading.Event(), threading.Event()

    async def trial():
        store = ResponseStore()
        body = ResponsesRequest(input="hi", background=True, stream=True)
        about = context("chatcmpl-1")
        (prompt,) = about.prompts
        answer = ResponsesAnswer(responses.chat_of(body, store), about, body, store)
        begins = answer._start

        def slow():
            begun.set()
            assert may_end.wait(60)
            return begins()

        answer._start = slow
        completion = CompletionOutput(0, "so", [5] * 5000, 0.0, [{5: Logprob(-1.0, 1, "so")}] * 5000)
        output = RequestOutput("chatcmpl-1", "hi", [1], [completion], False)

        class Engine:
            async def in_thread(self, work):
                return await asyncio.get_running_loop().run_in_executor(None, work)

            async def generate(self, *_, **__):
                yield output

        ticket = SimpleNamespace(close=lambda: None, opened=lambda _: None)
        job = SimpleNamespace(
            **{"answer": answer, "ticket": ticket, "params": None, "priority": 0, "request_id": "chatcmpl-1"},
            **{"cache_salt": None, "trace_headers": {}, "max_backlog_bytes": None, "max_unsent_bytes": 1 << 24},
            prompts=[prompt],
            fields=(),
            prompt_field="input",
        )
        run = BackgroundResponses(Engine(), store).start(job, records=True)
        assert await asyncio.to_thread(begun.wait, 60)
        cancels = [asyncio.ensure_future(run.cancel()) for _ in range(2)]  # two clients do
        await asyncio.sleep(0.05)
        assert not run.task.done(), "the thread still works on the answer"
        may_end.set()
        await asyncio.gather(*cancels)
        assert store.response("resp_1")["status"] == "cancelled"
        lines = b"".join([events async for events in run.record.read()]).decode().splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.cancelled"

    try:
        asyncio.run(trial())
    finally:
        may_end.set()


def test_so_many_run_in_the_background_and_no_more(monkeypatch):
    monkeypatch.setattr(background, "MAX_RUNNING", 0)
    closed = []
    job = SimpleNamespace(ticket=SimpleNamespace(close=lambda: closed.append(True)))
    with pytest.raises(ApiError, match="of at most 0; try again") as caught:
        BackgroundResponses(SimpleNamespace(), ResponseStore()).start(job, records=False)
    assert caught.value.status == 503
    assert closed == [True]


def recorded(num_bytes):
    record = EventRecord(1 << 30)
    for _ in range(num_bytes // 1000):
        record.add(b"e" * 998 + b"\n\n")
    return record


def kept_ones(store):
    found = []
    for i in range(10):
        with contextlib.suppress(ApiError):
            found.append(store.response(f"resp_{i}")["id"])
    return found


def test_all_responses_share_one_bound_and_the_oldest_that_have_ended_give_way_first():
    store = ResponseStore(1_000_000)
    for i in range(3):
        store.put(None, {"id": f"resp_{i}"}, recorded(250_000))
    big, small = recorded(300_000), recorded(50_000)
    first = store.hold(1000, big)  # 250,000 each, and 301,000
    assert kept_ones(store) == ["resp_1", "resp_2"]
    store.hold(1000, small)
    assert kept_ones(store) == ["resp_1", "resp_2"]
    first.grow_to(600_000)  # nothing that has ended is left; it has itself the most events
    assert kept_ones(store) == []
    assert (big.num_bytes, small.num_bytes) == (300_000, 50_000)
    first.grow_to(800_000)
    assert (big.num_bytes, small.num_bytes) == (149_000, 50_000)
    with pytest.raises(OverloadedError, match=r"--max-response-bytes\); try again") as caught:
        store.hold(2000, None)
    assert caught.value.status == 503
    with pytest.raises(OverloadedError, match="--max-response-bytes"):
        first.grow_to(999_999)
    assert (big.num_bytes, small.num_bytes) == (0, 0)
    first.release()
    store.put(None, {"id": "resp_9"}, recorded(500_000))
    assert kept_ones(store) == ["resp_9"]


def test_a_run_that_finds_no_room_takes_no_other_along():
    store = ResponseStore(1000)
    greedy, modest = store.hold(400, None), store.hold(500, None)
    with pytest.raises(OverloadedError, match="--max-response-bytes"):
        greedy.grow_to(600)
    modest.grow_to(550)  # before the other has ended
    greedy.release()
    modest.release()
    store.hold(1000, None).release()  # nothing is counted twice


def test_what_is_too_large_by_itself_is_told_so_and_not_to_try_again():
    store = ResponseStore(1000)
    with pytest.raises(ApiError, match=r"take 1001 bytes, .* may take 1000 \(--max-response-bytes\)") as caught:
        store.hold(1001, None)
    assert (caught.value.status, caught.value.code, caught.value.headers) == (413, "response_too_large", {})
    modest, growing = store.hold(100, None), store.hold(400, None)
    with pytest.raises(ApiError, match="Send less, or ask without background") as caught:
        growing.grow_to(1001)
    assert caught.value.status == 413
    modest.grow_to(1000)  # the other holds nothing any more


@pytest.mark.parametrize("kind", ["text", "reasoning", "call"])
def test_a_run_that_found_room_finds_room_to_be_kept(kind):
    tool = {"type": "function", "name": "f" * 60, "description": "d" * 5000, "parameters": {"type": "object"}}
    body = ResponsesRequest(input="hi" * 500, instructions="i" * 3000, background=True, tools=[tool])
    body.metadata, body.top_logprobs, body.include = {"a": "b" * 500}, 2, ["message.output_text.logprobs"]
    store = ResponseStore()
    about = context("chatcmpl-1")
    answer = ResponsesAnswer(responses.chat_of(body, store), about, body, store)
    position = {5: Logprob(-1.0123456789012345, 1, "\n\u00fc"), 6: Logprob(-2.0123456789012345, 2, "\t")}
    for _ in range(200):
        if kind == "reasoning":
            answer._add("reasoning", "\n\u00fc")
        elif kind == "call":
            answer._open(Item("call", len(answer.items), "call_" + "c" * 24, "f" * 60))
            answer._more_of('{"a": "\\n\u00fc"}')
        else:
            completion = CompletionOutput(0, "\n\u00fc", [5], 0.0, [position])
            answer.chunk(0, RequestOutput("chatcmpl-1", "hi", [1], [completion], False))
    last = CompletionOutput(0, "", [], 0.0, None, finish_reason="length")
    answer.chunk(0, RequestOutput("chatcmpl-1", "hi", [1], [last], True))
    tight = answer._store = ResponseStore(answer.num_bytes)
    tight.hold(answer.num_bytes, None).release()
    answer.end()
    answer.keep()
    assert tight.response("resp_1")["status"] == "incomplete"


def test_a_cancelled_response_is_answered_even_if_the_store_has_given_it_up():
    cancelled = []

    async def cancel():
        cancelled.append(True)

    run = SimpleNamespace(cancel=cancel, answer=SimpleNamespace(message=lambda: {"status": "cancelled"}))
    handlers = SimpleNamespace(
        _check_store=lambda *_: None, _background=SimpleNamespace(get={"resp_1": run}.get), _store=ResponseStore()
    )
    request = SimpleNamespace(path_params={"id": "resp_1"})
    answer = asyncio.run(_Handlers.cancel_response(handlers, request))
    assert (json.loads(answer.body), cancelled) == ({"status": "cancelled"}, [True])


def test_a_new_response_in_the_background_is_refused_while_others_fill_the_memory(tmp_path):
    server = Server(tmp_path / "log", "--max-response-bytes", "60000")
    try:
        body = {"background": True, "ignore_eos": True, "max_output_tokens": 900}
        many = []
        with server.engines_standing_still():
            while len(many) < 50:
                answer = server.client.post("/v1/responses", json=body | {"input": "a b " * 400})
                if answer.status_code != 200:
                    break
                many.append(answer.json()["id"])
        assert (answer.status_code, 10 < len(many) < 20) == (503, True)
        assert "--max-response-bytes" in answer.json()["error"]["message"]
        assert "retry-after" in answer.headers
        for one in many:
            assert server.client.post(f"/v1/responses/{one}/cancel").json()["status"] in ("cancelled", "incomplete")
        assert server.client.post("/v1/responses", json=body | {"input": "a"}).json()["status"] == "queued"
    finally:
        server.close()


def test_the_end_of_the_server_waits_for_no_response_in_the_background(tmp_path):
    server = Server(tmp_path / "log", "--shutdown-timeout", "600")
    try:
        body = {"input": STORY, "background": True, "ignore_eos": True}
        assert server.client.post("/v1/responses", json=body).json()["status"] == "queued"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 0, server.log.read_text()
    finally:
        server.close()
