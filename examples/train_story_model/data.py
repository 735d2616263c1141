"""From conversations to arrays: an endless, deterministic stream of packed rows, made by worker processes.

A row holds several conversations one after the other. Each is its own segment: attention does not cross segments and
positions begin again at 0, so that a token is trained exactly as it will be served.

    tokens     <|begin|> <|user|> Tell me ... <|end|> <|assistant|> Once ... <|end|> <|begin|> ...  <|pad|>
    segments   1         1        1  1        1       1             1        1       2              0
    positions  0         1        2  3        4       5             6        7       0              0
    learned    0         0        0  0        0       1             1        0       0              0

`learned` marks the tokens whose successor the model learns to predict: those of the assistant, <|end|> included.

Joined rows are for long contexts: all conversations of a row are one segment, and positions run on to its end.
"""

import multiprocessing
import os
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from conversations import Message, converse, raw_story
from text_tokenizer import ASSISTANT, BEGIN, END, PAD, SYSTEM, USER
from tokenizers import Tokenizer

RAW_SHARE = 0.08  # of the documents are plain stories without a chat
OPEN_ROWS = 12  # rows being filled at a time: more waste less room


class Batch(NamedTuple):
    """tokens, segments, positions: int32 [rows, length]; learned: float32 [rows, length]."""

    tokens: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    learned: np.ndarray


class Encoder:
    """Turns documents into token ids, as the chat template would, and says which ones are learned."""

    def __init__(self, tokenizer_file: str) -> None:
        self.tokenizer = Tokenizer.from_file(tokenizer_file)
        self.id = {token: self.tokenizer.token_to_id(token) for token in (PAD, BEGIN, END, SYSTEM, USER, ASSISTANT)}
        self.role = {"system": self.id[SYSTEM], "user": self.id[USER], "assistant": self.id[ASSISTANT]}

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def chat(self, messages: list[Message]) -> tuple[list[int], list[int]]:
        tokens, learned = [self.id[BEGIN]], [0]
        for message in messages:
            ids = [*self._ids(message["content"]), self.id[END]]
            answer = int(message["role"] == "assistant")
            # The role's token predicts the answer's first one; the end predicts nothing that is learned.
            tokens += [self.role[message["role"]], *ids]
            learned += [answer] * len(ids) + [0]
        return tokens, learned

    def text(self, text: str) -> tuple[list[int], list[int]]:
        ids = self._ids(text)
        return [self.id[BEGIN], *ids, self.id[END]], [1] * (len(ids) + 1) + [0]


def documents(encoder: Encoder, rng: random.Random, held_out: bool) -> Iterator[tuple[list[int], list[int]]]:
    while True:
        if not held_out and rng.random() < RAW_SHARE:
            yield encoder.text(raw_story(rng))
        else:
            yield encoder.chat(converse(rng, held_out))


def pack(encoder: Encoder, rng: random.Random, rows: int, length: int, held_out: bool) -> Batch:
    """`rows` full rows. Documents longer than a row are left out."""
    shape = (rows + OPEN_ROWS, length)
    tokens = np.full(shape, encoder.id[PAD], np.int32)
    segments, positions, learned = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    used, count = [0] * shape[0], [0] * shape[0]
    open_rows, closed, opened = list(range(OPEN_ROWS)), [], OPEN_ROWS
    for ids, mask in documents(encoder, rng, held_out):
        n = len(ids)
        if n > length:
            continue
        # Best fit: the open row that the document leaves with the least room.
        fitting = [row for row in open_rows if used[row] + n <= length]
        if not fitting:
            fullest = max(open_rows, key=lambda row: used[row])
            open_rows.remove(fullest)
            closed.append(fullest)
            if len(closed) == rows:
                break
            open_rows.append(opened)
            fitting, opened = [opened], opened + 1
        row = max(fitting, key=lambda row: used[row])
        place = slice(used[row], used[row] + n)
        count[row] += 1
        tokens[row, place], learned[row, place] = ids, mask
        segments[row, place], positions[row, place] = count[row], np.arange(n)
        used[row] += n
    return Batch(tokens[closed], segments[closed], positions[closed], learned[closed])


def join(encoder: Encoder, rng: random.Random, rows: int, length: int, held_out: bool) -> Batch:
    """`rows` full rows of documents one after the other, all of which a token sees that come before it."""
    tokens, learned = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.float32)
    stream = documents(encoder, rng, held_out)
    for row in range(rows):
        ids: list[int] = []
        marks: list[int] = []
        while len(ids) < length:
            document, mask = next(stream)
            ids += document
            marks += mask
        tokens[row], learned[row] = ids[:length], marks[:length]
    learned[:, -1] = 0  # whose successor is cut off
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    return Batch(tokens, np.ones_like(tokens), positions, learned)


_encoder: Encoder | None = None


def _start_worker(tokenizer_file: str) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = Encoder(tokenizer_file)


def _work(seed: int, index: int, rows: int, length: int, joined: bool) -> Batch:
    if _encoder is None:
        raise RuntimeError("the worker was not started with _start_worker")
    # A string seeds by its hash (sha512), so that neighbouring indices have unrelated streams.
    return (join if joined else pack)(_encoder, random.Random(f"{seed}/{index}/False"), rows, length, held_out=False)


def held_out_batch(tokenizer_file: Path, seed: int, rows: int, length: int, *, joined: bool = False) -> Batch:
    """Rows in which every hero meets an object that it never meets in training."""
    rng = random.Random(f"{seed}/held-out")
    return (join if joined else pack)(Encoder(str(tokenizer_file)), rng, rows, length, held_out=True)


class Stream:
    """Batches number 0, 1, 2, ... of a seed, the same whatever the number of workers.

    Workers run ahead by a few batches each; leaving the context ends them.
    """

    def __init__(
        self, tokenizer_file: Path, seed: int, rows: int, length: int, workers: int, *, joined: bool = False
    ) -> None:
        self._arguments = (rows, length, joined)
        self._seed = seed
        self._ahead = 3 * workers
        # Not "fork": a process that holds JAX's threads must not be forked.
        context = multiprocessing.get_context("spawn")
        self._pool = context.Pool(workers, _start_worker, (str(tokenizer_file),))

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()
        self._pool.join()

    def __iter__(self) -> Iterator[Batch]:
        pending: deque = deque()
        index = 0
        while True:
            while len(pending) < self._ahead:
                pending.append(self._pool.apply_async(_work, (self._seed, index, *self._arguments)))
                index += 1
            yield pending.popleft().get()
