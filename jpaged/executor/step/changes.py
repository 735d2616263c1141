"""The programs that tell the device what changed: requests that start and end, and beams that go on from others.

update             ends, starts and block-table entries
init_full          makes the full sampling state, when some request first asks for something kept there
start_full         writes a slot's row of it
known_tokens       counts the tokens that a slot starts with
set_masks[W]       what slots may sample from now on, where it is not sent with the step's sampling program
move_beams[N]      slots go on from other slots, with the tokens that a search chose
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from jaxtyping import Array, Int, UInt

from jpaged.engine.interface import NO_PLACE, NO_TOKEN
from jpaged.executor.sampling import records as sampling_records
from jpaged.executor.sampling import state as sampling_state
from jpaged.executor.step.bodies import table_updates
from jpaged.executor.step.masks import MaskRoom, take_masks
from jpaged.executor.step.packing import Field, PackedLayout
from jpaged.executor.step.program import Setup, SingleProgram, StepProgram
from jpaged.executor.step.state import SlotState, append_blocks, end_slots, start_slots

STARTS_PER_UPDATE = 32
TABLE_UPDATES_PER_UPDATE = 1024
KNOWN_TOKENS_PER_CALL = 1024


@dataclass(frozen=True)
class Update(SingleProgram):
    """Applies ends, then starts, then block-table entries."""

    kind = "update"
    writes = ("state", "sampling", "places")

    @classmethod
    def first(cls, setup: Setup) -> Self:
        return cls()

    def layout(self, setup: Setup) -> PackedLayout:
        null = setup.config.null_slot
        return PackedLayout(
            ends=Field((STARTS_PER_UPDATE,), null),
            slots=Field((STARTS_PER_UPDATE,), null),
            num_computed_tokens=Field((STARTS_PER_UPDATE,), 0),
            records=Field((STARTS_PER_UPDATE, sampling_records.CORE_RECORD_WORDS), 0),
            places=Field((STARTS_PER_UPDATE,), NO_PLACE),
            table_updates=table_updates(TABLE_UPDATES_PER_UPDATE, setup),
        )

    def body(
        self,
        setup: Setup,
        *,
        state: SlotState,
        sampling: sampling_state.SamplingState,
        places: Int[Array, " slots"],
        packed: Int[Array, " n"],
    ) -> tuple[dict[str, object], None]:
        host = self.layout(setup).unpack(packed)
        state = end_slots(state, host["ends"])
        state = start_slots(state, host["slots"], host["num_computed_tokens"], setup.config.null_slot)
        state = state._replace(block_tables=append_blocks(state.block_tables, host["table_updates"]))
        sampling = sampling_state.start_slots(sampling, host["slots"], host["records"])
        places = places.at[host["slots"]].set(host["places"])  # padding: NO_PLACE to the null slot
        return {"state": state, "sampling": sampling, "places": places}, None


@dataclass(frozen=True)
class InitFull(SingleProgram):
    """Makes the full sampling state, neutral for all slots."""

    kind = "init_full"
    creates = ("full",)

    def body(self, setup: Setup) -> tuple[dict[str, object], None]:
        slots, model = setup.config.max_num_seqs, setup.model
        return {"full": sampling_state.init_full_state(slots, model.vocab_size, model.config.vocab_size)}, None


@dataclass(frozen=True)
class StartFull(SingleProgram):
    """Writes a slot's row of the full sampling state; `KnownTokens` must follow for all its tokens."""

    kind = "start_full"
    writes = ("full",)

    def layout(self, setup: Setup) -> PackedLayout:
        words = sampling_records.full_record_words(setup.model.vocab_size)
        return PackedLayout(slot=Field((), setup.config.null_slot), record=Field((words,), 0))

    def body(
        self, setup: Setup, *, full: sampling_state.FullSamplingState, packed: Int[Array, " n"]
    ) -> tuple[dict[str, object], None]:
        host = self.layout(setup).unpack(packed)
        return {"full": sampling_state.start_full_slot(full, host["slot"], host["record"])}, None


@dataclass(frozen=True)
class KnownTokens(SingleProgram):
    """Counts the tokens that a slot starts with, some at a time."""

    kind = "known_tokens"
    writes = ("full",)

    def layout(self, setup: Setup) -> PackedLayout:
        return PackedLayout(
            slot=Field((), setup.config.null_slot),
            start=Field((), 0),
            prompt_len=Field((), 0),
            token_ids=Field((KNOWN_TOKENS_PER_CALL,), NO_TOKEN),
        )

    def body(
        self, setup: Setup, *, full: sampling_state.FullSamplingState, packed: Int[Array, " n"]
    ) -> tuple[dict[str, object], None]:
        host = self.layout(setup).unpack(packed)
        known = (host["slot"], host["token_ids"], host["start"], host["prompt_len"])
        return {"full": sampling_state.add_known_tokens(full, *known, setup.model.collectives)}, None


@dataclass(frozen=True)
class MoveBeams(StepProgram):
    """Slots go on from other slots: rows are (slot, parent slot, token). Every parent is read before any slot is
    written.
    """

    rows: int

    kind = "move_beams"
    writes = ("state",)

    @classmethod
    def programs(cls, setup: Setup) -> Iterable[Self]:
        return map(cls, setup.config.copy_buckets)

    def layout(self, setup: Setup) -> PackedLayout:
        null = setup.config.null_slot
        return PackedLayout(rows=Field((self.rows, 3), (null, null, 0)))

    def body(self, setup: Setup, *, state: SlotState, packed: Int[Array, " n"]) -> tuple[dict[str, object], None]:
        slots, parents, tokens = self.layout(setup).unpack(packed)["rows"].T
        state = state._replace(
            last_token=state.last_token.at[slots].set(tokens),
            seq_len=state.seq_len.at[slots].set(state.seq_len[parents]),
            block_tables=state.block_tables.at[slots].set(state.block_tables[parents]),
        )
        return {"state": state}, None


@dataclass(frozen=True)
class SetMasks(StepProgram):
    """Writes masks that are not sent with the step's sampling program, at most `whole` of them with a bit a token."""

    whole: int

    kind = "set_masks"
    writes = ("masks",)

    @classmethod
    def programs(cls, setup: Setup) -> Iterable[Self]:
        return map(cls, setup.config.whole_mask_buckets)

    def room(self, setup: Setup) -> MaskRoom:
        """What it takes in one call."""
        return MaskRoom.of(setup.config.max_num_seqs, self.whole)

    def layout(self, setup: Setup) -> PackedLayout:
        return PackedLayout(**self.room(setup).fields(setup))

    def body(
        self, setup: Setup, *, masks: UInt[Array, "slots words"], packed: Int[Array, " n"]
    ) -> tuple[dict[str, object], None]:
        return {"masks": take_masks(masks, self.layout(setup).unpack(packed))}, None


KINDS = (Update, InitFull, StartFull, KnownTokens, MoveBeams, SetMasks)
