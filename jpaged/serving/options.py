"""A server's options: how it answers (`AppOptions`), and where and how it listens (`ServerOptions`)."""

import signal
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jpaged.api.checks import check_integer
from jpaged.api.config import RestartOptions
from jpaged.api.errors import InvalidParameterError, shown
from jpaged.processes.traces import check_endpoint
from jpaged.serving.limits import ServerLimits
from jpaged.serving.listeners import Listeners
from jpaged.text.turns.formats import REASONING_FORMATS, TOOL_FORMATS

DEMO_MODEL_NAME = "jpaged-demo"

MAX_API_WORKERS = 64
"""API processes. One keeps up with thousands of tokens a second; more than cores only cost memory."""
LAST_WORDS_S = 2.0
"""After the time to drain, aborted requests get this long to send their answers."""
TOOL_PARSERS = tuple(form.name for form in TOOL_FORMATS)
REASONING_PARSERS = ("none", *(form.name for form in REASONING_FORMATS))
"""Names that the options of this name may have."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that begin the draining."""


def check_parsers(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Raises InvalidParameterError for a name that no format of calls or of reasoning has."""
    for name, value, known in (
        ("tool_parser", tool_parser, TOOL_PARSERS),
        ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
    ):
        if value is not None and value not in known:
            raise InvalidParameterError(f"{name} must be one of {', '.join(known)}, got {shown(value)}.")


def public_name(model: str | None) -> str:
    """What clients see of a model's name: its hub id, or the last part of a directory's path."""
    if model is None:
        return DEMO_MODEL_NAME
    path = Path(model).expanduser()
    return path.resolve().name if path.is_absolute() or path.is_dir() else model


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """How the application answers.

    Args:
        served_model_names: what clients may call the model; the first is what answers say.
        api_keys: of which a request must have one; with none, all are served.
        allowed_origins: web pages of these origins may ask, beside the server's own; "*": of any.
        allowed_hosts: names by which the server may be asked (the header Host); "*": by any. None means any too, but
            `serve` then takes only this machine's own names where there are no keys and it listens on a loopback
            address: a web page could otherwise ask by a name of its own that it made lead there (DNS rebinding).
        metrics_prefix: of the names in /metrics.
        chat_template: the text of a Jinja template instead of the model's own.
        trust_request_chat_template: take `chat_template` from requests. It runs in a sandbox, in a process of its own
            with bounds of time, memory and output.
        control_tokens_in_messages: take what messages spell like a control token (`<|end|>`) for one. By default only
            the chat template writes control tokens, so nobody can end a message and begin another role's.
        tool_parser: how the model writes calls: a name of `jpaged.text.turns.formats.TOOL_FORMATS`; None finds it from
            the chat template.
        reasoning_parser: how it writes reasoning: a name of REASONING_FORMATS there; "none" leaves it in the answer's
            text; None finds it from the chat template.
        log_requests: a line of JSON for each request that has ended (`processes/request_log.py`). log_prompts: with
            prompts and answers in it.
        otlp_traces_endpoint: URL of a collector that gets traces of requests (`processes/traces.py`).
        limits: of requests.

    Raises:
        InvalidParameterError: an empty name or key, a string where a list belongs, options that
            contradict, or an unknown parser.
        MissingPackageError: traces need OpenTelemetry.
    """

    served_model_names: Sequence[str] = (DEMO_MODEL_NAME,)
    api_keys: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    allowed_hosts: Sequence[str] | None = None
    metrics_prefix: str = "jpaged"
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    control_tokens_in_messages: bool = False
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    log_requests: bool = False
    log_prompts: bool = False
    otlp_traces_endpoint: str | None = None
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        for name in ("served_model_names", "api_keys", "allowed_origins", "allowed_hosts"):
            values = getattr(self, name) or ()
            if isinstance(values, str):  # a sequence too: of its letters
                raise InvalidParameterError(f"{name} must be a list of strings, got one string.")
            if not all(value.strip() for value in values):
                raise InvalidParameterError(f"{name} holds an empty string; leave it out or give a value.")
        if not self.served_model_names:
            raise InvalidParameterError("served_model_names is empty; give at least one name.")
        check_parsers(self.tool_parser, self.reasoning_parser)
        if self.chat_template is not None and not self.chat_template.strip():
            raise InvalidParameterError("chat_template is empty; leave it out or give a template.")
        if not self.metrics_prefix.isidentifier():
            raise InvalidParameterError(
                f"metrics_prefix must be letters, digits and underscores, got {self.metrics_prefix!r}."
            )
        if self.log_prompts and not self.log_requests:
            raise InvalidParameterError("log_prompts needs log_requests: prompts are part of the lines that it writes.")
        if self.otlp_traces_endpoint is not None:
            check_endpoint(self.otlp_traces_endpoint)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where and how to listen.

    Args:
        host, port: port 0 takes a free one. uds: a Unix socket instead. uds_mode: its permissions: who may write may
            connect.
        ssl_keyfile, ssl_certfile: PEM files, for HTTPS; both or none.
        root_path: under which a proxy shows the server.
        shutdown_timeout_s: for running requests to end after SIGTERM; then they are aborted.
        api_workers: processes that tokenize, detokenize and speak HTTP; one engine serves them all.
        restarts: when an engine process counts as hung, and how often it, or an API process, is started again.

    Raises:
        InvalidParameterError: a value out of range, or files that are not there.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    uds_mode: int = 0o600
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    root_path: str = ""
    shutdown_timeout_s: float = 30.0
    api_workers: int = 1
    restarts: RestartOptions = field(default_factory=RestartOptions)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidParameterError(f"port must be from 0 to 65535, got {self.port}.")
        if not 0 <= self.shutdown_timeout_s < float("inf"):
            raise InvalidParameterError(f"shutdown_timeout must be at least 0 s, got {self.shutdown_timeout_s}.")
        check_integer("api_workers", self.api_workers, 1, MAX_API_WORKERS)
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise InvalidParameterError("ssl_keyfile and ssl_certfile belong together; give both.")
        for name in ("ssl_keyfile", "ssl_certfile"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise InvalidParameterError(f"{name}={path} is no file.")
        if self.ssl_certfile is not None and self.ssl_keyfile is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
            except (OSError, ValueError) as error:
                raise InvalidParameterError(
                    f"ssl_certfile={self.ssl_certfile} and ssl_keyfile={self.ssl_keyfile} are not a PEM certificate and"
                    f" its key ({error})."
                ) from error
        if self.root_path and not self.root_path.startswith("/"):
            raise InvalidParameterError(f"root_path must begin with a slash, got {self.root_path!r}.")
        if not 0o600 <= self.uds_mode <= 0o777:
            raise InvalidParameterError(f"uds_mode must be from 600 to 777, octal, got {self.uds_mode:o}.")
        if self.uds == "":  # the kernel would take any name
            raise InvalidParameterError("uds is empty; give the path of a socket.")

    def listen(self) -> Listeners:
        """Binds the address. Raises OSError, which names it."""
        if self.uds is not None:
            return Listeners.on_path(self.uds, self.api_workers, self.uds_mode)
        return Listeners.on_port(self.host, self.port, self.api_workers)
