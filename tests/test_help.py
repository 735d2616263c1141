"""What `--help` says of each option, of every command and benchmark."""

import argparse
from dataclasses import fields
from importlib import import_module

import pytest

from jpaged.api.config import EngineArgs
from jpaged.cli import BENCHMARKS, _parser
from jpaged.executor.start.startup import with_known_backend
from jpaged.scoring import files
from jpaged.serving import batch
from jpaged.serving.limits import ServerLimits
from jpaged.serving.options import AppOptions, ServerOptions

COMMANDS = ("generate", "chat", "score", "run-batch", "serve", "worker", "convert", "quantize", "models")
DEFAULTS = {
    field.name.removesuffix("_s"): field.default
    for kind in (AppOptions, ServerOptions, ServerLimits, EngineArgs)
    for field in fields(kind)
    if isinstance(field.default, int | float | str)
}
"""Of options that leave theirs to whoever takes them."""


def _command_parser(name):
    (commands,) = [a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)]
    assert set(commands.choices) == {*COMMANDS, "bench"}
    return commands.choices[name]


def _benchmark_parser(name, monkeypatch):
    """The parser that a benchmark makes and asks."""

    def parse_args(self, args=None, namespace=None):
        raise _Asked(self)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    with pytest.raises(_Asked) as asked:
        import_module(f"jpaged.bench.{name}").main([])
    return asked.value.args[0]


class _Asked(Exception):
    pass


def _check(parser, defaults):
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help is argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        name = "/".join(action.option_strings) or action.dest
        assert action.help, f"{parser.prog} says nothing of {name}"
        shown = formatter._expand_help(action)
        assert shown.count("default: ") <= 1, (name, shown)
        default = action.default if action.default is not None or action.nargs == 0 else defaults.get(action.dest)
        if default in (None, [], "", argparse.SUPPRESS) or isinstance(default, bool):
            continue
        texts = {" ".join(map(str, default)) if isinstance(default, list) else str(default)}
        if isinstance(default, float):
            texts.add(f"{default:g}")
        assert any(f"(default: {text})" in shown for text in texts), (name, default, shown)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_says_what_it_means_and_its_default(command):
    own = {
        "generate": {"seed": None},
        "chat": {"seed": None},
        "score": {"shard_size": files.SHARD_SIZE},
        "run-batch": {"shard_size": batch.SHARD_SIZE},
        "serve": {"api_workers": "one for every four cores, at most 4; with several replicas 1"},
    }
    _check(_command_parser(command), DEFAULTS | own.get(command, {}))


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_every_option_of_a_benchmark_says_what_it_means_and_its_default(benchmark, monkeypatch):
    _check(_benchmark_parser(benchmark, monkeypatch), {})


def test_a_kernel_backend_may_be_given_by_its_alias():
    arguments = _parser().parse_args(["serve", "--kernel-backend", "mosaic"])
    known = with_known_backend(EngineArgs(kernel_backend=arguments.kernel_backend))
    assert known == EngineArgs(kernel_backend="hopper")
