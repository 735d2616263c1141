"""The KV pool as a picture: who holds each block, in one byte a cell.

    block       1      2      3      4      5      6      7      8
    refs        2      1      0      0      1      0      1      0
    named       x                    x
    holder    4, 9     4                    9           none
              -----------------------------------------------------
    cell       4|S     4     free  cached   9    free  other   free       one block a cell

A block that several sequences share is marked so, and has the colour of the earliest request among them. Blocks that
are referenced, but by no running sequence, are those of pinned prefixes. A pool of more than `max_cells` blocks is
drawn with several neighbouring blocks in a cell: the cell shows what most of those in use show, and its level says how
many are in use. Totals are always exact.

A view reads the whole pool, about 3 ms for 100,000 blocks: it is made when someone asks, and never by a step.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

FREE, CACHED, OTHER, FIRST_COLOUR = 0, 1, 2, 3
"""What a cell's low four bits say: nothing held, nothing held but a prefix could hit it, held by no running sequence,
and from FIRST_COLOUR on the request number modulo NUM_COLOURS."""
NUM_COLOURS = 13
"""A prime, so that the numbers that one of several API processes gives out (every second, every third) use all."""
SHARED = 16
"""The bit of a cell whose block several sequences hold."""
MAX_CELLS = 4096
MAX_LISTED = 24

_NUM_CODES = 2 * SHARED


@dataclass(frozen=True, slots=True)
class Holder:
    """A running request.

    number: the caller's own. blocks: distinct blocks that it holds. shared: those of them that others hold too.
    """

    number: int
    blocks: int
    shared: int


@dataclass(frozen=True, slots=True)
class PoolView:
    """A picture of the pool, without the null block.

    block_size: tokens that a block holds.
    num_blocks: of the pool. num_used: referenced. num_shared: referenced more than once. num_cached: not referenced,
    but a prefix could hit them.
    blocks_per_cell: 1, or more in a pool that is larger than the picture.
    cells: uint8 [cells] as bytes; see FREE, CACHED, OTHER, FIRST_COLOUR and SHARED.
    levels: uint8 [cells] as bytes; the part of each cell's blocks that is not free, of 255; empty with one block a
    cell.
    holders: those with the most blocks, in the order of their numbers. num_holders: how many there are in all.
    """

    block_size: int
    num_blocks: int
    num_used: int
    num_shared: int
    num_cached: int
    blocks_per_cell: int
    cells: bytes
    levels: bytes
    holders: list[Holder]
    num_holders: int


def view_pool(
    refs: np.ndarray,
    named: np.ndarray,
    tables: Iterable[tuple[int, np.ndarray]],
    block_size: int,
    max_cells: int = MAX_CELLS,
    max_listed: int = MAX_LISTED,
) -> PoolView:
    """Draws a pool.

    Args:
        refs, named: int32 and bool [blocks]; as `BlockPool.occupancy` gives them, the null block first.
        tables: (number of the request, its block table, int32 [n]) of every running sequence; a request may have
            several.
        block_size: tokens a block holds.
        max_cells: of the picture. max_listed: requests in its list.
    """
    of_request: dict[int, list[np.ndarray]] = {}
    for number, table in tables:
        of_request.setdefault(number, []).append(table)
    held, shared = refs > 0, refs > 1
    cells = np.where(held, OTHER, np.where(named, CACHED, FREE)).astype(np.uint8)
    holders = []
    for number in sorted(of_request, reverse=True):
        own = of_request[number]
        block_ids = own[0] if len(own) == 1 else np.unique(np.concatenate(own))
        cells[block_ids] = FIRST_COLOUR + number % NUM_COLOURS
        holders.append(Holder(number, len(block_ids), int(np.count_nonzero(shared[block_ids]))))
    cells[shared] |= SHARED
    holders.sort(key=lambda holder: (-holder.blocks, holder.number))
    blocks_per_cell, drawn, levels = _grouped(cells[1:], max_cells)
    return PoolView(
        block_size=block_size,
        num_blocks=len(refs) - 1,
        num_used=int(np.count_nonzero(held[1:])),
        num_shared=int(np.count_nonzero(shared[1:])),
        num_cached=int(np.count_nonzero(named[1:] & ~held[1:])),
        blocks_per_cell=blocks_per_cell,
        cells=drawn.tobytes(),
        levels=levels.tobytes(),
        holders=sorted(holders[:max_listed], key=lambda holder: holder.number),
        num_holders=len(holders),
    )


def _grouped(codes: np.ndarray, max_cells: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Blocks in a cell, and each cell's code and level, uint8 [cells] both; no levels for one block a cell."""
    per_cell = -(-len(codes) // max_cells)
    if per_cell == 1:
        return 1, codes, np.zeros((0,), np.uint8)
    num_cells = -(-len(codes) // per_cell)
    cell_of = np.arange(len(codes)) // per_cell
    counts = np.bincount(cell_of * _NUM_CODES + codes, minlength=num_cells * _NUM_CODES)
    counts = counts.reshape(num_cells, _NUM_CODES)
    sizes = counts.sum(axis=1)
    counts[:, FREE] = 0  # so a cell with nothing else is free, and one with anything else shows that
    levels = np.ceil(255 * counts.sum(axis=1) / sizes)
    return per_cell, counts.argmax(axis=1).astype(np.uint8), levels.astype(np.uint8)
