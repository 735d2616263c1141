"""What engine and executor need to know of any model, and how it is read from a Hugging Face config.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from math import inf, lcm
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from jpaged.api.checks import is_number
from jpaged.api.errors import CheckpointError, InvalidParameterError, UnsupportedModelError, shown
from jpaged.models.config_reader import ConfigReader, read_json
from jpaged.models.loading.safetensors_file import read_header
from jpaged.models.quantization import Scheme, find_scheme, stored_method
from jpaged.models.registry import architecture_of, family_of
from jpaged.models.states import LayerState

VOCAB_UNIT = 32
"""A shard's token ids are a multiple of this: a word of the sampler's masks."""

_INNER_UNIT = 8
"""Inner columns that have to be padded become a multiple of this: 16 bytes, which matrix products want aligned."""


ROUTER_SKEW = "jpaged_router_skew"
"""An entry of ours in the config.json of benchmarks with random weights (`ModelConfig.with_router_skew`); engines
refuse it with any others."""


class KVHeads(NamedTuple):
    """The key-value heads of a layer: how many, of how many columns, and `ModelConfig.kv_head_copies`."""

    number: int
    dim: int
    copies: int = 1

    def for_shards(self, shards: int) -> "KVHeads":
        """Each stored as often as it takes for `shards` to divide their number: the least common multiple divides the
        attention heads, as shards and key-value heads do."""
        number = lcm(self.number, shards)
        return self._replace(number=number, copies=number // self.number)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What every family's configuration has; a family's own class, derived from this one, adds what only it needs.

    architecture: the name in config.json, such as "LlamaForCausalLM", by which its family is found.
    intermediate_size: the inner width of the MLPs.
    max_position_embeddings: the usable context in tokens, RoPE scaling included.
    layer_windows: per layer; the tokens a query sees, itself included, or None for all before it. Left out, no layer
        has a window; one that never limits anything is None.
    chunked_windows: a window is a chunk of the context (Llama 4): chunks of so many tokens follow each other from the
        first token on, and a query sees its own chunk up to itself.
    layer_states: per layer; what a recurrent layer keeps of a sequence instead of its tokens, or None for attention.
        Left out, no layer is recurrent; one at least must not be.
    counts_tokens_alone: nothing reads what the layers without a state keep of a token. Their blocks count tokens, and
        the pool has no more of them than sequences and snapshots of states can have.
    layer_heads: per layer; its key-value heads, where they differ from layer to layer (Gemma 4). Left out, all layers
        have `num_kv_heads` of `head_dim`. What is made of one layer is made of its `of_layer`.
    layer_sources: per layer; the earlier layer whose keys and values it reads instead of keeping its own, or None. That
        one keeps its own, and has the same heads and window. Left out, every layer keeps its own.
    tie_word_embeddings: the embedding is the head.
    value_dim: values are the first so many columns of keys, of which a layer keeps nothing else (MLA); None where it
        keeps values apart, of `head_dim` columns as keys are.
    num_experts: routed experts of a sparse layer, all shards' together; 0 for a model without.
    kv_head_copies: equal key-value heads that stand side by side among num_kv_heads; more than one where a model with
        few of them is split over more shards (`shard`), never in a checkpoint.
    eos_token_ids: every token that ends a text. IDs outside the vocabulary (often -1) are dropped.
    dtype: the type the checkpoint was saved in, "bfloat16" for example; None when nothing tells.
    quantization: how the weights of `Linear`s are kept; None for as they are.
    source: the config.json it came from.
    may_list_experts: config.json may have a number of experts though no layer has any (Nemotron-H); elsewhere it is
        refused.
    """

    may_list_experts: ClassVar[bool] = False

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    layer_windows: tuple[int | None, ...] = ()
    chunked_windows: bool = False
    layer_states: tuple[LayerState | None, ...] = ()
    counts_tokens_alone: bool = False
    layer_heads: tuple[KVHeads, ...] = ()
    layer_sources: tuple[int | None, ...] = ()
    value_dim: int | None = None
    tie_word_embeddings: bool
    num_experts: int = 0
    kv_head_copies: int = 1
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None
    quantization: Scheme | None = None
    source: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for kv_heads in (self.num_kv_heads, *(heads.number for heads in self.layer_heads)):
            if self.num_heads % kv_heads == 0:
                continue
            is_default = self.source and not self.source.keys() & {"num_key_value_heads", "num_kv_heads"}
            raise CheckpointError(
                f"config.json: num_attention_heads ({self.num_heads}) must be a multiple of"
                f" num_key_value_heads ({kv_heads}"
                f"{', the default of its family, as config.json leaves it out' if is_default else ''})."
            )
        length = self.max_position_embeddings
        windows = self.layer_windows or (None,) * self.num_layers
        if len(windows) != self.num_layers:
            raise ValueError(f"layer_windows must have {self.num_layers} entries, got {len(windows)}.")
        limiting = tuple(None if window is None or window >= length else window for window in windows)
        object.__setattr__(self, "layer_windows", limiting)
        states = self.layer_states or (None,) * self.num_layers
        if len(states) != self.num_layers or None not in states:
            raise ValueError(f"layer_states must have {self.num_layers} entries, some of them None, got {states}.")
        object.__setattr__(self, "layer_states", states)
        if self.layer_heads and len(self.layer_heads) != self.num_layers:
            raise ValueError(f"layer_heads must have {self.num_layers} entries, got {len(self.layer_heads)}.")
        self._check_sources()

    def _check_sources(self) -> None:
        """Fills in `layer_sources`."""
        sources = self.layer_sources or (None,) * self.num_layers
        object.__setattr__(self, "layer_sources", sources)
        if len(sources) != self.num_layers:
            raise ValueError(f"layer_sources must have {self.num_layers} entries, got {len(sources)}.")
        for layer, source in enumerate(sources):
            if source is None:
                continue
            if not 0 <= source < layer or sources[source] is not None:
                raise ValueError(f"layer_sources: layer {layer} cannot read the keys and values of layer {source}.")
            if any(of_layers[layer] != of_layers[source] for of_layers in self._by_layer):
                raise ValueError(f"layer_sources: layers {layer} and {source} differ in heads, windows or states.")

    @property
    def _by_layer(self) -> tuple[Sequence[Any], ...]:
        """What layers that share keys and values have in common."""
        return self.layer_windows, self.layer_states, self.layer_heads or (None,) * self.num_layers

    @property
    def layer_keeps_tokens(self) -> tuple[bool, ...]:
        """Per layer; whether it keeps keys and values of its own."""
        both = zip(self.layer_states, self.layer_sources, strict=True)
        return tuple(state is None and source is None for state, source in both)

    def of_layer(self, layer: int) -> Self:
        """The same model with the key-value heads of a layer in all layers, for what is made of that layer."""
        if not self.layer_heads:
            return self
        number, dim, copies = self.layer_heads[layer]
        return replace(self, num_kv_heads=number, head_dim=dim, kv_head_copies=copies, layer_heads=())

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers keep a state of each sequence instead of its tokens."""
        return any(state is not None for state in self.layer_states)

    @staticmethod
    def from_dict(
        config: Mapping[str, Any], max_model_len: int | None = None, quantization: str | None = None
    ) -> "ModelConfig":
        """Reads the contents of a config.json, written by transformers 4 or 5. The result is of its family's class.

        max_model_len: the length to build the model for, in tokens, where its RoPE depends on that (`rope`); None for
            the length that it was trained for first.
        quantization: as `EngineArgs.quantization`.

        Raises:
            UnsupportedModelError: the architecture, or a feature that it asks for, is not implemented.
            InvalidParameterError: the quantization does not go with the checkpoint's.
            CheckpointError: a needed entry is missing or of the wrong type.
        """
        architecture = architecture_of(config)
        family = family_of(architecture)
        scheme = None if _is_dequantized(config, quantization, family) else find_scheme(config, quantization)
        read = family.read_config(ConfigReader(architecture, config, max_model_len))
        if not isinstance(read, ModelConfig):
            raise TypeError(f"The family of {architecture} read a {type(read).__name__}, which is no ModelConfig.")
        for feature in ("num_experts", "num_local_experts", "n_routed_experts"):
            if config.get(feature) and not read.num_experts and not read.may_list_experts:
                raise UnsupportedModelError(
                    f"config.json: mixtures of experts ({feature}) are not supported for {architecture}."
                )
        if skew := config.get(ROUTER_SKEW):
            if not is_number(skew) or not 0 < skew < inf:
                raise CheckpointError(f"config.json: {ROUTER_SKEW} must be a positive number, got {shown(skew)}.")
            read = read.with_router_skew(float(skew))
        if scheme is None:
            return read
        return replace(read, quantization=scheme)

    @staticmethod
    def from_directory(
        path: str | Path, max_model_len: int | None = None, quantization: str | None = None
    ) -> "ModelConfig":
        """Reads config.json, the end-of-text tokens of generation_config.json where there is one, and, when
        config.json does not tell the type of the weights, that of the first weight; and what ModelOpt's
        hf_quant_config.json says of quantization, when config.json says nothing.

        max_model_len, quantization: as of `from_dict`.
        """
        path = Path(path)
        config = dict(read_json(path / "config.json"))
        if (path / "generation_config.json").is_file():
            eos = read_json(path / "generation_config.json").get("eos_token_id")
            if eos is not None:
                ids = eos if isinstance(eos, list) else [eos]
                if not all(type(token) is int for token in ids):
                    raise CheckpointError(
                        f"{path / 'generation_config.json'}: eos_token_id must be a token id or a list of them, got"
                        f" {shown(eos)}."
                    )
                if named := [token for token in ids if token >= 0]:  # -1 leaves it to config.json
                    config["eos_token_id"] = named
        if not (config.get("dtype") or config.get("torch_dtype")):
            config["torch_dtype"] = _stored_dtype(path)
        if not config.get("quantization_config") and (path / "hf_quant_config.json").is_file():  # ModelOpt's
            apart = read_json(path / "hf_quant_config.json").get("quantization")
            if isinstance(apart, dict) and apart.get("quant_algo"):  # else of keys and values alone
                config["quantization_config"] = {"quant_method": "modelopt"} | apart
        entry, tensor = getattr(family_of(architecture_of(config)), "probed_tensor", ("", ""))
        if entry and (stored := _files_of_tensors(path)):
            found = next((name for name in stored if name.endswith(tensor)), None)
            config[entry] = found is not None
            if found is not None and (file := path / stored[found]).is_file():
                config[f"{entry}_shape"] = [*read_header(file)[found].shape]
        return ModelConfig.from_dict(config, max_model_len, quantization)

    def saved_as(self, dtype: str, *, quantized: bool = False) -> dict[str, Any]:
        """The config.json of a checkpoint whose weights are saved in this type. quantized: those that are quantized
        stay so."""
        left_out = ("dtype",) if quantized else ("dtype", "quantization_config")
        kept = {name: value for name, value in self.source.items() if name not in left_out}
        return kept | {"architectures": [self.architecture], "torch_dtype": dtype}

    def with_router_skew(self, zipf: float) -> Self:
        """The same model, whose random routers pick experts as often as their rank to the power of -zipf says.

        Raises:
            InvalidParameterError: it has no experts.
        """
        raise InvalidParameterError(
            f"A skew of routers ({zipf:g}) is for mixtures of experts, and {self.architecture} is none; leave it out."
        )

    @property
    def router_skew(self) -> float:
        """As of `with_router_skew`; 0 for routers that are as the weights say."""
        return 0.0

    def shard(self, shards: int) -> Self:
        """The configuration that one of `shards` equal shards computes; this one for one.

        A family that splits more sizes than these over shards extends this.

        Raises:
            InvalidParameterError: shards does not divide the attention heads.
        """
        if shards == 1:
            return self
        if self.num_heads % shards:
            fitting = ", ".join(str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0)
            raise InvalidParameterError(
                f"tensor_parallel_size={shards} does not divide the model's {self.num_heads} attention heads; use one"
                f" of {fitting}."
            )
        whole = self.with_kv_heads_for(shards)
        return replace(
            whole,
            vocab_size=token_rows(self.vocab_size, shards),
            num_heads=self.num_heads // shards,
            num_kv_heads=whole.num_kv_heads // shards,
            layer_heads=tuple(heads._replace(number=heads.number // shards) for heads in whole.layer_heads),
            intermediate_size=inner_columns(self.intermediate_size, shards),
            layer_states=tuple(None if state is None else state.shard(shards) for state in self.layer_states),
        )

    def with_kv_heads_for(self, shards: int) -> Self:
        """The same model with each key-value head stored as often as it takes for `shards` to divide their number."""
        number, _, copies = KVHeads(self.num_kv_heads, self.head_dim).for_shards(shards)
        of_layers = tuple(heads.for_shards(shards) for heads in self.layer_heads)
        return replace(self, num_kv_heads=number, kv_head_copies=copies, layer_heads=of_layers)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles name the architecture, so that another process finds the class wherever its family came from."""
        kind = type(self)
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return _restore, (self.architecture, kind.__module__, kind.__name__, values)


def token_rows(vocab_size: int, shards: int) -> int:
    """Token ids that each shard has, padding included."""
    return VOCAB_UNIT * -(-vocab_size // (shards * VOCAB_UNIT))


def inner_columns(inner: int, shards: int, group: int = 1) -> int:
    """Inner columns of an MLP that each shard has, padding included: whole groups of so many."""
    unit = lcm(_INNER_UNIT if inner % shards else 1, group)
    return unit * -(-inner // (shards * unit))


def _is_dequantized(config: Mapping[str, Any], quantization: str | None, family: Any) -> bool:
    """Whether loading is to make plain numbers of the checkpoint's quantized weights.

    Raises:
        InvalidParameterError: it is, and cannot.
        UnsupportedModelError, CheckpointError: as `stored_method`.
    """
    if quantization != "none":
        return False
    method = stored_method(config)
    if method is None or method in getattr(family, "quantizations", ()):
        return True
    raise InvalidParameterError(
        f"quantization='none' makes plain numbers of weights in MXFP4, and this checkpoint is in {method!r}; leave"
        " quantization out."
    )


def _restore(architecture: str, module: str, name: str, values: dict[str, Any]) -> ModelConfig:
    family_of(architecture)  # imports the module, which need not be where others are looked for
    config: ModelConfig = getattr(import_module(module), name)(**values)
    return config


def _files_of_tensors(directory: Path) -> dict[str, str]:
    """The file of each of a checkpoint's tensors, both by name."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = read_json(index).get("weight_map")
        return files if isinstance(files, dict) else {}
    return {name: path.name for path in sorted(directory.glob("*.safetensors")) for name in read_header(path)}


def _stored_dtype(directory: Path) -> str | None:
    """The type of the first floating-point tensor of the safetensors files; None where there is none."""
    for path in sorted(directory.glob("*.safetensors")):
        for tensor in read_header(path).values():
            if tensor.is_floating:
                return tensor.dtype.name
    return None
