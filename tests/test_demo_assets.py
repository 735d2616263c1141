"""The embedded demo model, and the generator that made up its training text."""

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from jpaged.assets import demo_model_path
from jpaged.models import ModelConfig, build, load

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_story_model"
MAX_WEIGHT_BYTES = 8_000_000


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, ModuleType]]:
    """The modules of the example, which import one another by their bare names."""
    import importlib

    names = ("grammar", "world", "plots", "stories", "conversations", "text_tokenizer", "data")
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in names:
            sys.modules.pop(name, None)


def test_the_weights_fit_the_size_limit_and_the_config() -> None:
    config = ModelConfig.from_directory(demo_model_path())
    model = build(config)
    size = (demo_model_path() / "model.safetensors").stat().st_size
    assert str(model.dtype) == "bfloat16"
    assert model.num_bytes < size <= MAX_WEIGHT_BYTES


def test_the_special_tokens_of_tokenizer_and_configs_agree(tokenizer: PreTrainedTokenizerBase) -> None:
    config = json.loads((demo_model_path() / "config.json").read_text())
    generation = json.loads((demo_model_path() / "generation_config.json").read_text())
    for ids in (config, generation):
        assert ids["bos_token_id"] == tokenizer.bos_token_id
        assert ids["eos_token_id"] == tokenizer.eos_token_id
        assert ids["pad_token_id"] == tokenizer.pad_token_id
    assert config["vocab_size"] == len(tokenizer)
    assert tokenizer.convert_tokens_to_ids("<|end|>") == tokenizer.eos_token_id


def test_the_chat_template_renders_roles_and_asks_for_an_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "  Hello "},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "A story, please."},
    ]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|begin|><|system|>Be kind.<|end|><|user|>Hello<|end|><|assistant|>Hi!<|end|>"
        "<|user|>A story, please.<|end|><|assistant|>"
    )
    with pytest.raises(Exception, match="tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_plain_text_begins_with_the_begin_token_once(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("Once upon a time")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time, there was a fox.",
        "  two leading, two trailing  ",
        "tabs\tand\r\nlines\n\n\n",
        "héllo wörld, 世界, привет, שלום, 😀👩‍👩‍👧 and e\u0301",
        "nul \x00, a private \ue000, the last \U0010ffff",
        "a .b , c don 't ( x )",
        "",
    ],
)
def test_any_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_common_words_of_the_stories_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    for word in (" fox", " lantern", " forest", " friend", "Once", " upon"):
        assert len(tokenizer(word, add_special_tokens=False)["input_ids"]) == 1, word


REQUESTS = {
    "Tell me a story about a fox and a lantern.": ("fox", "lantern"),
    "Can you tell me a story about a hedgehog called Moss and a blue kite?": ("hedgehog", "Moss", "blue kite"),
    "I'd like a story about an owl who is afraid of thunder, please.": ("owl", "thunder"),
    "Tell me a story about a grinkle in the castle.": ("grinkle", "the castle"),
}


@pytest.mark.transformers
def test_transformers_tells_the_stories_that_were_asked_for(tokenizer: PreTrainedTokenizerBase) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # for a model this small, threads only wait for each other
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": text}] for text in REQUESTS],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=400, do_sample=False, temperature=None, top_p=None)
    for answer, mentioned in zip(output[:, inputs["input_ids"].shape[1] :], REQUESTS.values(), strict=True):
        assert tokenizer.eos_token_id in answer
        story = tokenizer.decode(answer, skip_special_tokens=True)
        assert 60 < len(story.split()) < 300
        for words in mentioned:
            assert words in story
        sentences = re.split(r"(?<=[.!?])\s+", story)
        assert max(sentences.count(s) for s in sentences if len(s.split()) > 3) == 1


def test_every_story_mentions_what_its_wish_names(example: dict[str, ModuleType]) -> None:
    rng = random.Random(1)
    for _ in range(300):
        request, story = example["conversations"].answered(rng)
        wish = request.wish
        for given in (wish.hero, wish.friend):
            if given is not None:
                assert given.kind in story.text, request.text
        if wish.thing is not None:
            assert wish.thing.noun in story.text, request.text
        if wish.place is not None:
            assert wish.place.name in story.text, request.text
        if wish.topic:
            assert wish.topic.lower() in story.text.lower(), request.text


def test_every_plot_reads_as_clean_sentences(example: dict[str, ModuleType]) -> None:
    stories, plots = example["stories"], example["plots"]
    rng = random.Random(2)
    for plot in plots.PLOTS:
        for detail in (0.0, 0.5, 1.0):
            for mood in ("", *plots.MOOD_LINES):
                if (plot.name, mood) == ("storm_rescue", "bedtime"):
                    continue
                topic = "thunder" if plot.name in stories.TOPIC_PLOTS else ""
                text = stories.tell(stories.Wish(plot=plot.name, detail=detail, mood=mood, topic=topic), rng).text
                assert not re.search(r"[{}\[\]|]|  | [.,!?]|\.\.", text), text
                assert not re.search(r"\b[Aa] (?=[aeio]\w)|\b[Aa]n (?=[bcdfgjklmnpqrstvwxyz]\w)", text), text
                assert re.fullmatch(r'[A-Z"].*[.!"]', text, re.DOTALL), text
                assert text.count('"') % 2 == 0, text


def test_held_out_pairs_never_meet_in_training(example: dict[str, ModuleType]) -> None:
    stories, conversations = example["stories"], example["conversations"]
    rng = random.Random(3)
    trained = [conversations.answered(rng)[1] for _ in range(300)]
    held_out = [conversations.answered(rng, held_out=True)[1] for _ in range(30)]
    assert not any(stories.is_held_out(s.hero.kind, s.thing.noun) for s in trained)
    assert all(stories.is_held_out(s.hero.kind, s.thing.noun) for s in held_out)


def test_training_sees_the_tokens_of_the_chat_template(
    example: dict[str, ModuleType], tokenizer: PreTrainedTokenizerBase
) -> None:
    encoder = example["data"].Encoder(str(demo_model_path() / "tokenizer.json"))
    rng = random.Random(4)
    for _ in range(30):
        chat = example["conversations"].converse(rng)
        tokens, learned = encoder.chat(chat)
        assert tokens == tokenizer.apply_chat_template(chat, return_dict=False)
        # What is learned is to predict the assistant's words and their end, nothing else.
        answers = [after for after, mark in zip(tokens[1:], learned, strict=False) if mark]
        expected = "".join(m["content"] + "<|end|>" for m in chat if m["role"] == "assistant")
        assert tokenizer.decode(answers) == expected


def test_packed_rows_keep_conversations_apart(example: dict[str, ModuleType]) -> None:
    data = example["data"]
    encoder = data.Encoder(str(demo_model_path() / "tokenizer.json"))
    batch = data.pack(encoder, random.Random(5), rows=4, length=1024, held_out=False)
    again = data.pack(encoder, random.Random(5), rows=4, length=1024, held_out=False)
    assert all((a == b).all() for a, b in zip(batch, again, strict=True))
    assert batch.tokens.shape == (4, 1024)
    assert (batch.segments > 0).mean() > 0.9
    for row in range(4):
        for segment in range(1, batch.segments[row].max() + 1):
            inside = batch.segments[row] == segment
            assert batch.tokens[row][inside][0] == encoder.id["<|begin|>"]
            assert batch.tokens[row][inside][-1] == encoder.id["<|end|>"]
            assert batch.positions[row][inside].tolist() == list(range(inside.sum()))
            assert batch.learned[row][inside][-1] == 0
    assert batch.learned[batch.segments == 0].sum() == 0


def test_joined_rows_are_one_long_text(example: dict[str, ModuleType]) -> None:
    data = example["data"]
    encoder = data.Encoder(str(demo_model_path() / "tokenizer.json"))
    batch = data.join(encoder, random.Random(6), rows=2, length=2000, held_out=False)
    apart = data.documents(encoder, random.Random(6), held_out=False)
    ids, marks = (list(chain(*parts)) for parts in zip(*islice(apart, 20), strict=True))
    assert batch.tokens[0].tolist() == ids[:2000]
    assert batch.learned[0].tolist() == [*marks[:1999], 0]
    assert (batch.segments == 1).all()
    assert (batch.positions == range(2000)).all()


def test_the_example_trains_a_model_that_loads(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "train.py"), "--output", str(tmp_path), "--size", "tiny", "--steps", "3"]
    options = ["--rows", "1", "--length", "256", "--workers", "1", "--log-every", "1"]
    run = subprocess.run([*command, *options], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert "tokens/s" in run.stdout
    log = json.loads((tmp_path / "training.json").read_text())
    assert [entry["step"] for entry in log["steps"]] == [1, 2, 3]
    assert 3 < log["held_out_loss"] < 8  # log(1024 tokens) is 6.9
    model = build(ModelConfig.from_directory(tmp_path))
    weights = load(model, tmp_path)
    assert sum(w.size for w in weights) == model.num_parameters
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == model.config.vocab_size
