"""Large tensors in runs of their rows, so that the host never holds much of one.

    tensor [rows, ...]  --runs-->  rows 0 .. n-1 | n .. 2n-1 | ..    each with the piece that says where it belongs

An embedding may take gigabytes, and so may the experts of a layer where a checkpoint has one tensor for all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jpaged.models.loading.pieces import Piece
from jpaged.models.loading.safetensors_file import StoredTensor

MOST_BYTES = 1 << 28
"""Of a run, as it lies in memory. Reading and copying take far longer than what each costs beside."""


@dataclass(frozen=True)
class Run:
    """Rows first .. first + count - 1 of a stored tensor's first axis. piece: of them alone, a tensor of their own."""

    piece: Piece
    first: int
    count: int


def runs(piece: Piece, tensor: StoredTensor, most_bytes: int) -> list[Run]:
    """What a piece is made of, where its tensor takes more than so many bytes. Empty where it takes less, or where
    the part's rows are scattered: then it is to be read as a whole.
    """
    if tensor.array_bytes <= most_bytes:
        return []
    first, rows, part = 0, piece.shape[0], piece.part
    if part is not None:
        if part.axis or rows % part.split[0]:
            return []
        each = rows // part.split[0]
        first, rows = part.first * each, part.count * each
    row_bytes = tensor.array_bytes // piece.shape[0]
    whole = replace(piece, shape=(rows, *piece.shape[1:]), part=None)
    return list(_cut(Run(whole, first, rows), most_bytes // row_bytes))


def _cut(run: Run, most_rows: int) -> Iterator[Run]:
    """The run in runs of at most so many rows each, as far as it can be cut."""
    piece, rows = run.piece, run.count
    # Entries of the split's first axis that has several are consecutive runs of rows.
    axis = next((axis for axis, size in enumerate(piece.split) if size > 1), 0)
    entries = piece.split[axis]
    is_copied, is_ordered = piece.copies > 1 and piece.copied_axis == axis, piece.order and piece.ordered_axis == axis
    if rows <= most_rows or is_copied or is_ordered or rows % entries or rows == 1:
        yield run
        return
    unit = rows // entries
    number = -(-entries // max(1, most_rows // unit))
    size = -(-entries // number)
    for begin in range(0, entries, size):
        count = min(size, entries - begin)
        some = Run(_entries(piece, axis, begin, count, unit), run.first + begin * unit, count * unit)
        if count == 1:  # which may still be too large
            yield from _cut(some, most_rows)
        else:
            yield some


def _entries(piece: Piece, axis: int, begin: int, count: int, unit: int) -> Piece:
    """The piece that so many entries of an axis of the split are. unit: rows of an entry."""
    start = list(piece.offsets)
    start[piece.axes.index(axis)] += begin
    split = (*piece.split[:axis], count, *piece.split[axis + 1 :])
    return replace(piece, shape=(count * unit, *piece.shape[1:]), split=split, start=tuple(start))
