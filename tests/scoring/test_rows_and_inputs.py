"""What rows and files may hold, and what is said of those that hold something else."""

import csv
import json
import math

import numpy as np
import pytest

from jpaged.api.errors import InvalidParameterError, JPagedError, MalformedRowError
from jpaged.scoring.files import INPUT_FORMATS, size_of
from jpaged.scoring.inputs import Record, checked_inputs, read_records
from jpaged.scoring.jobs import shards_of
from jpaged.scoring.json_lines import json_lines
from jpaged.scoring.rows import RowScore, SequenceScore, parse_row

GOOD = [
    {"text": "Hello"},
    {"text": [1, 2, 3], "id": "a"},
    {"prompt": "", "completion": "x", "id": 7},
    {"prompt": [1], "completion": [2]},
    {"prompt": "Yes or no?\n", "choices": [" yes", " no"], "label": 1},
]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "must be an object"),
        ({}, "no fields"),
        ({"prompt": "a"}, 'needs "text"'),
        ({"text": "a", "completion": "b"}, "no two of these"),
        ({"text": "a", "prompt": "b"}, "no two of these"),
        ({"completion": "b"}, 'needs "prompt" too'),
        ({"text": ""}, "is empty"),
        ({"text": 5}, "must be a string or a list of token ids, got int 5"),
        ({"text": [1, -2]}, "list of token ids"),
        ({"text": [1, True]}, "list of token ids"),
        ({"text": "a\ud800"}, "lone surrogate"),
        ({"prompt": "a", "choices": []}, "at least one choice"),
        ({"prompt": "a", "choices": "bc"}, "must be a list"),
        ({"prompt": "a", "choices": ["b", ""]}, r'"choices"\[1\] is empty'),
        ({"prompt": "a", "completion": [1]}, "both be text or both be token ids"),
        ({"text": "a", "id": [1]}, '"id" must be'),
    ],
)
def test_a_malformed_row_is_refused_with_the_reason(row, message):
    with pytest.raises(MalformedRowError, match=message):
        parse_row(row)


def test_the_best_choice_is_told_by_sum_by_token_and_by_byte():
    def sequence(*logprobs):
        values = np.array(logprobs, np.float32)
        return SequenceScore(np.arange(len(values)), values, values > -1)

    row = parse_row({"prompt": "q", "choices": ["a", "bbb", "ééééé"]})
    score = RowScore(row, (sequence(-2.0), sequence(-1.5, -1.5), sequence(-1.25, -1.25, -1.25)))
    assert (score.best, score.best_per_token, score.best_per_byte) == (0, 2, 2)
    record = score.record(3, logprobs=True)
    assert record["choices"][1]["logprob"] == -3.0
    assert record["choices"][1]["perplexity"] == pytest.approx(math.exp(1.5))
    assert record["choices"][0]["token_logprobs"] == [-2.0]
    assert not record["choices"][0]["greedy"]
    with pytest.raises(ValueError, match="a score for each"):
        score.score  # noqa: B018


def test_infinite_scores_become_null_in_json():
    values = np.array([-np.inf], np.float32)
    record = RowScore(parse_row({"text": "x"}), (SequenceScore(np.array([1]), values, values > -1),)).record(0)
    assert (record["logprob"], record["perplexity"]) == (None, None)
    json.dumps(record, allow_nan=False)


def test_json_lines_report_the_lines_that_are_none(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "a"}\n\n{"text": \n{"text": "\xff"}\n' + b"[" * 100_000 + b'\n{"text": "b"}'
    )
    records = list(read_records([path]))
    assert [(r.index, r.line, r.error is None) for r in records] == [
        (0, 1, True),
        (1, 3, False),
        (2, 4, False),
        (3, 5, False),
        (4, 6, True),
    ]
    assert "not JSON" in records[1].error
    assert "not UTF-8: byte 0xff" in records[2].error
    assert records[4].place == f"{path}:6"


def test_csv_rows_are_json_rows(tmp_path):
    path = tmp_path / "rows.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "prompt", "completion", "choices"])
        writer.writerow(["a", "two\nlines, and a comma", " yes", ""])
        writer.writerow(["b", "", "", json.dumps([" x", " y"])])
        writer.writerow(["c", "p", "", "not json"])
        writer.writerow(["d", "p", "q", "", "extra"])
    records = list(read_records([path]))
    assert records[0].data == {"id": "a", "prompt": "two\nlines, and a comma", "completion": " yes"}
    assert records[1].data == {"id": "b", "prompt": "", "choices": [" x", " y"]}
    assert [r.line for r in records] == [3, 4, 5, 6]
    assert '"choices" must be a JSON list' in records[2].error
    assert "more cells than the header" in records[3].error


def test_parquet_rows_are_json_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    with_choices = pyarrow.schema(
        [("text", pyarrow.string()), ("prompt", pyarrow.string()), ("choices", pyarrow.list_(pyarrow.string()))]
    )
    rows = [{"text": "a"}, {"prompt": "p", "choices": ["x"]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows, with_choices), path)
    assert [r.data for r in read_records([path])] == rows
    path.write_bytes(b"PAR1, or so it says")
    with pytest.raises(JPagedError, match="cannot be read as Parquet"):
        list(read_records([path]))


def test_files_of_unknown_format_or_none_are_refused(tmp_path):
    with pytest.raises(InvalidParameterError, match="must end in one of"):
        checked_inputs([tmp_path / "rows.txt"], INPUT_FORMATS)
    with pytest.raises(InvalidParameterError, match="is no file"):
        checked_inputs([tmp_path / "rows.csv"], INPUT_FORMATS)
    with pytest.raises(InvalidParameterError, match="no input file"):
        checked_inputs([], INPUT_FORMATS)


def test_shards_hold_all_rows_in_order_and_depend_on_the_rows_alone():
    rng = np.random.default_rng(0)
    records = [Record(i, "f", i, {"text": "x" * int(n)}) for i, n in enumerate(rng.integers(1, 50, 200))]
    records[17] = Record(17, "f", 17, {}, "broken")
    shards = list(shards_of(records, 300, size_of))
    assert [record for shard in shards for record in shard.records] == records
    assert [shard.number for shard in shards] == list(range(len(shards)))
    assert all(300 <= sum(len(r.data.get("text", "")) for r in shard.records) < 350 for shard in shards[:-1])
    assert shards == list(shards_of(iter(records), 300, size_of))


def test_a_line_that_holds_what_is_no_text_is_written_all_the_same_and_alone_as_ascii():
    records = [{"custom_id": "\ud800"}, {"custom_id": "é"}]
    data = json_lines(records)
    assert [json.loads(line) for line in data.splitlines()] == records
    assert "é".encode() in data
    with pytest.raises(MalformedRowError, match='"id" holds a lone surrogate'):
        parse_row({"text": "a", "id": "\ud800"})


def test_choices_nested_without_end_are_one_malformed_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('prompt,choices\na,"' + "[" * 100_000 + '"\nb,"[""yes""]"\n')
    first, second = read_records([path])
    assert "must be a JSON list" in first.error
    assert second.data == {"prompt": "b", "choices": ["yes"]}


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_two_columns_of_one_name_are_refused(tmp_path, name):
    path = tmp_path / name
    if path.suffix == ".csv":
        path.write_text("text,id,text\na,1,b\n")
    else:
        import pyarrow
        from pyarrow import parquet

        columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
        parquet.write_table(pyarrow.Table.from_arrays(columns, names=["text", "text"]), path)
    with pytest.raises(JPagedError, match="two columns of the name 'text'"):
        list(read_records([path]))
