"""The shell scripts of `benchmarks/`: every command of the scripts with DRY_RUN is one that its program takes, and the
list of steps, the budget and a failing step do what `benchmarks/card.sh` says.

`against.sh` and `serving.sh` have no DRY_RUN, so what they run is not compared with what programs take.
"""

import argparse
import fnmatch
import os
import re
import runpy
import shlex
import subprocess
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from jpaged import EngineArgs
from jpaged.bench.engine_options import engine_options
from jpaged.bench.kernels import _is_asked_for, cases
from jpaged.bench.models import CONFIGS
from jpaged.cli import main as jpaged_main
from jpaged.executor.start.shapes import executor_config
from jpaged.models import ModelConfig

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "card.sh": ["all"],
    "single.sh": None,
    "virtual.sh": None,
    "parallel.sh": None,
}
"""By name: the steps that stand for all; None: those that its first lines list."""
H200_BYTES = 130 * 2**30
VARIABLES = {
    "BUDGET_S",
    "DRY_RUN",
    "LEAST_S",
    "LOGS",
    "MODELS",
    "OPTIONS",
    "OTHER",
    "RUNS",
    "SMALL",
    "TAG",
    "TOKENIZER",
    "TOKENIZER_8B",
    "TURNS",
}
"""What scripts read of their caller's environment; tests set what they need themselves."""


def script(name: str, *steps: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    return subprocess.run(
        ["bash", str(ROOT / "benchmarks" / name), *steps],
        env=environment | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def steps_of(name: str) -> list[str]:
    """Those that the table at the top of a script lists."""
    table = (ROOT / "benchmarks" / name).read_text().split("\nset ")[0]
    found = re.findall(r"^#     ([a-z0-9.-]+)  +\S.*\d", table, re.MULTILINE)
    return [step for step in found if step not in ("step", "OUT")]


@cache
def commands() -> list[tuple[str, ...]]:
    """What the steps of all scripts would run, each once."""
    found: dict[tuple[str, ...], None] = {}
    for name, steps in SCRIPTS.items():
        done = script(name, *(steps or steps_of(name)), DRY_RUN="1", PYTHON="python", WORK="/work-of-steps", OUT="/out")
        assert done.returncode == 0, done.stderr
        found |= dict.fromkeys(tuple(shlex.split(line)) for line in done.stdout.splitlines())
    return list(found)


def by_python() -> list[tuple[str, ...]]:
    """The arguments of Python, of the commands that it runs; variables before it left out."""
    return [command[command.index("python") + 1 :] for command in commands() if "python" in command]


class Parsed(BaseException):
    """Instead of what a program would do with its arguments."""


def parsed(arguments: tuple[str, ...], patch: pytest.MonkeyPatch) -> argparse.Namespace:
    """What a program's own parser makes of its arguments. Ends the test if it refuses them."""
    parse = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, *args: Any, **options: Any) -> None:
        raise Parsed(parse(self, *args, **options))

    patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a drill sets it; so it is put back
    try:
        match arguments:
            case ("-m", "jpaged", "bench", name, *rest):
                import_module(f"jpaged.bench.{name}").main(rest)
            case ("-m", "jpaged", *rest):
                jpaged_main(rest)
            case ("-m", module, *rest):
                patch.setattr(sys, "argv", [module, *rest])
                runpy.run_module(module, run_name="__main__")
            case (file, *rest):
                patch.setattr(sys, "argv", [file, *rest])
                patch.syspath_prepend(str((ROOT / file).parent))
                runpy.run_path(str(ROOT / file), run_name="__main__")
    except Parsed as found:
        return found.args[0]
    except SystemExit as end:
        pytest.fail(f"{shlex.join(arguments)}: ends with {end.code}")
    pytest.fail(f"{shlex.join(arguments)}: parses nothing")


def test_the_table_of_card_sh_has_every_step_that_it_can_run():
    text = (ROOT / "benchmarks" / "card.sh").read_text()
    lines = re.findall(r"^        ([a-z0-9*.-]+(?: \| [a-z0-9*.-]+)*)\)$", text, re.MULTILINE)
    labels = [label for line in lines for label in line.split(" | ") if label != "*"]
    steps = [step for step in steps_of("card.sh") if not step.startswith("plan-")]
    assert len(labels) > 30
    assert not [label for label in labels if not fnmatch.filter(steps, label)]
    assert not [step for step in steps if not any(fnmatch.fnmatch(step, label) for label in labels)]


def test_programs_take_the_arguments_that_scripts_give_them(monkeypatch):
    seen, own = set[str](), set(sys.modules)
    for arguments in by_python():
        if arguments[:2] == ("-m", "pytest"):
            continue
        if arguments[0].startswith("examples/") and find_spec("optax") is None:
            continue
        if arguments[0] == "benchmarks/triton_calls.py" and find_spec("triton") is None:
            continue
        with monkeypatch.context() as patch:
            parsed(arguments, patch)
        if "--" in arguments:  # a drill's server
            with monkeypatch.context() as patch:
                parsed(("-m", "jpaged", "serve", *arguments[arguments.index("--") + 1 :]), patch)
        seen.add(" ".join(arguments[: 4 if "bench" in arguments else 3]))
    assert {"-m jpaged bench throughput", "-m jpaged quantize", "-m tests.drills.survival kill"} <= seen
    for name in set(sys.modules) - own:
        if "/examples/" in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def test_engines_can_have_the_sizes_that_scripts_give_them(monkeypatch):
    checked = 0
    for arguments in by_python():
        if arguments[:3] != ("-m", "jpaged", "bench") or "--model" not in arguments or arguments[3] == "memory":
            continue
        with monkeypatch.context() as patch:
            args = parsed(arguments, patch)
        args.model = next(name for name in CONFIGS if name in args.model)  # of a directory that a step would write
        if arguments[3] == "vattention":  # which measures both layouts
            args.kv_cache_layout = "virtual"
        config = ModelConfig.from_dict(CONFIGS[args.model])
        executor_config(EngineArgs(**engine_options(args)), config, H200_BYTES)
        checked += 1
    assert checked > 20


def test_kernel_cases_that_scripts_ask_for_are_there(monkeypatch):
    known, checked = list(cases(None)), 0
    for arguments in by_python():
        if arguments[:4] != ("-m", "jpaged", "bench", "kernels"):
            continue
        with monkeypatch.context() as patch:
            args = parsed(arguments, patch)
        for text in args.only or ():
            assert any(_is_asked_for(case, [text]) for case in known), text
            checked += 1
    assert checked > 10


def test_files_and_scripts_that_steps_name_are_there():
    for arguments in by_python():
        if arguments[:2] == ("-m", "pytest"):
            paths = [one for one in arguments if one.startswith("tests/")]
            assert paths
            for path in paths:
                assert (ROOT / path).exists(), path
    for command in commands():
        if "bash" in command:
            file, *rest = command[command.index("bash") + 1 :]
            text = (ROOT / file).read_text()
            for step in rest:
                assert step in ("/out", ".") or f"{step})" in text, command


def test_the_list_of_steps_adds_up_to_what_a_plan_takes():
    for plan in ("plan-1", "plan-2", "plan-3"):
        listed = [line.split() for line in script("card.sh", "--list", plan).stdout.splitlines()]
        table = {line.split()[0]: line.split()[1] for line in script("card.sh", "--list").stdout.splitlines()[1:]}
        assert listed
        assert sum(int(words[1]) for words in listed) == int(table[plan]) <= 560


@pytest.fixture
def fake(tmp_path) -> dict[str, str]:
    """Variables of a script whose PYTHON only says what it was asked to run. It fails where that is a drill or of the
    virtual layout, and where it is to train a tokenizer, of which it leaves the directory. It makes directories for
    configurations.
    """
    python = tmp_path / "python"
    python.write_text(
        """#!/bin/sh
        echo "ran $*"
        case "$*" in
            *tests.drills* | *vattention*mapping*) exit 3 ;;
            *--train-tokenizer*) mkdir -p "$3"; exit 4 ;;
            *dummy_model.py*) mkdir -p "$3" ;;
        esac
        """
    )
    python.chmod(0o755)
    return {"PYTHON": str(python), "OUT": str(tmp_path / "out"), "WORK": str(tmp_path / "work")}


def test_a_step_that_fails_keeps_its_log_and_does_not_stop_the_next(fake):
    done = script("card.sh", "hybrid-prefixes", "invariant-bits", "rollouts", **fake)
    out = Path(fake["OUT"])
    lines = [line.split()[:2] for line in done.stdout.splitlines()[-3:]]
    assert lines == [["hybrid-prefixes", "0"], ["invariant-bits", "3"], ["rollouts", "0"]]
    assert (out / "summary.txt").read_text().splitlines() == done.stdout.splitlines()[-3:]
    assert "tests.drills.batch_invariance" in (out / "invariant-bits.log").read_text()
    assert "bench rollouts" in (out / "rollouts.log").read_text()
    assert done.returncode == 1
    assert script("card.sh", "rollouts", **fake).returncode == 0


def test_steps_for_which_no_time_is_left_are_not_run(fake):
    done = script("card.sh", "virtual-long", "virtual-attention", BUDGET_S="200", **fake)
    lines = [line.split()[:2] for line in done.stdout.splitlines()[-2:]]
    assert lines == [["virtual-long", "-"], ["virtual-attention", "0"]]
    assert "virtual-long: not run: it takes 240 s" in done.stdout
    assert "vattention --json" in Path(fake["OUT"], "virtual-attention.log").read_text()
    assert done.returncode == 0
    of_all_scripts = script("single.sh", "decode", BUDGET_S="10", **fake)
    assert "decode: not run" in of_all_scripts.stdout
    assert "ran" not in of_all_scripts.stdout


def test_an_unknown_step_is_refused_before_any_runs(fake):
    done = script("card.sh", "rollouts", "rolouts", **fake)
    assert done.returncode == 2
    assert "unknown step rolouts" in done.stderr
    assert not done.stdout


def test_what_a_step_needs_is_made_once(fake):
    done = script("card.sh", "int4-8b", **fake)
    names = [
        line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("== ") and "exit code" not in line
    ]
    assert names == ["== int4-8b-before", "== int4-8b"]
    assert os.listdir(fake["WORK"]) == ["llama-3.1-8b-int4"]
    assert "before" not in script("card.sh", "int4-8b", **fake).stdout


def test_what_was_made_in_part_is_not_kept(fake):
    done = script("card.sh", "structured-256", **fake)
    assert "== structured-256-before: exit code 4" in done.stdout
    assert not os.listdir(fake["WORK"])


def test_what_an_interrupted_run_made_in_part_is_made_again(fake):
    part = Path(fake["WORK"], "llama-3.1-8b-int4.part")
    part.mkdir(parents=True)
    Path(part, "old").touch()
    done = script("card.sh", "int4-8b", **fake)
    assert f"dummy_model.py llama-3.1-8b {part}" in done.stdout
    assert os.listdir(fake["WORK"]) == ["llama-3.1-8b-int4"]
    assert not os.listdir(part.with_suffix(""))


def test_a_tokenizer_that_is_not_there_is_refused_and_not_made(fake, tmp_path):
    missing = tmp_path / "mistyped"
    done = script("card.sh", "structured-256", TOKENIZER=str(missing), **fake)
    assert done.returncode == 2
    assert f"TOKENIZER={missing} is no directory" in done.stderr
    assert not done.stdout
    assert not missing.exists()


def test_a_tokenizer_that_is_given_is_taken_as_it_is(fake, tmp_path):
    given = tmp_path / "given"
    given.mkdir()
    done = script("card.sh", "structured-256", TOKENIZER=str(given), **fake)
    assert "before" not in done.stdout
    assert f"--tokenizer {given}" in done.stdout


def test_a_step_of_another_script_that_fails_has_failed(fake):
    done = script("card.sh", "virtual-mapping", **fake)
    assert done.stdout.splitlines()[-1].split()[:2] == ["virtual-mapping", "1"]
    assert "mapping: exit code 3" in Path(fake["OUT"], "virtual-mapping.log").read_text()
    assert done.returncode == 1


@pytest.mark.parametrize(("name", "step"), [("parallel.sh", "one-shot-2"), ("virtual.sh", "mapping")])
def test_other_scripts_end_with_whether_all_went_well(fake, name, step):
    assert script(name, step, **fake).returncode == 1
    assert script("single.sh", "decode", **fake).returncode == 0


def test_against_counts_the_runs_that_fail_and_those_for_which_no_time_is_left(fake):
    python = Path(fake["PYTHON"])
    run = {"TURNS": "other this", **fake}
    assert script("against.sh", str(ROOT), "throughput-0.6b", **run).returncode == 0
    late = script("against.sh", str(ROOT), "throughput-0.6b", BUDGET_S="0", **run)
    assert late.returncode == 1
    assert late.stdout.count("seconds are over") == 2
    assert "ran" not in late.stdout
    python.write_text("#!/bin/sh\nexit 3\n")
    done = script("against.sh", str(ROOT), "throughput-0.6b", **run)
    assert done.returncode == 1
    assert done.stdout.count("exit code 3") == 2


def test_against_ends_its_runs_within_the_budget_of_its_step(fake, tmp_path):
    """Its `timeout` is played; it says the limit that it gets."""
    played = tmp_path / "bin" / "timeout"
    played.parent.mkdir()
    played.write_text('#!/bin/sh\necho "limit $2"\n')
    played.chmod(0o755)
    done = script(
        "against.sh",
        str(ROOT),
        "throughput-0.6b",
        BUDGET_S="100",
        TURNS="this",
        PATH=f"{played.parent}{os.pathsep}{os.environ['PATH']}",
        **fake,
    )
    (limit,) = re.findall(r"^limit (\d+)$", done.stdout, re.MULTILINE)
    assert 0 < int(limit) <= 100


def test_what_has_no_small_form_is_left_out_of_a_small_run(fake):
    steps = ["load", "hybrid-prefixes", "serving-8b", "against-0.6b", "gemma-steps", "tests-rest"]
    done = script("card.sh", *steps, SMALL="1", OTHER=str(ROOT), **fake)
    for step in steps:
        assert f"== {step}: not run: it has no small form" in done.stdout
    assert "ran" not in done.stdout
    small = script("card.sh", "load", "rollouts", SMALL="1", DRY_RUN="1", **fake)
    assert len(small.stdout.splitlines()) == 1  # a command, and nothing else


def test_each_command_has_a_log_of_its_own(fake):
    script("card.sh", "quality", TAG="later", **fake)
    logs = sorted(path.name for path in Path(fake["OUT"]).glob("*.log"))
    before = ["quality-before-later.log", *(f"quality-before.{i}-later.log" for i in (2, 3, 4))]
    assert logs == sorted([*before, "quality-later.log"])
