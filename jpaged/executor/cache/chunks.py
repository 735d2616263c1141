"""Attention within chunks of the context (Llama 4): a query sees the tokens of its own chunk, up to itself.

Attention kernels need no mask for it. A row with queries in several chunks becomes a row for each of them, whose table
begins at the chunk's first block and whose length ends with the chunk:

    chunk 8, blocks of 4    tokens  0...|4...|8...|12..|16..      table        length   queries
    a row, queries 13 .. 17        [                qqq|qq]       0 1 2 3 4    18       5
    becomes two rows                         [      qqq]          2 3          8        3
                                                       [qq]       4 -          2        2

Kernels compare positions only within a row, so counting them from the chunk's first token changes nothing; but chunks
must begin where blocks do. Shapes are static: each row becomes as many rows as a step's tokens can touch chunks, and
those without queries are empty.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jpaged.api.errors import InvalidParameterError


def blocks_of_chunk(chunk: int, block_size: int) -> int:
    """How many blocks a chunk has. chunk, block_size: in tokens.

    Raises:
        InvalidParameterError: block_size does not divide the chunk.
    """
    if chunk % block_size:
        raise InvalidParameterError(
            f"block_size={block_size} does not divide the model's attention_chunk_size={chunk}; use a divisor of it."
        )
    return chunk // block_size


def decode_chunks(
    tables: Int[Array, "rows blocks"], kv_lens: Int[Array, " rows"], chunk: int, block_size: int
) -> tuple[Int[Array, "rows chunk_blocks"], Int[Array, " rows"]]:
    """Tables and lengths for rows with one query each, that of the last token, which sees its own chunk alone.

    tables: int32; block ids of each row. kv_lens: int32; its tokens, 0 for an empty row. chunk, block_size: in tokens.
    Returns tables and lengths of the rows' last chunks, both int32.

    Raises:
        InvalidParameterError: block_size does not divide the chunk.
    """
    number = jnp.maximum(kv_lens - 1, 0) // chunk
    return _tables(tables, number, blocks_of_chunk(chunk, block_size)), kv_lens - number * chunk


def mixed_chunks(
    tables: Int[Array, "rows blocks"],
    kv_lens: Int[Array, " rows"],
    query_starts: Int[Array, " rows+1"],
    num_decodes: Int[Array, ""],
    chunk: int,
    block_size: int,
    tokens: int,
) -> tuple[Int[Array, "parts chunk_blocks"], Int[Array, " parts"], Int[Array, " parts+1"]]:
    """Tables, lengths and query starts of the rows that a step's rows become; int32, like those given. The first
    num_decodes rows, which have one query each, stay first and stay one row each.

    tables, kv_lens, chunk, block_size: as of `decode_chunks`. query_starts, num_decodes: as of `mixed_attention`.
    tokens: the most queries that a row has.

    Raises:
        InvalidParameterError: block_size does not divide the chunk.
    """
    rows, parts = kv_lens.shape[0], 1 + -(-(tokens - 1) // chunk)
    index = jnp.arange(rows * parts, dtype=jnp.int32)
    of_others = jnp.maximum(index - num_decodes, 0)
    row = jnp.where(index < num_decodes, index, num_decodes + of_others // parts)
    part = jnp.where(index < num_decodes, 0, of_others % parts)
    absent, row = row >= rows, jnp.minimum(row, rows - 1)
    last = kv_lens[row]
    first = jnp.maximum(last - (query_starts[row + 1] - query_starts[row]), 0)
    number = first // chunk + part
    begin, end = jnp.clip(number * chunk, first, last), jnp.clip((number + 1) * chunk, first, last)
    starts = jnp.where(absent, query_starts[rows], query_starts[row] + begin - first)
    lengths = jnp.where(absent | (end <= begin), 0, end - number * chunk)
    return (
        _tables(tables[row], number, blocks_of_chunk(chunk, block_size)),
        lengths.astype(jnp.int32),
        jnp.append(starts, query_starts[rows]).astype(jnp.int32),
    )


def _tables(
    tables: Int[Array, "rows blocks"], number: Int[Array, " rows"], blocks: int
) -> Int[Array, "rows chunk_blocks"]:
    """Each row's block table of the chunk of this number. Entries past the end of a row's table repeat its last one."""
    width = tables.shape[1]
    index = number[:, None] * blocks + jnp.arange(min(blocks, width), dtype=jnp.int32)
    return jnp.take_along_axis(tables, jnp.minimum(index, width - 1), axis=1)
