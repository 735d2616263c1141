"""What `tests/models/test_norms.py` has done in a process of eight devices."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from jpaged.models import ModelConfig, build, dense_causal_attend, register
from jpaged.models.collectives import Exchange, ExchangeState
from jpaged.models.families.llama import QWEN3, LlamaFamily, LlamaForCausalLM
from jpaged.models.norms import RMSNorm
from jpaged.models.residual import Kernels
from jpaged.models.sharding import MODEL_AXIS, load_sharded, shard_of
from jpaged.pallas_kernels import initial_all_reduce_state
from jpaged.pallas_kernels.common.numerics import rms_norm
from tests.parallel.models import eight_heads

ROWS, DEVICES = 6, 2


class OnePlus(RMSNorm):
    """Gemma's norm: times 1 + w. Kernels may compute it."""

    def multiplier(self) -> jax.Array:
        return 1 + self.scale[...]


class OnePlusByCall(RMSNorm):
    """The same, by a call of its own, of which kernels know nothing."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, 1 + self.scale[...], self.eps)


@dataclass(frozen=True)
class OnePlusFamily(LlamaFamily):
    """Qwen3 with norms of another kind."""

    norm: type[RMSNorm] = RMSNorm

    def module(self, config: Any, *arguments: Any) -> LlamaForCausalLM:
        module = super().module(config, *arguments)
        for _, part in nnx.iter_modules(module):
            for name, norm in list(vars(part).items()):
                if isinstance(norm, RMSNorm):
                    size = norm.scale.shape[0]
                    setattr(part, name, self.norm(size, norm.eps, norm.scale.dtype, nnx.Rngs(0)))
        return module


def hidden_states() -> dict[str, Any]:
    """The greatest difference, beside their size, of hidden states from those of a plain model whose norms' weights are
    greater by one: for each kind of norm on one device, and on two by the exchange, whose kernel adds and norms.
    """
    case = eight_heads("qwen3-tied-d64")
    tokens = jnp.arange(3, 3 + ROWS)
    plain = build(ModelConfig.from_dict(case.config), "float32")
    doubled = [
        weight + 1 if name.endswith("norm.scale") else weight
        for name, weight in zip(plain.parameter_names, plain.init(3), strict=True)
    ]
    want = np.asarray(plain.forward(doubled, tokens, tokens, dense_causal_attend))
    found: dict[str, Any] = {}
    for kind in (RMSNorm, OnePlus, OnePlusByCall):
        register("OnePlusForCausalLM", OnePlusFamily("one_plus", QWEN3.reads, kind))
        model = build(ModelConfig.from_dict(case.config | {"architectures": ["OnePlusForCausalLM"]}), "float32")
        one = model.forward(model.init(3), tokens, tokens, dense_causal_attend)
        errors = [float(np.abs(hidden - want).max() / np.abs(want).max()) for hidden in (one, _on_two(model, tokens))]
        found[kind.__name__] = errors
    return found


def _on_two(model: Any, tokens: jax.Array) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:DEVICES]), (MODEL_AXIS,))
    shard = shard_of(model, DEVICES)
    weights = load_sharded(model, shard, mesh, None, "dummy", seed=3)
    inbox, generations = initial_all_reduce_state(DEVICES, ROWS, model.config.hidden_size, model.dtype)

    def run(weights: Any) -> jax.Array:
        state = ExchangeState(jnp.zeros(inbox.shape, inbox.dtype), jnp.zeros(generations.shape, generations.dtype))
        exchange = Exchange.begin(state, shard.collectives, None)
        return shard.forward(weights, tokens, tokens, dense_causal_attend, Kernels(exchange))

    specs = (tuple(weight.sharding.spec for weight in weights),)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    return np.asarray(jax.jit(mapped)(weights))
