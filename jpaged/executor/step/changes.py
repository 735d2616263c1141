"""The programs that tell the device what changed: requests that start and end, and beams that go on from others.

update             ends, starts and block-table entries
init_full          makes the full sampling state, when some request first asks for something kept there
start_full         writes a slot's row of it
known_tokens       counts the tokens that a slot starts with
set_masks[N, W]    what slots may sample from now on; some of them lose the token that they sampled last
move_beams[N]      slots go on from other slots, with the tokens that a search chose
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Self

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt

from jpaged.api.structured_outputs import FEW_TOKENS
from jpaged.engine.interface import NO_TOKEN
from jpaged.executor.sampling import records as sampling_records
from jpaged.executor.sampling import state as sampling_state
from jpaged.executor.step.bodies import table_updates
from jpaged.executor.step.packing import Field, PackedLayout
from jpaged.executor.step.program import Setup, SingleProgram, StepProgram
from jpaged.executor.step.state import SlotState, append_blocks, end_slots, replace_last, start_slots

STARTS_PER_UPDATE = 32
TABLE_UPDATES_PER_UPDATE = 1024
KNOWN_TOKENS_PER_CALL = 1024


@dataclass(frozen=True)
class Update(SingleProgram):
    """Applies ends, then starts, then block-table entries."""

    kind = "update"
    writes = ("state", "sampling")

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
            table_updates=table_updates(TABLE_UPDATES_PER_UPDATE, setup),
        )

    def body(
        self, setup: Setup, *, state: SlotState, sampling: sampling_state.SamplingState, packed: Int[Array, " n"]
    ) -> tuple[dict[str, object], None]:
        host = self.layout(setup).unpack(packed)
        state = end_slots(state, host["ends"])
        state = start_slots(state, host["slots"], host["num_computed_tokens"], setup.config.null_slot)
        state = state._replace(block_tables=append_blocks(state.block_tables, host["table_updates"]))
        sampling = sampling_state.start_slots(sampling, host["slots"], host["records"])
        return {"state": state, "sampling": sampling}, None


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
    """Writes masks: what some slots may sample from now on. The first ones' masks have a bit for each token, at most
    `whole` of them; of the others tokens are listed that may be sampled, or, where NO_TOKEN stands first, all but those
    behind it.

    A token in `tokens` becomes its slot's last in place of the one that was sampled. The slot is shorter by `backs`
    tokens, whose places are computed again. The slot is active, since only the token that it has lost can have ended
    it.
    """

    rows: int
    whole: int

    kind = "set_masks"
    writes = ("masks", "state")

    @classmethod
    def programs(cls, setup: Setup) -> Iterable[Self]:
        config = setup.config
        sizes = product(config.mask_buckets, config.whole_mask_buckets)
        return (cls(rows, whole) for rows, whole in sizes if whole <= rows)

    def layout(self, setup: Setup) -> PackedLayout:
        words = sampling_records.mask_words(setup.model.vocab_size)
        return PackedLayout(
            num_whole=Field((), 0),
            slots=Field((self.rows,), setup.config.null_slot),
            tokens=Field((self.rows,), NO_TOKEN),
            backs=Field((self.rows,), 0),
            listed=Field((self.rows, FEW_TOKENS), NO_TOKEN),
            masks=Field((self.whole, words), 0),
        )

    def body(
        self, setup: Setup, *, masks: UInt[Array, "slots words"], state: SlotState, packed: Int[Array, " n"]
    ) -> tuple[dict[str, object], None]:
        host = self.layout(setup).unpack(packed)
        slots, listed, words = host["slots"], host["listed"], masks.shape[1]
        word = jnp.where(listed == NO_TOKEN, words, listed // 32)  # beyond the last one: dropped
        bit = jnp.left_shift(jnp.uint32(1), (listed % 32).astype(jnp.uint32))
        rows = jnp.zeros((self.rows, words), jnp.uint32)
        rows = rows.at[jnp.arange(self.rows)[:, None], word].add(bit, mode="drop")
        rows = jnp.where(listed[:, :1] == NO_TOKEN, ~rows, rows)
        whole = lax.bitcast_convert_type(host["masks"], jnp.uint32)
        is_whole = jnp.arange(self.whole)[:, None] < host["num_whole"]
        rows = rows.at[: self.whole].set(jnp.where(is_whole, whole, rows[: self.whole]))
        state = replace_last(state, slots, host["tokens"], host["backs"])
        return {"masks": sampling_state.set_masks(masks, slots, rows), "state": state}, None


KINDS = (Update, InitFull, StartFull, KnownTokens, MoveBeams, SetMasks)
