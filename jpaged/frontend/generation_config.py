"""Reads a model's generation_config.json: its end-of-sequence tokens and default sampling parameters."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jpaged.api.errors import CheckpointError, InvalidParameterError, shown
from jpaged.api.sampling_params import SamplingParams

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class GenerationConfig:
    """What the file sets.

    eos_token_ids: end-of-sequence tokens; those below 0 (often -1) are dropped. sampling: fields of `SamplingParams`.
    """

    eos_token_ids: tuple[int, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def chosen(cls, choice: str, directory: str | Path) -> "GenerationConfig":
        """What `EngineArgs.generation_config` asks for. directory: the model's.

        Raises:
            InvalidParameterError: it names a directory that has no such file.
            CheckpointError: as `load`.
        """
        if choice == "auto":
            return cls.load(directory)
        if choice == "vllm":
            return cls(_token_ids(directory, _read(directory)))  # whatever it says of sampling, right or wrong
        try:
            own = Path(choice).expanduser()
            exists = _file(own).is_file()
        except (OSError, RuntimeError):  # too long a name; ~ of a user that does not exist
            exists = False
        if not exists:
            raise InvalidParameterError(
                f"generation_config={shown(choice)} is no directory that has a generation_config.json; give one, 'auto'"
                " for the model's own, or 'vllm' for none."
            )
        return cls.load(own)

    @classmethod
    def load(cls, directory: str | Path) -> "GenerationConfig":
        """Reads `directory`/generation_config.json; empty if there is none.

        Of the sampling parameters it reads temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens;
        "do_sample": false means greedy.

        Raises:
            CheckpointError: the file is not JSON, or holds a value that cannot be.
        """
        config = _read(directory)
        sampling = {key: config[key] for key in _SAMPLING_KEYS if config.get(key) is not None}
        if config.get("max_new_tokens") is not None:
            sampling["max_tokens"] = config["max_new_tokens"]
        if config.get("do_sample") is False:
            sampling["temperature"] = 0.0
        try:
            SamplingParams(**sampling)
        except InvalidParameterError as error:
            raise CheckpointError(
                f"{_file(directory)}: {error} Correct the file, or leave it out with generation_config='vllm'."
            ) from error
        return cls(_token_ids(directory, config), sampling)

    def sampling_params(self, **overrides: Any) -> SamplingParams:
        """The model's default sampling parameters, with `overrides` in their place where given."""
        return SamplingParams(**{**self.sampling, **overrides})


def _file(directory: str | Path) -> Path:
    return Path(directory) / "generation_config.json"


def _read(directory: str | Path) -> dict[str, Any]:
    """The file's contents; empty if there is none. Raises CheckpointError if it holds no JSON object."""
    path = _file(directory)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); fetch it anew, or delete it.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(config).__name__}; fetch it anew.")
    return config


def _token_ids(directory: str | Path, config: dict[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise CheckpointError(
                f"{_file(directory)}: eos_token_id must be a token id or a list of them, got {value!r}."
            )
    return tuple(token for token in ids if token >= 0)
