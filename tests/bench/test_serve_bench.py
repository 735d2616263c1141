"""The load generator against a server whose delays are written in the test."""

import asyncio
import json
import threading

import numpy as np
import pytest

from jpaged.bench.serve import draw_times, main

FIRST_S, NEXT_S = 0.1, 0.03


class ScriptedServer:
    """Streams max_tokens chunks of a token: the first after FIRST_S, the others NEXT_S apart. `refuses` says which
    requests, by their order, get an error 503, and `cuts` which end one token early.
    """

    def __init__(self, refuses=(), cuts=()):
        self.refuses, self.cuts = set(refuses), set(cuts)
        self.bodies = []
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, daemon=True).start()
        self._ready.wait(10)

    def _run(self):
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._answer, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()

    async def _answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if head.startswith("get"):
            body = json.dumps({"data": [{"id": "scripted"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
        else:
            length = int(head.split("content-length:")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            number = len(self.bodies)
            self.bodies.append(body)
            if number in self.refuses:
                writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            else:
                await self._stream(writer, body["max_tokens"] - (number in self.cuts), len(body["prompt"]))
        await writer.drain()
        writer.close()

    async def _stream(self, writer, tokens, prompt_tokens):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for i in range(tokens):
            await asyncio.sleep(NEXT_S if i else FIRST_S)
            self._send(writer, json.dumps({"choices": [{"index": 0, "text": "x", "finish_reason": None}]}))
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
        self._send(writer, json.dumps({"choices": [], "usage": usage}))
        self._send(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    def _send(self, writer, data):
        event = f"data: {data}\n\n".encode()
        writer.write(b"%x\r\n" % len(event) + event + b"\r\n")


def bench(server, tmp_path, *options):
    file = tmp_path / "serve.json"
    shape = ["--dataset", "random", "--input-len", "7", "--output-len", "5", "--workers", "1", "--json", str(file)]
    code = main(["--base-url", server.url, *shape, *options])
    return code, json.loads(file.read_text())["results"]


def test_figures_are_those_of_the_delays_that_the_server_has(tmp_path, capsys):
    server = ScriptedServer()
    code, _ = bench(server, tmp_path, "--num-prompts", "12")
    assert code == 0
    lines = {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    names = ("TTFT", "inter-token", "inter-arrival", "latency")
    first, between, arrivals, last = (float(lines[name][1]) for name in names)  # means in ms
    assert 1e3 * FIRST_S <= first < 10e3 * FIRST_S  # a busy machine is late, never early
    assert 1e3 * (FIRST_S + 4 * NEXT_S) <= last < 10e3 * (FIRST_S + 4 * NEXT_S)
    assert last == pytest.approx(first + 4 * between, abs=0.1)
    assert arrivals >= between  # tokens that it meets together came at once
    assert len(server.bodies) == 12
    for body in server.bodies:
        assert (len(body["prompt"]), body["max_tokens"], body["ignore_eos"]) == (7, 5, True)
        assert body["model"] == "scripted"


def test_failed_and_short_answers_are_counted_and_not_hidden(tmp_path, capsys):
    code, figures = bench(ScriptedServer(refuses=(1, 4), cuts=(6,)), tmp_path, "--num-prompts", "10")
    assert code == 1
    assert figures["failed"] == 3
    assert "503" in capsys.readouterr().out


def test_requests_are_sent_at_poisson_times_of_the_rate_asked_for():
    times = draw_times(4000, 25.0, seed=1)
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 25, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 25, rel=0.1)  # exponential
    assert not draw_times(10, np.inf, seed=1).any()


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9"):
        main(["--base-url", "http://127.0.0.1:9", "--num-prompts", "1"])
