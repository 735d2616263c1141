"""Replicas in processes of their own: the tokens of one engine, and what happens when one ends."""

from dataclasses import replace
from typing import Any

import pytest

from jpaged import EngineArgs, LLMEngine
from jpaged.api.errors import InvalidParameterError
from jpaged.host.devices import replica_environments, visible_gpus
from tests.parallel.eight_devices import call_with_eight_devices

one_process = pytest.mark.xdist_group("data-parallel")
ARGS = EngineArgs(data_parallel_size=2, tensor_parallel_size=2)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return call_with_eight_devices("tests.parallel.data_parallel_runs:two_replicas_of_four_shards", "opt-125m-style")


@one_process
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_two_replicas_of_four_shards_give_the_tokens_of_one_device(found, kind):
    one, two = found[kind]
    assert two == one
    assert min(found["preemptions_and_hits"]) > 0


@one_process
def test_replicas_score_given_tokens_as_one_device_does(found):
    one, two = found["scores"]
    assert two["greedy"] == one["greedy"]
    assert two["logprobs"] == pytest.approx(one["logprobs"], rel=1e-5, abs=1e-5)
    assert found["wrong_score"][0] == "InvalidParameterError"


@one_process
def test_replicas_embed_as_one_device_does(found):
    one, two = found["embeddings"]
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert b == pytest.approx(a, abs=1e-5)


@one_process
def test_a_prefix_is_pinned_on_every_replica_or_on_none(found):
    assert found["pinned_tokens"] == 8
    assert found["beside"] == ["beside"]
    assert found["hits"] == [8, 8]
    assert found["too_long"][0] == "OutOfMemoryError"
    assert found["unpinned"] == [True, False, False]


@one_process
def test_both_replicas_serve_and_their_counters_are_summed(found):
    assert min(found["by_replica"]) > 0
    assert sum(found["by_replica"]) == found["finished"] == 16
    assert found["reset"] is True


@one_process
def test_a_request_that_cannot_be_served_is_refused_at_once_and_alone(found):
    assert found["wrong_token"][0] == "InvalidPromptError"
    assert found["still_serves"] > 0


@one_process
def test_a_killed_replica_ends_the_engine_with_its_cause(found):
    name, message = found["killed"]
    assert name == "EngineDeadError"
    assert "Replica 1 was killed by SIGKILL" in message
    assert found["afterwards"][0] == "EngineDeadError"
    assert found["others_ended"] == [True, True]


@one_process
def test_a_replica_that_cannot_start_says_why(found):
    name, message = found["no_start"]
    assert name == "InvalidParameterError"
    assert "tensor_parallel_size=16" in message


def test_each_replica_sees_only_its_own_gpus():
    environment = {"CUDA_VISIBLE_DEVICES": "4,5,6,7,0"}
    seen = [own["CUDA_VISIBLE_DEVICES"] for own in replica_environments(ARGS, environment)]
    assert seen == ["4,5", "6,7"]


def test_more_replicas_than_gpus_are_refused():
    with pytest.raises(InvalidParameterError, match="needs 4 GPUs, but 3 are visible"):
        replica_environments(ARGS, {"CUDA_VISIBLE_DEVICES": "0,1,2"})


def test_on_a_cpu_there_are_no_gpus_to_divide():
    environment = {"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": "cpu"}
    assert visible_gpus(environment) == []
    assert [own["CUDA_VISIBLE_DEVICES"] for own in replica_environments(ARGS, environment)] == ["0,1"] * 2


def test_a_cpu_is_not_flooded_with_replicas():
    few = replace(ARGS, data_parallel_size=8)
    assert len(replica_environments(few, {"JAX_PLATFORMS": "cpu"})) == 8
    with pytest.raises(InvalidParameterError, match="data_parallel_size=4000 would start"):
        replica_environments(replace(ARGS, data_parallel_size=4000), {"JAX_PLATFORMS": "cpu"})


def test_one_engine_is_one_replica():
    with pytest.raises(InvalidParameterError, match="data_parallel_size=2"):
        LLMEngine(replace(ARGS, tensor_parallel_size=1))
