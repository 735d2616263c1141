"""The live view of the engine: snapshots, shared by all watchers, as server-sent events.

    watcher 1 --.                        .-- every INTERVAL_S, while there is a watcher
    watcher 2 --+-- the newest event <---+-- AsyncLLMEngine.get_pool_views --> engine process
    watcher 3 --'

While nobody watches nothing is asked of the engine. A watcher that is slower than the snapshots misses some.
"""

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from jpaged.engine.stats import EngineStats
from jpaged.processes.async_llm_engine import AsyncLLMEngine
from jpaged.processes.pool_view import PoolView
from jpaged.serving.answers import event
from jpaged.serving.errors import OverloadedError
from jpaged.serving.http import reported

INTERVAL_S = 0.5
_RETRY_AFTER_S = 5


class LiveView:
    """Snapshots of an engine for any number of watchers up to a limit.

    max_watchers: at once.
    """

    def __init__(self, engine: AsyncLLMEngine, max_watchers: int) -> None:
        self._engine = engine
        self._max_watchers = max_watchers
        self._num_watchers = 0
        self._closed = False
        self._poller: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes | None] | None = None

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Events, until the caller stops, the engine fails (the last event is then an error) or `close`.

        Raises:
            OverloadedError: too many watch already.
        """
        if self._num_watchers >= self._max_watchers:
            message = f"{self._num_watchers} watch already, the most this server takes (--max-watchers)."
            raise OverloadedError(message, _RETRY_AFTER_S)
        self._num_watchers += 1
        try:
            while not self._closed:
                if self._poller is None or self._poller.done():  # nobody watched, or the engine had failed
                    self._next = asyncio.get_running_loop().create_future()
                    self._poller = asyncio.ensure_future(self._poll())
                assert self._next is not None
                body = await asyncio.shield(self._next)
                if body is None:
                    return
                yield event(body)
        finally:
            self._num_watchers -= 1
            if not self._num_watchers and self._poller is not None:
                self._poller.cancel()
                self._poller = None

    def close(self) -> None:
        """Ends all streams. Streams that begin later end at once."""
        self._closed = True
        if self._poller is not None:
            self._poller.cancel()
        if self._next is not None and not self._next.done():
            self._next.set_result(None)

    async def _poll(self) -> None:
        failed = False
        while not failed:
            try:
                body = msgspec.json.encode(snapshot(await self._engine.get_pool_views(), time.monotonic()))
            except Exception as error:  # whatever it is, watchers are told: they would wait for ever
                body, failed = reported(error).body(), True
            self._publish(body)
            await asyncio.sleep(INTERVAL_S)
        self._publish(None)

    def _publish(self, body: bytes | None) -> None:
        assert self._next is not None
        if not self._next.done():
            self._next.set_result(body)
        self._next = asyncio.get_running_loop().create_future()


def snapshot(views: Mapping[int, tuple[EngineStats, PoolView]], now_s: float) -> dict[str, Any]:
    """The content of an event. It names requests by number, and has no id, text or token of theirs.

    views: by replica. now_s: on any clock that only goes forward, so that readers can make rates of the totals.
    """
    return {"time_s": now_s, "replicas": [_replica(number, *view) for number, view in sorted(views.items())]}


def _replica(number: int, stats: EngineStats, pool: PoolView) -> dict[str, Any]:
    picture = asdict(pool)
    for name in ("cells", "levels"):
        picture[name] = base64.b64encode(picture[name]).decode()
    return {
        "replica": number,
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "prefix_queries": stats.prefix_cache_queries,
        "prefix_hits": stats.prefix_cache_hits,
        "preemptions": stats.num_preemptions,
        "pool": picture,
    }
