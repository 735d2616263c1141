"""Which page is below which addresses: the page manager.

    pages      created when they are needed, cleared, and mapped at their home for as long as they are there
    places     each has one page below it, or none; a page may be below many places

    place 5    page 3        a sequence ends                 place 5    page 3 (deferred: costs nothing)
               page 3        the next one of the slot        place 5    page 3 if that is what it gets, else unmapped
                             begins                                      first

A place keeps its page when its sequence ends: whoever gets that page there next finds it mapped. So pages are unmapped
only when another one comes to the place (`put`), or when their memory is given back (`withdraw`).

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
    """What the manager did. num_kept: puts that found their page mapped already. seconds: in the driver's calls."""

    num_created: int = 0
    num_mapped: int = 0
    num_unmapped: int = 0
    num_kept: int = 0
    seconds: float = 0.0


class PageManager:
    """The pages of one device. Several threads may call it.

    Args:
        driver: of the device.
        bases: where each array begins; a page is as many pieces of memory, one in each.
        page_bytes: of a page in one array, a multiple of the driver's granularity.
        num_pages, num_places: of addresses; see `geometry.py`.
    """

    def __init__(self, driver: Driver, bases: Sequence[int], page_bytes: int, num_pages: int, num_places: int) -> None:
        if page_bytes % driver.granularity:
            raise EngineDeadError(f"Pages of {page_bytes} bytes are not a multiple of {driver.granularity}.")
        self._driver = driver
        self._bases = tuple(bases)
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
        """Memory that pages have."""
        return self.num_backed * self._page_bytes * len(self._bases)

    def is_backed(self, page: int) -> bool:
        """Whether the page has memory."""
        return self._handles[page] is not None

    def pages_at(self, places: np.ndarray) -> np.ndarray:
        """The pages of these places, int32; NO_PAGE for those that have none."""
        return self._page_at[places]

    def back(self, pages: np.ndarray) -> None:
        """Gives memory, all zeros, to those of these distinct pages that have none.

        Raises:
            OutOfMemoryError: the device has not enough; those that came before have got theirs.
        """
        with self._lock, self._timed():
            missing = np.array([page for page in pages.tolist() if self._handles[page] is None], np.int64)
            created: list[int] = []
            try:
                for page in missing.tolist():
                    self._handles[page] = self._create()
                    created.append(page)
            finally:
                for start, stop in _runs(np.array(sorted(created), np.int64)):
                    self._open_homes(start, stop)
                self._driver.settle()
                self.counts.num_created += len(created)

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
                for base in self._bases:
                    self._driver.unmap(base + start * self._page_bytes, (stop - start) * self._page_bytes)
            for page in there.tolist():
                for handle in self._handles[page] or ():
                    self._driver.release(handle)
                self._handles[page] = None

    def missing(self, places: np.ndarray, pages: np.ndarray, read_only: np.ndarray) -> np.ndarray:
        """Which of these places do not have these pages, with these rights: bool [n]. A place that may be written is
        good enough for who only reads.
        """
        differs: np.ndarray = (self._page_at[places] != pages) | (self._read_only[places] & ~read_only)
        return differs

    def put(self, places: np.ndarray, pages: np.ndarray, read_only: np.ndarray) -> None:
        """Maps pages below distinct places: int [n], int [n], bool [n]. What is there already stays; other pages below
        these places are unmapped, so nobody may be reading there.

        Raises:
            OutOfMemoryError: pages without memory get some, and the device has no more.
        """
        with self._lock:
            differs = self.missing(places, pages, read_only)
            self.counts.num_kept += len(places) - int(np.count_nonzero(differs))
            if not differs.any():
                return
            order = np.argsort(places[differs], kind="stable")
            places, pages, read_only = (x[differs][order] for x in (places, pages, read_only))
            self.back(np.unique(pages))
            with self._timed():
                self._empty(places)
                for place, page in zip(places.tolist(), pages.tolist(), strict=True):
                    for base, handle in zip(self._bases, self._handles[page] or (), strict=True):
                        self._driver.map(self._address(base, place), handle, self._page_bytes)
                for rights in (False, True):
                    for start, stop in _runs(places[read_only == rights]):
                        for base in self._bases:
                            self._driver.allow(self._address(base, start), (stop - start) * self._page_bytes, rights)
                self._page_at[places] = pages
                self._read_only[places] = read_only
                self.counts.num_mapped += len(places)

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
            for _ in self._bases:
                handles.append(self._driver.create(self._page_bytes))
        except OutOfMemoryError:
            for handle in handles:
                self._driver.release(handle)
            raise
        return handles

    def _open_homes(self, start: int, stop: int) -> None:
        """Maps pages start .. stop-1 at their homes, with zeros in them."""
        size = (stop - start) * self._page_bytes
        for i, base in enumerate(self._bases):
            for page in range(start, stop):
                handles = self._handles[page]
                assert handles is not None
                self._driver.map(base + page * self._page_bytes, handles[i], self._page_bytes)
            self._driver.allow(base + start * self._page_bytes, size, read_only=False)
            self._driver.clear(base + start * self._page_bytes, size)

    def _empty(self, places: np.ndarray) -> None:
        """Unmaps what these ascending places have."""
        mapped = places[self._page_at[places] != NO_PAGE]
        for start, stop in _runs(mapped):
            for base in self._bases:
                self._driver.unmap(self._address(base, start), (stop - start) * self._page_bytes)
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
