"""Reads how a model's embeddings are made from the files that sentence-transformers keeps beside a checkpoint.

modules.json             which modules follow the transformer: Pooling, Normalize
1_Pooling/config.json    which hidden states are pooled
config.json              hidden_size; is_matryoshka or matryoshka_dimensions, if the vector may be cut
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jpaged.api.errors import InvalidParameterError
from jpaged.api.pooling_params import Pooling, PoolingParams

_MODES: dict[str, Pooling] = {"lasttoken": "last", "last": "last", "mean_tokens": "mean", "mean": "mean"}
"""Pooling modes of sentence-transformers, and what they are here."""


@dataclass(frozen=True)
class EmbeddingConfig:
    """How a model embeds.

    pooling, normalize: defaults; the last token, normalised, without files that say otherwise.
    hidden_size: numbers of an embedding; None: unknown. matryoshka: lengths to which it may be cut: these, any (True)
        or none.
    refusal: why the model cannot embed as its files ask; empty if it can.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    hidden_size: int | None = None
    matryoshka: tuple[int, ...] | bool = False
    refusal: str = ""

    @classmethod
    def load(cls, directory: str | Path) -> "EmbeddingConfig":
        """Reads a checkpoint's directory. What cannot be read, or is not supported, becomes the `refusal`, since the
        model may serve other requests.
        """
        path = Path(directory)
        pooling: Pooling = "last"
        normalize = True
        try:
            model = _read(path / "config.json", {})
            modules = _read(path / "modules.json", None)
            if modules is not None:
                pooling, normalize = _of_modules(path, modules)
        except _Unsupported as error:
            return cls(refusal=str(error))
        sizes = (model.get(name) for name in ("hidden_size", "n_embd", "d_model"))
        size = next((size for size in sizes if type(size) is int), None)
        listed = model.get("matryoshka_dimensions")
        is_listed = isinstance(listed, list) and all(type(one) is int for one in listed)
        cut = tuple(listed) if isinstance(listed, list) and is_listed else model.get("is_matryoshka") is True
        return cls(pooling, normalize, size, cut)

    def params(
        self, *, pooling: Pooling | None = None, dimensions: int | None = None, normalize: bool | None = None
    ) -> PoolingParams:
        """The model's parameters, with these in their place where given.

        Raises:
            InvalidParameterError: as `check` and `PoolingParams`.
        """
        params = PoolingParams(
            pooling=self.pooling if pooling is None else pooling,
            dimensions=dimensions,
            normalize=self.normalize if normalize is None else normalize,
        )
        self.check(params)
        return params

    def check(self, params: PoolingParams) -> None:
        """Raises InvalidParameterError if the model cannot embed so."""
        if self.refusal:
            raise InvalidParameterError(self.refusal)
        cut = params.dimensions
        if cut is None or cut == self.hidden_size:
            return
        if self.matryoshka is False:
            raise InvalidParameterError(
                f"dimensions={cut} is not supported: the model's config.json has neither is_matryoshka nor"
                f" matryoshka_dimensions; leave dimensions out."
            )
        if self.matryoshka is not True and cut not in self.matryoshka:
            lengths = ", ".join(map(str, self.matryoshka))
            raise InvalidParameterError(f"dimensions={cut} is not one of the model's: {lengths}.")
        if self.hidden_size is None or cut > self.hidden_size:
            raise InvalidParameterError(f"dimensions={cut} exceeds the model's hidden size of {self.hidden_size}.")


class _Unsupported(Exception):
    """What the files ask for is not done here. The message says what."""


def _of_modules(directory: Path, modules: Any) -> tuple[Pooling, bool]:
    """What modules.json asks for: pooling, and whether to normalise."""
    pooling: Pooling | None = None
    normalize = False
    for module in modules if isinstance(modules, list) else [modules]:
        if not isinstance(module, dict):
            raise _Unsupported(f"{directory / 'modules.json'} must hold a list of modules; fetch it anew.")
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            path = directory / str(module.get("path", "")) / "config.json"
            pooling = _pooling_of(path, _read(path, {}))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise _Unsupported(f"The model's embeddings need a module {kind} (modules.json), which is not supported.")
    return pooling or "last", normalize


def _pooling_of(path: Path, config: Any) -> Pooling:
    prefix = "pooling_mode_"
    modes = [name.removeprefix(prefix) for name, on in config.items() if name.startswith(prefix) and on is True]
    if isinstance(config.get("pooling_mode"), str):
        modes = [config["pooling_mode"]]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise _Unsupported(
            f"{path} asks for pooling {', '.join(modes) or 'of no kind'}; only lasttoken and mean_tokens are supported."
        )
    return _MODES[modes[0]]


def _read(path: Path, missing: Any) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return missing
    except (OSError, ValueError, RecursionError) as error:
        raise _Unsupported(f"{path} cannot be read ({error}); fetch it anew.") from error
    if not isinstance(found, dict | list) or (missing == {} and not isinstance(found, dict)):
        raise _Unsupported(f"{path} must hold a JSON object or list; fetch it anew.")
    return found
