"""From the name of a model to its directory."""

from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from jpaged.api.errors import InvalidParameterError, ModelNotFoundError
from jpaged.host.hub import resolve

REPOSITORY = [
    "README.md",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "merges.txt",
    "chat_template.jinja",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "consolidated.safetensors",
    "original/consolidated.00.pth",
    "original/params.json",
    "onnx/model.onnx",
    "pytorch_model.bin",
    "flax_model.msgpack",
    "modeling_custom.py",
]


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What the hub would be asked for; nothing is downloaded."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        patterns = {key: options[key] for key in ("allow_patterns", "ignore_patterns")}
        files = set(filter_repo_objects(REPOSITORY, **patterns))
        calls.append({"repo_id": repo_id, "revision": options["revision"], "files": files})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_directory_is_taken_as_it_is(tmp_path: Path, downloads: list[dict[str, Any]]) -> None:
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path
    assert downloads == []


def test_only_safetensors_json_and_tokenizer_files_are_downloaded(
    tmp_path: Path, downloads: list[dict[str, Any]]
) -> None:
    assert resolve("owner/name", revision="v1") == tmp_path
    assert downloads == [{"repo_id": "owner/name", "revision": "v1", "files": set(REPOSITORY[1:10])}]


def test_dummy_weights_are_not_downloaded(downloads: list[dict[str, Any]]) -> None:
    resolve("owner/name", load_format="dummy")
    assert not any(file.endswith(".safetensors") for file in downloads[0]["files"])
    assert "config.json" in downloads[0]["files"]


@pytest.mark.parametrize("name", ["/no/such/directory", "./nothing", "~/nothing-here", "a/b/c", "../x"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(name: str, downloads: list[dict[str, Any]]) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        resolve(name)
    assert downloads == []


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelNotFoundError, match="is a file"):
        resolve(tmp_path / "model.safetensors")


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="model"):
        resolve("")


def test_an_unreachable_hub_is_said_to_be_unreachable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub's real client, against a port where nobody listens."""
    nobody = partial(
        huggingface_hub.snapshot_download, endpoint="http://127.0.0.1:9", cache_dir=tmp_path, etag_timeout=1
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", nobody)
    with pytest.raises(ModelNotFoundError, match=r"owner/name.*could not be reached.*directory") as error:
        resolve("owner/name")
    assert error.value.__cause__ is not None


def test_offline_mode_says_so_and_names_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    local = partial(huggingface_hub.snapshot_download, local_files_only=True, cache_dir=tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", local)
    with pytest.raises(ModelNotFoundError, match=r"owner/name.*directory"):
        resolve("owner/name")


def test_an_impossible_hub_id_is_refused() -> None:
    with pytest.raises(ModelNotFoundError, match="valid hub id"):
        resolve("not a valid id!")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("RepositoryNotFoundError", "neither a local directory nor a repository"),
        ("GatedRepoError", "HF_TOKEN"),
        ("RevisionNotFoundError", "no revision 'v9'"),
    ],
)
def test_what_the_hub_answers_is_passed_on(kind: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = getattr(huggingface_hub.errors, kind)

    def refuse(*_: object, **__: object) -> str:
        raise error.__new__(error)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFoundError, match=words):
        resolve("owner/name", revision="v9")
