"""Loading and saving weights: exactness, memory, and what is said about damaged checkpoints."""

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jpaged import models
from jpaged.api.errors import CheckpointError, InvalidParameterError, JPagedError, UnsupportedModelError
from jpaged.models.loading import checkpoint, placing
from jpaged.models.loading.safetensors_file import StoredTensor, read_header, write
from tests.tiny_models import draw, tiny_model, write_tiny_model

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NORM = "model.norm.weight"


def load(directory: Path, dtype: str = "auto") -> models.Weights:
    return models.load(models.build(models.ModelConfig.from_directory(directory), dtype), directory)


def same(one: models.Weights, other: models.Weights) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(one, other, strict=True)
    )


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_tiny_model(tiny_model("llama-mha-d16"), tmp_path / "llama", use_torch=False)


def rewrite(directory: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE)


def shard(directory: Path, files: int) -> dict[str, str]:
    """Splits model.safetensors over several files and returns the index's map."""
    tensors = load_file(directory / SINGLE)
    (directory / SINGLE).unlink()
    weight_map = {}
    for i in range(files):
        name = f"model-{i + 1:05}-of-{files:05}.safetensors"
        # Every n-th tensor, so that the parts of a fused parameter come from several files.
        part = dict(list(tensors.items())[i::files])
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


@pytest.mark.parametrize(
    "case",
    [tiny_model(n) for n in ("llama-biases", "qwen3-tied-d64", "opt-350m-style", "gpt2")],
    ids=lambda case: case.name,
)
def test_what_is_saved_is_loaded_bit_for_bit(case: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved by the programs that large parameters take, loaded by numpy."""
    config = models.ModelConfig.from_dict(case.config)
    model = models.build(config, "bfloat16")
    weights = model.init(3)
    with monkeypatch.context() as patch:
        patch.setattr(placing, "MOST_HOST_BYTES", 0)
        models.save_pretrained(model, weights, tmp_path)
    again = models.ModelConfig.from_directory(tmp_path)
    assert again == models.ModelConfig.from_dict(case.config | {"torch_dtype": "bfloat16"})
    assert same(load(tmp_path), weights)


def test_tensors_land_where_their_names_say(llama: Path) -> None:
    """The fused layouts, written out by hand from the checkpoint's tensors."""
    case = tiny_model("llama-gqa-d64-tied")
    write_tiny_model(case, llama, use_torch=False)
    model = models.build(models.ModelConfig.from_directory(llama))
    by_name = dict(zip(model.parameter_names, models.load(model, llama), strict=True))
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    q = draw(case, f"{attention}.q_proj.weight", (256, 64))
    k = draw(case, f"{attention}.k_proj.weight", (128, 64))
    v = draw(case, f"{attention}.v_proj.weight", (128, 64))
    qkv = by_name["layers.1.attention.qkv"]
    assert qkv.shape == (64, 2, 4, 64)
    np.testing.assert_array_equal(qkv[:, 1, 0], q[128:192].T)  # head 2, the first of the second group
    np.testing.assert_array_equal(qkv[:, 1, 2], k[64:].T)
    np.testing.assert_array_equal(qkv[:, 0, 3], v[:64].T)
    gate_up = by_name["layers.1.mlp.gate_up"]
    np.testing.assert_array_equal(gate_up[:, 0], draw(case, f"{mlp}.gate_proj.weight", (112, 64)).T)
    np.testing.assert_array_equal(gate_up[:, 1], draw(case, f"{mlp}.up_proj.weight", (112, 64)).T)
    out = draw(case, f"{attention}.o_proj.weight", (64, 256))
    np.testing.assert_array_equal(by_name["layers.1.attention.out"][3], out[:, 192:].T)


def test_an_independent_reader_reads_what_is_saved(llama: Path) -> None:
    with safe_open(llama / SINGLE, "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    stored = load_file(llama / SINGLE)
    case = tiny_model("llama-mha-d16")
    for name, tensor in stored.items():
        np.testing.assert_array_equal(tensor, draw(case, name, tensor.shape), err_msg=name)
    assert len(stored) == 2 * 9 + 3


@pytest.mark.parametrize("files", [2, 5])
def test_shards_load_as_the_single_file_does(llama: Path, files: int) -> None:
    single = load(llama)
    shard(llama, files)
    assert same(load(llama), single)


def test_shards_that_transformers_writes_are_loaded(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    case = tiny_model("qwen2-tied")
    write_tiny_model(case, tmp_path / "shards", max_shard_bytes=40_000)
    write_tiny_model(case, tmp_path / "single")
    assert (tmp_path / "shards" / INDEX).is_file()
    assert same(load(tmp_path / "shards"), load(tmp_path / "single"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_converted_once_to_the_type_asked_for(llama: Path, dtype: str) -> None:
    expected = tuple(weight.astype(dtype) for weight in load(llama))
    assert same(load(llama, dtype), expected)


def test_a_checkpoint_of_the_bare_body_is_loaded(tmp_path: Path) -> None:
    """As GPT-2's own: no "transformer." before the names, and the causal masks stored as tensors."""
    write_tiny_model(tiny_model("gpt2"), tmp_path, use_torch=False)
    expected = load(tmp_path)

    def strip(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.ones((1, 1, 256, 256), np.float32)
        tensors["h.1.attn.masked_bias"] = np.full((), -1e4, np.float32)

    rewrite(tmp_path, strip)
    assert same(load(tmp_path), expected)


def test_old_rotary_buffers_are_ignored(llama: Path) -> None:
    expected = load(llama)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(llama, lambda tensors: tensors.update({name: np.ones(8, np.float32)}))
    assert same(load(llama), expected)


@pytest.mark.parametrize("layer", [2, 46, 92])
def test_the_layer_of_glm_4_5_that_predicts_further_tokens_is_ignored_and_others_are_not(
    layer: int, tmp_path: Path
) -> None:
    directory = write_tiny_model(tiny_model("glm4.5-style"), tmp_path, use_torch=False)
    before = load(directory)
    rewrite(directory, lambda tensors: tensors.update({f"model.layers.{layer}.eh_proj.weight": np.ones((64, 128))}))
    assert same(load(directory), before)
    rewrite(directory, lambda tensors: tensors.update({f"model.layers.{layer + 1}.enorm.weight": np.ones(64)}))
    with pytest.raises(CheckpointError, match=f"holds tensor 'model.layers.{layer + 1}.enorm.weight'"):
        load(directory)


def test_a_tied_checkpoint_may_store_its_head_if_it_is_the_embedding(tmp_path: Path) -> None:
    write_tiny_model(tiny_model("llama-gqa-d64-tied"), tmp_path, use_torch=False)
    expected = load(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert same(load(tmp_path), expected)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load(tmp_path)


def test_the_stored_type_is_known_though_config_does_not_tell(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    del config["torch_dtype"]
    (llama / "config.json").write_text(json.dumps(config))
    rewrite(llama, lambda t: t.update({name: tensor.astype(jnp.bfloat16) for name, tensor in t.items()}))
    save_file({"mask": np.ones((2, 2), np.bool_)}, llama / "a.safetensors")  # no weight, so it tells nothing
    assert models.build(models.ModelConfig.from_directory(llama)).dtype == jnp.bfloat16


def test_progress_reaches_the_bytes_of_all_tensors(llama: Path) -> None:
    calls: list[tuple[int, int]] = []
    model = models.build(models.ModelConfig.from_directory(llama))
    models.load(model, llama, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (model.num_bytes, model.num_bytes)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_dummy_weights_need_no_checkpoint_and_depend_on_the_seed() -> None:
    model = models.build(models.ModelConfig.from_dict(tiny_model("llama-mha-d16").config), "bfloat16")
    weights = models.load(model, None, "dummy", seed=1)
    assert [(w.shape, w.dtype) for w in weights] == [(a.shape, a.dtype) for a in model.abstract_weights]
    assert same(weights, models.load(model, None, "dummy", seed=1))
    assert not same(weights, models.load(model, None, "dummy", seed=2))


_MEASURE = """
import json, sys
import jax
from jpaged import models

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

directory = sys.argv[1]
model = models.build(models.ModelConfig.from_directory(directory))
jax.device_put(0)
before = status("VmRSS")
weights = models.load(model, directory)
print(json.dumps([before, status("VmHWM"), model.num_bytes]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_loading_holds_the_weights_and_no_more_than_two_tensors(tmp_path: Path) -> None:
    """On the CPU the weights themselves are host memory, so the bound is for what comes on top of them. The
    compiler's own memory is the larger part of it; reading the whole file would exceed the bound.
    """
    config = tiny_model("llama-mha-d16").config | {
        "vocab_size": 16384,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
    }
    model = models.build(models.ModelConfig.from_dict(config), "bfloat16")
    layout = {piece.tensor: piece.shape for piece in model.pieces}
    write(
        tmp_path / SINGLE,
        layout,
        np.dtype(jnp.bfloat16),
        (np.full(shape, 0.01, jnp.bfloat16) for shape in layout.values()),
    )
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    )
    before, peak, num_bytes = json.loads(run.stdout)
    largest = 2 * max(np.prod(shape) for shape in layout.values())
    assert num_bytes > 3e8
    assert peak - before - num_bytes < 2 * largest + 200e6


CUT = ("gpt2", "phi3-window", "falcon-40b-style", "granite-moe-shared", "qwen3.5", "deepseek-v2-lite")
"""Layouts: transposed, joined, grouped, experts in one tensor, gated, latents; and tied heads."""


@pytest.mark.parametrize("name", CUT)
def test_large_tensors_are_read_in_runs_of_rows_and_land_where_whole_ones_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny_model(tiny_model(name), tmp_path, use_torch=False)
    whole = load(directory)
    most, sizes, read = 8192, [], StoredTensor.read

    def noting(tensor: StoredTensor) -> np.ndarray:
        sizes.append(tensor.num_bytes)
        return read(tensor)

    monkeypatch.setattr(checkpoint, "MOST_BYTES", most)
    monkeypatch.setattr(placing, "MOST_HOST_BYTES", 0)  # on the device, by compiled programs
    monkeypatch.setattr(StoredTensor, "read", noting)
    told: list[int] = []
    model = models.build(models.ModelConfig.from_directory(directory))
    cut = models.load(model, directory, progress=lambda done, total: told.extend((done, total)))
    assert same(whole, cut)
    assert told[-2] == told[-1] == sum(sizes)
    assert len(sizes) > len({piece.tensor for piece in model.pieces})
    if name == "phi3-window":  # no part lies scattered in its tensor, as DeepSeek's do, and no row is larger
        assert max(sizes) <= most


def test_the_host_holds_a_few_runs_of_a_tensor_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what numpy allocates: two, or more where JAX lets go of some late. The weights on a CPU are no part of it."""
    config = tiny_model("granite-moe").config | {"num_local_experts": 64, "hidden_size": 256, "intermediate_size": 128}
    model = models.build(models.ModelConfig.from_dict(config), "bfloat16")
    layout = {piece.tensor: piece.shape for piece in model.pieces}
    zeros = (np.zeros(shape, jnp.bfloat16) for shape in layout.values())
    write(tmp_path / SINGLE, layout, np.dtype(jnp.bfloat16), zeros)
    largest, most = 64 * 256 * 256 * 2, 1 << 20
    monkeypatch.setattr(checkpoint, "MOST_BYTES", most)
    monkeypatch.setattr(placing, "MOST_HOST_BYTES", 0)
    models.load(model, tmp_path)  # compiles
    tracemalloc.start()
    try:
        models.load(model, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert largest == 8 * most
    assert most <= peak < 6 * most  # of eight


# What is wrong with a checkpoint, and the words that the error must hold.


def truncate(directory: Path) -> None:
    content = (directory / SINGLE).read_bytes()
    (directory / SINGLE).write_bytes(content[:-100])


def overwrite(content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / SINGLE).write_bytes(content)


def only_pickles(directory: Path) -> None:
    (directory / SINGLE).rename(directory / "pytorch_model.bin")


def lose_a_shard(directory: Path) -> None:
    (directory / shard(directory, 3)[NORM]).unlink()


def break_the_index(directory: Path) -> None:
    shard(directory, 3)
    (directory / INDEX).write_text('{"weight_map": ')


def index_without_map(directory: Path) -> None:
    shard(directory, 3)
    (directory / INDEX).write_text('{"weight_map": [1]}')


def index_leaves_the_directory(directory: Path) -> None:
    weight_map = shard(directory, 3)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map | {NORM: "../other.safetensors"}}))


def index_names_the_wrong_shard(directory: Path) -> None:
    weight_map = shard(directory, 3)
    wrong = next(file for file in weight_map.values() if file != weight_map[NORM])
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map | {NORM: wrong}}))


def index_forgets_a_tensor(directory: Path) -> None:
    weight_map = shard(directory, 3)
    (directory / INDEX).write_text(json.dumps({"weight_map": {k: v for k, v in weight_map.items() if k != NORM}}))


def edit(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], object]:
    return lambda directory: rewrite(directory, change)


def same_tensor_twice(directory: Path) -> None:
    (directory / SINGLE).rename(directory / "a.safetensors")
    save_file({NORM: np.ones(64, np.float32)}, directory / "b.safetensors")


def index_names_what_no_file_is_called(directory: Path) -> None:
    weight_map = shard(directory, 3)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map | {NORM: "a\0b"}}))


def overlapping_tensors(directory: Path) -> None:
    content = (directory / SINGLE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    other = next(name for name in header if name != NORM and header[name].get("shape") == header[NORM]["shape"])
    header[NORM]["data_offsets"] = header[other]["data_offsets"]
    text = json.dumps(header).encode()
    (directory / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


NESTED = b"[" * 100_000

DAMAGES: list[tuple[Callable[[Path], object], tuple[str, ...]]] = [
    (truncate, (SINGLE, "truncated", "download")),
    (overwrite(b""), (SINGLE, "truncated")),
    (overwrite(b"\x01"), (SINGLE, "truncated")),
    (overwrite(b"\xff" * 64), (SINGLE, "not a safetensors file")),
    (overwrite((8).to_bytes(8, "little") + b"{broken}"), (SINGLE, "corrupt header")),
    (overwrite((2).to_bytes(8, "little") + b"[]"), (SINGLE, "corrupt header")),
    (overwrite(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), (SINGLE, "git lfs pull")),
    (lambda directory: (directory / SINGLE).unlink(), ("no *.safetensors", "convert")),
    (only_pickles, ("pytorch_model.bin", "pickle", "safetensors", "save_pretrained")),
    (lose_a_shard, ("does not exist", "of-00003.safetensors")),
    (break_the_index, (INDEX, "JSON")),
    (index_without_map, (INDEX, "weight_map")),
    (index_leaves_the_directory, (INDEX, "../other.safetensors")),
    (index_names_the_wrong_shard, (NORM, INDEX)),
    (index_forgets_a_tensor, (NORM, "lacks")),
    (edit(lambda t: t.pop(NORM)), (NORM, "lacks")),
    (edit(lambda t: t.pop("lm_head.weight")), ("lm_head.weight", "tie_word_embeddings")),
    (edit(lambda t: t.update({NORM: np.ones(63, np.float32)})), (SINGLE, NORM, "(63,)", "(64,)")),
    (edit(lambda t: t.update({NORM: np.ones(64, np.int8)})), (SINGLE, NORM, "I8")),
    (edit(lambda t: t.update({"model.layers.7.x": np.ones(2, np.float32)})), (SINGLE, "model.layers.7.x", "no place")),
    (overwrite(len(NESTED).to_bytes(8, "little") + NESTED), (SINGLE, "corrupt header")),
    (overwrite((2).to_bytes(8, "little") + b"{}"), ("holds no tensor", "lacks")),
    (index_names_what_no_file_is_called, ("cannot be read",)),
    (overlapping_tensors, (SINGLE, NORM, "overlap")),
    (same_tensor_twice, (NORM, "a.safetensors", "b.safetensors")),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_checkpoint_is_refused_naming_what_is_wrong(
    damage: Callable[[Path], object], words: tuple[str, ...], llama: Path
) -> None:
    model = models.build(models.ModelConfig.from_directory(llama))
    damage(llama)
    with pytest.raises(CheckpointError) as error:
        models.load(model, llama)
    for word in words:
        assert word in str(error.value)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_header_with_random_damage_is_read_or_refused_with_our_own_error(data: st.DataObject, llama: Path) -> None:
    original = (llama / SINGLE).read_bytes()
    length = int.from_bytes(original[:8], "little")
    content = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 8 + length - 1))] = data.draw(st.integers(0, 255))
    damaged = llama / "damaged.safetensors"
    damaged.write_bytes(content)
    try:
        tensors = read_header(damaged)
        for tensor in tensors.values():
            tensor.read()
    except JPagedError:
        pass


def test_a_file_as_directory_is_refused(llama: Path) -> None:
    model = models.build(models.ModelConfig.from_directory(llama))
    with pytest.raises(CheckpointError, match="not a directory"):
        models.load(model, llama / SINGLE)


def test_an_unknown_load_format_or_dtype_is_refused(llama: Path) -> None:
    config = models.ModelConfig.from_directory(llama)
    with pytest.raises(InvalidParameterError, match="pt"):
        models.load(models.build(config), llama, "pt")
    with pytest.raises(InvalidParameterError, match="directory"):
        models.load(models.build(config), None, "auto")
    with pytest.raises(InvalidParameterError, match="float8"):
        models.build(config, "float8")
    odd = models.ModelConfig.from_dict(dict(config.source) | {"torch_dtype": "float64"})
    with pytest.raises(UnsupportedModelError, match="float64"):
        models.build(odd, "auto")


def test_a_failed_save_leaves_no_file_behind(tmp_path: Path) -> None:
    model = models.build(models.ModelConfig.from_dict(tiny_model("gpt2").config), "float32")
    weights = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in model.abstract_weights]
    weights[-1].delete()
    with pytest.raises(RuntimeError, match="deleted"):
        models.save_pretrained(model, weights, tmp_path)
    assert list(tmp_path.iterdir()) == []
