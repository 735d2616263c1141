"""Writes a quantized checkpoint of one that is not, one tensor at a time.

q_proj.weight  --Recipe.tensors-->  q_proj.weight, q_proj.weight_scale  -->  model-00001-of-00002.safetensors
norm.weight    ------------------------------------------------------------>  as it is
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jpaged.api.errors import CheckpointError, InvalidParameterError, OutputError, UnsupportedModelError
from jpaged.host.hub import resolve
from jpaged.models.config import ModelConfig
from jpaged.models.config_reader import read_json
from jpaged.models.loading import orbax_checkpoint, safetensors_file
from jpaged.models.loading.calibration import Calibration
from jpaged.models.loading.checkpoint import INDEX_NAME, KV_SCALE, SINGLE_NAME, find_tensors, full_names, match
from jpaged.models.loading.safetensors_file import NewTensor, StoredTensor
from jpaged.models.model import Model, build
from jpaged.models.quantization.gptq import DAMPING
from jpaged.models.quantization.layers import StoredLayer, is_fused, is_transposed, stored_layer
from jpaged.models.quantization.recipes import GROUPS, RECIPES, Recipe
from jpaged.models.states import MambaState

_SHARD_BYTES = 5_000_000_000


def quantize_checkpoint(
    model: str | Path,
    out: str | Path,
    scheme: str,
    *,
    revision: str | None = None,
    group_size: int | None = None,
    calibration: Sequence[Sequence[int]] | None = None,
    kv_cache: str | None = None,
    damping: float = DAMPING,
    shard_bytes: int = _SHARD_BYTES,
    progress: bool = False,
) -> None:
    """Writes a checkpoint whose attention, MLP and recurrent weights are quantized, in compressed-tensors' layout.

    Embeddings, norms, biases and the head stay as they are; tokenizer, chat template and generation_config.json are
    copied. `LLM`, vLLM and transformers (with the compressed-tensors package) read the result, which has safetensors
    files and a config.json with a "quantization_config". The host holds one tensor at a time, with what it becomes,
    and no accelerator is used, but for calibration, which takes a layer at a time (`loading.calibration`).

    model: a directory in Hugging Face layout with safetensors files, or a hub id. It must not be quantized.
    out: the directory to write; it must not exist, or be empty.
    scheme: "fp8": e4m3 weights with a float32 scale for each output, activations with a scale for each token.
        "fp8-block": e4m3 weights with a float32 scale for each 128 x 128 of them, activations with a scale for each
        128 inputs of a token. "int8": 8-bit integers with a float32 scale for each output, activations with a scale for
        each token (W8A8). "int4": 4-bit weights, rounded to the nearest, with a scale in the weights' type for each 128
        inputs of an output, activations as they are (W4A16). `models.quantization.recipes` has the formulas.
    group_size: inputs that share a scale in "int4": 32, 64 or 128; 128 if None.
    calibration: token ids of texts, for "int4": weights are rounded by GPTQ (`quantization.gptq`), on the default
        device, layer by layer. None: to the nearest. Texts are cut at 2,048 tokens; 128 rows of so many are read.
        Likewise for `kv_cache`, with which weights in 8 bits are rounded as without.
    kv_cache: "fp8": write the scales, too, by which the largest of each layer's keys and values in the calibration's
        texts become 448 (k_scale, v_scale). `kv_cache_dtype="fp8"` reads them.
    damping: of GPTQ, a part of the mean of the hessian's diagonal.
    revision: branch, tag or commit on the hub.
    shard_bytes: of one file, at most, unless one tensor is larger.
    progress: show a bar.

    Raises:
        InvalidParameterError: the scheme does not exist, or an option is out of range or not for it, or something is in
            `out` already.
        ModelNotFoundError: there is no such model.
        UnsupportedModelError: it is quantized, has all experts of a layer in one tensor, stores its weights
            transposed (GPT-2), has layers whose sizes the scheme cannot store, or is to be calibrated and has layers
            that read others' keys and values or inputs of their own, or, for "int4", experts or Mamba-2 layers.
        CheckpointError: a tensor is missing, damaged or not finite.
        OutputError: `out` cannot be written, for want of space for example.
    What was begun is removed when anything fails.
    """
    if shard_bytes < 1:
        raise InvalidParameterError(f"shard_bytes must be at least 1, got {shard_bytes}.")
    if not 0 < damping <= 1:
        raise InvalidParameterError(f"damping must be above 0 and at most 1, got {damping!r}.")
    out = Path(out)
    calibrated = calibration is not None
    recipe = checked_recipe(out, scheme, group_size=group_size, calibrated=calibrated, kv_cache=kv_cache)
    directory = resolve(model, revision)
    plan = _Plan(directory, recipe, scheme, kv_cache is not None)
    if calibration is not None:
        plan.calibrate(calibration, damping)
    with _written_whole(out):
        plan.write(out, shard_bytes, progress)


def checked_recipe(
    out: Path, scheme: str, *, group_size: int | None, calibrated: bool, kv_cache: str | None = None
) -> Recipe:
    """What to write, where these arguments of `quantize_checkpoint` can be served. Nothing is downloaded or read.

    Raises:
        InvalidParameterError: as `quantize_checkpoint`.
    """
    if scheme not in RECIPES:
        raise InvalidParameterError(f"scheme must be one of {', '.join(RECIPES)}, got {scheme!r}.")
    recipe = RECIPES[scheme]
    if kv_cache not in (None, "fp8"):
        raise InvalidParameterError(f"kv_cache must be 'fp8' or left out, got {kv_cache!r}.")
    if kv_cache is not None and not calibrated:
        raise InvalidParameterError(
            f"kv_cache={kv_cache!r} needs calibration: scales are found by texts that the model reads."
        )
    if not recipe.packs and (group_size is not None or (calibrated and kv_cache is None)):
        named, also = ("group_size", "") if group_size is not None else ("calibration", ", unless kv_cache is given")
        raise InvalidParameterError(f"{named} is for scheme 'int4', and not for {scheme!r}{also}; leave it out.")
    if group_size is not None:
        if group_size not in GROUPS:
            raise InvalidParameterError(f"group_size must be one of {', '.join(map(str, GROUPS))}, got {group_size!r}.")
        recipe = recipe.in_groups(group_size)
    _check_target(out)
    return recipe


class _Plan:
    """What is written of a checkpoint. Nothing is read yet but headers and JSON."""

    def __init__(self, directory: Path, recipe: Recipe, scheme: str, kv_cache: bool) -> None:
        self._directory, self._recipe = directory, recipe
        source = read_json(directory / "config.json")
        _check_plain(directory, source)
        plain = ModelConfig.from_directory(directory)
        # Online, those layers are quantized that are to be here.
        model = build(ModelConfig.from_directory(directory, quantization="fp8"))
        self._stored = find_tensors(directory)
        match(model, self._stored)
        self._names = full_names(model, self._stored)
        self._layers = self._find_layers(model, scheme)
        self._kv_scales = self._kv_scale_names(model) if kv_cache else []
        self.config = source | {"quantization_config": recipe.config(self._ignored(model), kv_cache=kv_cache)}
        if not (source.get("dtype") or source.get("torch_dtype")):
            self.config["torch_dtype"] = plain.source["torch_dtype"]
        self._check_readable(model)
        self._quantized = model.quantized
        self._num_layers = plain.num_layers
        self._calibration: Calibration | None = None
        self._layer_of: dict[str, int] = {}
        self._done, self._made = -1, dict[str, tuple[np.ndarray, np.ndarray]]()

    def calibrate(self, texts: Sequence[Sequence[int]], damping: float) -> None:
        """Has 4-bit tensors rounded by GPTQ, layer by layer, in which order all tensors are then written; and has keys
        and values looked at."""
        model = build(ModelConfig.from_directory(self._directory))
        has_inputs = getattr(model.config, "input_size", 0) > 0
        if has_inputs or any(source is not None for source in model.config.layer_sources):
            raise UnsupportedModelError(
                f"{model.config.architecture}: layers that read others' keys and values, or inputs of their own, are"
                " not supported with calibration; leave it out."
            )
        if not self._recipe.packs:
            self._calibration = Calibration(model, self._stored, (), texts, group=0, damping=damping)
            return
        if model.config.num_experts:
            raise UnsupportedModelError(
                f"{model.config.architecture}: mixtures of experts are not supported with calibration; leave it out."
            )
        if any(isinstance(state, MambaState) for state in model.config.layer_states):
            raise UnsupportedModelError(
                f"{model.config.architecture}: Mamba-2 layers are not supported with calibration; leave it out."
            )
        for piece in model.pieces:
            found = re.match(r"layers\.(\d+)\.", piece.parameter)
            if found is None and piece.parameter in self._quantized:
                raise UnsupportedModelError(
                    f"{piece.tensor} is of no layer, and is not supported with calibration; leave it out."
                )
            if found is not None:
                self._layer_of[self._names[piece.tensor]] = int(found[1])
        self._stored = dict(sorted(self._stored.items(), key=lambda item: self._layer_of.get(item[0], -1)))
        self._calibration = Calibration(
            model, self._stored, self._quantized, texts, group=self._recipe.columns, damping=damping
        )

    def write(self, out: Path, shard_bytes: int, progress: bool) -> None:
        shards = self._shards(shard_bytes)
        weight_map: dict[str, str] = {}
        total = sum(tensor.num_bytes for tensor in self._stored.values())
        with tqdm(total=total, unit="B", unit_scale=True, desc="Quantizing", disable=not progress) as bar:
            for i, shard in enumerate(shards):
                name = SINGLE_NAME
                if len(shards) > 1:
                    name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
                layout = {new: entry for tensor in shard for new, entry in self._entries(tensor).items()}
                tensors = self._tensors(shard, bar)
                if shard is shards[-1]:
                    layout |= dict.fromkeys(self._kv_scales, NewTensor.of((1,), np.dtype(np.float32)))
                    tensors = chain(tensors, self._kv_scale_tensors())
                safetensors_file.write_mixed(out / name, layout, tensors)
                weight_map |= dict.fromkeys(layout, name)
        if len(shards) > 1:
            size = sum(entry.num_bytes for tensor in self._stored.values() for entry in self._entries(tensor).values())
            size += 4 * len(self._kv_scales)
            _write_json(out / INDEX_NAME, {"metadata": {"total_size": size}, "weight_map": weight_map})
        _write_json(out / "config.json", self.config)
        orbax_checkpoint.copy_companions(self._directory, out)

    def _find_layers(self, model: Model, scheme: str) -> dict[str, StoredLayer]:
        """The layers to quantize, by the names of their weights in the files."""
        left_out = {piece.tensor for piece in model.pieces if piece.parameter not in model.quantized}
        found: dict[str, StoredLayer] = {}
        for piece in model.pieces:
            if piece.tensor in left_out:
                continue
            layout, stored = model.quantized[piece.parameter], self._names[piece.tensor]
            if is_fused(piece, layout):
                raise UnsupportedModelError(
                    f"{stored} has all experts of a layer in one tensor, and such cannot be quantized here; serve the"
                    ' checkpoint with quantization="fp8" or "int8" instead.'
                )
            if is_transposed(piece, layout):
                raise UnsupportedModelError(
                    f"{stored} is stored transposed by a {model.config.architecture}, whose checkpoints cannot be"
                    ' quantized; serve it with quantization="fp8" or "int8" instead.'
                )
            layer = stored_layer(piece, layout)
            if misfit := self._recipe.misfit(layer):
                raise UnsupportedModelError(
                    f"{stored} has {layer.outputs} outputs and {layer.inputs} inputs, and scheme {scheme!r} needs"
                    f" {misfit}."
                )
            found[stored] = layer
        return found

    def _ignored(self, model: Model) -> list[str]:
        """Other layers with a matrix, by their names in the files and by the family's."""
        tables = {piece.tensor for piece in model.pieces if "embed" in piece.parameter + piece.tensor}
        names = ["lm_head"]
        for full, stored in self._names.items():
            is_matrix = stored.endswith(".weight") and len(self._stored[stored].shape) == 2
            if is_matrix and stored not in self._layers and full not in tables:
                names += [stored.removesuffix(".weight"), full.removesuffix(".weight")]
        return list(dict.fromkeys(names))

    def _check_readable(self, model: Model) -> None:
        """Raises UnsupportedModelError where `load` would not find just these layers quantized."""
        config = self.config | {"dtype": model.dtype.name}
        read = build(ModelConfig.from_dict(config))
        others = set(read.quantized) ^ {
            piece.parameter for piece in model.pieces if self._names.get(piece.tensor) in self._layers
        }
        if others:
            raise UnsupportedModelError(
                f"{model.config.architecture}: {min(others)} is stored together with what is not quantized, so such"
                ' checkpoints cannot be quantized; serve it with quantization="fp8" or "int8" instead.'
            )

    def _entries(self, tensor: StoredTensor) -> dict[str, NewTensor]:
        """What is written of a tensor."""
        layer = self._layers.get(tensor.name)
        if layer is None:
            return {tensor.name: NewTensor(tensor.type_name, tensor.shape, tensor.num_bytes)}
        shapes = self._recipe.shapes(layer, tensor.dtype)
        return {_renamed(tensor, suffix): NewTensor.of(*one) for suffix, one in shapes.items()}

    def _shards(self, shard_bytes: int) -> list[list[StoredTensor]]:
        """The tensors that each file is made of."""
        shards: list[list[StoredTensor]] = []
        room = 0
        for tensor in self._stored.values():
            size = sum(entry.num_bytes for entry in self._entries(tensor).values())
            if not shards or size > room:
                shards.append([])
                room = shard_bytes
            shards[-1].append(tensor)
            room -= size
        return shards

    def _tensors(self, shard: list[StoredTensor], bar: Any) -> Iterator[tuple[str, Any]]:
        for tensor in shard:
            if tensor.name not in self._layers:
                yield tensor.name, tensor.read_stored()
            else:
                try:
                    made = self._quantized_tensors(tensor)
                except ValueError as error:
                    raise CheckpointError(
                        f"{tensor.path}: tensor {tensor.name!r} {error}; download or write the checkpoint again."
                    ) from None
                for suffix, array in made.items():
                    yield _renamed(tensor, suffix), array
            bar.update(tensor.num_bytes)

    def _quantized_tensors(self, tensor: StoredTensor) -> dict[str, np.ndarray]:
        if self._calibration is None or not self._recipe.packs:
            return self._recipe.tensors(tensor.read())
        self._calibrate_to(self._layer_of[tensor.name])
        return self._recipe.packed(*self._made.pop(tensor.name))

    def _calibrate_to(self, layer: int) -> None:
        assert self._calibration is not None
        while self._done < layer:
            self._done += 1
            made = self._calibration.layer(self._done)
            self._made = {self._names[name]: arrays for name, arrays in made.items()}

    def _kv_scale_names(self, model: Model) -> list[str]:
        """Of keys and of values, layer by layer, beside the products that make them.

        Raises:
            UnsupportedModelError: the model keeps no keys and values, or names its layers as none does that is read.
        """
        owners = {
            int(found[1]): self._names[piece.tensor].rsplit(".", 2)[0]
            for piece in model.pieces
            if (found := re.match(r"layers\.(\d+)\.attention\.qkv$", piece.parameter))
        }
        layers = [layer for layer, keeps in enumerate(model.config.layer_keeps_tokens) if keeps]
        names = [f"{owners.get(layer)}.{kind}_scale" for layer in layers for kind in "kv"]
        if model.config.value_dim is not None or not all(KV_SCALE.search(name) for name in names):
            raise UnsupportedModelError(
                f"kv_cache='fp8' is not supported for a {model.config.architecture}, whose checkpoints have no place"
                " for scales of keys and values; leave it out."
            )
        return names

    def _kv_scale_tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Once all other tensors are made."""
        if not self._kv_scales:
            return
        assert self._calibration is not None
        self._calibrate_to(self._num_layers - 1)
        of_layers = np.array(self._calibration.kv_scales, np.float32)
        for name in self._kv_scales:
            found = KV_SCALE.search(name)
            assert found is not None
            yield name, of_layers[int(found["layer"]), "kv".index(found["kind"]), None]


def _renamed(tensor: StoredTensor, suffix: str) -> str:
    return f"{tensor.name.removesuffix('.weight')}.{suffix}"


def _check_target(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise InvalidParameterError(f"{out} is a file; name a directory to write.")
    if out.is_dir() and any(out.iterdir()):
        raise InvalidParameterError(f"{out} is not empty; choose another directory or empty it.")


def _check_plain(directory: Path, config: Mapping[str, Any]) -> None:
    texts = config.get("text_config")
    for part in (config, texts if isinstance(texts, Mapping) else {}):
        for name in ("quantization_config", "compression_config"):
            if part.get(name):
                raise UnsupportedModelError(
                    f"{directory / 'config.json'} has a {name}: the checkpoint is quantized already; give the one that"
                    " it was made of."
                )
    apart = directory / "hf_quant_config.json"  # ModelOpt's
    if apart.is_file() and read_json(apart).get("quantization"):
        raise UnsupportedModelError(f"{apart}: the checkpoint is quantized already; give the one that it was made of.")


@contextmanager
def _written_whole(out: Path) -> Iterator[None]:
    """Makes the directory, and takes away what was written there if not all is."""
    existed = out.is_dir()
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        for path in out.iterdir() if out.is_dir() else ():  # it was empty
            path.unlink()
        if not existed and out.is_dir():
            out.rmdir()
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise OutputError(
                f"{out} cannot be written ({error}); make room, or name another directory, and run the same again."
            ) from error
        raise


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
