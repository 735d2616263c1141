"""The page manager, against a model that says what each address holds."""

import ctypes

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jpaged.api.errors import EngineDeadError, OutOfMemoryError
from jpaged.executor.cache.virtual.memfd import MemfdDriver, Memory
from jpaged.executor.cache.virtual.pages import NO_PAGE, PageManager

PAGE = MemfdDriver.granularity
NUM_PAGES, NUM_PLACES, NUM_ARRAYS = 8, 20, 2


class Setup:
    def __init__(self, limit: int = NUM_PAGES * NUM_ARRAYS) -> None:
        self.driver = MemfdDriver(Memory(limit * PAGE))
        size = (NUM_PAGES + NUM_PLACES) * PAGE
        self.bases = [self.driver.reserve(size) for _ in range(NUM_ARRAYS)]
        self.manager = PageManager([(self.driver, base) for base in self.bases], PAGE, NUM_PAGES, NUM_PLACES)

    def word(self, array: int, row: int) -> ctypes.c_int64:
        """Of a home (a page's number) or a place (NUM_PAGES + its number)."""
        return ctypes.c_int64.from_address(self.bases[array] + row * PAGE + 16)


def flags(count: int, value: bool = False) -> np.ndarray:
    return np.full((count,), value, np.bool_)


def test_a_place_that_has_its_page_already_costs_nothing():
    setup = Setup()
    places, pages = np.array([3, 9]), np.array([5, 2])
    setup.manager.put(places, pages, flags(2))
    setup.manager.put(places, pages, flags(2))
    counts = setup.manager.counts
    assert (counts.num_mapped, counts.num_unmapped, counts.num_kept) == (2, 0, 2)
    setup.manager.put(places, np.array([5, 1]), flags(2))
    assert (counts.num_mapped, counts.num_unmapped, counts.num_kept) == (3, 1, 3)


def test_what_may_be_written_is_good_enough_for_a_reader_but_not_the_other_way():
    setup = Setup()
    place, page = np.array([0]), np.array([1])
    setup.manager.put(place, page, flags(1))
    setup.manager.put(place, page, flags(1, True))
    assert setup.manager.counts.num_mapped == 1
    setup.manager.put(np.array([4]), page, flags(1, True))
    setup.manager.put(np.array([4]), page, flags(1))
    setup.word(0, NUM_PAGES + 4).value = 5  # which would fault if it could only be read
    assert setup.word(0, NUM_PAGES).value == 5
    assert setup.manager.counts.num_mapped == 3


def test_a_page_for_which_there_is_no_memory_leaves_all_as_it_was():
    setup = Setup(limit=5)  # two pages and a half
    setup.manager.back(np.array([0, 1]))
    with pytest.raises(OutOfMemoryError):
        setup.manager.put(np.array([0, 1]), np.array([1, 2]), flags(2))
    assert setup.manager.num_backed == 2
    assert setup.driver.memory.num_used == 4 * PAGE
    assert setup.manager.pages_at(np.array([0, 1])).tolist() == [NO_PAGE, NO_PAGE]
    setup.manager.withdraw(np.array([0]))
    setup.manager.put(np.array([0, 1]), np.array([1, 2]), flags(2))


def test_a_page_without_memory_below_a_place_is_noticed():
    setup = Setup()
    setup.manager.put(np.array([0]), np.array([1]), flags(1))
    setup.manager._handles[1] = None
    with pytest.raises(EngineDeadError, match="no memory"):
        setup.manager.check_integrity()


class Devices:
    """Two devices with an array each, and a manager of both. The second fails in its `fails_in`-th call of a kind."""

    def __init__(self, kind: str = "", fails_in: int = 0) -> None:
        self.drivers = [MemfdDriver(Memory(NUM_PAGES * PAGE)) for _ in range(2)]
        self.bases = [driver.reserve((NUM_PAGES + NUM_PLACES) * PAGE) for driver in self.drivers]
        self.manager = PageManager(list(zip(self.drivers, self.bases, strict=True)), PAGE, NUM_PAGES, NUM_PLACES)
        self.manager.back(np.arange(3))
        if kind:
            call, self.left = getattr(self.drivers[1], kind), fails_in

            def failing(*arguments, **named):
                self.left -= 1
                if self.left == 0:
                    raise OutOfMemoryError("injected")
                return call(*arguments, **named)

            setattr(self.drivers[1], kind, failing)

    def maps(self) -> list[list[int]]:
        """Of each device, what is mapped, as homes and places."""
        return [
            sorted((at - base) // PAGE for at in driver._maps)
            for driver, base in zip(self.drivers, self.bases, strict=True)
        ]

    def word(self, device: int, row: int) -> ctypes.c_int64:
        return ctypes.c_int64.from_address(self.bases[device] + row * PAGE + 16)


def test_every_device_has_the_same_pages_at_the_same_places():
    devices = Devices()
    devices.manager.put(np.array([4, 5, 9]), np.array([2, 1, 2]), flags(3))
    assert devices.maps() == [[0, 1, 2, *(NUM_PAGES + place for place in (4, 5, 9))]] * 2
    for device in range(2):
        devices.word(device, NUM_PAGES + 4).value = 7 + device
        assert devices.word(device, NUM_PAGES + 9).value == devices.word(device, 2).value == 7 + device
    assert devices.manager.backed_bytes == 2 * 3 * PAGE


@pytest.mark.parametrize(("kind", "fails_in"), [("map", 1), ("map", 3), ("allow", 1), ("allow", 2)])
def test_places_that_one_device_cannot_map_are_empty_on_both_and_can_be_mapped_later(kind, fails_in):
    failing = Devices(kind, fails_in)
    places, pages = np.array([4, 5, 9]), np.array([2, 1, 2])
    with pytest.raises(OutOfMemoryError, match="injected"):
        failing.manager.put(places, pages, flags(3))
    assert failing.maps() == [[0, 1, 2]] * 2
    assert failing.manager.pages_at(places).tolist() == [NO_PAGE] * 3
    failing.manager.put(places, pages, flags(3))
    assert failing.maps() == [[0, 1, 2, *(NUM_PAGES + place for place in places.tolist())]] * 2


@pytest.mark.parametrize(("kind", "fails_in"), [("create", 2), ("map", 1), ("map", 2), ("allow", 1), ("clear", 1)])
def test_pages_that_one_device_has_no_memory_for_have_it_on_none(kind, fails_in):
    devices = Devices(kind, fails_in)
    manager = devices.manager
    with pytest.raises(OutOfMemoryError, match="injected"):
        manager.back(np.array([3, 4]))
    first, second = (driver.memory.num_used for driver in devices.drivers)
    assert first == second == manager.num_backed * PAGE
    assert devices.maps() == [list(range(manager.num_backed))] * 2
    manager.back(np.array([3, 4]))
    assert manager.num_backed == 5
    manager.close()
    assert devices.maps() == [[], []]
    assert not any(driver.memory.num_used for driver in devices.drivers)


class PagesMachine(RuleBasedStateMachine):
    """Puts, clears and withdraws at random; every mapped address is read after each, and written at random."""

    def __init__(self) -> None:
        super().__init__()
        self.setup = Setup()
        self.at: dict[int, tuple[int, bool]] = {}  # place -> page, whether it may only be read
        self.values: dict[int, list[int]] = {}  # page -> what each array's part of it holds
        self.written = 0

    def _backed(self, pages) -> None:
        for page in pages:
            self.values.setdefault(page, [0] * NUM_ARRAYS)

    @rule(
        pairs=st.dictionaries(
            st.integers(0, NUM_PLACES - 1), st.tuples(st.integers(0, NUM_PAGES - 1), st.booleans()), max_size=8
        )
    )
    def put(self, pairs):
        places = np.array(list(pairs), np.int64)
        pages = np.array([page for page, _ in pairs.values()], np.int64)
        read_only = np.array([rights for _, rights in pairs.values()], np.bool_)
        self.setup.manager.put(places, pages, read_only)
        self._backed(pages.tolist())
        for place, (page, rights) in pairs.items():
            had = self.at.get(place)
            if had is None or had[0] != page or (had[1] and not rights):
                self.at[place] = (page, rights)

    @rule(pages=st.sets(st.integers(0, NUM_PAGES - 1), max_size=4))
    def back(self, pages):
        self.setup.manager.back(np.array(sorted(pages), np.int64))
        self._backed(pages)

    @rule(places=st.sets(st.integers(0, NUM_PLACES - 1), max_size=6))
    def clear(self, places):
        self.setup.manager.clear(np.array(sorted(places), np.int64))
        for place in places:
            self.at.pop(place, None)

    @rule(pages=st.sets(st.integers(0, NUM_PAGES - 1), max_size=3))
    def withdraw(self, pages):
        self.setup.manager.withdraw(np.array(sorted(pages), np.int64))
        self.at = {place: had for place, had in self.at.items() if had[0] not in pages}
        for page in pages:
            self.values.pop(page, None)

    @precondition(lambda self: self.at)
    @rule(data=st.data())
    def write(self, data):
        place = data.draw(st.sampled_from(sorted(self.at)))
        page, read_only = self.at[place]
        self.written += 1
        for array in range(NUM_ARRAYS):
            value = 10 * self.written + array
            row = page if read_only else NUM_PAGES + place
            self.setup.word(array, row).value = value
            self.values[page][array] = value

    @invariant()
    def every_address_holds_its_page(self):
        for array in range(NUM_ARRAYS):
            for page, values in self.values.items():
                assert self.setup.word(array, page).value == values[array]
            for place, (page, _) in self.at.items():
                assert self.setup.word(array, NUM_PAGES + place).value == self.values[page][array]

    @invariant()
    def nothing_leaks(self):
        manager = self.setup.manager
        manager.check_integrity()
        assert manager.num_backed == len(self.values)
        assert self.setup.driver.memory.num_used == manager.backed_bytes == len(self.values) * NUM_ARRAYS * PAGE
        expected = [self.at.get(place, (NO_PAGE, False))[0] for place in range(NUM_PLACES)]
        assert manager.pages_at(np.arange(NUM_PLACES)).tolist() == expected

    def teardown(self):
        self.setup.manager.close()
        assert self.setup.driver.memory.num_used == 0
        self.setup.driver.close()


TestPagesMachine = PagesMachine.TestCase
TestPagesMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
