"""OpenAI batch files through the embedded model."""

import json
import math
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from jpaged import LLM, BeamSearchParams, SamplingParams
from jpaged.api.errors import InvalidParameterError
from jpaged.api.outputs import CompletionOutput, Logprob, RequestOutput
from jpaged.assets import demo_model_path
from jpaged.cli import main
from jpaged.frontend.embedding_config import EmbeddingConfig
from jpaged.scoring.inputs import Record
from jpaged.scoring.jobs import JobSummary
from jpaged.scoring.workers import Shard
from jpaged.serving import batch
from jpaged.serving.batch_requests import parse_request, response_line
from jpaged.text.tokenizer import Tokenizer
from jpaged.text.turns.declarations import Tool
from jpaged.text.turns.formats import GENERIC
from tests.tiny_models import DEMO_ENGINE, DEMO_OPTIONS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def request(name, url, **body):
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


TEXTS = ["Once upon a time", "One day", "A fox"]
MESSAGES = [{"role": "user", "content": "A story about a fox"}]
GOOD = [
    request("greedy", COMPLETIONS, prompt="Once upon a time", temperature=0, max_tokens=12),
    request("chat", CHAT, messages=MESSAGES, temperature=0, max_completion_tokens=10, logprobs=True, top_logprobs=2),
    request("several", COMPLETIONS, prompt=["One day", "There was"], temperature=0, max_tokens=5, logprobs=1),
    request("sampled", COMPLETIONS, prompt="Once", max_tokens=20, temperature=1.0),
    request("twice", COMPLETIONS, prompt="Once", max_tokens=20, temperature=1.0, n=2),
]
BAD = [
    request("suffix", COMPLETIONS, prompt="a", suffix="b"),
    request("streamed", CHAT, messages=MESSAGES, stream=True),
    request("hot", COMPLETIONS, prompt="a", temperature=-1),
    request("long", COMPLETIONS, prompt="fox " * 1100),
    request("empty", COMPLETIONS, prompt=[]),
    request("roles", CHAT, messages=[{"role": "user"}]),
    request("late", COMPLETIONS, prompt=["fine", "fox " * 1100]),
]
CONSTRAINED = [
    request("regex", COMPLETIONS, prompt="Once", max_tokens=20, structured_outputs={"regex": "[ab]{4}"}),
    request("schema", CHAT, messages=MESSAGES, response_format={"type": "json_object"}, temperature=0, max_tokens=9),
    request("broken", COMPLETIONS, prompt="Once", guided_regex="(a"),
]
NO_REQUESTS = [{"url": CHAT}, request("where", "/v1/images", input="a"), {**GOOD[0], "body": None}, "text"]


def run(path, lines, *options) -> tuple[int, list[dict]]:
    path.mkdir()
    source = path / "in.jsonl"
    source.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    code = main(
        ["run-batch", "-i", str(source), "-o", str(path / "out.jsonl"), "-q", "--in-process", *DEMO_OPTIONS, *options]
    )
    return code, [json.loads(line) for line in (path / "out.jsonl").read_text().splitlines()]


@pytest.mark.xdist_group("scoring-demo")
def test_lines_may_constrain_their_answers(tmp_path, capsys):
    code, (regex, schema, broken) = run(tmp_path / "constrained", CONSTRAINED)
    assert code == 1
    assert re.fullmatch("[ab]{4}", regex["response"]["body"]["choices"][0]["text"])
    assert schema["response"]["body"]["choices"][0]["message"]["content"].startswith("{")
    assert broken["response"]["body"]["error"]["param"] == "guided_regex"


@pytest.mark.xdist_group("scoring-demo")
def test_every_line_is_answered_in_order_with_its_text_or_its_error(tmp_path, capsys):
    code, answers = run(tmp_path / "all", [*GOOD, *BAD, *NO_REQUESTS, *GOOD], "--shard-size", "3")
    assert code == 1
    assert "11 of 21 requests failed" in capsys.readouterr().err
    ids = [line.get("custom_id") for line in (*GOOD, *BAD)]
    assert [answer["custom_id"] for answer in answers[:12]] == ids
    statuses = [answer["response"] and answer["response"]["status_code"] for answer in answers]
    assert statuses == [200] * 5 + [400] * 7 + [None] * 4 + [200] * 5

    bodies = [answer["response"]["body"] for answer in answers[:5]]
    llm = LLM(**DEMO_ENGINE, verbose=False)
    prompts = ["Once upon a time", "One day", "There was"]
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (12, 5, 5)]
    expected = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    chat = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)[0]
    assert bodies[0]["choices"][0]["text"] == expected[0]
    assert bodies[0]["choices"][0]["finish_reason"] == "length"
    assert [choice["text"] for choice in bodies[2]["choices"]] == expected[1:]
    message = {"role": "assistant", "content": chat.outputs[0].text, "refusal": None}
    message |= {"reasoning_content": None, "reasoning": None}
    assert bodies[1]["choices"][0]["message"] == message
    assert bodies[1]["usage"]["prompt_tokens"] == len(chat.prompt_token_ids)
    content = bodies[1]["choices"][0]["logprobs"]["content"]
    assert len(content) == bodies[1]["usage"]["completion_tokens"]
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in content)  # greedy
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert len(bodies[2]["choices"][1]["logprobs"]["tokens"]) == 5
    assert [choice["index"] for choice in bodies[4]["choices"]] == [0, 1]
    assert bodies[4]["choices"][0]["text"] != bodies[4]["choices"][1]["text"]
    for answer, line in ((answers[3], 3), (answers[19], 19)):  # a request's seed is the number of its line
        seeded = replace(llm.get_default_sampling_params(), temperature=1.0, max_tokens=20, seed=line)
        [sampled] = llm.generate("Once", seeded, use_tqdm=False)
        assert answer["response"]["body"]["choices"][0]["text"] == sampled.outputs[0].text

    errors = [answer["response"]["body"]["error"]["message"] for answer in answers[5:12]]
    for message, part in zip(
        errors,
        (
            "suffix is not supported",
            "stream is not supported in a batch",
            "temperature",
            "max_model_len=1024",
            "empty list",
            "content",
            "tokens",
        ),
        strict=True,
    ):
        assert part in message
    reasons = [answer["error"]["message"] for answer in answers[12:16]]
    for reason, part in zip(reasons, ("custom_id", "url must be", "body must be", "not JSON"), strict=True):
        assert part in reason


@pytest.mark.xdist_group("scoring-demo")
def test_a_batch_takes_what_the_server_takes_and_blames_the_field_that_is_wrong(tmp_path):
    search = {"use_beam_search": True, "n": 2, "length_penalty": 0.5}
    lines = [
        request("echo", COMPLETIONS, prompt="Once upon a time", echo=True, logprobs=2, max_tokens=0),
        request("beams", COMPLETIONS, prompt="One day", max_tokens=6, **search),
        request("salted", COMPLETIONS, prompt="One day", temperature=0, max_tokens=4, cache_salt="a"),
        request("ids", CHAT, messages=MESSAGES, temperature=0, max_tokens=3, return_token_ids=True),
        request("type", COMPLETIONS, prompt="a", max_tokens="ten"),
        request("variable", CHAT, messages=MESSAGES, chat_template_kwargs={"tokenize": False}),
        request("tools", CHAT, messages=MESSAGES, tools=[{"type": "function"}]),
        request("late", COMPLETIONS, prompt="a", priority=3),
        request("cut", COMPLETIONS, prompt="a", truncate_prompt_tokens=0),
        request("named", COMPLETIONS, prompt="a", model="\ud800"),
        request("odd", COMPLETIONS, prompt="a", **{"\ud800": 1}),
        request("bare", COMPLETIONS, prompt="One day", temperature=0, max_tokens=4, add_special_tokens=False),
        request("pairs", "/v1/score", queries="One day", documents=TEXTS),
        request("ranking", "/rerank", query="One day", documents=TEXTS, top_n=1),
        request("uneven", "/score", text_1=TEXTS, text_2=TEXTS[:1]),
        request("judged", "/v1/rerank", query="One day", documents=TEXTS, instruction="Find foxes"),
    ]
    code, answers = run(tmp_path / "all", lines)
    assert code == 1
    statuses = [answer["response"]["status_code"] for answer in answers]
    assert statuses == [200] * 4 + [400] * 7 + [200] * 3 + [400] * 2
    blamed = [answer["response"]["body"]["error"]["param"] for answer in (*answers[4:9], *answers[14:])]
    assert blamed[:5] == ["max_tokens", "chat_template_kwargs", "tools", "priority", "truncate_prompt_tokens"]
    assert blamed[5:] == ["text_1", "instruction"]
    assert all("lone surrogate" in answer["response"]["body"]["error"]["message"] for answer in answers[9:11])

    llm = LLM(**DEMO_ENGINE, verbose=False)
    [echo], beams, [salted], [chat] = (answer["response"]["body"]["choices"] for answer in answers[:4])
    [scored] = llm.generate("Once upon a time", SamplingParams(max_tokens=1, prompt_logprobs=2), use_tqdm=False)
    expected = [p[t].logprob for p, t in zip(scored.prompt_logprobs[1:], scored.prompt_token_ids[1:], strict=True)]
    assert echo["text"] == "Once upon a time"
    np.testing.assert_allclose(echo["logprobs"]["token_logprobs"][1:], expected, rtol=1e-4)
    params = BeamSearchParams(beam_width=2, n=2, max_tokens=6, length_penalty=0.5)
    [found] = llm.beam_search(["One day"], params, use_tqdm=False)
    assert [choice["text"] for choice in beams] == [beam.text for beam in found.outputs]
    greedy = SamplingParams(temperature=0, max_tokens=4)
    assert salted["text"] == llm.generate("One day", greedy, use_tqdm=False)[0].outputs[0].text
    bare = llm.get_tokenizer().encode("One day", add_special_tokens=False)
    [output] = llm.generate({"prompt_token_ids": bare}, greedy, use_tqdm=False)
    assert answers[11]["response"]["body"]["choices"][0]["text"] == output.outputs[0].text
    assert answers[11]["response"]["body"]["usage"]["prompt_tokens"] == len(bare)
    told = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)[0]
    assert chat["token_ids"] == told.outputs[0].token_ids
    scores = [one.outputs.score for one in llm.score("One day", TEXTS, use_tqdm=False)]
    pairs, ranking = (answer["response"]["body"] for answer in answers[12:14])
    np.testing.assert_allclose([one["score"] for one in pairs["data"]], scores, atol=1e-5)
    assert [one["index"] for one in ranking["results"]] == [int(np.argmax(scores))]


@pytest.mark.parametrize("content", ["", "\n"])
def test_an_input_without_requests_has_an_empty_output(tmp_path, content):
    """And no model is loaded for it."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(content)
    assert main(["run-batch", "-i", str(source), "-o", str(output), "-m", str(tmp_path / "no-model")]) == 0
    assert output.read_bytes() == b""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": ["in.jsonl"]}, "An input must be a path"),
        ({"output": None}, "output must be a path, got None"),
        ({"model": 5}, "model must be"),
        ({"shard_size": "x"}, "shard_size must be an integer, got 'x'"),
        ({"overwrite": "yes"}, "overwrite must be True or False"),
        ({"tool_parser": "hermit"}, "tool_parser must be one of .*hermes.*, got 'hermit'"),
        ({"reasoning_parser": "hermes"}, "reasoning_parser must be one of none, .*, got 'hermes'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_begun(tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(json.dumps(GOOD[0]) + "\n")
    with pytest.raises(InvalidParameterError, match=message):
        batch.run_batch(**({"inputs": "in.jsonl", "output": "out.jsonl"} | changes))
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


class FakeEngine:
    """Finishes one request a step."""

    def __init__(self, args) -> None:
        self.tokenizer = SimpleNamespace()
        self.startup = SimpleNamespace(config=SimpleNamespace(max_num_seqs=100))
        self.default_sampling_params = SamplingParams()
        self.embeddings = EmbeddingConfig()
        self.open: list[str] = []

    def add_request(self, request_id, prompt, params, *, cache_salt):
        self.open.append(request_id)

    def step(self):
        completion = CompletionOutput(0, "text", [1], finish_reason="length")
        return [RequestOutput(self.open.pop(), None, [1], [completion], True)]

    def abort_request(self, request_ids):
        assert not request_ids


class JudgingEngine(FakeEngine):
    """Tells of one answer at first, as where the other is not among the likeliest. "yes" is token 1, "no" 2."""

    def __init__(self, args) -> None:
        super().__init__(args)
        self.tokenizer = SimpleNamespace(encode=self.encode, encode_plain=self.encode)
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}

    def encode(self, text, **options):
        return {"yes": [1], "no": [2]}.get(text) or [ord(c) for c in text]

    def add_request(self, request_id, prompt, params, *, cache_salt):
        assert cache_salt == "a"
        self.open.append(request_id)
        self.asked[request_id] = prompt, params

    def step(self):
        request_id = self.open.pop()
        prompt, params = self.asked[request_id]
        text = "".join(map(chr, prompt))
        answer = params.allowed_token_ids[0] if "snail" in text else params.allowed_token_ids[-1]
        logprob = Logprob(-1.0 if answer == 1 else -2.0 - text.count("fox"))
        completion = CompletionOutput(0, "", [answer], logprobs=[{answer: logprob}], finish_reason="length")
        return [RequestOutput(request_id, None, prompt, [completion], True)]


def test_a_reranker_judges_the_pairs_of_a_line_by_both_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "LLMEngine", JudgingEngine)
    line = request("a", "/v1/score", text_1="q", text_2=["snail", "fox", "fox fox"], cache_salt="a")
    shard = Shard(0, [Record(0, "f", 0, line)])
    processor = batch.BatchShards({"engine": {"reranker": "qwen3"}}, tmp_path)
    entries = []
    processor.run([shard], entries.append, lambda rows, tokens: None)
    assert [entry["failed"] for entry in entries] == [0]
    answer = json.loads(next(tmp_path.iterdir()).read_text())["response"]["body"]
    expected = [1 / (1 + math.exp(-1.0 - num_foxes)) for num_foxes in range(3)]
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected)


@pytest.mark.timeout(30)
def test_shards_that_come_only_when_others_are_done_are_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "LLMEngine", FakeEngine)
    room = threading.Semaphore(2)  # as a worker's coordinator does it

    def shards():
        for number in range(6):
            room.acquire()
            yield Shard(
                number, [Record(i, "f", i, request(f"{number}-{i}", COMPLETIONS, prompt="a")) for i in range(3)]
            )

    entries = []

    def done(entry):
        entries.append(entry)
        room.release()

    batch.BatchShards({"engine": {}}, tmp_path).run(shards(), done, lambda rows, tokens: None)
    assert sorted(entry["shard"] for entry in entries) == list(range(6))


def test_a_line_with_tools_is_constrained_and_its_calls_are_read():
    tokenizer = Tokenizer.load(demo_model_path())
    tools = [{"type": "function", "function": {"name": "clock", "description": "Looks at it."}}]
    line = request("a", CHAT, messages=MESSAGES, tools=tools, tool_choice="required")
    parsed = parse_request(line, tokenizer, SamplingParams())
    assert parsed.params.structured_outputs.kind == "grammar"
    assert "Looks at it." in tokenizer.decode(parsed.prompts[0])
    text = GENERIC.render([(Tool("clock", {}), {})])
    output = RequestOutput("a", None, [1], [CompletionOutput(0, text, [1], None, None, "stop")], True)
    (choice,) = response_line(parsed, "model", [output], tokenizer)["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}


def test_calls_are_read_as_the_parser_that_was_named_writes_them(monkeypatch, tmp_path):
    tokenizer = Tokenizer.load(demo_model_path())
    tools = [{"type": "function", "function": {"name": "clock"}}]
    line = request("a", CHAT, messages=MESSAGES, tools=tools)
    text = '[TOOL_CALLS][{"name": "clock", "arguments": {}}]'
    output = RequestOutput("a", None, [1], [CompletionOutput(0, text, [1], None, None, "stop")], True)
    for name, reason in ((None, "stop"), ("mistral", "tool_calls")):
        parsed = parse_request(line, tokenizer, SamplingParams(), tool_parser=name)
        (choice,) = response_line(parsed, "model", [output], tokenizer)["response"]["body"]["choices"]
        assert choice["finish_reason"] == reason

    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    jobs = []
    monkeypatch.setattr(
        batch, "run_job", lambda job, *arguments, **options: jobs.append(job) or JobSummary(1, 0, 0, 0, 0)
    )
    command = ["run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert main([*command, "--tool-parser", "mistral", "--reasoning-parser", "none"]) == 0
    assert jobs[0].settings == {"tool_parser": "mistral", "reasoning_parser": "none"}
    monkeypatch.setattr(batch, "LLMEngine", FakeEngine)
    processor = batch.BatchShards(jobs[0].settings | {"engine": {}}, tmp_path)
    parsed = []
    monkeypatch.setattr(
        batch, "parse_request", lambda *given, **options: parsed.append(options) or parse_request(*given)
    )
    processor.run([Shard(0, [Record(0, "f", 0, GOOD[0])])], lambda entry: None, lambda rows, tokens: None)
    assert parsed == [jobs[0].settings]
