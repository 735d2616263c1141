"""Random config.json files of every family, tiny, for comparisons with transformers: `draw`.

A family is what its configurations always have, and fields with the values that each may take; `...` leaves a field
out. Sizes, experts, windows and rotations go together and are drawn by the functions below.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]
LENGTHS = (32, 48, 64, 256)
"""Of contexts, in tokens: some shorter than what the models are given once RoPE stretches them."""

GATES: tuple[Any, ...] = (..., "silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "gelu_fast")
FLAG: tuple[Any, ...] = (..., False, True)
EPS: tuple[Any, ...] = (..., 1e-6, 1e-5, 1e-2)
STRETCHES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True)
class Space:
    """architecture, model_type: as in config.json. fields: the values of each, `...` to leave it out.
    parts: functions that add what goes together, given a source of chance and what there is already.
    """

    architecture: str
    model_type: str
    fields: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    parts: tuple[Callable[[random.Random, Config], None], ...] = ()


def draw(space: Space, chance: random.Random) -> Config:
    """The contents of a config.json, as transformers 4 or 5 or neither would write it."""
    config: Config = {"model_type": space.model_type, "architectures": [space.architecture]}
    config["vocab_size"] = chance.choice((97, 128, 161, 300))
    for name, values in {**_IN_ALL, **space.fields}.items():
        if (value := chance.choice(values)) is not ...:
            config[name] = value
    for part in space.parts:
        part(chance, config)
    return config


_NO_KV_HEADS: dict[str, tuple[Any, ...]] = dict.fromkeys(("llama", "phi3", "olmo2", "granite", "cohere"), (...,))
"""Where the number of key-value heads may be left out, and is then that of the queries' heads."""

_IN_ALL: dict[str, tuple[Any, ...]] = {
    "tie_word_embeddings": FLAG,
    "torch_dtype": (..., "float32"),
    "dtype": (..., "float32"),
    "eos_token_id": (..., 2, [2, 5], None),
    "pad_token_id": (..., 0, None),
    "use_cache": (..., False),
    "transformers_version": (..., "4.30.0", "5.0.0"),
    "attention_dropout": (..., 0.1),
    "initializer_range": (..., 0.02),
}


def sizes(
    *,
    heads: str = "num_attention_heads",
    kv: str | None = "num_key_value_heads",
    dim: str = "optional",
    inner: str = "",
) -> Callable[[random.Random, Config], None]:
    """Sizes in Llama's spelling. dim: "optional" (at times null), "rare" (never null), "none" or "always" (now and then
    the family's own). inner: name, if not the usual."""

    def add(chance: random.Random, config: Config) -> None:
        count, size = chance.choice((1, 2, 3, 4, 6)), chance.choice((8, 12, 16, 24))
        config |= {heads: count, "hidden_size": count * size * (2 if count < 3 else 1)}
        config["num_hidden_layers"] = chance.choice((2, 2, 2, 3, 3, 4, 4, 7))
        config[inner or "intermediate_size"] = chance.choice((40, 72, 96))
        fitting = [n for n in range(1, count + 1) if count % n == 0]
        if kv is not None:
            unsaid = _NO_KV_HEADS.get(config["model_type"], ())
            chosen = None if chance.random() < 0.06 else chance.choice([*fitting, *unsaid])
            if chosen is not ...:
                config[kv] = chosen
        if chance.random() < {"always": 0.95, "optional": 0.5}.get(dim, 0):
            config["head_dim"] = chance.choice((8, 16, 20, 32))
        elif dim == "rare" and chance.random() < 0.25:
            config["head_dim"] = chance.choice((8, 16, 20))
        elif dim == "optional" and chance.random() < 0.3:
            config["head_dim"] = None
        config["max_position_embeddings"] = chance.choice(LENGTHS)

    return add


def head_dim_of(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def rotation(
    *stretches: str, partial: bool = False, default_fraction: float = 1.0, columns: str = ""
) -> Callable[[random.Random, Config], None]:
    """How queries and keys are rotated. stretches: the kinds. partial: a part of each head may be rotated.
    columns: the entry that has the number of rotated columns, if not a head's."""

    def add(chance: random.Random, config: Config) -> None:
        dim = config[columns] if columns else head_dim_of(config)
        theta = chance.choice((..., 10000, 500000.0, 1e6, 100))
        fraction = default_fraction
        spelt: Config = {}
        if partial and chance.random() < 0.6:
            fraction = chance.choice([f for f in (0.25, 0.5, 0.75, 1.0) if int(dim * f)])
            spelt["partial_rotary_factor"] = fraction
        if theta is not ...:
            spelt["rope_theta"] = theta
        parameters = stretch(chance, chance.choice(stretches or STRETCHES), int(dim * fraction), config)
        if chance.random() < 0.5:  # transformers 4
            config |= spelt
            if parameters["rope_type"] != "default":
                if chance.random() < 0.4:
                    parameters["type"] = parameters.pop("rope_type")
                config["rope_scaling"] = parameters
            elif chance.random() < 0.5:
                config["rope_scaling"] = None
        elif chance.random() < 0.7:
            config["rope_parameters"] = parameters | spelt
        else:  # as files of both versions mix them
            config |= spelt
            config[chance.choice(("rope_parameters", "rope_scaling"))] = parameters | (
                {"rope_theta": chance.choice((100, 20000.0))} if chance.random() < 0.4 else {}
            )

    return add


def stretch(chance: random.Random, kind: str, columns: int, config: Config) -> Config:
    """The parameters of a kind of RoPE."""
    length = config["max_position_embeddings"]

    def maybe(name: str, *values: Any) -> Config:
        return {name: chance.choice(values)} if chance.random() < 0.5 else {}

    found: Config = {"rope_type": kind}
    if kind == "proportional":
        found |= maybe("partial_rotary_factor", 0.25, 0.5, 1.0) | maybe("factor", 2.0)
    elif kind in ("linear", "dynamic"):
        found["factor"] = chance.choice((2, 2.0, 3.5))
    elif kind == "llama3":
        found |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": chance.choice((4, 2.0, 1.0))}
        found |= {"original_max_position_embeddings": max(16, length // 2)}
    elif kind == "yarn":
        original = chance.choice((..., 16, 24))
        found |= {"factor": chance.choice((2, 4.0, 16.0))}
        if original is not ...:
            found["original_max_position_embeddings"] = original
        found |= maybe("beta_fast", 32, 4.0) | maybe("beta_slow", 1, 0.5) | maybe("truncate", True, False)
        found |= maybe("mscale", 1.0, 0.707) | maybe("mscale_all_dim", 1.0, 0.5, 0)
        found |= maybe("attention_factor", 1.2, None)
    elif kind == "longrope":
        original = chance.choice((16, 24))
        factors = {"short_factor": (1.0, 1.3), "long_factor": (1.5, 4.0)}
        found |= {name: [chance.uniform(*span) for _ in range(columns // 2)] for name, span in factors.items()}
        found |= maybe("factor", 4.0, 2.0) | maybe("attention_factor", 1.3)
        if chance.random() < 0.5:
            found["original_max_position_embeddings"] = original
        else:
            config["original_max_position_embeddings"] = original
    return found


def layer_kinds(*, default: float = 0.5, pattern: str = "") -> Callable[[random.Random, Config], None]:
    """layer_types at random, or left out; pattern: an entry that says how often one is full."""

    def add(chance: random.Random, config: Config) -> None:
        if chance.random() > default:
            kinds = ("full_attention", "sliding_attention")
            config["layer_types"] = [chance.choice(kinds) for _ in range(config["num_hidden_layers"])]
        elif pattern and chance.random() < 0.5:
            config[pattern] = chance.choice((2, 3))

    return add


def _gemma3n(chance: random.Random, config: Config) -> None:
    """Kinds of layers, how many read the keys and values of others, MLPs, residual streams and inputs of layers."""
    if chance.random() < 0.1:
        config["num_hidden_layers"] = 11  # of which the first ten have few gates, where nothing is said
    count, full, sliding = config["num_hidden_layers"], "full_attention", "sliding_attention"
    kinds = [full if (i + 1) % 5 == 0 else sliding for i in range(count)]
    if chance.random() < 0.8:
        kinds = config["layer_types"] = [chance.choice((full, sliding)) for _ in range(count)]
    most = max(shared for shared in range(count) if {*kinds[: count - shared]} == {*kinds})
    config["num_kv_shared_layers"] = chance.randint(0, most)
    if chance.random() < 0.5:
        config["intermediate_size"] = [chance.choice((40, 72, 90)) for _ in range(count)]
    if chance.random() < 0.8:
        config["activation_sparsity_pattern"] = [chance.choice((0.0, 0.5, 0.95)) for _ in range(count)]
    if chance.random() < 0.7:
        config["altup_num_inputs"] = chance.choice((1, 2, 3))
    config["altup_active_idx"] = chance.randrange(config.get("altup_num_inputs", 4))
    config["vocab_size_per_layer_input"] = config["vocab_size"] + chance.choice((-40, 0, 3))


def _mimo(chance: random.Random, config: Config) -> None:
    """Heads, of which layers with windows have twice as many of keys and values; values, kinds of layers, rotations."""
    heads = config["num_attention_heads"] = 2 * config["num_attention_heads"]
    config["num_key_value_heads"] = chance.choice([n for n in range(1, heads) if heads % (2 * n) == 0])
    config["v_head_dim"] = chance.choice((4, 6, 8))
    count, kinds = config["num_hidden_layers"], ("full_attention", "sliding_attention")
    if chance.random() < 0.6:
        config["layer_types"] = [chance.choice(kinds) for _ in range(count)]
    if chance.random() < 0.6:
        config["mlp_layer_types"] = [chance.choice(("dense", "sparse")) for _ in range(count)]
    if chance.random() < 0.6:
        thetas, fraction = dict.fromkeys(kinds, 1e4) | {"sliding_attention": 100.0}, chance.choice((0.334, 0.5, 1.0))
        config["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": fraction}
            for kind, theta in thetas.items()
        }


def _gemma4(chance: random.Random, config: Config) -> None:
    """Kinds of layers, their heads and rotations, and how many read the keys and values of others."""
    if chance.random() < 0.1:
        config["num_hidden_layers"] = 11  # whose numbers transformers pads with zeros
    count, full, sliding = config["num_hidden_layers"], "full_attention", "sliding_attention"
    kinds = [sliding] * (count - 1) + [full]
    if chance.random() < 0.7:
        kinds = config["layer_types"] = [*(chance.choice((full, sliding)) for _ in range(count - 1)), full]
    if chance.random() < 0.9:
        config["global_head_dim"] = chance.choice((head_dim_of(config), 2 * head_dim_of(config), 32))
    heads = config["num_attention_heads"]
    if chance.random() < 0.5:
        config["num_global_key_value_heads"] = chance.choice([n for n in range(1, heads + 1) if heads % n == 0])
    most = max(shared for shared in range(count) if {*kinds[: count - shared]} == {*kinds})
    if chance.random() < 0.6:
        config["num_kv_shared_layers"] = chance.randint(0, most)
    if chance.random() < 0.5:
        theta, fraction = chance.choice((100.0, 1e6)), chance.choice((0.25, 0.5, 1.0))
        whole = {"rope_type": "proportional", "partial_rotary_factor": fraction, "rope_theta": theta}
        config["rope_parameters"] = {sliding: {"rope_type": "default", "rope_theta": 1000.0}, full: whole}


def _gemma4_parts(chance: random.Random, config: Config) -> None:
    """Inputs of layers, and experts beside MLPs."""
    config["hidden_size_per_layer_input"] = chance.choice((0, 4, 12))
    config["vocab_size_per_layer_input"] = config["vocab_size"] + chance.choice((0, 3))
    if chance.random() < 0.4:
        config |= {"enable_moe_block": True, "moe_intermediate_size": 24}
        config["num_experts"] = chance.choice((2, 5, 8))
        config["top_k_experts"] = chance.randint(1, 2)


def _no_windows_of_nothing(chance: random.Random, config: Config) -> None:
    """Of Qwen2-MoE: layers that are to have windows, where windows are switched off, see nothing in transformers."""
    if not config.get("use_sliding_window"):
        config.pop("layer_types", None)


def experts(**fields: tuple[Any, ...]) -> Callable[[random.Random, Config], None]:
    """fields: `total`, `top` and `size` name the entries; others are as of `Space`."""

    def add(chance: random.Random, config: Config) -> None:
        total = chance.choice((2, 4, 5, 6, 8, 12))
        top = chance.randint(1, min(total, 4))
        (count,), (best,) = fields["total"], fields["top"]
        config |= {count: total, best: top}
        if "size" in fields:
            config[fields["size"][0]] = chance.choice((24, 40))
        for name, values in fields.items():
            if name not in ("total", "top", "size") and (value := chance.choice(values)) is not ...:
                config[name] = value

    return add


def groups(chance: random.Random, config: Config) -> None:
    """n_group and topk_group that go with the number of experts, so that enough are left to choose from."""
    total, top = config["n_routed_experts"], config["num_experts_per_tok"]
    fitting = [n for n in (1, 2, 4) if total % n == 0 and total // n >= 2]
    config["n_group"] = chance.choice(fitting or [1])
    kept = [k for k in range(1, config["n_group"] + 1) if k * total // config["n_group"] >= top]
    config["topk_group"] = chance.choice(kept)


def _in_rope_parameters(chance: random.Random, config: Config) -> None:
    """Of Cohere2-MoE: transformers passes over "rope_scaling", which is refused; "rope_parameters" must be whole."""
    if not (parameters := config.pop("rope_scaling", None) or config.get("rope_parameters")):
        return
    config["rope_parameters"] = parameters = {"rope_theta": config.get("rope_theta", 1e4)} | parameters
    if {"yarn", "longrope"} & {parameters.get("rope_type"), parameters.get("type")}:
        parameters.setdefault("original_max_position_embeddings", config.pop("original_max_position_embeddings", 16))


def some_dense(chance: random.Random, config: Config) -> None:
    if chance.random() < 0.5:
        config["decoder_sparse_step"] = chance.choice((1, 2, 3))
    if chance.random() < 0.5:
        config["mlp_only_layers"] = chance.choice(([], None, [0], [1], [0, 1], [1, 3, 9]))


def _no_experts(chance: random.Random, config: Config) -> None:
    """At times: a shared MLP alone."""
    if chance.random() < 0.3:
        config |= {"num_local_experts": 0, "num_experts_per_tok": 0}


def _mlp_kinds(chance: random.Random, config: Config) -> None:
    if chance.random() < 0.5:
        config["mlp_layer_types"] = [chance.choice(("dense", "sparse")) for _ in range(config["num_hidden_layers"])]


def latents(chance: random.Random, config: Config) -> None:
    heads = chance.choice((1, 2, 3, 4))
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": 48 if heads == 3 else 64}
    config |= {"num_hidden_layers": chance.choice((2, 3)), "intermediate_size": 72, "kv_lora_rank": 24}
    config |= {"q_lora_rank": chance.choice((None, 20)), "qk_rope_head_dim": chance.choice((8, 16))}
    config |= {"qk_nope_head_dim": chance.choice((8, 12)), "v_head_dim": chance.choice((8, 16, 20))}
    config["max_position_embeddings"] = chance.choice(LENGTHS)


def mamba(chance: random.Random, config: Config) -> None:
    heads = chance.choice((2, 4))
    config |= {"mamba_n_heads": heads, "mamba_n_groups": chance.choice((1, 2)), "mamba_d_state": chance.choice((8, 16))}
    config |= {"mamba_d_conv": chance.choice((2, 3, 4)), "mamba_expand": 2}
    config["mamba_d_head"] = chance.choice(("auto", 2 * config["hidden_size"] // heads))
    config["mamba_chunk_size"] = chance.choice((8, 16, 256))
    if config["hidden_size"] * 2 % heads:
        config |= {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_d_head": "auto"}


def _own_size(chance: random.Random, config: Config) -> None:
    """Falcon-H1's mixers may be of any size, and its heads are not parts of the hidden size."""
    if chance.random() < 0.3:
        config |= {"head_dim": 16, "num_attention_heads": 5, "num_key_value_heads": 1}
    heads = config["mamba_n_heads"]
    config["mamba_d_ssm"] = chance.choice((None, 8 * heads, 16 * heads))
    if config["mamba_d_ssm"] is not None:
        config["mamba_d_head"] = chance.choice(("auto", config["mamba_d_ssm"] // heads))


def _phimoe_rope(chance: random.Random, config: Config) -> None:
    """LongRoPE with its temperatures, or none. transformers 5 has the short factors for every length."""
    if chance.random() < 0.5:
        config["rope_theta"] = chance.choice((10000.0, 100))
        return
    factors = [chance.uniform(1.0, 4.0) for _ in range(head_dim_of(config) // 2)]
    config["rope_scaling"] = {
        **{"type": "longrope", "original_max_position_embeddings": chance.choice((16, 24))},
        **{"short_factor": factors, "long_factor": factors, "short_mscale": 1.1, "long_mscale": 1.3},
    }


def _mamba_alone(chance: random.Random, config: Config) -> None:
    """Sizes of Mamba-2."""
    heads, size = chance.choice((2, 4, 6)), chance.choice((8, 12, 16))
    config |= {"num_heads": heads, "head_dim": size, "expand": 2, "hidden_size": heads * size // 2}
    config |= {"num_hidden_layers": chance.choice((1, 2, 3)), "n_groups": chance.choice((1, 2))}
    config |= {"state_size": chance.choice((8, 16)), "conv_kernel": chance.choice((2, 3, 4)), "chunk_size": 8}


def mamba_layers(chance: random.Random, config: Config) -> None:
    layers = config["num_hidden_layers"]
    if config["model_type"] == "bamba":
        config["attn_layer_indices"] = sorted(chance.sample(range(layers), chance.randint(1, layers)))
        return
    names = chance.choice((("mamba", "attention"), ("linear_attention", "full_attention")))
    kinds = [chance.choice(names) for _ in range(layers)]
    kinds[chance.randrange(layers)] = names[1]
    config[chance.choice(("layer_types", "layers_block_type"))] = kinds


def mixers(chance: random.Random, config: Config) -> None:
    """Nemotron-H's layers, each of one kind, in the spellings of its versions."""
    heads = chance.choice((2, 4, 6))
    config |= {"mamba_num_heads": heads, "mamba_head_dim": chance.choice((8, 12)), "ssm_state_size": 16}
    config[chance.choice(("n_groups", "mamba_n_groups"))] = chance.choice((1, 2))
    config[chance.choice(("conv_kernel", "mamba_d_conv"))] = chance.choice((2, 3, 4))
    config |= {"chunk_size": chance.choice((8, 128)), "head_dim": config.get("head_dim") or 16}
    letters = [chance.choice("MME-*") for _ in range(config["num_hidden_layers"])]
    letters[chance.randrange(len(letters))] = "*"
    if "E" not in letters:
        config["mlp_bias"] = chance.random() < 0.5
    if chance.random() < 0.5:
        config["hybrid_override_pattern"] = "".join(letters)
        return
    old = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    new = old | {"M": "linear_attention", "*": "full_attention"}
    names = chance.choice((old, new))
    config[chance.choice(("layer_types", "layers_block_type"))] = [names[letter] for letter in letters]


def convolutions(chance: random.Random, config: Config) -> None:
    """LFM2's layers, in the spellings of its versions."""
    layers = config["num_hidden_layers"]
    attention = sorted(chance.sample(range(layers), chance.randint(1, layers)))
    if config["model_type"] == "lfm2" and chance.random() < 0.5:
        config["full_attn_idxs"] = attention
    else:
        config["layer_types"] = ["full_attention" if i in attention else "conv" for i in range(layers)]


def adjusted_size(chance: random.Random, config: Config) -> None:
    """How LFM2's inner size follows from the one that is said, which has two names."""
    if chance.random() < 0.5:
        config["block_ff_dim"] = chance.choice((40, 72, 96))
    config |= {"block_multiple_of": chance.choice((8, 16, 32)), "block_auto_adjust_ff_dim": chance.random() < 0.7}
    if chance.random() < 0.7:
        config["block_ffn_dim_multiplier"] = chance.choice((1, 1.0, 1.3))


def _rotary_dim(chance: random.Random, config: Config) -> None:
    """The published name of what is rotated."""
    if chance.random() < 0.5:
        config["rotary_dim"] = chance.choice((4, 8))


def _chunked_layers(chance: random.Random, config: Config) -> None:
    layers = config["num_hidden_layers"]
    said = chance.choice((..., [], None, [chance.randrange(2) for _ in range(layers)]))
    if said is not ...:
        config["no_rope_layers"] = said
    if chance.random() < 0.3 and config.get("attention_chunk_size") is not None:
        config["layer_types"] = [chance.choice(("full_attention", "chunked_attention")) for _ in range(layers)]


def delta(chance: random.Random, config: Config) -> None:
    key_heads = chance.choice((1, 2))
    config |= {"linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * chance.choice((1, 2, 3))}
    config |= {"linear_key_head_dim": chance.choice((8, 16)), "linear_value_head_dim": chance.choice((8, 12))}
    config["linear_conv_kernel_dim"] = chance.choice((2, 3, 4))
    layers = config["num_hidden_layers"]
    if chance.random() < 0.5:
        kinds = [chance.choice(("linear_attention", "full_attention")) for _ in range(layers)]
        kinds[chance.randrange(layers)] = "full_attention"
        config["layer_types"] = kinds
    else:
        config["full_attention_interval"] = chance.choice((1, 2))


def _separate_delta(chance: random.Random, config: Config) -> None:
    """OLMo Hybrid's, whose convolution transformers saves in three chunks that end anywhere; head sizes at times left
    out or null; a layer of each kind at least; and at times no RoPE."""
    heads, group = chance.choice(((1, 1), (2, 1), (4, 1), (2, 2), (1, 3), (3, 1), (6, 1)))
    size = chance.choice((4, 8, 12, 16))
    config |= {"linear_num_key_heads": heads, "linear_num_value_heads": heads * group}
    dims = {
        "linear_key_head_dim": chance.choice((size, size, ..., None)),
        "linear_value_head_dim": chance.choice((2 * size, 12, ..., None)),
    }
    config |= {name: dim for name, dim in dims.items() if dim is not ...}
    config["linear_conv_kernel_dim"] = chance.choice((2, 3, 4))
    if chance.random() < 0.5:
        kinds = ["linear_attention", "full_attention"] * config["num_hidden_layers"]
        config["layer_types"] = chance.sample(kinds[: config["num_hidden_layers"]], config["num_hidden_layers"])
    if chance.random() < 0.3:
        for name in ("rope_scaling", "rope_parameters", "rope_theta"):
            config.pop(name, None)
        config |= chance.choice(({"rope_theta": None}, {"rope_parameters": {"rope_theta": None}}))


def _dbrx(chance: random.Random, config: Config) -> None:
    """DBRX's parts; RoPE's theta is in one of them, too, and transformers reads the other one."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    kv_heads = config.pop("num_key_value_heads", None) or 1
    config["attn_config"] = {"kv_n_heads": kv_heads, "clip_qkv": chance.choice((0.5, 8)), "rope_theta": theta}
    parts: dict[str, tuple[Any, ...]] = {
        "ffn_act_fn": (..., None, {"name": "silu"}, {"name": "gelu"}),
        "moe_num_experts": (..., 4, 6),
        "moe_top_k": (..., 1, 3),
        "moe_normalize_expert_weights": (..., None, 1.0, 1.0, 2.0),
        "moe_jitter_eps": (..., None, 0.01),
    }
    drawn = {name: chance.choice(values) for name, values in parts.items()}
    config["ffn_config"] = {"ffn_hidden_size": config.pop("intermediate_size")} | {
        name: value for name, value in drawn.items() if value is not ...
    }


def _tempered_rotation(chance: random.Random, config: Config) -> None:
    """Ministral 3's RoPE, whose parameters have the temperature of attention, too; at times left out."""
    rotation("yarn")(chance, config)
    for name in ("rope_scaling", "rope_parameters"):
        if name in config:
            config[name]["llama_4_scaling_beta"] = chance.choice((0.1, 0.5))
    if chance.random() < 0.1:
        config.pop("rope_scaling", None), config.pop("rope_parameters", None), config.pop("rope_theta", None)


def _tempered_latents(chance: random.Random, config: Config) -> None:
    """Mistral 4's rotation, in the one spelling that transformers takes; it always has a temperature."""
    parameters = stretch(chance, "yarn", config["qk_rope_head_dim"], config) | {"rope_theta": 10000.0}
    parameters |= {"llama_4_scaling_beta": chance.choice((0.1, 0.5)), "original_max_position_embeddings": 16}
    config["rope_parameters"] = parameters


def by_kind(theta: str = "") -> Callable[[random.Random, Config], None]:
    """Rotations of both kinds of layers, in one of the spellings (Gemma 3, OLMo 3). theta: of layers with windows."""

    def add(chance: random.Random, config: Config) -> None:
        kind = chance.choice(("default", "linear", "yarn", "llama3"))
        parameters = stretch(chance, kind, head_dim_of(config), config)
        if "truncate" in parameters:
            del parameters["truncate"]
        way = chance.randrange(3)
        if way == 0:
            if kind != "default":
                config["rope_scaling"] = parameters
            if chance.random() < 0.6:
                config["rope_theta"] = chance.choice((10000, 1e6))
            if theta and chance.random() < 0.6:
                config[theta] = chance.choice((100.0, 10000))
        elif way == 1:
            full = parameters | ({"rope_theta": 1e6} if chance.random() < 0.6 else {})
            local = {"rope_type": "default"} | ({"rope_theta": 1000.0} if chance.random() < 0.6 else {})
            config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
            for name in filter(None, ("rope_theta", theta)):
                if chance.random() < 0.3:
                    config[name] = chance.choice((100.0, 20000.0))

    return add


def _ropes_of_mellum(chance: random.Random, config: Config) -> None:
    """One for each kind of layer, or those that are usual."""
    if chance.random() < 0.8:
        parameters = stretch(
            chance, chance.choice(("default", "linear", "yarn", "llama3")), head_dim_of(config), config
        )
        parameters.pop("truncate", None)  # which transformers looks for outside
        config["rope_parameters"] = {
            "full_attention": parameters | {"rope_theta": chance.choice((1e4, 5e5))},
            "sliding_attention": {"rope_type": "default", "rope_theta": chance.choice((1e3, 1e4))},
        }


def _local_layers(chance: random.Random, config: Config) -> None:
    """GPT-Neo's layers with windows."""
    layers = config["num_layers"]
    config["attention_types"] = [
        [[chance.choice(("global", "local"))], layers - layers // 2],
        [[chance.choice(("global", "local"))], layers // 2],
    ]


def _thetas(chance: random.Random, config: Config) -> None:
    """A theta for each layer of Granite SWA, or none."""
    if chance.random() < 0.6:
        config["layer_rope_theta"] = [chance.choice((0, 100, 10000.0)) for _ in range(config["num_hidden_layers"])]


def _whole_heads(chance: random.Random, config: Config) -> None:
    """Helium's heads are of the hidden size together."""
    config["head_dim"] = head_dim_of(config)


def _biases_of_both(chance: random.Random, config: Config) -> None:
    """InternLM3's biases, which transformers has all or none of, by their own names."""
    if chance.random() < 0.7:
        config["bias"] = config["qkv_bias"] = chance.random() < 0.5


def names(**renamed: str) -> Callable[[random.Random, Config], None]:
    """Other names of entries, for families with their own."""

    def add(chance: random.Random, config: Config) -> None:
        for usual, own in renamed.items():
            if usual in config:
                config[own] = config.pop(usual)

    return add


def _alpha(chance: random.Random, config: Config) -> None:
    """Hunyuan's RoPE, at times."""
    if chance.random() < 0.4:
        for name in ("rope_scaling", "rope_parameters"):
            config.pop(name, None)
        config["rope_scaling"] = {"type": "dynamic", "alpha": chance.choice((2.0, 1000.0)), "factor": 1.0}


def _of_each_layer(chance: random.Random, config: Config) -> None:
    if chance.random() < 0.5:
        config["moe_topk"] = [config["moe_topk"]] * config["num_hidden_layers"]


def _alibi_or_rope(chance: random.Random, config: Config) -> None:
    if not config.get("alibi"):
        rotation()(chance, config)


def _gptj(chance: random.Random, config: Config) -> None:
    dim = config["hidden_size"] // config["num_attention_heads"]
    config["rotary_dim"] = chance.choice([n for n in (4, 8, dim) if n <= dim])
    names(**_GPT)(chance, config)
    _no_inner(chance, config)


def _neox_rope(chance: random.Random, config: Config) -> None:
    if chance.random() < 0.5:
        dim = head_dim_of(config)
        config["rotary_pct"] = chance.choice([f for f in (0.25, 0.5, 1.0) if int(dim * f) and int(dim * f) % 2 == 0])
        config["rotary_emb_base"] = chance.choice((10000, 500.0))
        if chance.random() < 0.5:
            config["rope_scaling"] = {"type": chance.choice(("linear", "dynamic")), "factor": 2.0}
    elif head_dim_of(config) % 8 == 0:
        rotation(partial=True, default_fraction=0.25)(chance, config)
    else:
        config["rotary_pct"] = 0.5


def _bloom(chance: random.Random, config: Config) -> None:
    """Entries by their old names or by their new ones."""
    olds = {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "hidden_size": "n_embed"}
    names(**{new: old for new, old in olds.items() if chance.random() < 0.6})(chance, config)


def _no_inner(chance: random.Random, config: Config) -> None:
    """At times: MLPs of four times the hidden size, without a word or by null."""
    for name in ("n_inner", "ffn_hidden_size"):
        if name in config and chance.random() < 0.4:
            if chance.random() < 0.5:
                config[name] = None
            else:
                del config[name]


_GPT = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
_SILU: tuple[Any, ...] = (..., "silu", "silu", "silu", "gelu")
_STEPS: tuple[Any, ...] = (..., ..., [0.0, float("inf")], [0.5, 1.5], [0.0, 0.7])
WINDOW: tuple[Any, ...] = (1, 5, 12, 1000)
_QWEN: dict[str, tuple[Any, ...]] = {"hidden_act": GATES, "rms_norm_eps": EPS}
_WINDOWS: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": (..., False, True, True),
    "sliding_window": (..., None, *WINDOW),
    "max_window_layers": (..., 0, 1, 2),
}
_GEMMA4: dict[str, tuple[Any, ...]] = {
    "hidden_activation": (..., "gelu_pytorch_tanh", "silu"),
    "use_bidirectional_attention": (..., None, "vision", "vision", "vision", "all"),
    "rms_norm_eps": EPS,
    "attention_bias": FLAG,
    "attention_k_eq_v": FLAG,
    "use_double_wide_mlp": FLAG,
    "final_logit_softcapping": (..., None, 8.0),
    "sliding_window": (..., *WINDOW),
    "pad_token_id": (0,),
}

_GRANITE: dict[str, tuple[Any, ...]] = _QWEN | {
    "attention_bias": FLAG,
    "attention_multiplier": (..., 0.1, 1),
    "embedding_multiplier": (..., 4, 0.5),
    "logits_scaling": (..., 2, 0.5),
    "residual_multiplier": (..., 0.3, 1),
}
_QWEN_EXPERTS = {"total": ("num_experts",), "top": ("num_experts_per_tok",), "size": ("moe_intermediate_size",)}
_SPLIT_EXPERTS = {"total": ("n_routed_experts",), "top": ("num_experts_per_tok",), "size": ("moe_intermediate_size",)}
_SIGMOID: dict[str, tuple[Any, ...]] = {
    "n_shared_experts": (1, 2),
    "routed_scaling_factor": (..., 2.5, 1.0),
    "norm_topk_prob": FLAG,
    "first_k_dense_replace": (..., 0, 1, 2),
}

_LFM2: dict[str, tuple[Any, ...]] = {
    "norm_eps": EPS,
    "conv_bias": FLAG,
    "conv_L_cache": (..., 2, 3, 4),
    "tie_embedding": FLAG,
    "theta": (..., 1e6),
}

_GEMMA2 = {
    "hidden_activation": (..., "gelu_pytorch_tanh", "gelu", "silu"),
    "use_bidirectional_attention": (..., False, False, True),
    "hidden_act": (..., "gelu_pytorch_tanh"),
    "rms_norm_eps": EPS,
    "attention_bias": FLAG,
    "query_pre_attn_scalar": (16, 24, ...),
    "attn_logit_softcapping": (..., None, 5.0, 2.0),
    "final_logit_softcapping": (..., None, 8.0, 3.0),
    "sliding_window": (..., *WINDOW),
}

SPACES: dict[str, Space] = {
    "llama": Space(
        *("LlamaForCausalLM", "llama", _QWEN | {"attention_bias": FLAG, "mlp_bias": FLAG, "pretraining_tp": (..., 1)}),
        (sizes(), rotation()),
    ),
    "llama4": Space(
        "Llama4ForCausalLM",
        "llama4_text",
        _QWEN
        | {
            "attention_bias": FLAG,
            "use_qk_norm": FLAG,
            "attention_chunk_size": (..., None, 16, 48, 256),
            "no_rope_layer_interval": (..., 2, 3),
            "attn_temperature_tuning": FLAG,
            "attn_scale": (..., 0.5),
            "floor_scale": (..., 5, 16),
            "moe_layers": (..., None, [], [1], [0, 1]),
            "interleave_moe_layer_step": (..., 1, 2),
            "intermediate_size_mlp": (40, 72),
        },
        (
            *(sizes(dim="always"), rotation(), _chunked_layers),
            experts(total=("num_local_experts",), top=("num_experts_per_tok",)),
        ),
    ),
    "mistral": Space(
        *("MistralForCausalLM", "mistral", _QWEN | {"sliding_window": (..., None, *WINDOW)}),
        (sizes(), rotation(), layer_kinds(default=0.8)),
    ),
    "ministral3": Space(
        *("Ministral3ForCausalLM", "ministral3", _QWEN | {"sliding_window": (..., None, *WINDOW)}),
        (sizes(dim="always"), _tempered_rotation),
    ),
    "ministral": Space(
        *("MinistralForCausalLM", "ministral", _QWEN | {"sliding_window": (..., *WINDOW)}),
        (sizes(), rotation(), layer_kinds()),
    ),
    "qwen2": Space("Qwen2ForCausalLM", "qwen2", _QWEN | _WINDOWS, (sizes(), rotation(), layer_kinds(default=0.7))),
    "qwen3": Space(
        *("Qwen3ForCausalLM", "qwen3", _QWEN | _WINDOWS | {"attention_bias": FLAG}),
        (sizes(dim="always"), rotation(), layer_kinds(default=0.7)),
    ),
    "seed_oss": Space(
        "SeedOssForCausalLM",
        "seed_oss",
        _QWEN | {"attention_bias": FLAG, "attention_out_bias": FLAG, "mlp_bias": FLAG},
        (sizes(dim="always"), rotation()),
    ),
    "helium": Space(
        *("HeliumForCausalLM", "helium", _QWEN | {"attention_bias": FLAG, "mlp_bias": FLAG}),
        (sizes(dim="none"), rotation(), _whole_heads),
    ),
    "cwm": Space(
        *("CwmForCausalLM", "cwm", _QWEN | {"mlp_bias": FLAG, "sliding_window": (..., None, 0, *WINDOW)}),
        (sizes(dim="always"), rotation(), layer_kinds()),
    ),
    "internlm3": Space(
        *("InternLM3ForCausalLM", "internlm3", _QWEN),
        (sizes(dim="always"), rotation(), _biases_of_both),
    ),
    "iquestcoder": Space(
        *("IQuestCoderForCausalLM", "iquestcoder", _QWEN | {"attention_bias": FLAG, "mlp_bias": FLAG}),
        (sizes(dim="always"), rotation()),
    ),
    "ernie4_5": Space(
        *("Ernie4_5ForCausalLM", "ernie4_5", _QWEN | {"use_bias": FLAG}), (sizes(dim="always"), rotation())
    ),
    "ernie4_5_moe": Space(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        _QWEN
        | {
            "use_bias": (..., False, False, True),
            "moe_num_shared_experts": (..., 0, 1, 2),
            "moe_layer_start_index": (..., 0, 1, 2),
            "moe_layer_end_index": (..., -1, 1, 3),
            "moe_layer_interval": (..., 1, 2),
        },
        (
            *(sizes(), rotation()),
            experts(total=("moe_num_experts",), top=("moe_k",), size=("moe_intermediate_size",)),
        ),
    ),
    "hunyuan": Space(
        *("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", _QWEN | {"attention_bias": FLAG, "pad_token_id": (0,)}),
        (sizes(dim="always"), rotation(), _alpha),
    ),
    "hunyuan_moe": Space(
        *("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", _QWEN | {"attention_bias": FLAG, "pad_token_id": (0,)}),
        (sizes(dim="always"), rotation(), _alpha, experts(total=("num_experts",), top=("moe_topk",)), _of_each_layer),
    ),
    "gemma": Space(
        "GemmaForCausalLM",
        "gemma",
        {
            "hidden_act": ("gelu", "gelu_pytorch_tanh", ..., "silu"),
            "hidden_activation": (..., None, "gelu_pytorch_tanh"),
            "use_bidirectional_attention": (..., False, False, True),
            "rms_norm_eps": EPS,
            "attention_bias": FLAG,
        },
        (sizes(dim="always"), rotation()),
    ),
    "gemma2": Space(
        "Gemma2ForCausalLM",
        "gemma2",
        _GEMMA2,
        (sizes(dim="always"), rotation(), layer_kinds(default=0.7)),
    ),
    "vaultgemma": Space(
        "VaultGemmaForCausalLM",
        "vaultgemma",
        {name: values for name, values in _GEMMA2.items() if name not in ("use_bidirectional_attention", "hidden_act")},
        (sizes(dim="always"), rotation(), layer_kinds(default=0.7)),
    ),
    "gemma3": Space(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "hidden_activation": (..., "gelu_pytorch_tanh", "silu"),
            "use_bidirectional_attention": (..., False, False, True),
            "rms_norm_eps": EPS,
            "attention_bias": FLAG,
            "query_pre_attn_scalar": (16, 24, ...),
            "attn_logit_softcapping": (..., None, 5.0),
            "final_logit_softcapping": (..., None, 8.0),
            "sliding_window": (..., *WINDOW),
        },
        (sizes(dim="always"), by_kind("rope_local_base_freq"), layer_kinds(pattern="sliding_window_pattern")),
    ),
    "gemma3n": Space(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        {
            "hidden_activation": (..., "gelu_pytorch_tanh", "silu"),
            "rms_norm_eps": EPS,
            "attention_bias": FLAG,
            "final_logit_softcapping": (..., 8.0),
            "sliding_window": (..., *WINDOW),
            "altup_correct_scale": FLAG,
            "laurel_rank": (..., 3, 8),
            "hidden_size_per_layer_input": (4, 12),
            "pad_token_id": (0,),
        },
        (sizes(dim="always"), by_kind("rope_local_base_freq"), _gemma3n),
    ),
    "mimo_v2_flash": Space(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        _QWEN
        | {
            "attention_bias": FLAG,
            "attention_value_scale": (..., None, 0.5),
            "sliding_window": (..., *WINDOW),
            "sliding_window_size": (..., ..., 5),
            "norm_topk_prob": FLAG,
            "routed_scaling_factor": (..., None, 2.5),
        },
        (sizes(dim="always"), _mimo, experts(**_SPLIT_EXPERTS), groups),
    ),
    "gemma4": Space(*("Gemma4ForCausalLM", "gemma4_text", _GEMMA4), (sizes(dim="always"), _gemma4, _gemma4_parts)),
    "gemma4_unified": Space(
        *("Gemma4UnifiedForCausalLM", "gemma4_unified_text", _GEMMA4), (sizes(dim="always"), _gemma4)
    ),
    "phi3": Space(
        "Phi3ForCausalLM",
        "phi3",
        _QWEN
        | {
            "sliding_window": (..., None, *WINDOW),
            "original_max_position_embeddings": (..., 16, 32),
            "pad_token_id": (0,),
        },
        (sizes(dim="rare"), rotation("default", "longrope", partial=True)),
    ),
    "olmo": Space(
        *(
            "OlmoForCausalLM",
            "olmo",
            {"hidden_act": GATES, "attention_bias": FLAG, "pad_token_id": (0,)} | {"clip_qkv": (..., None, 0.5)},
        ),
        (sizes(dim="rare"), rotation()),
    ),
    "olmo2": Space(
        *("Olmo2ForCausalLM", "olmo2", _QWEN | {"attention_bias": FLAG, "pad_token_id": (0,)}),
        (sizes(dim="rare"), rotation()),
    ),
    "olmo3": Space(
        *(
            "Olmo3ForCausalLM",
            "olmo3",
            _QWEN | {"attention_bias": FLAG, "sliding_window": (..., *WINDOW), "pad_token_id": (0,)},
        ),
        (sizes(dim="rare"), by_kind(), layer_kinds()),
    ),
    "olmo_hybrid": Space(
        *(
            "OlmoHybridForCausalLM",
            "olmo_hybrid",
            _QWEN
            | {
                "hidden_act": (*_SILU, "swish"),
                "attention_bias": FLAG,
                "linear_allow_neg_eigval": FLAG,
                "pad_token_id": (0,),
            },
        ),
        (sizes(dim="rare"), rotation(), _separate_delta),
    ),
    "exaone4": Space(
        *("Exaone4ForCausalLM", "exaone4", _QWEN | {"sliding_window": (..., None, *WINDOW), "pad_token_id": (0,)}),
        (sizes(), rotation(), layer_kinds(pattern="sliding_window_pattern")),
    ),
    "granite": Space(
        *("GraniteForCausalLM", "granite", _GRANITE | {"mlp_bias": FLAG}), (sizes(dim="rare"), rotation())
    ),
    "granite_swa": Space(
        *("GraniteSWAForCausalLM", "granite_swa", _GRANITE | {"mlp_bias": FLAG, "sliding_window": (..., *WINDOW)}),
        (sizes(dim="rare"), rotation("default", "linear", "yarn"), layer_kinds(), _thetas),
    ),
    "granitemoe_swa": Space(
        "GraniteMoeSWAForCausalLM",
        "granitemoe_swa",
        _GRANITE | {"sliding_window": (..., *WINDOW), "shared_intermediate_size": (..., 0, 24)},
        (
            *(sizes(dim="rare"), rotation("default", "linear", "yarn"), layer_kinds(), _thetas),
            experts(total=("num_local_experts",), top=("num_experts_per_tok",)),
        ),
    ),
    "hyperclovax": Space(
        "HyperCLOVAXForCausalLM",
        "hyperclovax",
        _GRANITE | {"mlp_bias": FLAG, "use_post_norm": FLAG, "residual_multiplier": (..., 1, 1.0, 0.3)},
        (sizes(dim="rare"), rotation()),
    ),
    "granitemoe": Space(
        *("GraniteMoeForCausalLM", "granitemoe", _GRANITE),
        (sizes(dim="rare"), rotation(), experts(total=("num_local_experts",), top=("num_experts_per_tok",))),
    ),
    "granitemoeshared": Space(
        *("GraniteMoeSharedForCausalLM", "granitemoeshared", _GRANITE | {"shared_intermediate_size": (..., 0, 24)}),
        (sizes(dim="rare"), rotation(), experts(total=("num_local_experts",), top=("num_experts_per_tok",))),
    ),
    "granitemoehybrid": Space(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        _GRANITE
        | {
            "hidden_act": _SILU,
            "time_step_limit": _STEPS,
            "shared_intermediate_size": (24, 40),
            "position_embedding_type": (..., None, "nope", "rope"),
            "mamba_conv_bias": FLAG,
            "mamba_proj_bias": FLAG,
        },
        (
            *(sizes(dim="rare"), rotation("default", "linear", "yarn"), mamba, mamba_layers),
            experts(total=("num_local_experts",), top=("num_experts_per_tok",)),
            _no_experts,
        ),
    ),
    "bamba": Space(
        "BambaForCausalLM",
        "bamba",
        {
            "rms_norm_eps": EPS,
            "hidden_act": _SILU,
            "time_step_limit": _STEPS,
            "attention_bias": FLAG,
            "mlp_bias": FLAG,
            "mamba_conv_bias": FLAG,
            "mamba_proj_bias": FLAG,
        },
        (sizes(dim="rare"), mamba, rotation("default", "linear"), mamba_layers),
    ),
    "falcon_h1": Space(
        "FalconH1ForCausalLM",
        "falcon_h1",
        {
            "rms_norm_eps": EPS,
            "hidden_act": _SILU,
            "time_step_limit": _STEPS,
            "attention_bias": FLAG,
            "mlp_bias": FLAG,
            "projectors_bias": FLAG,
            "mamba_conv_bias": FLAG,
            "mamba_proj_bias": FLAG,
            "mamba_rms_norm": FLAG,
            "mamba_norm_before_gate": FLAG,
            "mlp_multipliers": (..., None, [0.5, 0.8], [1.0, 2.0]),
            "ssm_multipliers": (..., None, [0.3, 0.25, 0.7, 1.5, 0.5]),
        }
        | {
            f"{name}_multiplier": (..., 0.5, 1.5)
            for name in ("lm_head", "embedding", "key", "attention_out", "attention_in", "ssm_in", "ssm_out")
        },
        (sizes(dim="rare"), mamba, rotation("default", "linear", "yarn"), _own_size),
    ),
    "mamba2": Space(
        "Mamba2ForCausalLM",
        "mamba2",
        {
            "layer_norm_epsilon": EPS,
            "hidden_act": _SILU,
            "time_step_limit": _STEPS,
            "use_bias": FLAG,
            "use_conv_bias": FLAG,
            "residual_in_fp32": FLAG,
        },
        (_mamba_alone,),
    ),
    "lfm2": Space(
        *("Lfm2ForCausalLM", "lfm2", _LFM2),
        (sizes(dim="rare"), rotation(), convolutions, adjusted_size),
    ),
    "lfm2_moe": Space(
        *("Lfm2MoeForCausalLM", "lfm2_moe", _LFM2 | {"num_dense_layers": (..., 0, 1, 2)}),
        (
            *(sizes(dim="rare"), rotation(), convolutions),
            experts(
                total=("num_experts",),
                top=("num_experts_per_tok",),
                size=("moe_intermediate_size",),
                norm_topk_prob=FLAG,
                use_expert_bias=FLAG,
                routed_scaling_factor=(..., 1.0, 2.5),
            ),
        ),
    ),
    "nemotron_h": Space(
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            "layer_norm_epsilon": EPS,
            "tie_word_embeddings": (..., False),  # ties nothing, so that a body alone has no head
            "mlp_hidden_act": (..., "relu2", "relu2", "silu", "gelu"),
            "mamba_hidden_act": _SILU,
            "use_conv_bias": FLAG,
            "use_bias": FLAG,
            "time_step_min": (..., 0.001, 0.5),
            "time_step_limit": (..., [0.0, 1e30]),
            "rope_theta": (..., 10000),
            "sliding_window": (..., None),
            "attention_bias": (..., False),
            "residual_in_fp32": FLAG,
        },
        (
            sizes(dim="always"),
            experts(
                total=("n_routed_experts",),
                top=("num_experts_per_tok",),
                size=("moe_intermediate_size",),
                n_shared_experts=(..., 1),
                norm_topk_prob=FLAG,
                routed_scaling_factor=(..., 1.0, 2.5),
                moe_shared_expert_intermediate_size=(24, 40),
                moe_latent_size=(..., None, 16),
            ),
            groups,
            mixers,
        ),
    ),
    "smollm3": Space(
        "SmolLM3ForCausalLM",
        "smollm3",
        _QWEN
        | {
            "attention_bias": FLAG,
            "mlp_bias": FLAG,
            "no_rope_layer_interval": (..., 1, 2, 3),
            "no_rope_layers": (..., ..., None, [1, 0, 1, 0], [0, 0, 1, 1]),
            "use_sliding_window": FLAG,
            "sliding_window": (..., None, *WINDOW),
            "pad_token_id": (0,),
        },
        (sizes(), rotation(), layer_kinds(default=0.7)),
    ),
    "glm": Space(
        *("GlmForCausalLM", "glm", _QWEN | {"attention_bias": FLAG, "pad_token_id": (0,)}),
        (sizes(dim="always"), rotation(partial=True, default_fraction=0.5)),
    ),
    "glm4": Space(
        *("Glm4ForCausalLM", "glm4", _QWEN | {"attention_bias": FLAG, "pad_token_id": (0,)}),
        (sizes(dim="always"), rotation(partial=True, default_fraction=0.5)),
    ),
    "cohere": Space(
        "CohereForCausalLM",
        "cohere",
        {
            "hidden_act": GATES,
            "layer_norm_eps": EPS,
            "logit_scale": (..., 0.25, 1.0),
            "attention_bias": FLAG,
            "use_qk_norm": FLAG,
        },
        (sizes(dim="rare"), rotation()),
    ),
    "cohere2": Space(
        "Cohere2ForCausalLM",
        "cohere2",
        {
            "hidden_act": GATES,
            "layer_norm_eps": EPS,
            "logit_scale": (..., 0.25, 1.0),
            "attention_bias": FLAG,
            "sliding_window": (..., *WINDOW),
        },
        (sizes(), rotation(), layer_kinds(pattern="sliding_window_pattern")),
    ),
    "cohere2_moe": Space(
        "Cohere2MoeForCausalLM",
        "cohere2_moe",
        {
            "hidden_act": GATES,
            "layer_norm_eps": EPS,
            "rms_norm_eps": (None, *EPS),
            "logit_scale": (..., 0.25, 1.0),
            "attention_bias": FLAG,
            "sliding_window": (..., *WINDOW),
            "prefix_dense_intermediate_size": (..., None, 48),
            "prefix_dense_sliding_window_pattern": (..., 1, 2),
        },
        (
            *(sizes(dim="always"), rotation(), _in_rope_parameters),
            *(layer_kinds(pattern="sliding_window_pattern"), _mlp_kinds),
            experts(
                total=("num_experts",),
                top=("num_experts_per_tok",),
                expert_selection_fn=(..., "softmax", "sigmoid", "sigmoid"),
                norm_topk_prob=FLAG,
                num_shared_experts=(..., 0, 1, 2),
                shared_expert_combination_strategy=(..., "average", "sum"),
                first_k_dense_replace=(..., 0, 1, 2),
            ),
        ),
    ),
    "stablelm": Space(
        "StableLmForCausalLM",
        "stablelm",
        {
            "hidden_act": GATES,
            "layer_norm_eps": EPS,
            "use_qkv_bias": FLAG,
            "qk_layernorm": FLAG,
            "use_parallel_residual": FLAG,
        },
        (sizes(dim="none"), rotation(partial=True, default_fraction=0.25)),
    ),
    "phi": Space(
        "PhiForCausalLM",
        "phi",
        {"hidden_act": GATES, "layer_norm_eps": EPS, "qk_layernorm": (..., False)},
        (sizes(dim="none"), rotation(partial=True, default_fraction=0.5)),
    ),
    "phimoe": Space(
        "PhimoeForCausalLM",
        "phimoe",
        _QWEN
        | {
            "attention_bias": FLAG,
            "lm_head_bias": FLAG,
            "router_jitter_noise": (..., 0.1, 0.3),
            "sliding_window": (..., None, *WINDOW),
            "num_local_experts": (..., 2, 5, 8),
            "num_experts_per_tok": (..., 2),
        },
        (sizes(), _phimoe_rope),
    ),
    "starcoder2": Space(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {"hidden_act": GATES, "norm_epsilon": EPS, "use_bias": FLAG, "sliding_window": (..., None, *WINDOW)},
        (sizes(), rotation()),
    ),
    "falcon": Space(
        "FalconForCausalLM",
        "falcon",
        {
            "activation": GATES,
            "layer_norm_epsilon": EPS,
            "alibi": FLAG,
            "new_decoder_architecture": FLAG,
            "multi_query": FLAG,
            "parallel_attn": FLAG,
            "bias": FLAG,
            "num_ln_in_parallel_attn": (..., None, 1, 2),
        },
        (sizes(dim="none", kv="num_kv_heads", inner="ffn_hidden_size"), _no_inner, _alibi_or_rope),
    ),
    "gpt_neox": Space(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        {"hidden_act": GATES, "layer_norm_eps": EPS, "use_parallel_residual": FLAG, "attention_bias": FLAG},
        (sizes(dim="none", kv=None), _neox_rope),
    ),
    "codegen": Space(
        *("CodeGenForCausalLM", "codegen", {"activation_function": GATES, "layer_norm_epsilon": EPS}),
        (sizes(dim="none", kv=None), _gptj),
    ),
    "gptj": Space(
        *("GPTJForCausalLM", "gptj", {"activation_function": GATES, "layer_norm_epsilon": EPS}),
        (sizes(dim="none", kv=None), _gptj),
    ),
    "bloom": Space(
        "BloomForCausalLM",
        "bloom",
        {
            "layer_norm_epsilon": EPS,
            "apply_residual_connection_post_layernorm": FLAG,
            "pretraining_tp": (..., 1, 4),
            "slow_but_exact": FLAG,
        },
        (sizes(dim="none", kv=None), _bloom),
    ),
    "dbrx": Space(
        "DbrxForCausalLM",
        "dbrx",
        {"pad_token_id": (0,), "resid_pdrop": (..., 0.1), "tie_word_embeddings": (..., False)},
        (
            *(sizes(dim="none"), rotation("default", "linear", "llama3", "yarn"), _dbrx),
            names(
                hidden_size="d_model",
                num_attention_heads="n_heads",
                num_hidden_layers="n_layers",
                max_position_embeddings="max_seq_len",
            ),
        ),
    ),
    "mpt": Space(
        "MptForCausalLM",
        "mpt",
        {
            "layer_norm_epsilon": EPS,
            "attn_config": (..., {"clip_qkv": 0.5}, {"softmax_scale": 0.3, "alibi": True}, {"clip_qkv": None}),
            "no_bias": (..., True),
            "expansion_ratio": (..., 4, 2),
            "logit_scale": (..., None, 0.5),
            "norm_type": (..., "low_precision_layernorm", "layernorm"),
            "learned_pos_emb": FLAG,
            "embedding_fraction": (..., 0.5),
        },
        (
            sizes(dim="none", kv=None),
            names(
                hidden_size="d_model",
                num_attention_heads="n_heads",
                num_hidden_layers="n_layers",
                max_position_embeddings="max_seq_len",
            ),
        ),
    ),
    "opt": Space(
        "OPTForCausalLM",
        "opt",
        {
            "activation_function": GATES,
            "do_layer_norm_before": FLAG,
            "_remove_final_layer_norm": FLAG,
            "word_embed_proj_dim": (..., None, 24),
            "enable_bias": FLAG,
            "layer_norm_elementwise_affine": (..., True),
            "pad_token_id": (..., 1),
        },
        (sizes(dim="none", kv=None, inner="ffn_dim"),),
    ),
    "gpt2": Space(
        "GPT2LMHeadModel",
        "gpt2",
        {
            "activation_function": GATES,
            "layer_norm_epsilon": EPS,
            "scale_attn_weights": FLAG,
            "scale_attn_by_inverse_layer_idx": FLAG,
            "reorder_and_upcast_attn": FLAG,
        },
        (sizes(dim="none", kv=None), names(**_GPT), _no_inner),
    ),
    "gpt_bigcode": Space(
        "GPTBigCodeForCausalLM",
        "gpt_bigcode",
        {
            "activation_function": GATES,
            "layer_norm_epsilon": EPS,
            "scale_attn_weights": FLAG,
            "multi_query": FLAG,
        },
        (sizes(dim="none", kv=None), names(**_GPT), _no_inner),
    ),
    "gpt_neo": Space(
        "GPTNeoForCausalLM",
        "gpt_neo",
        {"activation_function": GATES, "layer_norm_epsilon": EPS, "window_size": WINDOW},
        (
            sizes(dim="none", kv=None),
            names(num_attention_heads="num_heads", num_hidden_layers="num_layers"),
            *(_local_layers, _no_inner),
        ),
    ),
    "nemotron": Space(
        "NemotronForCausalLM",
        "nemotron",
        {"hidden_act": (..., "relu2", *GATES), "norm_eps": EPS, "attention_bias": FLAG, "mlp_bias": FLAG},
        (sizes(), rotation(partial=True, default_fraction=0.5)),
    ),
    "jais2": Space(
        "Jais2ForCausalLM",
        "jais2",
        {"hidden_act": (..., "relu2", *GATES), "layer_norm_eps": EPS, "attention_bias": FLAG, "mlp_bias": FLAG},
        (sizes(), rotation()),
    ),
    "nanochat": Space(
        "NanoChatForCausalLM",
        "nanochat",
        {
            "hidden_act": (..., "relu2", *GATES),
            "rms_norm_eps": EPS,
            "attention_bias": FLAG,
            "final_logit_softcapping": (..., None, 2.0),
        },
        (sizes(), rotation()),
    ),
    "arcee": Space(
        "ArceeForCausalLM",
        "arcee",
        {"hidden_act": (..., "relu2", *GATES), "rms_norm_eps": EPS, "attention_bias": FLAG, "mlp_bias": FLAG},
        (sizes(), rotation()),
    ),
    "apertus": Space(
        *("ApertusForCausalLM", "apertus", {"hidden_act": (..., "xielu"), "rms_norm_eps": EPS}),
        (sizes(), rotation()),
    ),
    "afmoe": Space(
        "AfmoeForCausalLM",
        "afmoe",
        {
            "hidden_act": GATES,
            "rms_norm_eps": EPS,
            "mup_enabled": FLAG,
            "sliding_window": (..., *WINDOW),
            "num_dense_layers": (..., 0, 1, 2),
            "num_shared_experts": (..., 1, 2),
            "route_scale": (..., 2.5),
        },
        (
            *(sizes(dim="always"), rotation(), layer_kinds(pattern="global_attn_every_n_layers")),
            experts(total=("num_experts",), top=("num_experts_per_tok",), size=("moe_intermediate_size",)),
        ),
    ),
    "mistral4": Space(
        *("Mistral4ForCausalLM", "mistral4", _QWEN | {"attention_bias": FLAG, "rope_interleave": FLAG}),
        (
            *(latents, _tempered_latents),
            experts(**_SPLIT_EXPERTS, norm_topk_prob=FLAG, routed_scaling_factor=(..., 1.0, 2.5)),
            groups,
        ),
    ),
    "mixtral": Space(
        *("MixtralForCausalLM", "mixtral", _QWEN | {"sliding_window": (..., None, *WINDOW)}),
        (sizes(), rotation(), experts(total=("num_local_experts",), top=("num_experts_per_tok",))),
    ),
    "solar_open": Space(
        *("SolarOpenForCausalLM", "solar_open", _QWEN | {"attention_bias": FLAG}),
        (
            *(sizes(dim="always"), rotation(partial=True)),
            experts(**_SPLIT_EXPERTS, **{n: v for n, v in _SIGMOID.items() if n != "first_k_dense_replace"}),
            groups,
        ),
    ),
    "exaone_moe": Space(
        "ExaoneMoeForCausalLM",
        "exaone_moe",
        _QWEN | {"sliding_window": (..., *WINDOW)},
        (
            *(sizes(), rotation(), layer_kinds(pattern="sliding_window_pattern"), _mlp_kinds),
            experts(
                total=("num_experts",),
                top=("num_experts_per_tok",),
                size=("moe_intermediate_size",),
                num_shared_experts=(..., 1, 2),
                norm_topk_prob=FLAG,
                routed_scaling_factor=(..., 1.0, 2.5),
                first_k_dense_replace=(..., 0, 1, 2),
            ),
        ),
    ),
    "qwen2_moe": Space(
        *("Qwen2MoeForCausalLM", "qwen2_moe", _QWEN | _WINDOWS | {"qkv_bias": FLAG}),
        (
            *(sizes(), rotation(), layer_kinds(default=0.7), _no_windows_of_nothing, some_dense),
            experts(
                **_QWEN_EXPERTS,
                norm_topk_prob=FLAG,
                shared_expert_intermediate_size=(24, 40),
            ),
        ),
    ),
    "qwen3_moe": Space(
        *("Qwen3MoeForCausalLM", "qwen3_moe", _QWEN | _WINDOWS | {"attention_bias": FLAG}),
        (
            *(sizes(), rotation(), some_dense),
            experts(
                **_QWEN_EXPERTS,
                norm_topk_prob=FLAG,
            ),
        ),
    ),
    "mellum": Space(
        *("MellumForCausalLM", "mellum", _QWEN | {"attention_bias": FLAG, "sliding_window": (..., *WINDOW)}),
        (
            *(sizes(), _ropes_of_mellum, layer_kinds(), _mlp_kinds),
            experts(**_QWEN_EXPERTS, norm_topk_prob=FLAG),
        ),
    ),
    "olmoe": Space(
        *("OlmoeForCausalLM", "olmoe", _QWEN | {"attention_bias": FLAG, "clip_qkv": (..., None)}),
        (
            sizes(dim="rare"),
            rotation(),
            experts(total=("num_experts",), top=("num_experts_per_tok",), norm_topk_prob=FLAG),
        ),
    ),
    "flex_olmo": Space(
        *("FlexOlmoForCausalLM", "flex_olmo", _QWEN | {"attention_bias": FLAG, "pad_token_id": (0,)}),
        (
            *(sizes(dim="rare"), rotation()),
            experts(total=("num_experts",), top=("num_experts_per_tok",), norm_topk_prob=FLAG),
        ),
    ),
    "minimax_m2": Space(
        *("MiniMaxM2ForCausalLM", "minimax_m2", _QWEN),
        (
            *(sizes(dim="always"), rotation(partial=True), _rotary_dim),
            experts(total=("num_local_experts",), top=("num_experts_per_tok",)),
        ),
    ),
    "dots1": Space(
        "Dots1ForCausalLM",
        "dots1",
        _QWEN | {"attention_bias": FLAG, "sliding_window": (..., None, *WINDOW), "max_window_layers": (..., 0, 1)},
        (sizes(), rotation(), layer_kinds(default=0.7), experts(**_SPLIT_EXPERTS, **_SIGMOID), groups),
    ),
    "glm4_moe": Space(
        *("Glm4MoeForCausalLM", "glm4_moe", _QWEN | {"attention_bias": FLAG, "use_qk_norm": FLAG}),
        (
            sizes(dim="always"),
            rotation(partial=True, default_fraction=0.5),
            experts(**_SPLIT_EXPERTS, **_SIGMOID),
            groups,
        ),
    ),
    "deepseek_v2": Space(
        *("DeepseekV2ForCausalLM", "deepseek_v2", _QWEN | {"attention_bias": FLAG, "mlp_bias": (..., False, True)}),
        (
            *(latents, rotation("default", "yarn", "linear", columns="qk_rope_head_dim")),
            experts(
                **_SPLIT_EXPERTS,
                **_SIGMOID
                | {"norm_topk_prob": (..., False), "topk_method": (..., "greedy", "group_limited_greedy", "noaux_tc")},
            ),
            groups,
        ),
    ),
    "deepseek_v3": Space(
        *("DeepseekV3ForCausalLM", "deepseek_v3", _QWEN | {"attention_bias": FLAG, "rope_interleave": FLAG}),
        (
            *(latents, rotation("default", "yarn", "linear", columns="qk_rope_head_dim")),
            experts(
                **_SPLIT_EXPERTS, **_SIGMOID | {"topk_method": (..., "noaux_tc"), "scoring_func": (..., "sigmoid")}
            ),
            groups,
        ),
    ),
    "minicpm3": Space(
        "MiniCPM3ForCausalLM",
        "minicpm3",
        _QWEN
        | {
            "attention_bias": FLAG,
            "scale_emb": (..., 12, 1.5),
            "scale_depth": (..., None, 1.4),
            "dim_model_base": (..., None, 32),
        },
        (latents, rotation("default", "longrope", "linear", columns="qk_rope_head_dim")),
    ),
    "youtu": Space(
        *("YoutuForCausalLM", "youtu", _QWEN | {"attention_bias": FLAG, "rope_interleave": FLAG}),
        (latents, rotation("default", "yarn", "linear", columns="qk_rope_head_dim")),
    ),
    "glm4_moe_lite": Space(
        *("Glm4MoeLiteForCausalLM", "glm4_moe_lite", _QWEN | {"attention_bias": FLAG, "rope_interleave": FLAG}),
        (
            *(latents, rotation("default", "yarn", "linear", columns="qk_rope_head_dim"), _mlp_kinds),
            experts(**_SPLIT_EXPERTS, **_SIGMOID),
            groups,
        ),
    ),
    "gpt_oss": Space(
        "GptOssForCausalLM",
        "gpt_oss",
        {
            "rms_norm_eps": EPS,
            "hidden_act": _SILU,
            "attention_bias": FLAG,
            "sliding_window": (..., *WINDOW),
            "swiglu_limit": (..., 7.0, 1.0),
            "swiglu_alpha": (..., 1.5),
        },
        (
            *(sizes(dim="always"), rotation("default", "yarn", "linear"), layer_kinds()),
            experts(total=("num_local_experts",), top=("num_experts_per_tok",)),
        ),
    ),
    "qwen3_next": Space(
        *("Qwen3NextForCausalLM", "qwen3_next", _QWEN | {"hidden_act": _SILU, "attention_bias": FLAG}),
        (
            *(sizes(dim="always"), rotation(partial=True, default_fraction=0.25), delta, some_dense),
            experts(
                **_QWEN_EXPERTS,
                norm_topk_prob=FLAG,
                shared_expert_intermediate_size=(24, 40),
            ),
        ),
    ),
    "qwen3_5": Space(
        *("Qwen3_5ForCausalLM", "qwen3_5_text", _QWEN | {"hidden_act": _SILU, "attention_bias": FLAG}),
        (sizes(dim="always"), rotation(partial=True, default_fraction=0.25), delta),
    ),
    "qwen3_5_moe": Space(
        *("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _QWEN | {"hidden_act": _SILU, "attention_bias": FLAG}),
        (
            *(sizes(dim="always"), rotation(partial=True, default_fraction=0.25), delta),
            experts(
                **_QWEN_EXPERTS,
                shared_expert_intermediate_size=(24, 40),
            ),
        ),
    ),
}
