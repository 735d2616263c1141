"""Finds the local directory of a model that a user names."""

from pathlib import Path

from jpaged.api.config import EngineArgs
from jpaged.api.errors import InvalidParameterError, ModelNotFoundError, shown
from jpaged.assets import demo_model_path

_CONFIG_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_WEIGHT_FILES = ("*.safetensors",)
# Copies of the same weights in other layouts.
_IGNORED = ("*/*", "consolidated*")


def model_directory(args: EngineArgs) -> Path:
    """The local directory of the model that `args` name; the embedded demo model's if they name none.

    Raises InvalidParameterError, ModelNotFoundError: as `resolve`.
    """
    return demo_model_path() if args.model is None else resolve(args.model, args.revision, args.load_format)


def resolve(model: str | Path, revision: str | None = None, load_format: str = "auto") -> Path:
    """The local directory of a model.

    model: a directory, or the id of a repository on the Hugging Face hub ("Qwen/Qwen3-0.6B"), of which only
        safetensors, JSON and tokenizer files are downloaded, unless they are in the local cache already.
    revision: branch, tag or commit on the hub.
    load_format: "dummy" leaves the weights out.

    Raises ModelNotFoundError when there is no such directory, or the hub does not have it or cannot be reached.
    """
    if not str(model):
        raise InvalidParameterError("model must be a directory or a hub id, got an empty string.")
    name = str(model)
    try:
        path = Path(model).expanduser()
        is_directory, exists = path.is_dir(), path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~ of a user that does not exist
        raise ModelNotFoundError(f"{shown(name)} cannot be a path; give a directory or a hub id.") from error
    if is_directory:
        return path
    if exists:
        raise ModelNotFoundError(f"{name} is a file; give the directory that holds config.json.")
    if isinstance(model, Path) or name.startswith(("/", "~", ".")) or name.count("/") > 1 or "\\" in name:
        raise ModelNotFoundError(f"{name} does not exist; give a directory that holds config.json, or a hub id.")
    return _download(name, revision, load_format)


def _download(name: str, revision: str | None, load_format: str) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    patterns = _CONFIG_FILES if load_format == "dummy" else _CONFIG_FILES + _WEIGHT_FILES
    local = "a local copy works too: give the directory that holds config.json, tokenizer and *.safetensors as model"
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_IGNORED)
            )
        )
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{name} is gated on the Hugging Face hub: ask for access on its page and set HF_TOKEN; {local}."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{name} is neither a local directory nor a repository on the Hugging Face hub that you may read;"
            f" check the spelling, or set HF_TOKEN if it is private; {local}."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{name} has no revision {revision!r} on the Hugging Face hub.") from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(
            f"{shown(name)} is neither a local directory nor a valid hub id (owner/name): {error}"
        ) from error
    except Exception as error:  # the hub's client raises its HTTP library's own types as well
        raise ModelNotFoundError(
            f"{name} is not a local directory, and the Hugging Face hub could not be reached"
            f" ({type(error).__name__}: {error}); {local}."
        ) from error
