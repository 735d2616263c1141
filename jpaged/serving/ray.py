"""The server on Ray Serve: replicas over a cluster, each an engine with GPUs of its own. Needs `jpaged[ray]`.

    clients -- HTTP --> Serve's proxy --+--> Replica: the application of `jpaged serve` --> engine process on its GPUs
                                        +--> Replica ...

    from ray import serve
    from jpaged.serving.ray import application

    serve.run(application(model="Qwen/Qwen3-0.6B", num_replicas=4))

    $ serve run jpaged.serving.ray:build model=Qwen/Qwen3-0.6B num_replicas=4

Serve places, starts, watches and replaces replicas, and picks one for each request. What a replica answers, and how it
streams, is `jpaged.serving.app`'s.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import msgspec

from jpaged.api.config import EngineArgs
from jpaged.api.errors import EngineRestartingError, InvalidParameterError, MissingPackageError
from jpaged.processes.async_llm_engine import AsyncLLMEngine
from jpaged.serving.options import AppOptions, public_name

try:
    from ray import serve
    from starlette.types import ASGIApp

    from jpaged.serving.app import build_app
except ImportError as error:
    raise MissingPackageError(f"jpaged.serving.ray needs Ray Serve: pip install 'jpaged[ray]'. ({error})") from error

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """How Serve runs the replicas.

    Args:
        num_replicas: engines.
        gpus_per_replica: `tensor_parallel_size` by default; 0 where there are no GPUs.
        max_ongoing_requests: that a replica may hold; Serve's proxies keep the others back. To keep an engine busy it
            takes more than its slots (`max_num_seqs`).
        shutdown_timeout_s: for running requests to end when a replica is to go; then they are cut off.
        health_check_period_s: how often a replica is asked whether its engine is alive. One that is not is replaced.

    Raises:
        InvalidParameterError: a value out of range.
    """

    num_replicas: int = 1
    gpus_per_replica: int | None = None
    max_ongoing_requests: int = 1024
    shutdown_timeout_s: float = 30.0
    health_check_period_s: float = 5.0

    def __post_init__(self) -> None:
        for name, least in (("num_replicas", 1), ("gpus_per_replica", 0), ("max_ongoing_requests", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidParameterError(f"{name} must be at least {least}, got {value}.")
        if not 0 <= self.shutdown_timeout_s < float("inf"):
            raise InvalidParameterError(f"shutdown_timeout_s must be at least 0, got {self.shutdown_timeout_s}.")
        if not 0 < self.health_check_period_s < float("inf"):
            raise InvalidParameterError(f"health_check_period_s must be above 0, got {self.health_check_period_s}.")


class Replica:
    """An engine, in a process of its own, and the application that serves it. Lives in a replica of Serve's."""

    def __init__(self, args: EngineArgs, options: AppOptions) -> None:
        self._engine = AsyncLLMEngine(args)  # its process inherits the GPUs that Ray gave to this one
        self._options = options

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Serve, which sends requests when it has returned."""
        await self._engine.ready()
        return build_app(self._engine, self._options)

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine has ended for good."""
        with contextlib.suppress(EngineRestartingError):
            await self._engine.check_health()

    async def __del__(self) -> None:
        """Called by Serve when running requests have ended, or their time is up. It gives no sign before that, by which
        the streams of pages that watch (`/live`) could be ended earlier.
        """
        if hasattr(self, "_engine"):
            await self._engine.shutdown()


def application(**options: Any) -> serve.Application:
    """The server as a Ray Serve application, for `serve.run`.

    Args:
        options: by name, fields of `EngineArgs` (model, tensor_parallel_size and so on), of `AppOptions`
            (served_model_names, api_keys, limits and so on) and of `ReplicaOptions`.
    Raises:
        InvalidParameterError: an option that does not exist, or with a value of a wrong type or out of range. What is
            wrong with a model comes when a replica starts.
    """
    return build(options)


def build(options: Mapping[str, Any]) -> serve.Application:
    """`application` for Ray Serve's command line and configuration files: `jpaged.serving.ray:build` is the import
    path, and the options its arguments; their values may be text.
    """
    kinds = (EngineArgs, AppOptions, ReplicaOptions)
    unknown = sorted(set(options) - {field.name for kind in kinds for field in fields(kind)})
    if unknown:
        raise InvalidParameterError(
            f"There is no option {unknown[0]!r}; it may be any field of EngineArgs, AppOptions and ReplicaOptions."
        )
    engine = _options(EngineArgs, options)
    if engine.data_parallel_size != 1:
        raise InvalidParameterError(
            f"data_parallel_size={engine.data_parallel_size}: a replica of Serve's is one engine; use num_replicas."
        )
    names = {"served_model_names": [public_name(engine.model)]}
    app, replicas = _options(AppOptions, names | dict(options)), _options(ReplicaOptions, options)
    gpus = engine.tensor_parallel_size if replicas.gpus_per_replica is None else replicas.gpus_per_replica
    deployment = serve.deployment(
        name="jpaged",
        num_replicas=replicas.num_replicas,
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
        max_ongoing_requests=replicas.max_ongoing_requests,
        graceful_shutdown_timeout_s=replicas.shutdown_timeout_s,
        health_check_period_s=replicas.health_check_period_s,
    )
    return deployment(serve.ingress()(Replica)).bind(engine, app)


def _options(kind: type[_T], options: Mapping[str, Any]) -> _T:
    """The options of one kind; text becomes what the field is."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    try:
        return msgspec.convert({name: options[name] for name in options if name in names}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidParameterError(f"{error}") from error
