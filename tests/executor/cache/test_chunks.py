"""Rows cut at chunks of the context: each query sees the tokens of its own chunk, up to itself, and nothing else."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.api.errors import InvalidParameterError
from jpaged.executor.cache.chunks import decode_chunks, mixed_chunks

BLOCK, WIDTH, TOKENS = 4, 12, 40


def seen(table: np.ndarray, length: int, last_queries: int) -> list[list[tuple[int, int]]]:
    """What each of a row's queries sees, as kernels read rows: (row, position) of each token."""
    places = [(int(block) // WIDTH, int(block) % WIDTH * BLOCK + i) for block in table for i in range(BLOCK)]
    return [places[: length - last_queries + i + 1] for i in range(last_queries)]


def tables(rows: int) -> np.ndarray:
    """Whose entries tell the row and the index."""
    return np.arange(rows * WIDTH, dtype=np.int32).reshape(rows, WIDTH)


def own_chunk(row: int, position: int, chunk: int) -> list[tuple[int, int]]:
    return [(row, p) for p in range(position // chunk * chunk, position + 1)]


ROWS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=4)
"""Tokens before a step, and in it."""


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, decodes=st.integers(0, 4), chunk=st.sampled_from([4, 8, 12, 48]))
def test_each_query_of_a_step_sees_its_own_chunk(rows: list[tuple[int, int]], decodes: int, chunk: int) -> None:
    decodes = min(decodes, len(rows))
    rows = [(before, 1 if i < decodes else new) for i, (before, new) in enumerate(rows)]
    starts = np.cumsum([0, *(new for _, new in rows)], dtype=np.int32)
    lens = np.array([before + new for before, new in rows], np.int32)
    found_tables, found_lens, found_starts = map(
        np.asarray,
        mixed_chunks(
            *map(jnp.asarray, (tables(len(rows)), lens, starts)), jnp.int32(decodes), chunk, BLOCK, tokens=TOKENS
        ),
    )
    assert found_starts[0] == 0
    assert (np.diff(found_starts) >= 0).all()
    np.testing.assert_array_equal(np.diff(found_starts)[:decodes], 1)
    found = []
    for row, length in enumerate(found_lens):
        found += seen(found_tables[row], int(length), int(found_starts[row + 1] - found_starts[row]))
    wanted = [own_chunk(r, before + i, chunk) for r, (before, new) in enumerate(rows) for i in range(new)]
    assert found == wanted


@pytest.mark.parametrize("chunk", [4, 12, 48])
def test_a_row_that_decodes_sees_its_own_chunk_and_one_without_tokens_nothing(chunk: int) -> None:
    lens = np.array([1, 4, 5, 12, 13, 48, 0], np.int32)
    found_tables, found_lens = map(np.asarray, decode_chunks(jnp.asarray(tables(7)), jnp.asarray(lens), chunk, BLOCK))
    for row, length in enumerate(lens[:-1]):
        assert seen(found_tables[row], int(found_lens[row]), 1) == [own_chunk(row, int(length) - 1, chunk)]
    assert found_lens[-1] == 0


def test_blocks_that_do_not_divide_a_chunk_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"block_size=4 .*attention_chunk_size=10"):
        decode_chunks(jnp.zeros((1, 8), jnp.int32), jnp.ones(1, jnp.int32), 10, BLOCK)
