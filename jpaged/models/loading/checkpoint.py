"""Checkpoints in the Hugging Face layout: into device arrays, and back.

Loading streams: a tensor, or a run of rows of a large one (`runs.py`), is read, sent to the device, written there into
its fused parameter (donated, so in place) and forgotten. The host holds one of them at a time, the device the weights
and one of them.
"""

import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jpaged.api.errors import CheckpointError, InvalidParameterError
from jpaged.models.config_reader import read_json
from jpaged.models.loading import orbax_checkpoint, safetensors_file
from jpaged.models.loading.mxfp4 import join_packed
from jpaged.models.loading.pieces import Piece
from jpaged.models.loading.placing import empty_parameter, parameter_to_read
from jpaged.models.loading.quantized import QuantizedLayers, Tensors, expected_tensors, repeated_scales
from jpaged.models.loading.runs import MOST_BYTES
from jpaged.models.loading.safetensors_file import StoredTensor
from jpaged.models.model import Model, Weights, resolve_dtype
from jpaged.models.quantization.scheme import Stored

LOAD_FORMATS = ("auto", "safetensors", "orbax", "dummy")
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def load(
    model: Model,
    directory: str | Path | None,
    load_format: str = "auto",
    *,
    device: jax.Device | None = None,
    seed: int = 0,
    progress: bool | Callable[[int, int], None] = False,
    sized: Callable[[int], None] = lambda _: None,
) -> Weights:
    """The weights of a checkpoint directory on the device, in the model's type.

    load_format: "safetensors" reads single or sharded safetensors files, "orbax" an Orbax checkpoint
        (`orbax_checkpoint`), "auto" what is there; "dummy" reads nothing and makes random weights on the device from
        `seed`.
    device: where to; the default device if None.
    progress: True shows a bar; a function is called with (bytes read so far, bytes in all).
    sized: called with the bytes in all of a safetensors checkpoint, before they are read.

    Raises CheckpointError, naming file and tensor, when a tensor of the model is missing, doubled or of another
    shape, when the checkpoint holds one that the model has no place for, and when a file is missing or damaged.
    """
    check_load_format(load_format, directory)
    if load_format == "dummy":
        return model.init(seed, device)
    assert directory is not None
    if is_orbax(load_format, directory):
        return orbax_checkpoint.load(model, Path(directory), device)
    stored = match(model, find_tensors(Path(directory)))
    total = num_bytes(stored)
    sized(total)
    if callable(progress):
        return _stream(model, stored, device, progress, total)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not progress) as bar:
        return _stream(model, stored, device, lambda done, _: bar.update(done - bar.n), total)


def num_bytes(stored: Mapping[int, Tensors]) -> int:
    """Bytes of the tensors that `match` found, each counted once."""
    return sum({tensor.name: tensor.num_bytes for tensors in stored.values() for tensor in tensors.values()}.values())


def read_each(
    model: Model, stored: Mapping[int, Tensors], device: jax.Device | None, shard: Model | None = None
) -> Iterator[tuple[Piece, Any, int]]:
    """Each piece of the parameters, what it is of (a numpy or JAX array), and the bytes that were read for it: none
    where the pieces before it are of the same tensors. Of a large tensor a piece comes in runs of its rows.

    Nothing is held here when the next one is read, so that nothing is held at all if the caller has let go.

    stored: as `match` returns it. device: where weights are quantized. shard: what is filled, if not the model itself.

    Raises:
        CheckpointError: a quantized layer's tensors cannot be served.
    """
    held: Tensors = {}
    arrays: dict[str, Any] = {}
    layers = QuantizedLayers(model, device, {} if shard is None else repeated_scales(model, shard))
    for index, tensors in stored.items():
        piece, read = model.pieces[index], 0
        cut = layers.runs(piece, tensors, MOST_BYTES)
        if tensors != held or cut:
            held, arrays = {}, {}
        for run in cut:
            rows = tensors[piece.tensor].rows(run.first, run.count)
            arrays = layers.arrays(run.piece, {piece.tensor: rows}) or {"": rows.read()}
            yield from _placed(layers, run.piece, arrays, rows.num_bytes)
            arrays = {}
        if cut:
            continue
        if not held:
            read, held = sum(tensor.num_bytes for tensor in tensors.values()), tensors
            arrays = layers.arrays(piece, tensors) or {"": tensors[piece.tensor].read()}
        yield from _placed(layers, piece, arrays, read)


def _placed(
    layers: QuantizedLayers, piece: Piece, arrays: Mapping[str, Any], read: int
) -> Iterator[tuple[Piece, Any, int]]:
    for part, array in layers.pieces(piece, arrays):
        yield part, array, read
        read = 0
        del array


KV_SCALE = re.compile(r"\blayers\.(?P<layer>\d+)\.(?:\w+\.)*(?P<kind>[kv])_scale$")
"""Names of the scales of keys and values in the cache."""


def check_load_format(load_format: str, directory: str | Path | None) -> None:
    """Raises InvalidParameterError for a format that does not exist, or that needs the directory that is not given."""
    if load_format not in LOAD_FORMATS:
        raise InvalidParameterError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}.")
    if directory is None and load_format != "dummy":
        raise InvalidParameterError(f"load_format {load_format!r} needs a checkpoint directory.")


def is_orbax(load_format: str, directory: str | Path) -> bool:
    """Whether to read an Orbax checkpoint: asked for, or there and no safetensors beside it."""
    if load_format == "auto":
        return orbax_checkpoint.find(Path(directory)) is not None and not any(Path(directory).glob("*.safetensors"))
    return load_format == "orbax"


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint directory by name, headers only. Those in MXFP4 stand for what they are read as.

    Raises CheckpointError when the directory has no safetensors (pickles are refused), or a file is damaged.
    """
    return join_packed(_find_stored(directory))


def _find_stored(directory: Path) -> dict[str, StoredTensor]:
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; give the directory that holds config.json.")
    if (directory / INDEX_NAME).is_file():
        return _find_sharded(directory)
    if (directory / SINGLE_NAME).is_file():
        return safetensors_file.read_header(directory / SINGLE_NAME)
    others = sorted(directory.glob("*.safetensors"))
    if not others:
        pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
        if pickles:
            raise CheckpointError(
                f"{directory} holds only pickled weights ({', '.join(pickles[:3])}), which can run any code when they"
                " are read and are refused. Convert the checkpoint to safetensors: load it with transformers where"
                " you trust it, and call save_pretrained."
            )
        raise CheckpointError(
            f"{directory} holds no *.safetensors file; download the checkpoint again, or convert it to safetensors."
        )
    tensors: dict[str, StoredTensor] = {}
    for path in others:
        for name, tensor in safetensors_file.read_header(path).items():
            if name in tensors:
                raise CheckpointError(
                    f"Tensor {name!r} is in both {tensors[name].path} and {path}; remove the file that is not of this"
                    " checkpoint."
                )
            tensors[name] = tensor
    return tensors


def _find_sharded(directory: Path) -> dict[str, StoredTensor]:
    index = directory / INDEX_NAME
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f'{index} has no "weight_map" from tensor to file; download it again.')
    shards: dict[str, dict[str, StoredTensor]] = {}
    for file in dict.fromkeys(weight_map.values()):
        if Path(file).name != file:
            raise CheckpointError(f"{index} names the file {file!r}, which is not in its own directory.")
        shards[file] = safetensors_file.read_header(directory / file)
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise CheckpointError(
                f"{directory / file} lacks tensor {name!r}, which {INDEX_NAME} says it holds; download both again."
            )
    # In the order of files and bytes, so that reading is sequential.
    return {name: tensor for shard in shards.values() for name, tensor in shard.items() if name in weight_map}


def match(model: Model, found: dict[str, StoredTensor]) -> dict[int, Tensors]:
    """Which stored tensors fill which of `model.pieces`: by index, in the order of the files, by the names that the
    family gives them. Quantized layers have several.

    Raises CheckpointError when one is missing, doubled, of another shape or type, or has no place.
    """
    wanted: dict[str, list[int]] = {}
    expected: dict[str, Stored] = {}
    for index, piece in enumerate(model.pieces):
        for name, tensor in expected_tensors(model, piece).items():
            wanted.setdefault(name, []).append(index)
            expected[name] = tensor
    tied = {tensor.tensor: tensor for tensor in model.tied_tensors}
    names = full_names(model, found)
    matched: dict[int, Tensors] = {}
    unexpected: list[StoredTensor] = []
    for full, name in names.items():
        if full in wanted:
            for index in wanted[full]:
                matched.setdefault(index, {})[full] = found[name]
        elif full in tied:
            equals = names.get(tied[full].equals)
            if equals is not None:  # or it is missed below
                _check_tied(found[name], found[equals])
        elif (model.derived_tensors and re.search(model.derived_tensors, full)) or KV_SCALE.search(full):
            continue
        elif not _is_no_bias(full, wanted, found[name]):
            unexpected.append(found[name])
    missing = [name for name, tensor in expected.items() if name not in names and not tensor.optional]
    directory = next(iter(found.values())).path.parent if found else "The checkpoint, which holds no tensor,"
    if missing:
        hint = "download the checkpoint again, or correct its config.json"
        head = {model.parameter_names[index] for index in model.head_indices}
        lacking = {model.pieces[index].parameter for name in missing for index in wanted[name]}
        if lacking <= head and not model.config.tie_word_embeddings:
            hint = 'set "tie_word_embeddings": true in its config.json if the model shares the embedding'
        scheme, are_experts = model.config.quantization, all(".experts." in parameter for parameter in lacking)
        if scheme is not None and unexpected and are_experts and lacking.isdisjoint(model.quantized):
            hint = f"tensors of each expert are not supported in {scheme.name} here; use one that is not quantized"
        raise CheckpointError(f"{directory} lacks {_listed(missing)}; {hint}.")
    if unexpected:
        raise CheckpointError(
            f"{unexpected[0].path} holds {_listed([tensor.name for tensor in unexpected])}, for which a"
            f" {model.config.architecture} with this config.json has no place; correct config.json, or remove them."
        )
    for full, stored in ((full, stored) for tensors in matched.values() for full, stored in tensors.items()):
        shapes = expected[full].shapes
        if stored.shape not in shapes:
            raise CheckpointError(
                f"{stored.path}: tensor {stored.name!r} has shape {stored.shape}, config.json implies"
                f" {' or '.join(map(str, shapes))}; one of the two is of another model."
            )
        if stored.type_name not in expected[full].types:
            raise stored.refusal(expected[full].types)
    return matched


def full_names(model: Model, names: Iterable[str]) -> dict[str, str]:
    """The names of stored tensors, by what the family calls them."""
    known = {name for piece in model.pieces for name in expected_tensors(model, piece)}
    known |= {tensor.tensor for tensor in model.tied_tensors}
    # A checkpoint of the bare body, such as GPT-2's own, leaves the prefix out.
    own_names = {_own_name(name, model.aliases): name for name in names}
    bare = not any(own.startswith(model.base_prefix) for own in own_names)
    return {model.base_prefix + own if bare and own not in known else own: name for own, name in own_names.items()}


def _is_no_bias(full: str, wanted: Container[str], stored: StoredTensor) -> bool:
    """Whether it is the bias of zeros that GPTQ checkpoints give quantized layers that have none."""
    is_bias = full.endswith(".bias") and full.removesuffix("bias") + "qweight" in wanted
    return is_bias and not np.any(stored.read())


def _own_name(name: str, aliases: Sequence[tuple[str, str]]) -> str:
    """A stored tensor's name as the family calls it."""
    for theirs, ours in aliases:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _check_tied(head: StoredTensor, embedding: StoredTensor) -> None:
    """A stored head of a tied model must be the embedding itself; loading either would be wrong otherwise."""
    same = embedding.shape == head.shape and embedding.type_name == head.type_name
    if same and (embedding.path, embedding.offset) != (head.path, head.offset):
        step = 1 << 24
        with embedding.path.open("rb") as one, head.path.open("rb") as other:
            one.seek(embedding.offset)
            other.seek(head.offset)
            for start in range(0, head.num_bytes, step):
                size = min(step, head.num_bytes - start)
                same = same and one.read(size) == other.read(size)
    if not same:
        raise CheckpointError(
            f'{head.path}: {head.name!r} differs from {embedding.name!r}, but config.json says "tie_word_embeddings":'
            " true; set it to false to use the head."
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return f"tensor {shown}" if len(names) == 1 else f"{len(names)} tensors ({shown}{', ...' * (len(names) > 5)})"


def _stream(
    model: Model,
    stored: Mapping[int, Tensors],
    device: jax.Device | None,
    progress: Callable[[int, int], None],
    total: int,
) -> Weights:
    position = {name: i for i, name in enumerate(model.parameter_names)}
    weights: list[Any] = [None] * len(position)
    done = 0
    for piece, tensor, read in read_each(model, stored, device):
        i = position[piece.parameter]
        target = weights[i]
        if target is None:
            target = empty_parameter(model.abstract_weights[i], device)
        weights[i] = jax.block_until_ready(piece.place(target, tensor, device))
        del tensor  # before the next one is read
        done += read
        progress(done, total)
    return tuple(jax.device_put(weight, device) for weight in weights if weight is not None)


def save_pretrained(
    model: Model, weights: Sequence[jax.Array], directory: str | Path, dtype: str | None = None
) -> None:
    """Writes config.json and model.safetensors under Hugging Face's names and shapes.

    `load`, transformers and other engines read the result. Tensors are fetched and written one at a time.

    weights: as `Model.init`, `load` or `Model.flatten` return them.
    dtype: the type to save in, such as "bfloat16"; the model's own if None.

    Raises InvalidParameterError for a quantized model.
    """
    if model.quantized:
        raise InvalidParameterError("save_pretrained writes no quantized models; build it without quantization.")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    kept = model.dtype if dtype is None else resolve_dtype(dtype, model.config)
    by_name = dict(zip(model.parameter_names, map(parameter_to_read, weights), strict=True))

    def taken(piece: Piece) -> np.ndarray:
        parameter: Any = by_name[piece.parameter]
        return np.asarray(piece.take(parameter).astype(kept))

    def tensors() -> Iterator[np.ndarray]:
        for name, shape in layout.items():
            first, *others = pieces[name]
            if first.part is None:
                yield taken(first)
                continue
            whole = np.empty(shape, np.dtype(kept))
            for piece in (first, *others):
                assert piece.part is not None
                piece.part.of(whole)[...] = taken(piece)
            yield whole

    pieces: dict[str, list[Piece]] = {}
    for piece in model.pieces:
        pieces.setdefault(piece.tensor, []).append(piece)
    layout = {name: of_tensor[0].shape for name, of_tensor in pieces.items()}
    safetensors_file.write(directory / SINGLE_NAME, layout, np.dtype(kept), tensors())
    config = model.config.saved_as(kept.name)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
