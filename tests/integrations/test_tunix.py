"""jpaged as Tunix' rollout engine, with the released google-tunix (`make test-tunix`)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

pytest.importorskip("tunix", reason="needs google-tunix: make test-tunix")

from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout import base_rollout

from jpaged.api.errors import InvalidParameterError
from jpaged.integrations.tunix import JpagedRollout, TunixModel
from jpaged.models import ModelConfig, build
from tests.tiny_models import TINY_ENGINE, tiny_model

EOS, PAD = 1, 0


class Letters:
    """A tokenizer of letters."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))

    def bos_id(self) -> int:
        return 2

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


ENGINE = {name: value for name, value in TINY_ENGINE.items() if name != "max_model_len"} | {"batch_invariant": True}


def rollout_config(**options: Any) -> base_rollout.RolloutConfig:
    return base_rollout.RolloutConfig(
        **{"max_tokens_to_generate": 6, "temperature": 1.0, "max_prompt_length": 8, "return_logprobs": True} | options
    )


def policy(seed: int) -> TunixModel:
    model = build(ModelConfig.from_dict(tiny_model("llama-biases").config), "float32")
    return TunixModel(model, model.init(seed))


@pytest.fixture(scope="module")
def rollout() -> JpagedRollout:
    return JpagedRollout(policy(0), Letters(), rollout_config=rollout_config(), **ENGINE)


def test_a_rollout_has_what_tunix_expects(rollout):
    output = rollout.generate(["ab", "hello"], rollout_config(seed=jax.random.key(3)))
    assert output.left_padded_prompt_tokens.tolist() == [
        [PAD] * 5 + [2, ord("a"), ord("b")],
        [PAD] * 2 + [2, *map(ord, "hello")],
    ]
    assert [len(tokens) for tokens in output.tokens] == [len(logprobs) for logprobs in output.logprobs]
    assert output.text == [Letters().decode(tokens.tolist()) for tokens in output.tokens]
    again = rollout.generate(["ab", "hello"], rollout_config(seed=jax.random.key(3)))
    other = rollout.generate(["ab", "hello"], rollout_config(seed=jax.random.key(4)))
    assert [t.tolist() for t in again.tokens] == [t.tolist() for t in output.tokens]
    assert [t.tolist() for t in other.tokens] != [t.tolist() for t in output.tokens]
    with pytest.raises(InvalidParameterError, match="prompt 1 has 10 tokens, more than max_prompt_length=8"):
        rollout.generate(["a", "ninechars"], rollout_config())


def test_log_probabilities_are_those_of_the_rollout_to_the_bit_and_follow_the_weights(rollout):
    for seed in (5, 6):
        rollout.update_params(nnx.state(policy(seed), nnx.Param))
        output = rollout.generate(["abc", "b"], rollout_config(eos_tokens=[EOS]))
        completions = np.full((2, 9), PAD, np.int32)
        for row, tokens in zip(completions, output.tokens, strict=True):
            row[: len(tokens)] = tokens
        found = np.asarray(rollout.get_per_token_logps(jnp.asarray(output.left_padded_prompt_tokens), completions))
        for row, tokens, logprobs in zip(found, output.tokens, output.logprobs, strict=True):
            assert row[: len(tokens)].tolist() == logprobs.tolist()
            assert not row[len(tokens) :].any()


def test_a_model_that_is_not_ours_needs_a_map_of_its_weights():
    with pytest.raises(InvalidParameterError, match=r"give config=\.\.\. and to_weights=\.\.\."):
        JpagedRollout(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), Letters(), rollout_config=rollout_config())


def test_grpo_of_tunix_trains_on_rollouts_of_jpaged():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    actor = policy(0)
    before = jax.tree.map(jnp.copy, nnx.state(actor, nnx.Param))
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys((rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh),
        rollout_engine=partial(JpagedRollout, **ENGINE),
        offload_to_cpu=False,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.sgd(0.1), eval_every_n_steps=100, max_steps=2, mini_batch_size=2
        ),
        rollout_config=rollout_config(),
    )
    cluster = rl_cluster.RLCluster(actor=actor, reference=policy(0), tokenizer=Letters(), cluster_config=config)
    seen: list[list[str]] = []

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        seen.append(completions)
        return [float(sum(letter < "P" for letter in text)) for text in completions]

    algorithm = GRPOConfig(num_generations=4, num_iterations=1, beta=0.1)
    learner = GRPOLearner(cluster, reward_fns=reward, algo_config=algorithm)
    learner.train([{"prompts": np.array(["ab", "cd"])}] * 2)
    assert sum(map(len, seen)) == 16
    actor = cluster.actor_trainer.model  # a copy on its mesh
    trained = nnx.state(actor, nnx.Param)
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(trained), strict=True))
    sampled = cluster.rollout.llm.weights_as("state")
    expected = nnx.state(actor.module, nnx.Param)
    for one, other in zip(jax.tree.leaves(sampled), jax.tree.leaves(expected), strict=True):
        assert (one == other).all()
