"""The manifest and its shards after crashes of every kind."""

import fcntl
import json
import os
import resource

import pytest

from jpaged.api.errors import InvalidParameterError, OutputError
from jpaged.scoring.shards import ShardStore, write_shard

JOB = {"task": "score", "model": "m"}


def add(store: ShardStore, number: int, data: bytes = b"data\n") -> None:
    store.add(write_shard(store.directory, number, ".jsonl", data))


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.jsonl"


def test_finished_shards_are_found_again_and_listed_in_order(output):
    store = ShardStore(output, JOB)
    add(store, 2, b"c")
    add(store, 0, b"a")
    store.close()
    again = ShardStore(output, JOB)
    assert sorted(again.finished) == [0, 2]
    assert [path.read_bytes() for path in again.shard_files()] == [b"a", b"c"]
    again.close()


def test_a_shard_that_is_not_as_listed_counts_as_absent(output):
    store = ShardStore(output, JOB)
    for number in range(4):
        add(store, number)
    store.close()
    files = sorted(store.directory.glob("shard-*"))
    files[0].write_bytes(b"DATA\n")
    files[1].write_bytes(b"dat")
    files[2].unlink()
    again = ShardStore(output, JOB)
    assert list(again.finished) == [3]
    again.close()


def test_a_manifest_cut_anywhere_leaves_a_store_that_can_go_on(output):
    store = ShardStore(output, JOB)
    add(store, 0)
    add(store, 1)
    store.close()
    manifest = store.directory / "manifest.jsonl"
    whole = manifest.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in sorted({*range(0, len(whole), 9), *(end + by for end in ends for by in (-2, -1, 0))}):
        manifest.write_bytes(whole[:cut])
        again = ShardStore(output, JOB)
        assert len(again.finished) == max(0, sum(end <= cut for end in ends) - 1), cut
        add(again, 5)
        again.close()
        last = ShardStore(output, JOB)
        assert set(last.finished) == {*again.finished}
        last.close()


def test_unfinished_work_of_another_job_is_refused_unless_overwritten(output):
    store = ShardStore(output, JOB)
    add(store, 0)
    store.close()
    with pytest.raises(InvalidParameterError, match="its model is 'm', this one's 'other'"):
        ShardStore(output, JOB | {"model": "other"})
    fresh = ShardStore(output, JOB | {"model": "other"}, overwrite=True)
    assert not fresh.finished
    fresh.close()


def test_an_output_that_exists_is_not_replaced_unless_asked_to(output):
    output.write_text("precious")
    with pytest.raises(InvalidParameterError, match="--overwrite"):
        ShardStore(output, JOB)
    store = ShardStore(output, JOB, overwrite=True)
    assert output.read_text() == "precious"  # until the new one is there
    made = store.directory / "merged"
    made.write_text("new")
    store.put_in_place({made: output})
    assert output.read_text() == "new"
    store.clear()
    assert not store.directory.exists()


def test_a_crash_after_the_output_is_in_place_leaves_only_clearing_up(output):
    store = ShardStore(output, JOB)
    add(store, 0)
    made = store.directory / "merged"
    made.write_text("all")
    store.put_in_place({made: output})
    store.close()
    (store.directory / "shard-00000000.jsonl").unlink()
    again = ShardStore(output, JOB)
    assert again.complete
    assert list(again.finished) == [0]
    again.clear()
    assert [path.name for path in output.parent.iterdir()] == ["out.jsonl"]


def test_two_runs_do_not_work_on_one_output(output):
    store = ShardStore(output, JOB)
    with pytest.raises(OutputError, match="Another process is at work"):
        ShardStore(output, JOB)
    store.close()
    ShardStore(output, JOB).close()


def test_places_that_cannot_be_written_to_are_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OutputError, match=r"Not a directory.*finished work is kept"):
        ShardStore(file / "out.jsonl", JOB)
    with pytest.raises(OutputError, match="No such file or directory"):
        ShardStore(tmp_path / "missing" / "out.jsonl", JOB)


def test_a_full_disk_leaves_no_part_of_a_shard(output, monkeypatch):
    store = ShardStore(output, JOB)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"No space left on device.*free some space"):
        write_shard(store.directory, 0, ".jsonl", b"data")
    assert [path.name for path in store.directory.iterdir()] == ["manifest.jsonl"]
    store.close()


def test_the_manifest_is_plain_json_lines(output):
    store = ShardStore(output, JOB)
    add(store, 0)
    store.close()
    header, entry = map(json.loads, (store.directory / "manifest.jsonl").read_text().splitlines())
    assert header["job"] == JOB
    assert (entry["shard"], entry["bytes"]) == (0, 5)
    with open(store.directory / "manifest.jsonl") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the lock went with the store


def test_a_job_that_finished_nothing_gives_way_to_another_and_one_that_did_does_not(output):
    ShardStore(output, JOB | {"model": "mistyped"}).close()
    store = ShardStore(output, JOB)
    add(store, 0)
    store.close()
    with pytest.raises(InvalidParameterError, match="its model is 'm', this one's 'other'"):
        ShardStore(output, JOB | {"model": "other"})
    again = ShardStore(output, JOB)
    assert list(again.finished) == [0]
    again.close()


def test_a_disk_that_is_full_for_the_manifest_is_a_typed_error_and_leaves_whole_lines(output):
    store = ShardStore(output, JOB)
    add(store, 0)
    entries = [write_shard(store.directory, number, ".jsonl", b"data\n") for number in (1, 2)]
    manifest = store.directory / "manifest.jsonl"
    before, limits = manifest.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))  # five bytes of the next line
    try:
        with pytest.raises(OutputError, match="free some space"):
            store.add(entries[0])
        assert manifest.read_bytes() == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    store.add(entries[1])  # a worker that is still at it
    store.close()
    again = ShardStore(output, JOB)
    assert sorted(again.finished) == [0, 2]
    again.close()


def test_closing_a_store_after_a_full_disk_raises_nothing_that_would_hide_why(output):
    store = ShardStore(output, JOB)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OutputError):
            store.add({"shard": 0, "file": "x", "bytes": 1, "sha256": ""})
        store.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
