"""Requests drawn from a file of conversations."""

import json

import pytest

from jpaged.api.errors import InvalidParameterError
from jpaged.bench.serve import main as serve
from jpaged.bench.sharegpt import read_turns, sharegpt_requests
from jpaged.bench.throughput import main
from jpaged.text.tokenizer import Tokenizer
from tests.bench import small_engine


class Words:
    """A tokenizer of one token a word, the word's length, after a begin-of-sequence token."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [len(word) for word in text.split()]


def conversation(*turns: str) -> dict:
    speakers = ["human", "gpt"] * len(turns)
    return {
        "id": "x",
        "conversations": [{"from": who, "value": text} for who, text in zip(speakers, turns, strict=False)],
    }


def write(path, entries) -> str:
    path.write_text(json.dumps(entries))
    return str(path)


def draw(path, count: int, **options):
    return sharegpt_requests(read_turns(path), Words(), count, **options)


def words(count: int) -> str:
    return "word " * count


def test_the_first_turn_is_the_prompt_and_the_second_gives_the_output_length(tmp_path):
    file = tmp_path / "file.json"
    write(file, [conversation("a bb ccc", words(7), "and more")])
    [request] = draw(file, 1)
    assert request.prompt_token_ids == [0, 1, 2, 3]
    assert request.output_len == 7


def test_conversations_of_unusual_length_are_passed_over(tmp_path):
    file = tmp_path / "file.json"
    dropped = [(2, 50), (50, 3), (1024, 50), (1000, 1048), (5, 2043)]  # one token more in each prompt
    kept = [(3, 4), (1023, 1024), (50, 50)]
    short = [conversation(), conversation("only one turn of many words")]
    write(file, short + [conversation(words(a), words(b)) for a, b in dropped + kept])
    found = draw(file, 3)
    assert sorted((len(r.prompt_token_ids) - 1, r.output_len) for r in found) == sorted(kept)
    [within] = draw(file, 1, max_model_len=20)
    assert within.output_len == 4
    with pytest.raises(InvalidParameterError, match=r"--num-prompts=4, .* has 3 conversations"):
        draw(file, 4)


def test_the_draw_is_the_same_for_the_same_seed_and_repeats_nothing(tmp_path):
    file = tmp_path / "file.json"
    write(file, [conversation(words(5 + i), words(5)) for i in range(100)])
    first, again, other = draw(file, 30, seed=1), draw(file, 30, seed=1), draw(file, 30, seed=2)
    assert first == again != other
    assert len({len(request.prompt_token_ids) for request in first}) == 30


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[", "is not JSON"),
        ("{}", "must hold a list of conversations, not dict"),
        ('[{"conversations": []}, {"turns": []}]', r'entry 1 must be an object with a list "conversations"'),
        ('[{"conversations": [{"value": "x"}, {"value": 3}]}]', r"entry 0, turn 1, must be .* \{\"value\": 3\}"),
        ('[{"conversations": ["x", {"value": "x"}]}]', r"entry 0, turn 0,"),
    ],
)
def test_a_file_of_another_form_is_refused_by_name_and_entry(tmp_path, content, says):
    file = tmp_path / "broken.json"
    file.write_text(content)
    with pytest.raises(InvalidParameterError, match=says) as refused:
        read_turns(file)
    assert str(file) in str(refused.value)


def test_a_missing_file_or_tokenizer_is_refused_before_a_model_is_loaded(tmp_path):
    missing = ["--dataset-path", str(tmp_path / "missing.json")]
    with pytest.raises(InvalidParameterError, match=r"missing.json cannot be read"):
        main(missing)
    with pytest.raises(InvalidParameterError, match=r"needs --tokenizer: --model qwen3-0\.6b"):
        main([*missing, "--model", "qwen3-0.6b"])
    with pytest.raises(InvalidParameterError, match="--dataset-path and --tokenizer go together"):
        serve(missing)


@small_engine.GROUP
def test_throughput_is_measured_on_a_files_conversations(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Tokenizer, "load", lambda source: Words())
    file, report = tmp_path / "talks.json", tmp_path / "figures.json"
    write(file, [conversation("tell me a story about a snail", "once upon a time there was one")] * 5)
    arguments = [*small_engine.options(tmp_path), "--dataset-path", str(file), "--num-prompts", "4", "--runs", "1"]
    arguments += ["--profile", str(tmp_path / "trace")]
    assert main([*arguments, "--json", str(report)]) == 0
    [figures] = json.loads(report.read_text())["results"]
    assert (figures["name"], figures["input_tokens"], figures["output_tokens"]) == ("talks", 4 * 8, 4 * 7)
    assert figures["device_idle"] is None  # there is no GPU
    assert list((tmp_path / "trace" / "talks").rglob("*.trace.json.gz"))
    assert "talks: 4 requests" in capsys.readouterr().out
