"""Keeps the pages of running sequences below their places: before each step, and ahead of the next.

    plan N:   slots start, grow, copy, move      --prepare-->   what N uses and is not mapped yet; then N is dispatched
    plan N:   what prompts use in later chunks,
              what next plans will bring         --thread--->   mapped while N runs, so that others find it

The thread maps a few pages at a time, and stops when the next plan comes: nobody waits for what can wait.

A place may lose its page only when nobody reads or writes it any more. Steps in flight do so in two cases: a sequence
that goes on gets another page in the place of one (copy-on-write); or the host ended a sequence, of which the device
does not know yet. Then what is in flight is waited for. A slot that the device ended itself is not touched by the steps
after that: they write to the null block and see nothing.

Some kernels read whole tiles of keys, so a chunk's last tile may reach behind its sequence's pages (`read_behind`). The
null block's page is mapped there to be read only, which costs no memory, and stays until another page comes to the
place. That page waits for the steps whose chunks may be reading there:

    slot 3, chunk 1,000 .. 1,019      [ page 7: 0 .. 1,023 ][ page 0, read only ]      tile 1,000 .. 1,127
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from jpaged.api.errors import EngineDeadError, OutOfMemoryError
from jpaged.engine.interface import NULL_BLOCK, Chunk, StepPlan
from jpaged.executor.cache.virtual.driver import Driver
from jpaged.executor.cache.virtual.pages import NO_PAGE, MappingCounts, PageManager

_NO_STEP = -1
_Puts = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Places, their pages, and whether they may only be read, as `PageManager.put` takes them."""

_NO_PLACES, _NO_FLAGS = np.zeros((0,), np.int64), np.zeros((0,), np.bool_)
_NO_PUTS: _Puts = (_NO_PLACES, _NO_PLACES, _NO_FLAGS)

_BATCH = 16
"""Pages that the thread maps at a time, in 0.8 ms on an H200: the longest that a step waits for it."""


def _batches(puts: _Puts) -> Iterator[_Puts]:
    for first in range(0, len(puts[0]), _BATCH):
        places, pages, read_only = (part[first : first + _BATCH] for part in puts)
        yield places, pages, read_only


class PlanMapper:
    """Maps what plans need.

    Args:
        manager: of the pages. drivers: of its devices.
        tables: cache groups, slots and entries of a block table. A place is an index into such an array, flat.
        page_tokens: tokens that a page holds. read_behind: tokens behind a chunk that kernels may read.

    Attributes:
        maps_ahead: whether to map what plans announce (`StepPlan.ahead`) while they run.
        num_in_steps: pages that were mapped before a step could be dispatched.
        waited_s: for which steps waited for that, and for the thread.
    """

    def __init__(
        self,
        manager: PageManager,
        drivers: Sequence[Driver],
        tables: tuple[int, int, int],
        page_tokens: int,
        read_behind: int = 0,
    ) -> None:
        self._manager, self._drivers = manager, tuple(drivers)
        self._page_tokens, self._read_behind = page_tokens, read_behind
        self._shape = tables
        self._tables = np.zeros(tables, np.int32)  # the pages of running sequences
        self._last_step = np.full(tables[1:2], _NO_STEP, np.int64)  # that had a row of the slot
        self._last_chunk = self._last_step.copy()  # the last step that had a chunk of the slot
        self._ended_in = self._last_step.copy()  # the last step of a tenant that the host ended
        self.maps_ahead = True
        self.num_in_steps = 0
        self.waited_s = 0.0
        self._num_steps = 0
        self._newest_read = _NO_STEP
        self._work: Future[None] | None = None
        self._is_pausing = False
        self._later = _NO_PUTS  # of running sequences, what no program has used yet
        self._ahead = _NO_PLACES, _NO_PLACES  # places and pages that plans announced
        self._retired: list[tuple[int, np.ndarray]] = []  # pages to withdraw once a step was read, in its order
        self._thread = ThreadPoolExecutor(1, "jpaged-map-ahead", self._begin_thread)

    @property
    def counts(self) -> MappingCounts:
        """What was mapped."""
        return self._manager.counts

    def forget(self) -> None:
        """Nothing runs, and what sequences had is gone: no place is anybody's any more."""
        self.join()
        self._retired.clear()
        self._later, self._ahead = _NO_PUTS, (_NO_PLACES, _NO_PLACES)
        self._tables[:] = NULL_BLOCK

    def empty_places(self) -> None:
        """Takes the pages from all places, as if nobody had been there; pages keep their memory. Nothing runs, and no
        sequence is unfinished."""
        self.withdraw_all()
        self.forget()
        self._manager.clear(np.arange(np.prod(self._shape, dtype=np.int64)))

    def close(self) -> None:
        """Ends the thread. The second time it does nothing."""
        self._thread.shutdown()

    def prepare(self, plan: StepPlan, wait: Callable[[], None]) -> None:
        """Maps what a plan needs, before any of its programs is dispatched.

        wait: returns when everything dispatched has run.
        Raises:
            OutOfMemoryError: a page needs memory, and the device has no more.
        """
        begun = time.perf_counter()
        try:
            self._prepare(plan, wait)
        finally:
            self.waited_s += time.perf_counter() - begun

    def _prepare(self, plan: StepPlan, wait: Callable[[], None]) -> None:
        self._pause()
        self._ended_in[plan.ends] = self._last_step[plan.ends]
        places, pages, read_only, is_live = self._changes(plan)
        behind = self._read_behind_pages(plan)
        if len(behind):
            places, pages = np.append(places, behind), np.append(pages, np.full(behind.shape, NULL_BLOCK))
            read_only = np.append(read_only, np.ones(behind.shape, np.bool_))
            is_live = np.append(is_live, np.zeros(behind.shape, np.bool_))
        if len(places):
            missing = self._manager.missing(places, pages, read_only)
            self.counts.num_kept += int(np.count_nonzero(~missing))
            places, pages, read_only = places[missing], pages[missing], read_only[missing]
            if self._are_read(places, is_live[missing]).any():
                wait()
                self._newest_read = self._num_steps - 1
        if len(self._later[0]):
            places, pages, read_only = self._with_later(places, pages, read_only)
        is_later = self._are_used_later(plan, places)
        self._later = places[is_later], pages[is_later], read_only[is_later]
        if not is_later.all():
            self.num_in_steps += self._manager.put(places[~is_later], pages[~is_later], read_only[~is_later])
        self._last_step[plan.decode_slots] = self._num_steps
        for chunk in plan.chunks:
            self._last_step[chunk.slot] = self._last_chunk[chunk.slot] = self._num_steps

    @property
    def num_steps(self) -> int:
        """That were dispatched; the number of the next one, for `has_run`."""
        return self._num_steps

    def dispatched(self, plan: StepPlan) -> None:
        """The plan's programs are on their way: begins to map what later plans need, and to withdraw pages that no step
        in flight uses any more.
        """
        batches = deque(_batches(self._later)) if self.maps_ahead else deque()
        if self.maps_ahead and len(plan.ahead):
            slots, groups, indices, pages = plan.ahead.T
            self._tables[groups, slots, indices] = NULL_BLOCK  # a former tenant's, if any
            places = self._places(groups, slots, indices)
            old = ~np.isin(self._ahead[0], places)
            self._ahead = np.append(self._ahead[0][old], places), np.append(self._ahead[1][old], pages)
        if len(self._ahead[0]):
            places, pages = self._ahead
            writable = np.zeros(places.shape, np.bool_)
            awaited = self._tables.reshape(-1)[places] == NULL_BLOCK
            awaited &= self._manager.missing(places, pages, writable)
            self._ahead = places[awaited], pages[awaited]
            ready = awaited & ~self._are_read(places, writable)
            batches += _batches((places[ready], pages[ready], writable[ready]))
        unused_pages = [self._retired.pop(0)[1] for _ in range(self._num_unused())]
        if batches or unused_pages:
            self._work = self._thread.submit(self._change, batches, unused_pages)
        self._num_steps += 1

    def has_run(self, step: int) -> None:
        """A step's result was read, so it and those before it are done."""
        self._newest_read = max(self._newest_read, step)

    def retire(self, pages: np.ndarray) -> None:
        """Withdraws pages as soon as no step uses them: the next plan may, by copies to host memory, but no later one
        does before `take` names them.
        """
        goes = np.zeros((int(self._tables.max(initial=0)) + 1,), np.bool_)
        goes[pages[pages < len(goes)]] = True
        self._tables[goes[self._tables]] = NULL_BLOCK  # of sequences that ended, or before a window
        kept = ~np.isin(self._ahead[1], pages)
        self._ahead = self._ahead[0][kept], self._ahead[1][kept]
        self._retired.append((self._num_steps, pages))

    def take(self, pages: np.ndarray, num_spare: int) -> int:
        """Gives distinct pages their memory, in order: those that are still to be withdrawn, and at most `num_spare`
        others.

        Returns: how many have it then, the first ones.
        """
        self.join()
        manager = self._manager
        has_none = np.array([not manager.is_backed(page) for page in pages.tolist()], np.bool_)
        with suppress(OutOfMemoryError):  # others take it at the same time
            manager.back(pages[has_none][: max(0, num_spare)])
        backed = [manager.is_backed(page) for page in pages.tolist()]
        count = backed.index(False) if False in backed else len(backed)
        taken = pages[:count]
        retired = [(step, old[~np.isin(old, taken)]) for step, old in self._retired]
        self._retired = [(step, old) for step, old in retired if len(old)]
        fresh = pages[count:][~np.isin(pages[count:], [page for _, old in self._retired for page in old.tolist()])]
        manager.withdraw(fresh)
        return count

    def withdraw_all(self) -> None:
        """Withdraws what was retired. Nothing runs."""
        self.join()
        self._change(deque(), [pages for _, pages in self._retired])
        self._retired.clear()

    def check_integrity(self) -> None:
        """Raises EngineDeadError unless what running sequences have is mapped where they look for it."""
        self.join()
        places = np.flatnonzero(self._tables.reshape(-1) != NULL_BLOCK)
        pages = self._tables.reshape(-1)[places]
        self._manager.check_integrity()
        wrong = places[self._manager.pages_at(places) != pages]
        if len(wrong):
            raise EngineDeadError(f"Places {wrong[:16].tolist()} do not have the pages of their block tables.")

    def _changes(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The places that have other pages after the plan's changes than before, their pages, which of them the slot
        only reads, and at which a sequence that goes on had another page before.
        """
        tables, parts, live = self._tables, list[np.ndarray](), list[np.ndarray]()
        computed = np.zeros(self._shape[1:2], np.int64)  # pages whose tokens all are, when a slot starts

        def change(slots: np.ndarray, groups: np.ndarray, indices: np.ndarray, pages: np.ndarray) -> None:
            parts.append(np.stack([slots, groups, indices, pages]))
            live.append(tables[groups, slots, indices] != NULL_BLOCK)
            tables[groups, slots, indices] = pages

        for start in plan.starts:
            tables[:, start.slot] = NULL_BLOCK
            groups, indices = np.nonzero(start.block_ids != NULL_BLOCK)
            change(np.full(groups.shape, start.slot), groups, indices, start.block_ids[groups, indices])
            computed[start.slot] = start.num_computed_tokens // self._page_tokens
        if len(plan.beams):
            slots, parents = plan.beams[:, 0], plan.beams[:, 1]
            before, after = tables[:, slots], tables[:, parents]
            groups, rows, indices = np.nonzero(before != after)
            pages = after[groups, rows, indices]
            tables[groups, slots[rows], indices] = np.where(
                pages == NULL_BLOCK, NULL_BLOCK, before[groups, rows, indices]
            )
            is_page = pages != NULL_BLOCK
            change(slots[rows][is_page], groups[is_page], indices[is_page], pages[is_page])
        if len(plan.table_updates):
            slots, groups, indices, pages = plan.table_updates.T
            change(slots, groups, indices, pages)
        if not parts:
            return _NO_PLACES, _NO_PLACES, _NO_FLAGS, _NO_FLAGS
        slots, groups, indices, pages = np.concatenate(parts, axis=1)
        is_live, places = np.concatenate(live), self._places(groups, slots, indices)
        if len(parts) > 1:  # of a place that changes twice the last page counts
            last = len(places) - 1 - np.unique(places[::-1], return_index=True)[1]
            slots, indices, pages, places, is_live = (x[last] for x in (slots, indices, pages, places, is_live))
        return places, pages, indices < computed[slots], is_live

    def _are_read(self, places: np.ndarray, is_live: np.ndarray) -> np.ndarray:
        """Of which of these places steps in flight may touch the page that is there."""
        slots, pages = self._slots_of(places), self._manager.pages_at(places)
        until = np.where(is_live, self._last_step[slots], self._ended_in[slots])
        until = np.where(pages == NULL_BLOCK, self._last_chunk[slots], until)  # mapped for what chunks read behind
        in_use: np.ndarray = (pages != NO_PAGE) & (until > self._newest_read)
        return in_use

    def _read_behind_pages(self, plan: StepPlan) -> np.ndarray:
        """Places that kernels may read behind the plan's chunks, and where the chunks' sequences have no pages."""
        found = [_NO_PLACES]
        for chunk in plan.chunks if self._read_behind else ():
            first, end = (self._num_pages(chunk, behind) for behind in (0, self._read_behind))
            if len(chunk.token_ids) and first < end:
                groups, indices = np.nonzero(self._tables[:, chunk.slot, first:end] == NULL_BLOCK)
                found.append(self._places(groups, np.full(groups.shape, chunk.slot), first + indices))
        return np.concatenate(found)

    def _num_pages(self, chunk: Chunk, behind: int) -> int:
        """That hold a chunk's tokens, those before them, and so many behind."""
        return -(-(chunk.start + len(chunk.token_ids) + behind) // self._page_tokens)

    def _places(self, groups: np.ndarray, slots: np.ndarray, indices: np.ndarray) -> np.ndarray:
        _, num_slots, width = self._shape
        places: np.ndarray = (groups.astype(np.int64) * num_slots + slots) * width + indices
        return places

    def _num_unused(self) -> int:
        """How many entries of `_retired` no step in flight uses."""
        return sum(step <= self._newest_read for step, _ in self._retired)

    def _with_later(self, places: np.ndarray, pages: np.ndarray, read_only: np.ndarray) -> _Puts:
        """These, and what was put off that is still to be mapped."""
        later, of_later, rights = self._later
        missing = self._manager.missing(later, of_later, rights) & (self._tables.reshape(-1)[later] == of_later)
        missing &= ~np.isin(later, places)
        return (
            np.append(places, later[missing]),
            np.append(pages, of_later[missing]),
            np.append(read_only, rights[missing]),
        )

    def _are_used_later(self, plan: StepPlan, places: np.ndarray) -> np.ndarray:
        """Which of these places the plan's programs do not use: of prompts those behind what kernels read of the plan's
        chunk, if any."""
        if not self.maps_ahead:
            return np.zeros(places.shape, np.bool_)
        end = np.zeros(self._shape[1:2], np.int64)
        end[plan.decode_slots] = self._shape[2]
        for chunk in plan.chunks:
            end[chunk.slot] = self._num_pages(chunk, self._read_behind)
        is_later: np.ndarray = places % self._shape[2] >= end[self._slots_of(places)]
        return is_later

    def _slots_of(self, places: np.ndarray) -> np.ndarray:
        slots: np.ndarray = places // self._shape[2] % self._shape[1]
        return slots

    def _change(self, batches: deque[_Puts], unused: Sequence[np.ndarray]) -> None:
        while batches and not self._is_pausing:
            with suppress(OutOfMemoryError):  # whoever needs them will hear of it
                self._manager.put(*batches.popleft())
        for pages in unused:
            self._manager.withdraw(pages)

    def _pause(self) -> None:
        """Lets the thread end what it has begun, a few pages; what it did not come to is mapped when it is needed, or
        after the next step's dispatch.
        """
        self._is_pausing = True
        try:
            self.join()
        finally:
            self._is_pausing = False

    def join(self) -> None:
        """Waits for what the thread is doing."""
        if self._work is not None:
            self._work.result()
            self._work = None

    def _begin_thread(self) -> None:
        for driver in self._drivers:
            driver.begin_thread()
