"""`jpaged serve`: an OpenAI-compatible server."""

import argparse
import gc
import logging
import os
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import get_args

from jpaged.api.config import EngineArgs, Policy, RestartOptions
from jpaged.api.errors import InvalidParameterError
from jpaged.cli.options import add_model_options, add_parser_options, engine_options
from jpaged.cli.terminal import Screen
from jpaged.serving.limits import ServerLimits

API_KEYS_VARIABLE = "JPAGED_API_KEY"

_LIMITS = (
    ("--max-body-bytes", int, "N", "bytes of a request's body"),
    ("--max-header-bytes", int, "N", "bytes of a request's line and headers"),
    ("--max-prompts", int, "N", "prompts in a request, or texts to embed, score or rank"),
    ("--max-prompt-tokens", int, "N", "tokens of a prompt (default: what the model takes)"),
    ("--max-n", int, "N", "choices for a prompt"),
    ("--max-stop-strings", int, "N", "stop strings of a request"),
    ("--max-stop-characters", int, "N", "characters of those together"),
    ("--max-logprobs", int, "N", "alternatives to each token that log-probabilities are asked of"),
    ("--max-logprob-values", int, "N", "log-probabilities in one answer: tokens times alternatives and one"),
    ("--max-logit-bias", int, "N", "entries of logit_bias"),
    ("--max-stop-token-ids", int, "N", "entries of stop_token_ids"),
    ("--max-allowed-token-ids", int, "N", "entries of allowed_token_ids"),
    ("--max-detokenize-tokens", int, "N", "tokens of one /detokenize, unless the model takes longer sequences"),
    ("--max-bad-words", int, "N", "entries of bad_words"),
    ("--max-tools", int, "N", "entries of tools"),
    ("--max-queued-requests", int, "N", "prompts that wait to run; above it clients get a 503"),
    ("--max-queued-tokens", int, "N", "tokens of those prompts"),
    ("--max-requests-per-client", int, "N", "prompts of one key or address that wait or run (default: no limit)"),
    ("--max-watchers", int, "N", "pages that show the live view, for each API process"),
    ("--max-unsent-bytes", int, "N", "bytes of a stream that wait for its client; above it the stream ends"),
    ("--max-response-bytes", int, "N", "bytes of /v1/responses that are kept or run in the background, all together"),
    ("--header-timeout", float, "S", "seconds for a request's headers to come, and for a TLS handshake"),
    ("--body-timeout", float, "S", "seconds for a request's body to come"),
    ("--send-timeout", float, "S", "seconds after which a client that takes nothing of its answer is cut off"),
    ("--keep-alive-timeout", float, "S", "seconds that a connection may wait for its next request"),
    ("--template-timeout", float, "S", "seconds for a chat template to render"),
)


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "serve",
        help="serve OpenAI clients over HTTP",
        description="Serve a model to OpenAI clients over HTTP. Only this machine reaches it, unless --host says more.",
        epilog=dedent("""\
            examples:
              jpaged serve
              jpaged serve Qwen/Qwen3-0.6B --port 8001 --served-model-name qwen
              JPAGED_API_KEY=... jpaged serve path/to/model --host 0.0.0.0
              curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
                -d '{"messages": [{"role": "user", "content": "A story about a snail"}]}'"""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="as --model")
    group = parser.add_argument_group("server options")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    group.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port to listen on; 0 takes a free one (default: 8000)"
    )
    group.add_argument("--uds", metavar="PATH", help="a Unix socket to listen on instead")
    group.add_argument(
        "--uds-mode",
        type=_octal,
        default="600",
        metavar="MODE",
        help="permissions of that socket, octal: 660 lets the group connect, 666 everybody (default: 600)",
    )
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"a key that requests must have; may be repeated; other users of this machine see it in the list of"
        f" processes, not so {API_KEYS_VARIABLE}, which may hold several separated by commas",
    )
    group.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="what clients call the model; may be repeated (default: its hub id or its directory's name)",
    )
    group.add_argument("--ssl-keyfile", metavar="FILE", help="private key, for HTTPS")
    group.add_argument("--ssl-certfile", metavar="FILE", help="certificate, for HTTPS")
    group.add_argument("--root-path", default="", metavar="PATH", help="path under which a proxy shows the server")
    group.add_argument(
        "--allowed-origins",
        action="append",
        default=[],
        metavar="ORIGIN",
        help='web pages of this origin may ask; may be repeated; "*": of any',
    )
    group.add_argument(
        "--allowed-hosts",
        action="append",
        metavar="NAME",
        help='a name by which the server may be asked; may be repeated; "*": by any (default: any; without keys on a'
        " loopback address: localhost, 127.0.0.1, ::1)",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds for requests to end after SIGTERM (default: 30)",
    )
    group.add_argument(
        "--api-workers",
        type=int,
        metavar="N",
        help="processes that speak HTTP (default: one for every four cores, at most 4; with several replicas 1)",
    )
    group.add_argument(
        "--step-timeout",
        type=float,
        default=RestartOptions.step_timeout_s,
        metavar="S",
        help="seconds without a step after which an engine process counts as hung and is killed, and so is one of "
        "several API processes whose event loop stands still; at least 3 (default: 300)",
    )
    group.add_argument(
        "--start-timeout",
        type=float,
        default=RestartOptions.start_timeout_s,
        metavar="S",
        help="seconds after which an engine process that does not serve yet counts as hung and is killed (default: "
        "3600)",
    )
    group.add_argument(
        "--max-restarts",
        type=int,
        default=RestartOptions.max_restarts,
        metavar="N",
        help="how often within ten minutes an engine or API process that ended is started again (default: 10)",
    )
    group.add_argument(
        "--spare-processes",
        action=argparse.BooleanOptionalAction,
        help="keep a process of each replica ready to take the place of one that ends (default: on GPUs)",
    )
    group.add_argument(
        "--metrics-prefix", default="jpaged", metavar="NAME", help="what names of metrics begin with (default: jpaged)"
    )
    group.add_argument("--no-access-log", action="store_true", help="write no line for each request")
    group.add_argument(
        "--log-requests", action="store_true", help="write a line of JSON for each request that has ended; no prompts"
    )
    group.add_argument("--log-prompts", action="store_true", help="write prompts and answers, too, with --log-requests")
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send traces of requests to this OpenTelemetry collector (OTLP over HTTP: http://HOST:4318/v1/traces)",
    )
    group.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja template instead of the model's own, for conversations"
    )
    group.add_argument(
        "--trust-request-chat-template", action="store_true", help="take chat templates from requests; see the docs"
    )
    group.add_argument(
        "--control-tokens-in-messages",
        action="store_true",
        help="take what messages spell like a control token for one; see the docs",
    )
    add_parser_options(group)
    group.add_argument("--scheduling-policy", choices=get_args(Policy), help="which requests run first (default: fcfs)")
    limits = parser.add_argument_group("limits", "What clients may ask for.")
    defaults = {f"--{field.name.removesuffix('_s').replace('_', '-')}": field.default for field in fields(ServerLimits)}
    for flag, kind, metavar, what in _LIMITS:
        shown = what if defaults[flag] is None else f"{what} (default: {defaults[flag]})"
        limits.add_argument(flag, type=kind, metavar=metavar, help=shown)
    add_model_options(parser, compares=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns when the server has drained."""
    if args.model_argument is not None:
        if args.model is not None:
            raise InvalidParameterError("MODEL and --model both name a model; give one of them.")
        args.model = args.model_argument
    screen = Screen(args.quiet)
    engine_args = EngineArgs(**engine_options(args, verbose=screen.shows_progress))
    missing = [name for name in ("starlette", "uvicorn", "uvloop", "httptools") if find_spec(name) is None]
    if missing:
        raise InvalidParameterError(f"serve needs {', '.join(missing)}; install them: pip install 'jpaged[serve]'.")

    gc.disable()  # a Ctrl-C that meets a collection would be lost in JAX's callback; and imports make no garbage
    try:
        from jpaged.serving.options import AppOptions, ServerOptions, public_name
        from jpaged.serving.server import LOG_FORMAT, default_api_workers, serve
    finally:
        gc.enable()

    given = {}
    for field in fields(ServerLimits):
        value = getattr(args, field.name.removesuffix("_s"))
        if value is not None:
            given[field.name] = value
    app_options = AppOptions(
        served_model_names=args.served_model_name or [public_name(args.model)],
        api_keys=[*args.api_key, *_keys_of_environment()],
        allowed_origins=args.allowed_origins,
        allowed_hosts=args.allowed_hosts,
        metrics_prefix=args.metrics_prefix,
        chat_template=None if args.chat_template is None else _text_of(args.chat_template),
        trust_request_chat_template=args.trust_request_chat_template,
        control_tokens_in_messages=args.control_tokens_in_messages,
        tool_parser=args.tool_parser,
        reasoning_parser=args.reasoning_parser,
        log_requests=args.log_requests,
        log_prompts=args.log_prompts,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        limits=ServerLimits(**given),
    )
    api_workers = args.api_workers
    if api_workers is None:
        api_workers = default_api_workers(engine_args.data_parallel_size)
    options = ServerOptions(
        host=args.host,
        port=args.port,
        uds=args.uds,
        uds_mode=args.uds_mode,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        root_path=args.root_path,
        shutdown_timeout_s=args.shutdown_timeout,
        api_workers=api_workers,
        restarts=RestartOptions(
            step_timeout_s=args.step_timeout,
            start_timeout_s=args.start_timeout,
            max_restarts=args.max_restarts,
            spare_processes=args.spare_processes,
        ),
    )
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    if not args.quiet:
        logging.getLogger("jpaged.server").setLevel(logging.INFO)
        if not args.no_access_log:
            logging.getLogger("jpaged.access").setLevel(logging.INFO)
    serve(engine_args, app_options, options)
    return 0


def _text_of(path: str) -> str:
    """The text of a chat template's file. Raises InvalidParameterError: it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError(f"--chat-template {path} cannot be read: {error}.") from error


def _octal(text: str) -> int:
    try:
        return int(text, 8)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no octal number, such as 660") from None


def _keys_of_environment() -> list[str]:
    """The keys of `JPAGED_API_KEY`; none if it is not set.

    Raises:
        InvalidParameterError: it is set and holds none: who sets it wants a server that asks for keys.
    """
    value = os.environ.get(API_KEYS_VARIABLE)
    if value is None:
        return []
    keys = [key.strip() for key in value.split(",") if key.strip()]
    if not keys:
        raise InvalidParameterError(f"{API_KEYS_VARIABLE} is set but holds no key; give it one, or unset it.")
    return keys
