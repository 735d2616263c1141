"""Which page is below which addresses: the page manager.

    pages      created when they are needed, cleared, and mapped at their home for as long as they are there
    places     each has one page below it, or none; a page may be below many places

    place 5    page 3        a sequence ends                 place 5    page 3 (deferred: costs nothing)
               page 3        the next one of the slot        place 5    page 3 if that is what it gets, else unmapped
                             begins                                      first

A place keeps its page when its sequence ends: whoever gets that page there next finds it mapped. So pages are unmapped
only when another one comes to the place (`put`), or when their memory is given back (`withdraw`).

With several devices a page is a piece of memory in each array of each of them, and every device has the same pages at
the same places. Where a call of one driver fails, what the others did for the same pages is undone.

It knows nothing of sequences, steps or kernels: its callers see to it that nobody reads what they change.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jpaged.api.errors import EngineDeadError, OutOfMemoryError
from jpaged.executor.cache.virtual.driver import Driver, Handle

NO_PAGE = -1
"""Stands for the page of a place that has none."""


@dataclass(slots=True)
class MappingCounts:
    """What the manager did.

    num_created, num_mapped, num_unmapped: pages that got memory, came to a place, and went from one.
    num_kept: puts that found their page mapped already.
    num_access_calls, num_unmap_calls: of the drivers, for places, on all devices; one serves neighbouring places.
    seconds: in the drivers' calls.
    """

    num_created: int = 0
    num_mapped: int = 0
    num_unmapped: int = 0
    num_kept: int = 0
    num_access_calls: int = 0
    num_unmap_calls: int = 0
    seconds: float = 0.0


class PageManager:
    """The pages of one device, or of several that are alike. Several threads may call it.

    Args:
        arrays: each array of each device: its driver, and where it begins. A page is as many pieces of memory.
        page_bytes: of a page in one array, a multiple of the drivers' granularity.
        num_pages, num_places: of addresses; see `geometry.py`. The last pages may never be used.
    """

    def __init__(self, arrays: Sequence[tuple[Driver, int]], page_bytes: int, num_pages: int, num_places: int) -> None:
        for driver, _ in arrays:
            if page_bytes % driver.granularity:
                raise EngineDeadError(f"Pages of {page_bytes} bytes are not a multiple of {driver.granularity}.")
        self._arrays = tuple(arrays)
        self._drivers = tuple({id(driver): driver for driver, _ in arrays}.values())
        self._page_bytes = page_bytes
        self._num_pages = num_pages
        self._handles: list[list[Handle] | None] = [None] * num_pages
        self._page_at = np.full((num_places,), NO_PAGE, np.int32)
        self._read_only = np.zeros((num_places,), np.bool_)
        self._lock = threading.RLock()
        self.counts = MappingCounts()

    @property
    def num_backed(self) -> int:
        """Pages that have memory."""
        return sum(handles is not None for handles in self._handles)

    @property
    def backed_bytes(self) -> int:
        """Memory that pages have, on all devices together."""
        return self.num_backed * self._page_bytes * len(self._arrays)

    def is_backed(self, page: int) -> bool:
        """Whether the page has memory."""
        return self._handles[page] is not None

    def pages_at(self, places: np.ndarray) -> np.ndarray:
        """The pages of these places, int32; NO_PAGE for those that have none."""
        return self._page_at[places]

    def back(self, pages: np.ndarray) -> None:
        """Gives memory, all zeros, to those of these distinct pages that have none.

        Raises:
            OutOfMemoryError: a device has not enough; those that came before have got theirs on every device, and the
                others on none.
        """
        with self._lock, self._timed():
            missing = [page for page in pages.tolist() if self._handles[page] is None]
            created: list[int] = []
            try:
                for page in missing:
                    self._handles[page] = self._create()
                    created.append(page)
            finally:
                self._open_homes(np.array(sorted(created), np.int64))

    def withdraw(self, pages: np.ndarray) -> None:
        """Takes the memory of those of these distinct pages that have any, and unmaps it everywhere. Nobody reads them,
        nor will before they are backed again.
        """
        with self._lock, self._timed():
            there = np.array([page for page in pages.tolist() if self._handles[page] is not None], np.int64)
            goes = np.zeros((self._num_pages + 1,), np.bool_)  # the last one stands for NO_PAGE
            goes[there] = True
            self._empty(np.flatnonzero(goes[self._page_at]))
            for start, stop in _runs(np.sort(there)):
                for driver, base in self._arrays:
                    driver.unmap(base + start * self._page_bytes, (stop - start) * self._page_bytes)
            for page in there.tolist():
                self._release(page)

    def missing(self, places: np.ndarray, pages: np.ndarray, read_only: np.ndarray) -> np.ndarray:
        """Which of these places do not have these pages, with these rights: bool [n]. A place that may be written is
        good enough for who only reads.
        """
        differs: np.ndarray = (self._page_at[places] != pages) | (self._read_only[places] & ~read_only)
        return differs

    def put(self, places: np.ndarray, pages: np.ndarray, read_only: np.ndarray) -> int:
        """Maps pages below distinct places: int [n], int [n], bool [n]. What is there already stays; other pages below
        these places are unmapped, so nobody may be reading there.

        Returns: how many were mapped.

        Raises:
            OutOfMemoryError: pages without memory get some, and a device has no more; or it has none for the mapping
                itself. Those of the places that had to change have nothing then, on any device, or what they had.
        """
        with self._lock:
            differs = self.missing(places, pages, read_only)
            self.counts.num_kept += len(places) - int(np.count_nonzero(differs))
            if not differs.any():
                return 0
            order = np.argsort(places[differs], kind="stable")
            places, pages, read_only = (x[differs][order] for x in (places, pages, read_only))
            self.back(np.unique(pages))
            with self._timed():
                self._empty(places)
                self._map(places, pages, read_only)
                self._page_at[places] = pages
                self._read_only[places] = read_only
                self.counts.num_mapped += len(places)
        return len(places)

    def clear(self, places: np.ndarray) -> None:
        """Leaves nothing below these distinct places, which nobody reads."""
        with self._lock, self._timed():
            self._empty(np.sort(places))

    def close(self) -> None:
        """Gives everything back. The second time it does nothing."""
        self.withdraw(np.arange(self._num_pages))

    def check_integrity(self) -> None:
        """Raises EngineDeadError if a place has a page without memory."""
        used = np.unique(self._page_at[self._page_at != NO_PAGE])
        lost = [page for page in used.tolist() if self._handles[page] is None]
        if lost:
            raise EngineDeadError(f"Pages {lost[:16]} are mapped, but have no memory.")

    def _create(self) -> list[Handle]:
        handles: list[Handle] = []
        try:
            for driver, _ in self._arrays:
                handles.append(driver.create(self._page_bytes))
        except OutOfMemoryError:
            for (driver, _), handle in zip(self._arrays, handles, strict=False):
                driver.release(handle)
            raise
        return handles

    def _release(self, page: int) -> None:
        for (driver, _), handle in zip(self._arrays, self._handles[page] or (), strict=True):
            driver.release(handle)
        self._handles[page] = None

    def _open_homes(self, pages: np.ndarray) -> None:
        """Maps these ascending pages, which have memory, at their homes, with zeros in them; if that fails on a device,
        none of them has memory any more.
        """
        size, mapped = self._page_bytes, list[tuple[Driver, int]]()
        try:
            for i, (driver, base) in enumerate(self._arrays):
                for page in pages.tolist():
                    handles = self._handles[page]
                    assert handles is not None
                    driver.map(base + page * size, handles[i], size)
                    mapped.append((driver, base + page * size))
                for start, stop in _runs(pages):
                    driver.allow(base + start * size, (stop - start) * size, read_only=False)
                    driver.clear(base + start * size, (stop - start) * size)
            for driver in self._drivers:
                driver.settle()
        except Exception:
            self._undo(mapped)
            for page in pages.tolist():
                self._release(page)
            raise
        self.counts.num_created += len(pages)

    def _map(self, places: np.ndarray, pages: np.ndarray, read_only: np.ndarray) -> None:
        """Maps pages, which have memory, below ascending places that have none; all of them on every device, or none on
        any.
        """
        size, mapped = self._page_bytes, list[tuple[Driver, int]]()
        runs = [(rights, list(_runs(places[read_only == rights]))) for rights in (False, True)]
        try:
            for i, (driver, base) in enumerate(self._arrays):
                for place, page in zip(places.tolist(), pages.tolist(), strict=True):
                    handles = self._handles[page]
                    assert handles is not None
                    driver.map(self._address(base, place), handles[i], size)
                    mapped.append((driver, self._address(base, place)))
                for rights, of_rights in runs:
                    for start, stop in of_rights:
                        driver.allow(self._address(base, start), (stop - start) * size, rights)
                    self.counts.num_access_calls += len(of_rights)
        except Exception:
            self._undo(mapped)
            raise

    def _undo(self, mapped: Sequence[tuple[Driver, int]]) -> None:
        for driver, address in mapped:
            driver.unmap(address, self._page_bytes)

    def _empty(self, places: np.ndarray) -> None:
        """Unmaps what these ascending places have."""
        mapped = places[self._page_at[places] != NO_PAGE]
        for start, stop in _runs(mapped):
            for driver, base in self._arrays:
                driver.unmap(self._address(base, start), (stop - start) * self._page_bytes)
            self.counts.num_unmap_calls += len(self._arrays)
        self._page_at[mapped] = NO_PAGE
        self.counts.num_unmapped += len(mapped)

    def _address(self, base: int, place: int) -> int:
        return base + (self._num_pages + place) * self._page_bytes

    def _timed(self) -> "_Stopwatch":
        return _Stopwatch(self.counts)


class _Stopwatch:
    """Adds the time within it to the counts. One is never within another."""

    def __init__(self, counts: MappingCounts) -> None:
        self._counts = counts

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._counts.seconds += time.perf_counter() - self._begun


def _runs(numbers: np.ndarray) -> Iterator[tuple[int, int]]:
    """The runs of consecutive numbers among ascending ones: (first, last + 1) each."""
    if not len(numbers):
        return
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    starts = np.concatenate([numbers[:1], numbers[breaks + 1]])
    stops = np.concatenate([numbers[breaks], numbers[-1:]]) + 1
    yield from zip(starts.tolist(), stops.tolist(), strict=True)
