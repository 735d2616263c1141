"""Tokens of a text that comes in pieces are those of the whole text."""

import random

import pytest

from jpaged.assets import demo_model_path
from jpaged.serving.token_count import TokenCount
from jpaged.text.tokenizer import Tokenizer


@pytest.mark.parametrize("most", [1, 40, 5000])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(most):
    tokenizer, draw = Tokenizer.load(demo_model_path()), random.Random(most)
    words = ["fox", "snail,", "\n\nThe", " ", "ünïcode", "lantern.", "1234"]
    text = " ".join(draw.choice(words) for _ in range(3000))
    count, begin = TokenCount(tokenizer), 0
    while begin < len(text):
        end = begin + draw.randint(1, most)
        count.add(text[begin:end])
        begin = end
        if most > 1:
            assert count.num_tokens <= begin
    assert count.num_tokens == len(tokenizer.encode(text, add_special_tokens=False))


def test_a_text_without_spaces_is_counted_in_bounded_pieces():
    tokenizer = Tokenizer.load(demo_model_path())
    count, longest = TokenCount(tokenizer), 0

    class Watched:
        def encode(self, text, add_special_tokens):
            nonlocal longest
            longest = max(longest, len(text))
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    count._tokenizer = Watched()
    count.add("abc" * 10_000)
    whole = len(tokenizer.encode("abc" * 10_000, add_special_tokens=False))
    assert whole <= count.num_tokens <= whole + 60
    assert longest <= 512


def test_asking_again_counts_nothing_again():
    asked = []

    class Watched:
        def encode(self, text, add_special_tokens):
            asked.append(text)
            return [0] * len(text)

    count = TokenCount(Watched())
    count.add("some words")
    assert [count.num_tokens for _ in range(3)] == [10, 10, 10]
    count.add("")
    assert (count.num_tokens, asked) == (10, ["some words"])
    count.add(" more")
    assert (count.num_tokens, asked) == (15, ["some words", "some words more"])


def test_without_a_tokenizer_there_is_nothing_to_count():
    count = TokenCount(None)
    count.add("words " * 1000)
    assert count.num_tokens == 0
