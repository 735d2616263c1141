"""The routes for operators: health, load, metrics and the live view."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged.api.errors import shown
from jpaged.api.version import __version__
from jpaged.processes.async_llm_engine import AsyncLLMEngine
from jpaged.serving.errors import ApiError
from jpaged.serving.http import guarded, json_response
from jpaged.serving.live import LiveView
from jpaged.serving.metrics import exposition
from jpaged.serving.openapi import openapi
from jpaged.serving.options import AppOptions
from jpaged.serving.streams import LiveStream


def operational_routes(engine: AsyncLLMEngine, options: AppOptions, live: LiveView) -> list[Route]:
    """Health, load, metrics, the live view, and the schemas of all routes."""
    server = _Handlers(engine, options, live)
    return [
        Route("/live", guarded(server.live), methods=["GET"]),
        Route("/health", guarded(server.health), methods=["GET"]),
        Route("/ping", guarded(server.health), methods=["GET", "POST"]),
        Route("/version", guarded(server.version), methods=["GET"]),
        Route("/load", guarded(server.load), methods=["GET"]),
        Route("/debug/requests", guarded(server.requests), methods=["GET"]),
        Route("/metrics", guarded(server.metrics), methods=["GET"]),
        Route("/reset_prefix_cache", guarded(server.reset_prefix_cache), methods=["POST"]),
        Route("/sleep", guarded(server.sleep), methods=["POST"]),
        Route("/wake_up", guarded(server.wake_up), methods=["POST"]),
        Route("/is_sleeping", guarded(server.is_sleeping), methods=["GET"]),
        Route("/openapi.json", guarded(server.openapi), methods=["GET"]),
    ]


class _Handlers:
    """The handlers of the routes."""

    def __init__(self, engine: AsyncLLMEngine, options: AppOptions, live: LiveView) -> None:
        self._engine = engine
        self._options = options
        self._live = live

    async def health(self, request: Request) -> Response:
        await self._engine.check_health()
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def load(self, request: Request) -> Response:
        return json_response({"server_load": self._engine.num_unfinished})

    async def requests(self, request: Request) -> Response:
        return json_response({"requests": await self._engine.get_requests()})

    async def metrics(self, request: Request) -> Response:
        stats = await self._engine.get_replica_metrics()
        options = self._options
        args, limits = self._engine.args, (await self._engine.ready()).limits
        cache_config = {
            "block_size": limits.block_size,
            "max_model_len": limits.max_model_len,
            "cache_dtype": args.kv_cache_dtype,
            "enable_prefix_caching": args.enable_prefix_caching,
            "gpu_memory_utilization": args.gpu_memory_utilization,
            "swap_space": args.swap_space,
        }
        model = options.served_model_names[0]
        text = exposition(self._engine.metrics, options.metrics_prefix, model, stats, cache_config)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def reset_prefix_cache(self, request: Request) -> Response:
        if not await self._engine.reset_prefix_cache():
            raise ApiError(409, "Requests are running; the prefix cache can be reset when there are none.", code="busy")
        return json_response({"reset": True})

    async def sleep(self, request: Request) -> Response:
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise ApiError(400, f"level must be 1 or 2, got {shown(level)}.", param="level")
        if not await self._engine.sleep(int(level)):
            raise ApiError(409, "Requests are running; the engine can sleep when there are none.", code="busy")
        return json_response({"asleep": int(level)})

    async def wake_up(self, request: Request) -> Response:
        if "tags" in request.query_params:
            raise ApiError(400, "tags is not supported: all memory is taken again at once. Leave it out.", param="tags")
        await self._engine.wake_up()
        return json_response({"asleep": 0})

    async def is_sleeping(self, request: Request) -> Response:
        stats = await self._engine.get_replica_metrics()
        return json_response({"is_sleeping": any(one.asleep for one in stats.values())})

    async def live(self, request: Request) -> Response:
        return LiveStream(self._live)

    async def openapi(self, request: Request) -> Response:
        return json_response(openapi())
