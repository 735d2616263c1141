"""`jpaged bench vattention`: what its processes are told and answer, and what is kept when one fails."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged.api.errors import EngineDeadError
from jpaged.bench import layout_engines, layout_throughput, sharing, vattention
from jpaged.bench.engine_processes import EngineProcess, digest, engine_argv, obey
from jpaged.bench.models import model_directory
from jpaged.engine.limits import RequestLimits
from tests.bench import small_engine
from tests.tiny_models import MAX_LENGTH

SIZES = ["--rows", "4", "--context", "24", "--steps", "16"]


@small_engine.GROUP
def test_an_engine_process_grows_gives_back_sleeps_and_wakes_as_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*small_engine.options(tmp_path), *SIZES, "--kv-cache-layout", "virtual", "--kv-idle-release-s", "0.01"]
    args = vattention.parser().parse_args([*options, "--block-size", "1"])
    said = "rest 0\nserve\nrest 0.2\nsleep\nwake\nserve\nserve 2\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    obey(args)
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    started, served, rested, asleep, awake, again, two = answers
    assert started["start_s"] > 0
    assert started["kv_gb"] < served["kv_gb"] <= served["kv_gb_at_most"]
    assert rested["kv_gb"] == awake["kv_gb"] == started["kv_gb"]
    assert asleep["kv_gb"] < rested["kv_gb"]
    assert again["tokens_sha256"] == served["tokens_sha256"]
    assert (again["rows"], two["rows"]) == (4, 2)


class Told:
    """An `EngineProcess` that ends at the command `ends_at`, counted over all of them."""

    ends_at = 99
    commands: list[tuple[str, str]]
    argv: list[str]
    digest = "7"

    def __init__(self, name: str, argv: list[str]) -> None:
        self.name, Told.argv = name, argv

    def __enter__(self) -> "Told":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, command: str) -> dict[str, Any]:
        if len(Told.commands) == Told.ends_at:
            raise EngineDeadError(f"Engine {self.name} ended.")
        Told.commands.append((self.name, command))
        served = {"tokens_sha256": Told.digest} if command == "serve" else {}
        return {"s": 0.5, "kv_gb": 1.0} | served


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    Told.commands, Told.ends_at = [], 99
    monkeypatch.setattr(sharing, "EngineProcess", Told)


@pytest.mark.usefixtures("told")
def test_one_engine_serves_while_the_other_rests_or_sleeps_and_both_start_small(tmp_path: Path) -> None:
    report = tmp_path / "sharing.json"
    assert vattention.main(["--part", "sharing", "--kv-idle-release-s", "3", "--json", str(report)]) == 0
    assert [f"{name} {command}" for name, command in Told.commands] == [
        *("A rest 0", "B rest 0", "A serve", "A rest 5.0", "B serve"),
        *("A sleep", "B serve", "B rest 5.0", "A wake", "A serve"),
    ]
    asked = vattention.parser().parse_args(Told.argv[5:])
    assert (asked.kv_cache_layout, asked.virtual_page_layout, asked.kv_idle_release_s) == ("virtual", "sliced", 3.0)
    assert asked.obeys
    written = json.loads(report.read_text())
    assert {"commit", "host", "driver", "jax", "device"} <= written["environment"].keys()
    assert [row["phase"] for row in written["results"]][:3] == ["A starts", "B starts", "A busy"]
    assert [row["same_tokens"] for row in written["results"] if "same_tokens" in row] == [True, True, True, True]


@pytest.mark.usefixtures("told")
def test_what_was_measured_before_a_part_failed_is_kept_and_the_next_part_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Told.ends_at = 3
    report = tmp_path / "sharing.json"
    assert vattention.main(["--part", "sharing", "--part", "waste", "--json", str(report)]) == 1
    assert "sharing: failed: EngineDeadError: Engine A ended." in capsys.readouterr().err
    rows = json.loads(report.read_text())["results"]
    assert [row.get("phase") or row.get("failed") for row in rows if row["part"] == "sharing"] == [
        *("A starts", "B starts", "A busy"),
        "EngineDeadError: Engine A ended.",
    ]
    assert [row for row in rows if row["part"] == "waste"]


def test_tokens_are_the_same_where_each_of_them_is() -> None:
    assert digest([[1, 2], [3]]) == digest(((1, 2), np.array([3]).tolist()))
    assert len({digest(tokens) for tokens in ([[1, 2], [3]], [[2, 1], [3]], [[1, 2, 3]], [[1], [2, 3]])}) == 4


@pytest.mark.parametrize(("visible", "asked"), [("3,1", ["3"]), ("GPU-6a,GPU-7b", ["GPU-6a"]), ("", [])])
def test_the_card_s_memory_is_that_of_the_gpu_that_engines_use(
    visible: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    class Sampler:
        stdout = io.StringIO("512\n")

        def __init__(self, argv: list[str], **_: Any) -> None:
            started.append(argv)

    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("subprocess.Popen", Sampler)
    sharing.CardMemory()
    assert [argv[argv.index("-i") + 1] for argv in started] == asked


def test_a_process_that_ends_is_named_with_what_it_was_told() -> None:
    import sys

    with (
        EngineProcess("B", [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(3)"]) as engine,
        pytest.raises(EngineDeadError, match="Engine B ended at 'serve' with exit code 3"),
    ):
        engine.ask("serve")


def test_an_engine_gets_the_options_that_are_its_own() -> None:
    parser = vattention.parser()
    args = parser.parse_args(["--part", "steps", "--json", "x.json", "--decode-buckets", "4,8", "--skip-sleep"])
    argv = engine_argv(parser, args, "per-layer")
    assert argv[argv.index("--decode-buckets") + 1] == "4,8"
    assert "--skip-sleep" in argv
    assert not {"--part", "--json"} & set(argv)
    assert "--model" not in argv
    assert engine_argv(parser, args, "paged")[argv.index("--kv-cache-layout") + 1] == "paged"


def test_an_engine_that_is_killed_leaves_no_directory_of_a_named_model_behind() -> None:
    """It gets one of its parent."""
    parser = vattention.parser()
    argv = engine_argv(parser, parser.parse_args(["--model", "qwen3-0.6b"]), "paged")
    directory = argv[argv.index("--model") + 1]
    assert (Path(directory) / "config.json").exists()
    assert model_directory(directory) == directory


@pytest.mark.parametrize(("status", "written"), [(1, True), (1, False), (0, True)])
def test_a_layout_s_engine_that_fails_leaves_its_steps_and_the_other_layouts(
    monkeypatch: pytest.MonkeyPatch, status: int, written: bool
) -> None:
    def ran(argv: list[str], check: bool) -> Any:
        layout = argv[argv.index("--kv-cache-layout") + 1]
        if layout == "paged" or written:
            figures = [{"part": "steps", "mean_ms": 1.0}]
            found = {"figures": figures, "memory": {"startup_s": 2.0}, "tokens": [[1], [2]]}
            Path(argv[argv.index("--json") + 1]).write_text(json.dumps(found))
        return type("Done", (), {"returncode": 0 if layout == "paged" else status})

    monkeypatch.setattr(layout_engines.subprocess, "run", ran)
    args = vattention.parser().parse_args(["--layout", "paged", "--layout", "sliced"])
    measured = layout_engines.measure(vattention.parser(), args, ["steps"])
    rows = [row for row in measured if row["layout"] == "sliced"]
    assert ("mean_ms" in rows[0]) == written
    if status:
        assert "exit code 1" in rows[-1]["failed"]
    else:
        assert rows[-1]["sequences_as_first"] == "2 of 2"


@small_engine.GROUP
def test_an_engine_maps_a_prompt_s_pages_when_it_is_told_to_and_answers_as_itself(tmp_path: Path) -> None:
    options = [*small_engine.options(tmp_path), "--rows", "2", "--context", "24", "--steps", "8", "--block-size", "1"]
    options += ["--kv-cache-layout", "virtual", "--prompt-lengths", "40,9999", "--of-one-layout", "prompts,agreement"]
    *_, found = layout_engines.measure_engine(vattention.parser().parse_args(options))
    rows = {row["mapping"]: row for row in found["figures"]}
    assert {row["tokens"] for row in rows.values()} == {40}  # the other one is longer than the engine takes
    step, left = rows["in the step"], rows["left"]
    assert step["pages"] == step["pages_in_steps"] > 0
    assert (left["pages"], left["pages_in_steps"]) == (0, 0)
    waiting = rows["in the step, behind another"]
    assert waiting["pages_in_steps"] == step["pages"]
    assert rows["ahead, behind another"]["pages_in_steps"] <= waiting["pages_in_steps"]
    assert all(row["ms"] > 0 for row in rows.values())
    same = layout_engines.compare(found["answers"], json.loads(json.dumps(found["answers"])))
    assert (same["sequences_equal"], same["prompt_logprobs"]) == ("2 of 2", 2 * 23)
    assert (same["difference_max"], "margin_where_they_part_max" in same) == (0.0, False)


@small_engine.GROUP
def test_an_engine_decodes_fewer_and_fewer_rows_of_one_context_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    options = [*small_engine.options(tmp_path), "--block-size", "1", "--steps", "16", "--kv-cache-layout", "virtual"]
    options += ["--batches", "1,8,2,4", "--contexts", "16,30,9999", "--most-tokens", "100"]
    options += ["--prompt-lengths", "20,40,9999", "--of-one-layout", "throughput"]
    *_, found = layout_engines.measure_engine(vattention.parser().parse_args(options))
    figures = [figure for figure in found["figures"] if "left_out" not in figure]
    decode = {(figure["context"], figure["rows"]): figure for figure in figures if figure["what"] == "decode"}
    assert list(decode) == [(16, 4), (16, 2), (16, 1), (30, 2), (30, 1)]
    for (context, rows), figure in decode.items():
        assert figure["tokens_per_s"] * figure["step_ms"] == pytest.approx(1e3 * rows)
        assert figure["preemptions"] == 0
        assert figure["mean_length"] > context
    grown = [decode[16, rows]["mean_length"] for rows in (4, 2, 1)]
    assert np.diff(grown) == pytest.approx([24, 24], abs=3)  # 8 steps before 16, of which a few may end late
    prompts = {figure["context"]: figure for figure in figures if figure["what"] == "prompts"}
    assert {length: figure["rows"] for length, figure in prompts.items()} == {20: 2, 40: 1}
    assert all(figure["tokens_per_s"] * figure["ms"] == pytest.approx(40e3) for figure in prompts.values())
    left_out = [figure for figure in found["figures"] if "left_out" in figure]
    why = {(one["what"], one["context"], one.get("rows")): one["left_out"] for one in left_out}
    assert why["decode", 16, 8] == "max_num_seqs is 4"
    assert why["decode", 30, 4] == "more than 100 tokens"
    assert f"max_model_len is {MAX_LENGTH}" in why["prompts", 9999, None]
    assert {rows for what, length, rows in why if (what, length) == ("decode", 9999)} == {1, 2, 4, 8}


def test_rows_that_the_pool_cannot_hold_to_their_end_are_left_out() -> None:
    limits = RequestLimits(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, block_size=16, num_blocks=30)
    args = vattention.parser().parse_args(["--steps", "16"])
    why = {rows: layout_throughput._left_out(limits, args, [rows], 32) for rows in (1, 2, 4, 5, 8)}
    # A row begins with 32 tokens and decodes 24, and 2 more for each row while others' prompts are computed. So 4 rows
    # take 4 blocks each, and 5 or 8 rows 5 blocks each.
    assert {rows for rows, reason in why.items() if reason is None} == {1, 2, 4, 5}
    assert why[8] == "the pool has 30 blocks of 16"


def test_a_layout_s_throughput_stands_beside_the_first_one_s(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"paged": 100.0, "virtual": 90.0}

    def ran(argv: list[str], check: bool) -> Any:
        rate = rates[argv[argv.index("--kv-cache-layout") + 1]]
        cases = [{"what": "prompts", "context": 64, "rows": 2}, {"what": "decode", "context": 64, "rows": 2}]
        figures = [{"part": "throughput"} | case | {"tokens_per_s": rate * (1 + i)} for i, case in enumerate(cases)]
        figures.append({"part": "throughput", "what": "decode", "context": 64, "rows": 4, "left_out": "the pool"})
        Path(argv[argv.index("--json") + 1]).write_text(json.dumps({"figures": figures, "memory": {}}))
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(layout_engines.subprocess, "run", ran)
    args = vattention.parser().parse_args(["--layout", "paged", "--layout", "sliced"])
    rows = list(layout_engines.measure(vattention.parser(), args, ["throughput"]))
    assert [row["layout"] for row in rows] == ["paged"] * 3 + ["sliced"] * 3
    assert [(row.get("beside"), row.get("ratio")) for row in rows] == [
        *[(None, None)] * 3,
        *[("paged", 0.9)] * 2,
        (None, None),
    ]


def test_engines_that_part_are_compared_where_they_do() -> None:
    def answers(tokens: list[list[int]], logprobs: list[list[float]]) -> dict[str, Any]:
        return {"tokens": tokens, "likeliest": [], "prompts": logprobs}

    first = answers([[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]])
    first["likeliest"] = [[[(token, -0.5), (token + 50, -0.75)] for token in row] for row in first["tokens"]]
    other = answers([[1, 52, 99], [4, 5, 6], [7, 8, 60]], [[-1.0, -2.5], [-3.0, -4.0], [-5.0, -6.0]])
    found = layout_engines.compare(first, other)
    assert found["sequences_equal"] == "1 of 3"
    assert found["not_second"] == 1  # 60 is not what the first engine would have said instead of 9
    assert found["tokens_before_they_part_median"] == 1.5
    assert found["margin_where_they_part_max"] == found["margin_of_all_steps_median"] == 0.25
    assert (found["prompt_logprobs"], found["difference_max"]) == (6, 0.5)


def test_parts_of_one_engine_are_measured_together_and_those_of_others_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def measured(parser: Any, args: Any, parts: list[str]) -> Any:
        asked.append(parts)
        return iter([{"part": part} for part in parts])

    monkeypatch.setattr(layout_engines, "measure", measured)
    report = tmp_path / "parts.json"
    parts = ["prompts", "waste", "agreement"]
    assert vattention.main([*(word for part in parts for word in ("--part", part)), "--json", str(report)]) == 0
    assert asked == [["prompts", "agreement"]]
    rows = [row["part"] for row in json.loads(report.read_text())["results"]]
    assert rows[:3] == ["prompts", "agreement", "waste"]


def test_cudnn_reads_per_layer_pages() -> None:
    parser = vattention.parser()
    argv = engine_argv(parser, parser.parse_args([]), "cudnn")
    told = {name: argv[argv.index(f"--{name}") + 1] for name in ("kv-cache-layout", "virtual-page-layout")}
    assert told == {"kv-cache-layout": "virtual", "virtual-page-layout": "per-layer"}
    assert argv[argv.index("--kernel-backend") + 1] == "cudnn"


def test_cudnn_s_engine_may_have_fewer_slots() -> None:
    parser = vattention.parser()
    sizes = ["--max-num-seqs", "16", "--decode-buckets", "2,8,16"]
    for slots, buckets in (("4", "2,4"), ("8", "2,8"), (None, "2,8,16")):
        args = parser.parse_args([*sizes, *(["--cudnn-slots", slots] if slots else [])])
        for layout, expected in (("cudnn", (slots or "16", buckets)), ("per-layer", ("16", "2,8,16"))):
            argv = engine_argv(parser, args, layout)
            assert (argv[argv.index("--max-num-seqs") + 1], argv[argv.index("--decode-buckets") + 1]) == expected
