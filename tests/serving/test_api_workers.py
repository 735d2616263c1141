"""Several API processes and several replicas behind one port: no client can tell, and none outlives the others."""

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import time
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import pytest

from jpaged import cli
from jpaged.api.config import EngineArgs
from jpaged.api.errors import EngineDeadError, InvalidParameterError, ModelNotFoundError
from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.engine.sequences.request import RequestStatus
from jpaged.frontend.llm_engine import LLMEngine
from jpaged.processes import keeper
from jpaged.processes.client_requests import ClientRequest, StepRequests
from jpaged.processes.pulse import Pulse
from jpaged.serving import workers
from jpaged.serving.limits import ServerLimits
from jpaged.serving.options import AppOptions, ServerOptions
from jpaged.serving.workers import supervise
from tests.serving.server_process import Server, ended_within, shared
from tests.tiny_models import DEMO_ENGINE

pytestmark = pytest.mark.xdist_group("server")

PROMPTS = [f"{beginning} {animal}" for beginning in ("Once upon a time a", "The") for animal in ("snail", "fox", "owl")]
SEEDED = {"seed": 3, "max_tokens": 200}
STOPPED_S = 8
"""In which an API process that is stopped is noticed."""
LONG = {"prompt": "A", "max_tokens": 1000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def engine():
    return LLMEngine(EngineArgs(**DEMO_ENGINE))


@pytest.fixture(scope="module")
def running_server(tmp_path_factory, engine):
    """Whose replicas find the programs that the engine compiled."""
    options = ("--api-workers", "2", "--data-parallel-size", "2", "--max-queued-requests", "12")
    log = tmp_path_factory.mktemp("server") / "log"
    with shared(lambda: Server(log, *options, "--shutdown-timeout", "0.3")) as running:
        yield running


@pytest.fixture
def server(running_server):
    return running_server()


def ask_at_once(server, bodies):
    """Answers to requests that each come over a connection of their own, so that both API processes get some."""

    async def ask():
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        options = {"base_url": server.url, "headers": server.client.headers, "timeout": 60, "trust_env": False}
        async with httpx.AsyncClient(limits=limits, **options) as client:
            return await asyncio.gather(*(client.request(method, path, json=body) for method, path, body in bodies))

    return asyncio.run(ask())


def events(response):
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def test_tokens_are_those_of_one_offline_engine(server, engine):
    params = replace(engine.default_sampling_params, max_tokens=20, n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, replace(params, seed=i))
    expected = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            expected[int(output.request_id)] = [completion.token_ids for completion in output.outputs]
    bodies = [
        ("POST", "/v1/completions", {"prompt": p, "seed": i, "max_tokens": 20, "n": 2, "return_token_ids": True})
        for i, p in enumerate(PROMPTS)
    ]
    answers = [response.json() for response in ask_at_once(server, bodies)]
    assert [[choice["token_ids"] for choice in answer["choices"]] for answer in answers] == [
        expected[i] for i in range(len(PROMPTS))
    ]


def test_equal_requests_without_a_seed_differ_whichever_replica_serves_them(server):
    bodies = [("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 30})] * 8
    texts = [response.json()["choices"][0]["text"] for response in ask_at_once(server, bodies)]
    assert len(set(texts)) == len(texts)


def test_every_api_process_reports_the_requests_of_all(server):
    before = server.metric("request_success_total")
    ask_at_once(server, [("POST", "/v1/completions", {"prompt": p, "max_tokens": 30}) for p in PROMPTS])
    name = "jpaged:request_success_total"
    for page in ask_at_once(server, [("GET", "/metrics", None)] * 12):
        lines = [line for line in page.text.splitlines() if line.startswith(name)]
        assert sum(float(line.rsplit(" ", 1)[1]) for line in lines) == before + len(PROMPTS)
        by_replica = [
            float(line.rsplit(" ", 1)[1])
            for line in page.text.splitlines()
            if line.startswith("jpaged:generation_tokens_total")
        ]
        assert len(by_replica) == 2
        assert min(by_replica) > 0


def test_steps_are_counted_once_however_many_api_processes_have_news_of_them(server):
    """And token by token, though who does not stream hears of all its tokens at the end."""
    bodies = [{"prompt": p, "max_tokens": 30, "ignore_eos": True, "stream": i % 2 == 0} for i, p in enumerate(PROMPTS)]
    ask_at_once(server, [("POST", "/v1/completions", body) for body in bodies * 2])
    for page in ask_at_once(server, [("GET", "/metrics", None)] * 6):
        for replica in "01":
            labels = f'model_name="jpaged-demo",engine="{replica}"'
            steps = value(page, f"engine_steps_total{{{labels}}}")
            tokens = value(page, f"generation_tokens_total{{{labels}}}")
            assert value(page, f"iteration_tokens_total_count{{{labels}}}") == steps
            computed = value(page, f"iteration_tokens_total_sum{{{labels}}}")  # but for those in the prefix cache
            assert 0 < tokens < computed <= tokens + value(page, f"prompt_tokens_total{{{labels}}}")
            assert value(page, f'iteration_tokens_total_bucket{{{labels},le="128"}}') == steps  # its slots and budget


def value(page, sample):
    (line,) = (line for line in page.text.splitlines() if line.startswith(f"jpaged:{sample} "))
    return float(line.rsplit(" ", 1)[1])


def test_the_queue_is_full_for_every_api_process_at_once(server):
    """The replicas stand still meanwhile, so that what waits goes on to wait."""
    short = {"prompt": "A", "max_tokens": 1}

    async def fill_and_ask():
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        options = {"base_url": server.url, "headers": server.client.headers, "timeout": 120, "trust_env": False}
        async with httpx.AsyncClient(limits=limits, **options) as client:
            waiting = [asyncio.create_task(client.post("/v1/completions", json=short)) for _ in range(12)]
            while (await client.get("/load")).json()["server_load"] < 12:
                await asyncio.sleep(0.05)
            refused = await asyncio.gather(*(client.post("/v1/completions", json=short) for _ in range(12)))
            still.close()
            return await asyncio.gather(*waiting), refused

    with contextlib.ExitStack() as still:
        still.enter_context(server.engines_standing_still())
        answered, refused = asyncio.run(asyncio.wait_for(fill_and_ask(), 120))
    assert {response.status_code for response in answered} == {200}
    assert {response.status_code for response in refused} == {503}
    assert all(response.headers["retry-after"] for response in refused)
    assert {response.status_code for response in ask_at_once(server, [("POST", "/v1/completions", short)] * 8)} == {200}


def test_streams_of_a_replica_that_is_killed_go_on_in_the_other(server):
    calm = [events_of(response) for response in ask_at_once(server, [("POST", "/v1/completions", LONG | SEEDED)] * 2)]
    streams = [server.client.stream("POST", "/v1/completions", json=LONG | SEEDED) for _ in range(2)]
    seen = [events(stream.__enter__()) for stream in streams]
    firsts = [next(stream) for stream in seen]
    killed = server.children("engine_process")[1]
    os.kill(killed, signal.SIGKILL)
    texts = [text_of([first, *stream]) for first, stream in zip(firsts, seen, strict=True)]
    for stream in streams:
        stream.__exit__(None, None, None)
    assert texts == [text_of(one) for one in calm]
    server.log_with("The engine process of replica 1 was killed by SIGKILL; starting it again")
    assert {page.status_code for page in ask_at_once(server, [("GET", "/health", None)] * 8)} == {200}
    answers = ask_at_once(server, [("POST", "/v1/completions", {"prompt": p, "max_tokens": 3}) for p in PROMPTS])
    assert {answer.status_code for answer in answers} == {200}
    end = time.monotonic() + 120
    while server.metric("engine_restarts_total") != 1 or len(server.children("engine_process")) != 2:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert killed not in server.children("engine_process")


def events_of(response):
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


def text_of(stream):
    assert all("error" not in event for event in stream)
    return "".join(event["choices"][0]["text"] for event in stream if event["choices"])


def test_no_process_that_tokenizes_has_loaded_pytorch(server):
    assert server.client.post("/v1/completions", json={"prompt": "A", "max_tokens": 1}).status_code == 200
    for pid in (server.process.pid, *server.children("api_process")):
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


def check_both_serve(server, other):
    """Two API processes serve again, one of which is still `other`, and nothing of the one that ended counts."""
    end = time.monotonic() + 120
    while len(server.children("api_process")) != 2:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert other in server.children("api_process")
    bodies = [("POST", "/v1/completions", {"prompt": p, "max_tokens": 3}) for p in PROMPTS * 2]
    assert {answer.status_code for answer in ask_at_once(server, bodies)} == {200}
    assert {page.json()["server_load"] for page in ask_at_once(server, [("GET", "/load", None)] * 8)} == {0}


def test_a_killed_api_process_is_started_again_and_only_its_own_streams_break_off(server):
    streams, seen, of = [], [], []
    while len(set(of)) < 2:  # the kernel chooses to which process a connection comes
        streams.append(server.client.stream("POST", "/v1/completions", json=LONG | {"max_tokens": 300}))
        response = streams[-1].__enter__()
        seen.append(events(response))
        next(seen[-1])
        of.append(server.serving(response))
    other, killed = of[0], of[-1]
    os.kill(killed, signal.SIGKILL)
    broken = []
    for stream, pid in zip(seen, of, strict=True):
        try:
            assert list(stream)[-1]["choices"][0]["finish_reason"] == "length"
        except httpx.RemoteProtocolError:
            broken.append(pid)
    for stream in streams:
        with contextlib.suppress(httpx.HTTPError):
            stream.__exit__(None, None, None)
    server.log_with(f"API process {killed} ended with signal 9; starting it again")
    check_both_serve(server, other)
    assert broken == [killed]


async def ends_of_streams(server, number, stopped):
    """How streams end of which all have begun before a process is stopped."""
    # What the stopped process does not read fills its sockets.
    body, last = LONG | {"logprobs": 20, "seed": 1}, number

    async def read(client):
        nonlocal last
        end = "broken"
        with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        if end == "broken":
                            last -= 1
                            if not last:
                                os.kill(stopped, signal.SIGSTOP)
                        end = json.loads(line[6:])["choices"][0]["finish_reason"]
        return end or "broken"

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    options = {"base_url": server.url, "headers": server.client.headers, "timeout": 120, "trust_env": False}
    async with httpx.AsyncClient(limits=limits, **options) as client:
        return await asyncio.gather(*(read(client) for _ in range(number)))


def test_an_api_process_that_is_stopped_is_killed_and_replaced_and_others_notice_nothing(tmp_path):
    server = Server(tmp_path / "log", "--api-workers", "2", "--step-timeout", str(STOPPED_S))
    try:
        stopped, other = server.children("api_process")
        begun = time.monotonic()
        ends = asyncio.run(ends_of_streams(server, 12, stopped))
        assert set(ends) == {"length", "broken"}
        log = server.log_with("; starting it again")
        assert f"API process {stopped} did not come round for {STOPPED_S} s (--step-timeout) and was killed" in log
        assert time.monotonic() - begun > STOPPED_S / 2
        check_both_serve(server, other)
    finally:
        server.close()
    assert server.process.returncode == 0


def test_an_api_process_that_goes_on_with_the_first_one_is_left_alone(monkeypatch):
    """As after all of a server was stopped."""

    async def scene():
        worker = workers._Worker(1, SimpleNamespace(), most_restarts=1, hang_s=0.2)
        worker._pulse = pulse = Pulse.create()
        signals = []
        process = SimpleNamespace(send_signal=signals.append, kill=lambda: signals.append(signal.SIGKILL))
        killing = asyncio.ensure_future(worker._kill_when_silent(process))
        for _ in range(8):
            pulse.beat()
            await asyncio.sleep(0.05)
            time.sleep(0.3)  # nothing runs
        assert not signals
        await asyncio.wait_for(killing, 60)
        assert signals == [signal.SIGUSR1, signal.SIGKILL]
        pulse.close()

    asyncio.run(scene())


def test_that_one_hung_is_not_said_of_the_next_which_ends_at_once():
    async def wait():
        return 1

    worker = workers._Worker(1, None, 0, 60.0)
    worker.process, worker._pulse, worker._was_hanging = SimpleNamespace(pid=7, wait=wait), Pulse.create(), True
    links = [SimpleNamespace(board=SimpleNamespace(clear_gauges=lambda number: None))]
    with (
        contextlib.closing(worker._pulse),
        pytest.raises(EngineDeadError, match="API process 7 ended with exit code 1"),
    ):
        asyncio.run(worker.keep(None, SimpleNamespace(links=links)))


def test_a_killed_api_process_that_is_not_started_again_ends_the_others_and_the_server(tmp_path):
    server = Server(tmp_path / "log", "--api-workers", "2", "--max-restarts", "0")
    pids = [*server.children("engine_process"), *server.children("api_process")]
    os.kill(pids[-1], signal.SIGKILL)
    assert server.process.wait(60) == 1
    assert ended_within(pids, 60)
    ended = f"API process {pids[-1]} ended with signal 9"
    log = server.log_with(f"{ended}; start the server anew")
    assert log.index(f"{ended}; the others drain") < log.index(f"{ended}; start the server anew")


def test_a_killed_supervisor_leaves_nothing(tmp_path):
    server = Server(tmp_path / "log", "--api-workers", "2")
    pids = [*server.children("engine_process"), *server.children("api_process")]
    assert len(pids) == 3
    server.process.kill()
    assert ended_within(pids, 60)
    server.close()


def test_sigterm_drains_every_api_process(server):
    pids = [*server.children("engine_process"), *server.children("api_process")]
    streams = [server.client.stream("POST", "/v1/completions", json=LONG) for _ in range(4)]
    seen = [events(stream.__enter__()) for stream in streams]
    for stream in seen:
        next(stream)
    with server.engines_standing_still():
        server.process.send_signal(signal.SIGTERM)
        server.log_with("draining")
        server.wait_until_refusing()
    last = [list(stream)[-1]["choices"][0]["finish_reason"] for stream in seen]
    for stream in streams:
        stream.__exit__(None, None, None)
    assert set(last) <= {"abort", "length"}
    assert "abort" in last
    assert server.process.wait(60) == 0
    assert ended_within(pids, 60)


def test_a_tokenizer_that_is_missing_is_told_before_any_process_starts():
    with pytest.raises(ModelNotFoundError, match="/no/such/tokenizer"):
        asyncio.run(supervise(EngineArgs(tokenizer="/no/such/tokenizer"), AppOptions(), ServerOptions(), []))


@pytest.mark.parametrize("name", ["served_model_names", "api_keys", "allowed_origins"])
def test_a_string_is_no_list_of_its_letters(name):
    with pytest.raises(InvalidParameterError, match=f"{name} must be a list of strings"):
        AppOptions(**{name: "secret"})


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan")])
def test_limits_are_positive_and_finite(value):
    with pytest.raises(InvalidParameterError, match="body_timeout_s must be positive and finite"):
        ServerLimits(body_timeout_s=value)


@pytest.mark.parametrize("before", ["nothing", "one with less priority", "one whose grammar is not ready"])
def test_what_has_started_is_told_whatever_waits_before_it(before):
    class ClientRequest:  # all that counts of it
        def __init__(self, status, structured_outputs=None):
            self.request = SimpleNamespace(
                status=status, sampling=SamplingParams(structured_outputs=structured_outputs)
            )

    policy = "priority" if before == "one with less priority" else "fcfs"
    engine = SimpleNamespace(args=EngineArgs(scheduling_policy=policy), core=None)
    requests = StepRequests(engine)
    grammar = StructuredOutputsParams(json_object=True) if before == "one whose grammar is not ready" else None
    waiting, running = ClientRequest(RequestStatus.WAITING, grammar), ClientRequest(RequestStatus.RUNNING)
    requests._not_started.extend([running, waiting] if before == "nothing" else [waiting, running])
    assert requests._take_started() == [running]
    assert list(requests._not_started) == [waiting]
    assert requests._take_started() == []


def test_those_that_wait_are_looked_through_only_when_a_sequence_has_got_a_slot_or_a_request_has_ended():
    core = SimpleNamespace(num_starts=0, abort=list)
    requests = StepRequests(SimpleNamespace(args=EngineArgs(), core=core))
    connection = object()

    def open_request(handle):
        request = SimpleNamespace(status=RequestStatus.RUNNING, request_id=str(handle))
        requests._not_started.append(ClientRequest(request, connection, handle, True))

    open_request(7)
    assert requests._report([]) == {}
    core.num_starts = 1
    assert array("q", requests._report([])[connection].started).tolist() == [7]
    open_request(8)
    assert requests._report([]) == {}
    requests.abort(["9"])
    assert array("q", requests._report([])[connection].started).tolist() == [8]


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (7, 1), (8, 2), (16, 4), (128, 4)])
def test_there_is_an_api_process_for_every_four_cores_but_for_replicas_unless_their_number_is_given(
    cores, workers, monkeypatch
):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    served = []
    monkeypatch.setattr(
        "jpaged.serving.server.serve", lambda args, app_options, options: served.append(options.api_workers)
    )
    replicas = ["--data-parallel-size", "2"]
    for given in ([], replicas, ["--api-workers", "3"], [*replicas, "--api-workers", "3"]):
        assert cli.main(["serve", *given]) == 0
    assert served == [workers, 1, 3, 3]


def test_an_api_process_that_cannot_be_started_at_the_moment_is_tried_again(monkeypatch, caplog):
    """The others, and the engine, go on meanwhile."""
    errors = [BlockingIOError(11, "no processes"), OSError(24, "no files")]

    async def start(*command, stdin, **options):
        if errors:
            raise errors.pop(0)
        return await real("sleep", "600", stdin=stdin)

    async def scene():
        engine = SimpleNamespace(keeper=SimpleNamespace(add_client=lambda _, channel: channel.close()))
        links = [SimpleNamespace(board=SimpleNamespace(clear_gauges=lambda _: None))]
        processes = SimpleNamespace(links=links, new_client=list)
        worker = workers._Worker(1, msgspec.defstruct("Start", [(name, int, 0) for name in STARTED_WITH])(), 10, 300.0)
        worker.process = ended = await real("true")
        keep = asyncio.ensure_future(worker.keep(engine, processes))
        while worker.process is ended and not keep.done():
            await asyncio.sleep(0.01)
        assert not keep.done(), keep.exception()
        keep.cancel()
        worker.process.kill()
        await worker.process.wait()

    real = asyncio.create_subprocess_exec
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(keeper, "_FIRST_WAIT_S", 0.01)
    asyncio.run(asyncio.wait_for(scene(), 60))
    assert caplog.text.count("An API process cannot be started") == 2


STARTED_WITH = ("engine_fds", "handover_fd", "board_fd", "clients_fd", "pulse_fd", "listen_fd")


def test_an_api_process_for_which_no_descriptor_is_left_leaves_no_socket_open(monkeypatch):
    def refuse():
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(workers.handover, "socket_pair", refuse)
    sockets = socket.socketpair()
    worker = workers._Worker(1, SimpleNamespace(), most_restarts=1, hang_s=300.0)
    with pytest.raises(OSError, match="too many open files"):
        asyncio.run(worker.begin(SimpleNamespace(keeper=SimpleNamespace()), sockets))
    assert [one.fileno() for one in sockets] == [-1, -1]
