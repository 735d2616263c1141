"""The drill of all families (`tests/drills/families.py`): its order, what it reports, also when it is cut short, and
that its engines compile only what they run. Whether the families' tokens are the same is for the drill itself to say.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jpaged import LLMEngine
from jpaged.executor.start import startup
from jpaged.executor.step.kinds import step_programs
from tests.drills import families
from tests.drills.families import Found, Task, by_worth, cells, few_programs, try_models
from tests.parallel.family_runs import ARGS, greedy_tokens
from tests.tiny_models import models_of_blocks, tiny_model, tiny_models, write_tiny_model

COLUMNS = Task().columns


def test_each_architecture_s_first_model_comes_before_any_second_and_refused_ones_come_last() -> None:
    names = [case.name for case in tiny_models() + models_of_blocks()]
    order = by_worth(names)
    assert sorted(order) == sorted(names)
    keep_latents = ["kv_lora_rank" in tiny_model(name).config for name in order]
    assert keep_latents == sorted(keep_latents)
    served = [tiny_model(name).config["architectures"][0] for name in order[: keep_latents.index(True)]]
    assert len(set(served[: len(set(served))])) == len(set(served)) > 30


def test_the_columns_are_the_ways_of_each_layout() -> None:
    few, sliced, layer = ", few pages", "virtual, sliced", "virtual, per-layer"
    assert Task().columns == ["paged", sliced, sliced + few, layer, layer + few]
    assert Task(with_xla=True).columns == ["paged, XLA", *COLUMNS]
    of_two = Task(degree=2).ways
    assert [options.get("tensor_parallel_size") for options in of_two.values()] == [None, 2, 2]


def test_a_row_of_the_table_says_what_happened_in_each_way() -> None:
    sliced, few_sliced, layer, few_layer = COLUMNS[1:]
    served = Found("a", equal=["paged", sliced, few_sliced, layer], preemptions={sliced: 0, layer: 2})
    served.wrong[few_layer] = [[1, 2], [1, 3]]
    assert list(cells(served, COLUMNS).values()) == ["same", "same", "same, none preempted", "same", "differs"]
    refuses = Found("b", equal=["paged"], refused={sliced: "latents", layer: "latents"})
    assert list(cells(refuses, COLUMNS).values()) == ["same", *["refused"] * 4]
    died = Found("c", equal=["paged"], wrong={"the run": "its process ended with -9"})
    assert list(cells(died, COLUMNS).values()) == ["same", *["failed"] * 4]
    assert set(cells(None, COLUMNS).values()) == {"not done"}


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_run_that_is_cut_short_leaves_its_table_and_says_what_was_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], interrupted: bool
) -> None:
    report, reports = tmp_path / "families.json", list[int]()

    def tried(names: Any, processes: int, task: Task, until: float) -> Iterator[Found]:
        assert (processes, task.all_programs) == (2, False)
        assert 0 < until - time.monotonic() <= 7
        yield Found(names[0], equal=list(COLUMNS), preemptions={"virtual, sliced": 1, "virtual, per-layer": 1})
        reports.append(len(json.loads(report.read_text())["results"]["models"]))
        if interrupted:
            raise KeyboardInterrupt

    for variable in ("XLA_FLAGS", "TMPDIR", "TF_CPP_MIN_LOG_LEVEL", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.setenv(variable, "")  # which the drill sets, and which are put back
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setattr(families.signal, "signal", lambda *_: None)
    monkeypatch.setattr(families, "try_models", tried)
    options = ["--models", "bloom", "gpt2", "--processes", "2", "--limit-s", "7", "--json", str(report)]
    monkeypatch.setattr(sys, "argv", ["families", *options])
    with pytest.raises(SystemExit, match=r"^not done: gpt2$"):
        families.main()
    assert reports == [1]  # there already while others were tried
    results = json.loads(report.read_text())["results"]
    assert results["table"]["bloom"] == dict.fromkeys(COLUMNS, "same")
    assert results["table"]["gpt2"] == dict.fromkeys(COLUMNS, "not done")
    assert results["ways"]["virtual, sliced"] == {"same": 1, "not done": 1}
    said = capsys.readouterr().out
    assert "virtual, sliced, few pages: 1 same, 1 not done" in said
    assert "1 of 2 models the same, 0 not, 1 not done" in said
    assert ("interrupted" in said) == interrupted


def test_processes_end_when_the_time_is_over() -> None:
    assert list(try_models(["gpt2", "bloom"], 1, Task(), time.monotonic() + 0.5)) == []
    assert not multiprocessing.active_children()


def test_engines_compile_only_what_their_requests_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tiny_model("llama-gqa-d64-tied"), tmp_path, use_torch=False)
    args = replace(ARGS, model=str(tmp_path), compile_programs="at_start")
    monkeypatch.setattr(startup, "free_device_memory", lambda *_, **__: 2**33)  # both as on a GPU
    with few_programs():
        engine = LLMEngine(args)
    at_start, known = sum(engine.startup.origins.values()), len(step_programs(engine.startup.setup))
    assert 0 < at_start < known / 3
    assert all(greedy_tokens(engine))
