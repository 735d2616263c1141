"""The page's files, and the stream that feeds its live view, without a browser (tests/serving/test_browser.py has one).

The engine here answers at once with pictures of a small pool; `test_server.py` asks a real one.
"""

import asyncio
import base64
import json
import re
from dataclasses import fields, replace
from importlib.resources import files

import httpx
import numpy as np
import pytest

from jpaged.api.errors import EngineDeadError
from jpaged.engine.stats import EngineStats
from jpaged.processes import pool_view
from jpaged.processes.pool_view import view_pool
from jpaged.serving import live as live_module
from jpaged.serving.app import build_app
from jpaged.serving.limits import ServerLimits
from jpaged.serving.middleware import OPEN_PATHS
from jpaged.serving.options import AppOptions
from jpaged.serving.page import PATHS

STATS = EngineStats(*range(len(fields(EngineStats))))
REFS = np.array([0, 2, 1, 0, 0], np.int32)
NAMED = np.array([0, 1, 0, 1, 0], np.bool_)
POOL = view_pool(REFS, NAMED, [(3, np.array([1, 2])), (4, np.array([1]))], 16)
KEY = "a-key-for-tests"


class FakeEngine:
    """Counts how often it is asked."""

    def __init__(self):
        self.asked = 0
        self.error = None

    async def get_pool_views(self):
        self.asked += 1
        if self.error is not None:
            raise self.error
        return {0: (replace(STATS, num_steps=self.asked), POOL)}


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(live_module, "INTERVAL_S", 0.01)
    return FakeEngine()


def app_of(engine, max_watchers=2, keys=(KEY,)):
    return build_app(engine, AppOptions(api_keys=keys, limits=ServerLimits(max_watchers=max_watchers)))


def get(app, path, root_path="", **headers):
    async def ask():
        transport = httpx.ASGITransport(app, root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(root_path + path, headers=headers)

    return asyncio.run(ask())


class Watcher:
    """A client of /live, as ASGI sees one."""

    def __init__(self, app, key=KEY):
        self.messages = asyncio.Queue()
        self._gone = asyncio.Event()
        scope = {
            **{
                "type": "http",
                "method": "GET",
                "path": "/live",
                "root_path": "",
                "query_string": b"",
                "scheme": "http",
            },
            **{"http_version": "1.1", "server": ("test", 80), "client": ("test", 1)},
            "headers": [(b"authorization", f"Bearer {key}".encode())],
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self.messages.put))

    async def _receive(self):
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def next(self):
        return await asyncio.wait_for(self.messages.get(), 60)

    async def event(self):
        body = (await self.next())["body"]
        assert body.startswith(b"data: ")
        assert body.endswith(b"\n\n")
        return json.loads(body[6:])

    async def leave(self):
        self._gone.set()
        await asyncio.wait_for(self.task, 60)


@pytest.mark.parametrize("path", PATHS)
def test_files_are_served_without_a_key_under_a_strict_policy(engine, path):
    for root_path in ("", "/under/a/proxy"):
        response = get(app_of(engine), path, root_path)
        assert response.status_code == 200
        policy = dict(
            part.strip().partition(" ")[::2] for part in response.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert path in OPEN_PATHS
    assert engine.asked == 0


def test_the_page_refers_to_files_that_are_served_and_to_nothing_else():
    assets = files("jpaged.serving").joinpath("assets")
    page = assets.joinpath("index.html").read_text()
    found = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert {"/" + path for path in found if not path.startswith("data:")} <= set(PATHS)
    scripts = {path: assets.joinpath(path.rsplit("/", 1)[1]).read_text() for path in PATHS if path.endswith(".js")}
    for path, text in scripts.items():
        for imported in re.findall(r'from "\./([^"]+)"', text):
            assert f"/page/{imported}" in scripts, path
    for text in (page, *scripts.values(), assets.joinpath("page.css").read_text()):
        assert not re.search(
            r"https?://(?!www\.w3\.org)|@import|url\(|innerHTML|insertAdjacentHTML|document\.write", text
        )
    assert not re.search(r"<(script|style)>|\son\w+=|\sstyle=", page), "the policy forbids inline scripts and styles"


def test_the_page_reads_cells_as_the_engine_writes_them():
    script = files("jpaged.serving").joinpath("assets", "live.js").read_text()
    names, values = re.search(r"const \[([A-Z_, ]+)\] = \[([\d, ]+)\]", script).groups()
    for name, value in zip(names.split(", "), values.split(", "), strict=True):
        assert getattr(pool_view, name) == int(value)


def test_every_control_of_the_page_has_a_label():
    page = files("jpaged.serving").joinpath("assets", "index.html").read_text()
    controls = re.findall(r"<(?:input|textarea)[^>]*\bid=\"([^\"]+)\"", page)
    assert set(controls) == set(re.findall(r"<label for=\"([^\"]+)\"", page))


def test_the_live_view_needs_a_key(engine):
    assert get(app_of(engine), "/live").status_code == 401
    assert get(app_of(engine), "/live", authorization="Bearer wrong").status_code == 401
    assert engine.asked == 0


def test_an_event_has_figures_and_the_pool_and_no_request_id(engine):
    async def watch():
        watcher = Watcher(app_of(engine))
        start, event = await watcher.next(), await watcher.event()
        await watcher.leave()
        return start, event

    start, event = asyncio.run(watch())
    assert start["status"] == 200
    assert dict(start["headers"])[b"content-type"].startswith(b"text/event-stream")
    (replica,) = event["replicas"]
    assert set(event) == {"time_s", "replicas"}
    assert (replica["replica"], replica["running"], replica["waiting"]) == (0, STATS.num_running, STATS.num_waiting)
    assert replica["generated_tokens"] == STATS.generated_tokens
    pool = replica["pool"]
    assert base64.b64decode(pool["cells"]) == POOL.cells
    assert (pool["num_blocks"], pool["num_used"], pool["num_shared"], pool["num_cached"]) == (4, 2, 1, 1)
    expected = [{"number": 3, "blocks": 2, "shared": 1}, {"number": 4, "blocks": 1, "shared": 1}]
    assert pool["holders"] == expected


def others() -> set[asyncio.Task]:
    """What goes on beside the task that asks."""
    return asyncio.all_tasks() - {asyncio.current_task()}


def test_many_watchers_cost_the_engine_what_one_does_and_none_costs_nothing(engine):
    async def watch():
        app = app_of(engine, max_watchers=20)
        assert not others(), "nobody who could ask"
        assert engine.asked == 0
        watchers = [Watcher(app) for _ in range(20)]
        for watcher in watchers:
            await watcher.next()
        events = [[await watcher.event() for _ in range(5)] for watcher in watchers]
        assert [e["time_s"] for e in events[0]] == sorted({e["time_s"] for e in events[0]})
        assert engine.asked < 20 * 5
        for watcher in watchers:
            await watcher.leave()
        if left := others():
            _, going_on = await asyncio.wait(left, timeout=60)
            assert not going_on, "nobody who could ask"
        assert app.state.live._num_watchers == 0
        again = Watcher(app)
        assert (await again.next())["status"] == 200
        await again.event()
        await again.leave()

    asyncio.run(watch())


def test_one_watcher_too_many_is_told_to_come_again(engine):
    async def watch():
        app = app_of(engine, max_watchers=2)
        watchers = [Watcher(app) for _ in range(2)]
        for watcher in watchers:
            assert (await watcher.next())["status"] == 200
        refused = Watcher(app)
        start = await refused.next()
        assert start["status"] == 503
        assert b"retry-after" in dict(start["headers"])
        assert "max-watchers" in json.loads((await refused.next())["body"])["error"]["message"]
        await watchers.pop().leave()
        welcome = Watcher(app)
        assert (await welcome.next())["status"] == 200
        for watcher in (*watchers, welcome):
            await watcher.leave()

    asyncio.run(watch())


def test_streams_end_when_the_server_does(engine):
    async def watch():
        app = app_of(engine)
        watcher = Watcher(app)
        await watcher.next()
        await watcher.event()
        app.state.live.close()
        await asyncio.wait_for(watcher.task, 60)
        while not watcher.messages.empty():
            last = await watcher.next()
        assert last["more_body"] is False
        late = Watcher(app)
        assert (await late.next())["status"] == 503
        await asyncio.wait_for(late.task, 60)

    asyncio.run(watch())


def test_an_engine_that_fails_ends_the_stream_with_an_error(engine):
    async def watch():
        watcher = Watcher(app_of(engine))
        await watcher.next()
        engine.error = EngineDeadError("The engine failed: out of luck")
        for _ in range(100):
            event = await watcher.event()
            if "error" in event:
                break
        assert event["error"]["code"] == "engine_dead"
        assert "out of luck" in event["error"]["message"]
        await asyncio.wait_for(watcher.task, 60)
        assert (await watcher.next())["more_body"] is False

    asyncio.run(watch())
