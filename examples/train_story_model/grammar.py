"""A small template language: the part of the story generator that turns patterns into grammatical English.

A template is a string with two kinds of brackets:

    "One [cool|bright] morning, {N} [walked|went] to {place}."

`[a|b]` picks one alternative at random (alternatives may nest and may be empty); `{name}` inserts a field. After
all pieces are joined, `finish` repairs what templates cannot know: "a" before a vowel sound becomes "an", and
sentences begin with a capital letter.
"""

import random
import re
from collections.abc import Mapping
from functools import cache

# A compiled template: literal text, a field to look up, or a choice between compiled templates.
Node = str | tuple[str, object]

_FIELD, _CHOICE = "field", "choice"
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou8AEIOU])")
# Written with a vowel, spoken with a consonant ("a unicorn"), and the other way round ("an hour").
_CONSONANT_SOUND = re.compile(r"\b([Aa])n (?=(?:uni|use|usu|one\b|once\b|ukulele|eur|ewe))", re.IGNORECASE)
_VOWEL_SOUND = re.compile(r"\b([Aa]) (?=(?:hour|honest))")
_SENTENCE_START = re.compile(r"(?:^|(?<=[.!?] )|(?<=\n))[a-z]")
_SPACES = re.compile(r" {2,}")


def _parse(text: str, at: int, depth: int) -> tuple[list[list[Node]], int]:
    """Alternatives of `text` from position `at` up to the closing bracket (or the end at depth 0)."""
    alternatives: list[list[Node]] = [[]]
    literal: list[str] = []

    def flush() -> None:
        if literal:
            alternatives[-1].append("".join(literal))
            literal.clear()

    while at < len(text):
        char = text[at]
        if char == "[":
            flush()
            inner, at = _parse(text, at + 1, depth + 1)
            alternatives[-1].append((_CHOICE, inner))
        elif char == "{":
            flush()
            end = text.index("}", at)
            alternatives[-1].append((_FIELD, text[at + 1 : end]))
            at = end + 1
        elif char == "|" and depth:
            flush()
            alternatives.append([])
            at += 1
        elif char == "]" and depth:
            flush()
            return alternatives, at + 1
        else:
            literal.append(char)
            at += 1
    if depth:
        raise ValueError(f"template lacks a closing bracket: {text!r}")
    flush()
    return alternatives, at


@cache
def _compile(template: str) -> tuple[Node, ...]:
    return tuple(_parse(template, 0, 0)[0][0])


def _expand(
    nodes: tuple[Node, ...] | list[Node], fields: Mapping[str, str], rng: random.Random, out: list[str]
) -> None:
    for node in nodes:
        if isinstance(node, str):
            out.append(node)
        elif node[0] == _FIELD:
            value = fields[node[1]]
            if "[" in value or "{" in value:
                _expand(_compile(value), fields, rng, out)
            else:
                out.append(value)
        else:
            alternatives = node[1]
            _expand(alternatives[int(rng.random() * len(alternatives))], fields, rng, out)


def render(template: str, fields: Mapping[str, str], rng: random.Random) -> str:
    """One random expansion of `template`; a field's value may itself be a template. KeyError names a lacking field."""
    out: list[str] = []
    _expand(_compile(template), fields, rng, out)
    return "".join(out)


def finish(text: str) -> str:
    """`text` with articles agreeing, single spaces, and capitals where sentences begin."""
    text = _SPACES.sub(" ", text).replace(" \n", "\n").replace("\n ", "\n").strip()
    text = _ARTICLE.sub(r"\1n ", text)
    text = _CONSONANT_SOUND.sub(r"\1 ", text)
    text = _VOWEL_SOUND.sub(r"\1n ", text)
    return _SENTENCE_START.sub(lambda match: match.group().upper(), text)


def capital(text: str) -> str:
    """`text` with its first letter in upper case, the rest as it is."""
    return text[:1].upper() + text[1:]


def indefinite(noun: str) -> str:
    """`noun` with its article: "a fox", "an owl"."""
    return finish("x a " + noun)[2:] if noun else noun
