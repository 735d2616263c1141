"""One model over two processes that `jax.distributed` joins: the tokens of one process."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from jpaged import EngineArgs
from jpaged.api.errors import InvalidParameterError
from jpaged.api.sampling_params import SamplingParams
from jpaged.engine.interface import Chunk, SamplingVariant, SlotStart, StepPlan
from jpaged.executor import plan_codec
from jpaged.executor.distributed import Cluster, lead, run_worker
from tests.parallel.eight_devices import ROOT, xla_flags
from tests.parallel.models import eight_heads
from tests.tiny_models import write_tiny_model

LEADER = """
import json, sys
from dataclasses import replace
from jpaged import LLMEngine
from tests.parallel.tensor_parallel_runs import ARGS, prompts, run
import jax
options = json.loads(sys.argv[1])
engine = LLMEngine(replace(ARGS, **options))
found = [jax.process_count(), len(jax.devices())]
found += [run(engine, prompts(), **params) for params in ({}, {"temperature": 0.9}, {"temperature": 0.9, "top_p": 0.8})]
engine.close()
found.append(all(pool.is_deleted() for pool in engine.startup.runner.pools))
print(json.dumps(found))
"""


def environment(devices: int) -> dict[str, str]:
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(devices)}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_two_processes_of_two_devices_give_the_tokens_of_one_process_of_one(tmp_path):
    # Its one layer has four norms, which with the last one are a bundle, made of arrays that span both processes.
    directory = write_tiny_model(eight_heads("glm4", num_hidden_layers=1), tmp_path, use_torch=False)
    alone = subprocess.run(
        [sys.executable, "-c", LEADER, json.dumps({"model": str(directory)})],
        cwd=ROOT,
        env=environment(1),
        capture_output=True,
        text=True,
        timeout=600,
    )
    cluster = {"coordinator_address": f"127.0.0.1:{free_port()}", "num_processes": 2}
    options = cluster | {"model": str(directory), "tensor_parallel_size": 4, "process_id": 0}
    variables = {f"JAX_{name.upper()}": str(value) for name, value in (cluster | {"process_id": 1}).items()}
    with subprocess.Popen(
        [sys.executable, "-m", "jpaged", "--debug", "worker"],
        cwd=ROOT,
        env=environment(2) | variables,
        stderr=subprocess.PIPE,
        text=True,
    ) as worker:
        leader = subprocess.run(
            [sys.executable, "-c", LEADER, json.dumps(options)],
            cwd=ROOT,
            env=environment(2),
            capture_output=True,
            text=True,
            timeout=600,
        )
        _, errors = worker.communicate(timeout=300)
    assert alone.returncode == 0, alone.stderr[-2000:]
    assert leader.returncode == 0, leader.stderr[-2000:] + errors[-2000:]
    assert worker.returncode == 0, errors[-2000:]
    one, two = (json.loads(process.stdout.splitlines()[-1]) for process in (alone, leader))
    assert one[:2] == [1, 1]
    assert two[:2] == [2, 4]
    assert two[2:] == one[2:]
    assert one[-1] is True  # both have freed their pools


def test_a_plan_comes_back_from_its_bytes():
    rng = np.random.default_rng(0)
    sampling = SamplingParams(temperature=0.5, logit_bias={3: -1.5}, stop=["x"], allowed_token_ids=[1, 2], seed=7)
    start = SlotStart(3, rng.integers(0, 9, 5), 5, np.array([[4, 2]]), 0, 40, sampling, 2**63, (1, 2), ((1,), (2, 3)))
    chunk = Chunk(3, 0, rng.integers(0, 9, 5).astype(np.int32), True, np.array([1, -1], np.int32))
    plan = StepPlan(
        step_id=7,
        variant=SamplingVariant.FULL,
        ends=np.array([1, 2], np.int32),
        starts=(start,),
        table_updates=rng.integers(0, 9, (4, 4)).astype(np.int32),
        mask_slots=np.array([3, 4], np.int32),
        masks=(rng.integers(0, 9, 7).astype(np.uint32), np.array([5, 1], np.int32)),
        chunks=(chunk,),
        tokens_per_row=3,
    )
    again = plan_codec.decode(plan_codec.encode(plan))
    assert isinstance(again, StepPlan)
    assert again.variant is SamplingVariant.FULL
    assert again.tokens_per_row == 3
    np.testing.assert_array_equal(again.starts[0].block_ids, start.block_ids)
    assert again.starts[0].sampling == sampling
    assert again.starts[0].seed == 2**63
    assert again.starts[0].bad_words_token_ids == ((1,), (2, 3))
    assert plan_codec.encode(again) == plan_codec.encode(plan)
    for found, sent in (
        (again.table_updates, plan.table_updates),
        (again.chunks[0].token_ids, chunk.token_ids),
        *zip(again.masks, plan.masks, strict=True),
    ):
        assert found.dtype == sent.dtype
        np.testing.assert_array_equal(found, sent)


def test_only_parts_of_plans_are_encoded_and_decoded():
    with pytest.raises(TypeError, match="Path"):
        plan_codec.encode(StepPlan(step_id=1, variant=SamplingVariant.GREEDY, starts=(ROOT,)))
    forged = plan_codec.encode({"x": 1}).replace(b'"dict"', b'"eval"')
    with pytest.raises(ValueError, match="'eval' is no part of a plan"):
        plan_codec.decode(forged)


def test_the_cluster_comes_from_options_or_the_environment():
    variables = {"JAX_COORDINATOR_ADDRESS": "host0:9", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert Cluster.find(EngineArgs(), {}) is None
    assert Cluster.find(EngineArgs(), variables) == Cluster("host0:9", 2, 1)
    assert Cluster.find(EngineArgs(process_id=0), variables) == Cluster("host0:9", 2, 0)
    assert Cluster.find(EngineArgs(), variables | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}) is None
    assert Cluster("[::1]:80", 2, 0).host == "::1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"process_id": None}, "process_id is missing"),
        ({"process_id": 2}, "process_id=2 must be from 0 to num_processes - 1 = 1"),
        ({"coordinator_address": "host0"}, 'must be "host:port"'),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(changes, message):
    args = EngineArgs(coordinator_address="host0:9", num_processes=2, process_id=0)
    with pytest.raises(InvalidParameterError, match=message):
        Cluster.find(replace(args, **changes), {})


def test_requests_enter_at_process_0_only():
    with pytest.raises(InvalidParameterError, match="jpaged worker"):
        lead(EngineArgs(), Cluster("host0:9", 2, 1))
    with pytest.raises(InvalidParameterError, match="process_id=0"):
        run_worker(Cluster("host0:9", 2, 0))
