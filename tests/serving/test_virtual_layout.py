"""A server whose replicas keep their cache in the virtual layout, and hold little memory while they rest."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from jpaged import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from tests.serving.server_process import Server
from tests.tiny_models import DEMO_ENGINE

pytestmark = pytest.mark.xdist_group("server")

OPTIONS = ("--kv-cache-layout", "virtual", "--kv-idle-release-s", "0.1", "--data-parallel-size", "2")
PROMPTS = [f"{start} {animal}" for start in ("Once upon a time, a", "The little") for animal in ("snail", "fox", "owl")]


def test_replicas_give_the_paged_layouts_texts_asleep_they_refuse_and_awake_they_go_on(tmp_path):
    engine = LLMEngine(EngineArgs(**DEMO_ENGINE))
    params = SamplingParams(temperature=0, max_tokens=24, output_kind=RequestOutputKind.FINAL_ONLY)
    for prompt in PROMPTS:
        engine.add_request(prompt, prompt, params)
    expected = {}
    while engine.has_unfinished_requests():
        expected |= {output.request_id: output.outputs[0].text for output in engine.step()}

    engine.close()
    LLMEngine(EngineArgs(**DEMO_ENGINE, kv_cache_layout="virtual")).close()  # compiles once what both replicas would
    server = Server(tmp_path / "log", *OPTIONS)
    try:

        def ask(prompt: str) -> httpx.Response:
            return server.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 24, "temperature": 0})

        def texts() -> dict[str, str]:
            with ThreadPoolExecutor(len(PROMPTS)) as threads:
                answers = [answer.json() for answer in threads.map(ask, PROMPTS)]
            return {prompt: answer["choices"][0]["text"] for prompt, answer in zip(PROMPTS, answers, strict=True)}

        assert len(server.children("engine_process")) == 2
        assert texts() == expected
        stranger = httpx.Client(base_url=server.url, trust_env=False, timeout=60)
        assert [stranger.post(path).status_code for path in ("/sleep", "/wake_up")] == [401, 401]
        assert texts() == expected
        assert server.client.post("/sleep").json() == {"asleep": 1}
        assert ask(PROMPTS[0]).status_code == 503
        assert server.client.post("/wake_up").json() == {"asleep": 0}
        assert texts() == expected
    finally:
        server.close()
