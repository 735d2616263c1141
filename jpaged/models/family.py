"""The contract of a model family: how config.json becomes a configuration, a Flax module, and a map of its checkpoint.

`jpaged.models.register` makes a family known. docs/adding_a_model.md adds one in a file outside this package.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.models.collectives import Collectives
from jpaged.models.config_reader import ConfigReader
from jpaged.models.loading.pieces import Piece, TiedTensor
from jpaged.models.residual import PLAIN_XLA, Kernels
from jpaged.pallas_kernels import Expansion

Config = TypeVar("Config")
"""A family's configuration: a frozen dataclass derived from `ModelConfig`."""


TEXT_PART_NAMES = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
)
"""`aliases` of a family whose models may be the text part of a multimodal checkpoint."""

OTHER_PARTS = r"^(model\.)?(vision_tower|multi_modal_projector|mm_projector)\."
"""The other parts of such a checkpoint, for `derived_tensors`."""

SIGHT_AND_SOUND = r"^(model\.)?(vision_tower|vision_embedder|audio_tower|embed_vision|embed_audio)\."
"""Likewise of Gemma 3n and 4."""


def unread_keys_and_values(layer_sources: Sequence[int | None]) -> str:
    """For `passed_over`: projections and norms of keys and values that checkpoints hold of layers that read others'.

    layer_sources: of a `ModelConfig`.
    """
    layers = "|".join(str(layer) for layer, source in enumerate(layer_sources) if source is not None)
    return rf"layers\.({layers})\.self_attn\.[kv]_(proj|norm)\." if layers else ""


class Attend(Protocol):
    """What a layer calls for attention; the caller decides where keys and values live.

    qkv: [T, kv_heads, group + 2, head_dim]: of each key-value head the queries that read it, its key, its value.
        `rotation`, `norms` and `norm_eps` make them what attention takes: see `pallas_kernels.split_qkv`, which does
        just that. A caller's `attend` that has `takes_sums` set may get the `Sums` of a product instead, whose scales
        are still to be multiplied.
        Of a layer that reads the keys and values of another (`ModelConfig.layer_sources`) queries alone, normed
        already, [T, kv_heads, group, head_dim] (`pallas_kernels.split_queries`). A caller's one `attend` for all layers
        never gets these, but the other's keys and values with them (`run_layers`).
    scale: multiplies the product of query and key.
    sliding_window: tokens that a query sees, itself included; None for all before it.
    chunked: of these it sees only its own chunk: chunks of sliding_window tokens follow each other from a sequence's
        first token on. The caller gives it only where a layer has such chunks.
    sinks: [heads], logits without values that join each softmax; the caller gives them only where a layer has some.
    value_dim: qkv has no values, [T, kv_heads, group + 1, head_dim]: they are the first so many columns of the keys, of
        which the cache keeps nothing else (`pallas_kernels.split_latents`). Given only where `ModelConfig.value_dim`
        says so, and equal to it; without rotation and norms, which such a layer has done.
    expansion: with value_dim, and only to a caller's `attend` that has `takes_expansion` set: what makes queries, keys
        and values of heads (`pallas_kernels.expanded_attention`).
    Returns [T, heads, head_dim], or [T, heads, value_dim], or with an expansion the values of heads,
    [T, heads, head_values].
    """

    def __call__(
        self,
        qkv: Any,
        *,
        rotation: tuple[jax.Array, jax.Array] | None,
        norms: tuple[jax.Array, jax.Array] | None,
        norm_eps: float,
        scale: float,
        sliding_window: int | None = None,
        chunked: bool = False,
        logit_softcap: float | None = None,
        alibi_slopes: jax.Array | None = None,
        sinks: jax.Array | None = None,
        value_dim: int | None = None,
        expansion: Expansion | None = None,
    ) -> jax.Array: ...


class CausalLM(Protocol):
    """A family's module, a `flax.nnx.Module`. Its parameters are made by `parameters.parameter`, as those of `Linear`,
    `Embedding` and the norms are.
    """

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend | list[Any], kernels: Kernels = PLAIN_XLA
    ) -> jax.Array:
        """int32 tokens [T] and their positions [T] -> hidden states [T, hidden], after the final norm if any.

        attend: one for all layers, or a list of one a layer, which `layers.run_layers` updates.
        kernels: for `residual.begin_stream`.
        """

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [R, hidden] -> float32 [R, vocab]; a shard's part of the vocabulary from a shard."""


class Family(Protocol[Config]):
    """What `register` takes.

    model_type: config.json's "model_type", which stands in for missing "architectures".
    base_prefix: what the names of a checkpoint begin with; checkpoints of the bare body leave it out.
    derived_tensors: a regular expression that finds names of stored tensors that hold no weights, such as causal masks,
        or that are of a part which is not run, such as a vision tower. They are left unread; "" for none.

    A family may also have `other_types`: further values of "model_type", such as that of multimodal models. And
    `aliases`: pairs of what a tensor's name may begin with in a checkpoint, and what it begins with in `tensors`; for
    the text part of multimodal checkpoints. It may be a method that gives them for a configuration. And
    `quantizations`: values of "quant_method" in config.json's "quantization_config" of which loading makes plain
    numbers with quantization="none" ("mxfp4"). And `passed_over`: from a configuration another regular expression like
    `derived_tensors`, for layers that are not run. And `probed_tensor`: the name of an entry, and what a tensor's name
    ends with. Where a directory has tensors, config.json is read with two entries more: this one, whether there is such
    a tensor, and with "_shape" at its end, the shape of the first one.
    """

    @property
    def model_type(self) -> str: ...

    @property
    def base_prefix(self) -> str: ...

    @property
    def derived_tensors(self) -> str: ...

    def read_config(self, read: ConfigReader, /) -> Config:
        """The configuration in a config.json.

        Raises:
            UnsupportedModelError: it asks for a feature that the family does not implement.
            CheckpointError: a needed entry is missing or of the wrong type.
        """

    def module(self, config: Config, dtype: jnp.dtype, rngs: nnx.Rngs, collectives: Collectives, /) -> CausalLM:
        """The module.

        config: of the whole model, or of one shard (`ModelConfig.shard`).
        dtype: of weights and residual stream.
        collectives: of the shards that the model is split into; `ALONE` for a whole model.
        """

    def tensors(self, config: Config, /) -> Iterable[Piece | TiedTensor]:
        """Every tensor of a checkpoint, in the order in which checkpoints are written."""
