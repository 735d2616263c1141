"""The server on a local Ray Serve with two replicas. Needs `jpaged[ray]`: `make test-ray`."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from jpaged import LLM, SamplingParams
from jpaged.api.errors import InvalidParameterError

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray

OPTIONS = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 128,
    "decode_buckets": (8,),
    "token_buckets": (64,),
    "verbose": False,
}
PROMPTS = ["Once upon a time", "One day, a little fox", "There was a house", "The sea was"]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    from ray import serve

    from jpaged.serving.ray import application

    names = ("PYTHONPATH", "JAX_PLATFORMS", "JPAGED_CACHE_DIR")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    ray.init(num_cpus=3, include_dashboard=False, runtime_env={"env_vars": variables}, object_store_memory=2**28)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(application(num_replicas=2, gpus_per_replica=0, health_check_period_s=1, **OPTIONS))
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as asking:
        yield asking
    serve.shutdown()
    ray.shutdown()


def engine_pids() -> set[int]:
    """Engine processes whose parent is a replica."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"jpaged.processes.engine_process" in path.read_bytes():
                parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
                if b"ray::" in Path(f"/proc/{parent}/cmdline").read_bytes():
                    found.add(int(path.parent.name))
        except (OSError, ValueError):
            continue
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def metric(text: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"jpaged:{name}{{"))


def completion(client: httpx.Client, prompt: str, **changes) -> dict:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 16, "ignore_eos": True} | changes
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_two_replicas_answer_as_one_engine_does(client):
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    expected = [output.outputs[0].text for output in LLM(**OPTIONS).generate(PROMPTS, params, use_tqdm=False)]
    assert len(engine_pids()) == 2
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda prompt: completion(client, prompt)["choices"][0]["text"], PROMPTS * 4))
    assert found == expected * 4
    answers = (client.get("/metrics").text for _ in range(16))  # each is of one replica
    names = "generation_tokens_total", "e2e_request_latency_seconds_sum"
    served = {tuple(metric(text, name) for name in names) for text in answers}
    assert len(served) == 2
    assert sum(tokens for tokens, _ in served) == 16 * len(PROMPTS) * 4


def test_a_stream_comes_in_parts_through_the_proxy(client):
    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        parts = list(response.iter_raw())
    assert len(parts) > 5
    events = [line[6:] for line in b"".join(parts).decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    assert text == completion(client, PROMPTS[0], max_tokens=200)["choices"][0]["text"]


def test_who_leaves_a_stream_ends_its_request(client):
    body = {"prompt": PROMPTS[0], "max_tokens": 240, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    wait_until(lambda: all(client.get("/load").json() == {"server_load": 0} for _ in range(8)))


def test_a_refused_request_says_why(client):
    response = client.post("/v1/completions", json={"prompt": PROMPTS[0], "model": "another"})
    assert response.status_code == 404
    assert "jpaged-demo" in response.json()["error"]["message"]


def test_a_replica_whose_engine_died_is_replaced(client):
    before = engine_pids()
    os.kill(min(before), signal.SIGKILL)
    wait_until(lambda: len(engine_pids() - {min(before)}) == 2)
    wait_until(lambda: all(client.get("/health").status_code == 200 for _ in range(8)))
    texts = {completion(client, PROMPTS[1])["choices"][0]["text"] for _ in range(8)}
    assert len(texts) == 1


def test_engines_end_with_their_application(client):
    from ray import serve

    assert engine_pids()
    serve.delete("default")
    wait_until(lambda: not engine_pids())


def test_options_come_as_text_from_a_command_line():
    from jpaged.serving.ray import build

    made = build({"model": "x/y", "num_replicas": "3", "tensor_parallel_size": "2", "enable_prefix_caching": "false"})
    deployment = made._bound_deployment
    args, options = deployment.init_args
    assert (args.model, args.tensor_parallel_size, args.enable_prefix_caching) == ("x/y", 2, False)
    assert list(options.served_model_names) == ["x/y"]
    assert deployment.num_replicas == 3
    assert deployment.ray_actor_options["num_gpus"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modell": "x"}, "no option 'modell'"),
        ({"num_replicas": 0}, "num_replicas must be at least 1"),
        ({"num_replicas": "many"}, "Expected `int`.*num_replicas"),
        ({"block_size": 3}, "block_size must be"),
        ({"data_parallel_size": 2}, "use num_replicas"),
        ({"limits": {"max_prompts": 0}}, "max_prompts must be"),
    ],
)
def test_wrong_options_are_refused_at_once(options, message):
    from jpaged.serving.ray import application

    with pytest.raises(InvalidParameterError, match=message):
        application(**options)
