"""jpaged as the rollout engine of Tunix (google-tunix 0.1.7): `JpagedRollout`, which its `RLCluster` takes.

    policy = TunixModel(model, weights)            # a jpaged model, as Tunix' trainers call models
    ClusterConfig(rollout_engine=functools.partial(JpagedRollout, batch_invariant=True), ...)

Weights stay on the device: `update_params` gives the trainer's arrays to `LLM.update_weights`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.api.errors import InvalidParameterError, MissingPackageError
from jpaged.api.outputs import RequestOutput
from jpaged.api.sampling_params import SamplingParams
from jpaged.executor.start.startup import Startup
from jpaged.frontend.llm_engine import LLMEngine
from jpaged.llm import LLM
from jpaged.models import Model, Weights, dense_causal_attend
from jpaged.training import token_logprobs

try:
    from tunix.rl.rollout import base_rollout
except ImportError as error:
    raise MissingPackageError(
        f"jpaged.integrations.tunix needs google-tunix: pip install 'jpaged[tunix]'. ({error})"
    ) from error


class TunixModel(nnx.Module):
    """A jpaged model with the signature by which Tunix' trainers call models. They train its parameters.

    model: `jpaged.models.build(config, dtype)`. weights: of `model.init` or `jpaged.models.load`.
    """

    def __init__(self, model: Model, weights: Weights) -> None:
        self.jpaged_model = model
        self.module: Any = model.module(weights)

    def __call__(
        self,
        input_tokens: jax.Array,
        positions: jax.Array,
        cache: Any = None,
        attention_mask: jax.Array | None = None,
        **_: Any,
    ) -> tuple[jax.Array, None]:
        """int32 tokens and positions [batch, length] -> float32 logits [batch, length, vocab], and no cache.

        attention_mask: bool [batch, length, length], causal; padding sees nothing. Segment ids, which say the same of
            sequences that are not packed, are not looked at.
        Raises:
            InvalidParameterError: a cache is given; a jpaged engine samples, not this module.
        """
        if cache is not None:
            raise InvalidParameterError("TunixModel has no cache: use JpagedRollout for rollouts, not 'vanilla'.")
        live = jnp.ones(input_tokens.shape, bool)
        if attention_mask is not None:
            live = jnp.diagonal(attention_mask, axis1=-2, axis2=-1)

        def hidden_of(tokens: jax.Array, positions: jax.Array, live: jax.Array) -> jax.Array:
            attend: Any = partial(dense_causal_attend, segment_ids=live.astype(jnp.int32))
            return self.module(tokens, positions, attend)

        hidden = jax.vmap(hidden_of)(input_tokens, positions, live)
        logits = self.module.logits(hidden.reshape(-1, hidden.shape[-1]))
        return logits.reshape(*input_tokens.shape, -1), None


class JpagedRollout(base_rollout.BaseRollout):
    """Rollouts by a jpaged engine in the trainer's process.

    Args:
        rollout_actor: the model whose weights are sampled from: a `TunixModel`, or any module together with `config`
            and `to_weights`.
        tokenizer: of Tunix, with encode, decode, bos_id, eos_id and pad_id.
        mesh: not used: `tensor_parallel_size` says how the engine is split.
        rollout_config: of the lengths that requests may have. `generate` takes the rest from its own argument.
        config: the model's configuration, as `LLM` takes it; of a `TunixModel`, its own.
        to_weights: makes what `LLM.update_weights` takes of the module's `nnx.State`, such as arrays by the names of
            the Hugging Face checkpoint.
        options: of `LLM`, such as dtype, gpu_memory_utilization, batch_invariant. logprobs_mode is
            "processed_logprobs" unless given, as Tunix has it of its other engines.
    Raises:
        InvalidParameterError: a model that is no `TunixModel`, without `config` and `to_weights`; or as `LLM`.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Any = None,
        rollout_config: base_rollout.RolloutConfig | None = None,
        *,
        config: Any = None,
        to_weights: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(rollout_actor, TunixModel):
            config = config or rollout_actor.jpaged_model.config
            to_weights = to_weights or _of_tunix_model
            options.setdefault("dtype", np.dtype(rollout_actor.jpaged_model.dtype).name)
        if config is None or to_weights is None:
            raise InvalidParameterError(
                f"rollout_actor is a {type(rollout_actor).__name__}: give config=... and to_weights=..., by"
                " functools.partial(JpagedRollout, ...), or make it a TunixModel."
            )
        if options.get("data_parallel_size", 1) != 1:
            raise InvalidParameterError("JpagedRollout has its engine in this process: leave out data_parallel_size.")
        self._tokenizer, self._to_weights = tokenizer, to_weights
        if rollout_config is not None:
            longest = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
            limit = getattr(config, "max_position_embeddings", longest)
            options.setdefault("max_model_len", min(longest, limit))
        options = {"logprobs_mode": "processed_logprobs", "skip_tokenizer_init": True, "verbose": False} | options
        self.llm = LLM(config, weights=to_weights(nnx.state(rollout_actor, nnx.Param)), **options)

    def generate(
        self, prompts: list[str], rollout_config: base_rollout.RolloutConfig, **kwargs: Any
    ) -> base_rollout.RolloutOutput:
        """One completion of each prompt. `tokens` keep the end-of-sequence token; `logits` is empty.

        Raises:
            InvalidParameterError: a prompt has more than max_prompt_length tokens, or arguments that are not known.
        """
        if kwargs:
            raise InvalidParameterError(f"generate has no argument {next(iter(kwargs))!r}; leave it out.")
        ids = [self._encode(prompt) for prompt in prompts]
        width = rollout_config.max_prompt_length
        for number, tokens in enumerate(ids):
            if len(tokens) > width:
                raise InvalidParameterError(
                    f"prompt {number} has {len(tokens)} tokens, more than max_prompt_length={width}; raise that."
                )
        params = [self._sampling(rollout_config, number) for number in range(len(ids))]
        outputs: list[RequestOutput] = self.llm.generate(ids, params, use_tqdm=False)
        completions = [output.outputs[0] for output in outputs]
        sampled = [np.array(completion.token_ids, np.int32) for completion in completions]
        padded = np.full((len(ids), width), self.pad_id(), np.int32)
        for row, prompt in zip(padded, ids, strict=True):
            row[width - len(prompt) :] = prompt
        logprobs = None
        if rollout_config.return_logprobs:
            logprobs = [
                np.array([at[token].logprob for at, token in zip(one.logprobs or (), one.token_ids, strict=True)], "f4")
                for one in completions
            ]
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(list(completion.token_ids)) for completion in completions],
            logits=[],
            tokens=sampled,
            left_padded_prompt_tokens=padded,
            logprobs=logprobs,
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Log-probabilities of completions under the engine's weights, of the model's own distribution.

        prompt_tokens: [batch, P], padded on the left. completion_tokens: [batch, C], padded on the right.
        Returns float32 [batch, C]; 0 for padding. In an engine with batch_invariant=True they are those of the rollout,
        to the bit.
        """
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        starts = _leading(prompts, self.pad_id())
        ends = _lengths(completions, self.pad_id(), self.eos_id())
        width = prompts.shape[1]
        joined = np.concatenate([prompts, completions], axis=1)
        tokens = np.zeros_like(joined)
        for row, start in enumerate(starts):
            tokens[row, : joined.shape[1] - start] = joined[row, start:]
        startup = self._startup()
        lengths = (width - starts + ends).astype(np.int32)
        found = token_logprobs(
            startup.model,
            startup.runner.weights,
            jnp.asarray(tokens),
            jnp.asarray(lengths),
            batch_invariant=startup.args.batch_invariant,
            kernel_backend=startup.args.kernel_backend if startup.args.batch_invariant else None,
        )
        places = (width - starts)[:, None] + np.arange(completions.shape[1])
        return jnp.take_along_axis(found, jnp.asarray(places), axis=1)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Gives the engine new weights; all of them.

        params: an `nnx.State` of a module like `rollout_actor`, or a tree of the same structure.
        Raises:
            InvalidParameterError: arrays are missing, surplus or of another shape, as with parameters of LoRA alone:
                merge them first.
        """
        del filter_types  # what arrived says itself what it is
        # Tunix forbids transfers meanwhile, on a CPU. Weights make none; where they go are small numbers that do.
        with jax.transfer_guard("allow"):
            self.llm.update_weights(self._to_weights(params))

    def pad_id(self) -> int:
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module:
        """A `TunixModel` of the engine's own arrays, until the next `update_params`. Not `rollout_actor`: Tunix leaves
        out updates of rollouts whose model shares the trainer's arrays."""
        startup = self._startup()
        weights = startup.runner.weights
        assert weights is not None  # it never sleeps
        return TunixModel(startup.model, weights)

    def _startup(self) -> Startup:
        assert isinstance(self.llm.engine, LLMEngine)
        return self.llm.engine.startup

    def _encode(self, prompt: str) -> list[int]:
        """As Tunix' own engines do it: behind the token that begins sequences, if there is one, once."""
        tokens, begin = list(self._tokenizer.encode(prompt)), self._tokenizer.bos_id()
        has_one = begin is None or begin < 0 or not begin or tokens[:1] == [begin]
        return tokens if has_one else [begin, *tokens]

    def _sampling(self, config: base_rollout.RolloutConfig, number: int) -> SamplingParams:
        seed = None if config.seed is None else (int(np.asarray(jax.random.bits(_key(config.seed)))) << 16) + number
        return SamplingParams(
            max_tokens=config.max_tokens_to_generate,
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=0 if config.top_k is None or config.top_k < 0 else config.top_k,
            seed=seed,
            stop_token_ids=config.eos_tokens or [self.eos_id()],
            logprobs=0 if config.return_logprobs else None,
        )


def _key(seed: Any) -> jax.Array:
    """A key, from one or from a number."""
    array = jnp.asarray(seed)
    return jax.random.key(array) if array.ndim == 0 and jnp.issubdtype(array.dtype, jnp.integer) else array


def _of_tunix_model(params: Any) -> Any:
    """The state of the module in a `TunixModel`, of its own state."""
    found = params.get("module", params)
    return found if isinstance(found, nnx.State) else nnx.State(found)


def _leading(rows: np.ndarray, pad: int) -> np.ndarray:
    """How many pads each row begins with."""
    return np.cumprod(rows == pad, axis=1).sum(axis=1)


def _lengths(rows: np.ndarray, pad: int, end: int) -> np.ndarray:
    """Tokens of each row up to its first end, that included, or to the pads behind it."""
    is_end = rows == end
    to_end = np.where(is_end.any(axis=1), is_end.argmax(axis=1) + 1, rows.shape[1])
    return to_end if pad == end else np.minimum(to_end, rows.shape[1] - _leading(rows[:, ::-1], pad))
