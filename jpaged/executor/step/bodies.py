"""The programs that compute a step's tokens: the model's body, over the pool.

    decode[B]         B slots compute their last token
    shared_decode[B]  the same, a prefix that many share read once for them
    mixed[T]          decode rows and prefill chunks, ragged, T tokens in all

All return the hidden states that sample, for a head (`heads.py`). Bodies and heads are programs apart so that their
counts add up: bodies are large and there is one per bucket; heads are small and there is one per bucket and variant.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jpaged.engine.interface import NO_TOKEN, NULL_BLOCK
from jpaged.executor.cache.paged import Layers, Pools
from jpaged.executor.cache.states import StateRows, States
from jpaged.executor.step.expert_load import add_counts
from jpaged.executor.step.packing import Field, PackedLayout
from jpaged.executor.step.program import Setup, StepProgram
from jpaged.executor.step.state import SlotState, append_blocks
from jpaged.models.collectives import Exchange, ExchangeState
from jpaged.models.residual import ExpertCounts, Kernels
from jpaged.models.row_tiles import forward_in_row_tiles


class RowFlags:
    """Bits of a mixed step's `flags` field."""

    DECODE = 1  # the query is the slot's last token, which the device has
    SAMPLES = 2  # a token is sampled after the query
    RENEWED = 4  # the slot has lost the token that it sampled last: it is active, and the host sends the query's token


class Rows(NamedTuple):
    """What the sampling program needs to know of a step's rows.

    samples: which sample a token. active: which have been computed, because their slots have not ended.
    """

    slots: Int[Array, " rows"]
    samples: Bool[Array, " rows"]
    active: Bool[Array, " rows"]


def table_updates(entries: int, setup: Setup) -> Field:
    """So many new entries of block tables: (slot, group, index, block) each."""
    return Field((entries, 4), (setup.config.null_slot, 0, 0, NULL_BLOCK))


class _Pass(NamedTuple):
    """What a body computes of which tokens.

    live: which tokens are not padding.
    state: the slots' new state.
    result: makes the program's result of the hidden states of all tokens.
    rows: the rows, for recurrent layers.
    """

    tokens: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    live: Bool[Array, " tokens"]
    layers: Layers
    state: SlotState
    result: Callable[[Float[Array, "tokens hidden"]], tuple[Any, ...]]
    rows: Callable[[], StateRows]


@dataclass(frozen=True)
class _Body(StepProgram):
    """Runs the model's body. A kind says what on, in `forward_pass`.

    exchange: given to shards whose sums take the one-shot all-reduce.
    """

    reads = ("large", "small")

    def updates(self, setup: Setup) -> tuple[str, ...]:
        is_one_shot = self.product_rows(setup) <= setup.config.one_shot_rows
        more = (("recurrent",) if setup.states else ()) + (("exchange",) if is_one_shot else ())
        more += ("expert_tokens",) if setup.config.expert_load else ()
        return ("pools", "state", *more)

    def layout(self, setup: Setup) -> PackedLayout:
        raise NotImplementedError

    def forward_pass(self, setup: Setup, pools: Pools, state: SlotState, host: Mapping[str, Array]) -> _Pass:
        """state: with this step's block tables. host: what the host sent."""
        raise NotImplementedError

    def body(
        self, setup: Setup, *, large: Sequence[Array], small: Sequence[Array], **arrays: Any
    ) -> tuple[dict[str, object], tuple[Any, ...]]:
        return self.with_weights(setup, weights=setup.bundles.taken_apart(large, small), **arrays)

    def with_weights(
        self,
        setup: Setup,
        *,
        weights: Sequence[Array],
        pools: Pools,
        state: SlotState,
        packed: Int[Array, " n"],
        recurrent: States | None = None,
        exchange: ExchangeState | None = None,
        expert_tokens: Array | None = None,
    ) -> tuple[dict[str, object], tuple[Any, ...]]:
        """What `body` does, given the model's weights as models take them."""
        host = self.layout(setup).unpack(packed)
        state = state._replace(block_tables=append_blocks(state.block_tables, host["table_updates"]))
        of = self.forward_pass(setup, pools, state, host)

        model, config = setup.model, setup.config
        if config.batch_invariant:
            rows = of.tokens, of.positions, of.live
            backend = config.optional_backend
            hidden = forward_in_row_tiles(model, weights, *rows, of.layers.attend_rows, backend)
            return {"pools": of.layers.pools, "state": of.state}, of.result(hidden)
        sums = None if exchange is None else Exchange.begin(exchange, model.collectives, config.kernel_backend)
        counts = None if expert_tokens is None else ExpertCounts(model.config.num_experts)
        kernels = Kernels(sums, config.optional_backend, of.live, counts)
        hybrid = None if recurrent is None else setup.states.beside(of.layers, recurrent, of.rows())
        hidden = model.forward(weights, of.tokens, of.positions, of.layers if hybrid is None else hybrid, kernels)
        updated: dict[str, object] = {"pools": of.layers.pools, "state": of.state}
        if hybrid is not None:
            updated["recurrent"] = hybrid.states
        if sums is not None:
            updated["exchange"] = sums.state
        if counts is not None and expert_tokens is not None:
            updated["expert_tokens"] = add_counts(expert_tokens, counts.by_layer(expert_tokens.shape[1]))
        return updated, of.result(hidden)


@dataclass(frozen=True)
class Decode(_Body):
    """One token for each of `batch` slots. A slot that stopped, like a padded row, writes to the null block.

    A slot with an entry in `last_tokens` loses the token that it sampled last and gets this one instead. It becomes
    shorter by `backs` tokens, whose places are computed again. It counts as active, since only the lost token can have
    ended it. The state learns of the new token and of the slot being active when the row is sampled; until then the
    host sends the token with each body that computes the slot.

    shares_prefix: whether what the first rows share is read once for all of them.
    """

    batch: int

    kind = "decode"
    shares_prefix: ClassVar[bool] = False

    @classmethod
    def programs(cls, setup: Setup) -> Iterable[Self]:
        return map(cls, setup.config.decode_buckets)

    @classmethod
    def first(cls, setup: Setup) -> Self | None:
        return None if cls.shares_prefix else cls(setup.config.decode_buckets[0])

    def layout(self, setup: Setup) -> PackedLayout:
        shared = {"num_sharing": Field((), 0), "shared_len": Field((), 0)} if self.shares_prefix else {}
        return PackedLayout(
            slots=Field((self.batch,), setup.config.null_slot),
            last_tokens=Field((self.batch,), NO_TOKEN),
            backs=Field((self.batch,), 0),
            table_updates=table_updates(self.batch * len(setup.cache.groups), setup),
            **shared,
        )

    def product_rows(self, setup: Setup) -> int:
        return self.batch

    def forward_pass(self, setup: Setup, pools: Pools, state: SlotState, host: Mapping[str, Array]) -> _Pass:
        """Its result: hidden states of the rows, and what there is to know of them."""
        slots = host["slots"]
        is_given = host["last_tokens"] != NO_TOKEN
        active = state.active[slots] | is_given
        positions = jnp.where(active, state.seq_len[slots] - host["backs"], 0)
        shared = (host["num_sharing"], host["shared_len"]) if self.shares_prefix else None
        tables = setup.cache.row_tables(state.block_tables, slots)
        layers = setup.cache.decode_layers(pools, tables, positions, active, shared)

        after = state._replace(seq_len=state.seq_len.at[slots].add(active - host["backs"]))
        tokens = jnp.where(is_given, host["last_tokens"], state.last_token[slots])
        # Active as shared-prefix attention tests it. A result that is `active` itself would cost each layer a kernel.
        computed = jnp.where(active, positions + 1, 0) > 0
        rows = Rows(slots, jnp.ones((self.batch,), bool), computed)

        def state_rows() -> StateRows:
            return StateRows(jnp.where(active, slots, setup.states.null_row), jnp.zeros_like(active))

        return _Pass(tokens, positions, active, layers, after, lambda hidden: (hidden, rows), state_rows)


@dataclass(frozen=True)
class SharedDecode(Decode):
    """As `Decode`; what the first rows share is read once for all of them."""

    kind = "shared_decode"
    shares_prefix = True

    @classmethod
    def programs(cls, setup: Setup) -> Iterable[Self]:
        return map(cls, setup.config.shared_prefix_buckets)


@dataclass(frozen=True)
class Mixed(_Body):
    """Decode rows and prefill chunks side by side, each a run of consecutive tokens of its sequence."""

    tokens: int

    kind = "mixed"

    @classmethod
    def programs(cls, setup: Setup) -> Iterable[Self]:
        return map(cls, setup.config.token_buckets)

    @classmethod
    def first(cls, setup: Setup) -> Self:
        return cls(setup.config.token_buckets[0])

    @classmethod
    def largest(cls, setup: Setup) -> Self:
        return cls(setup.config.token_buckets[-1])

    def layout(self, setup: Setup) -> PackedLayout:
        rows = setup.config.mixed_rows(self.tokens)
        entries = (rows + -(-self.tokens // setup.config.block_size)) * len(setup.cache.groups)
        return PackedLayout(
            slots=Field((rows,), setup.config.null_slot),
            query_lens=Field((rows,), 0),
            flags=Field((rows,), 0),
            backs=Field((rows,), 0),
            tokens=Field((self.tokens,), 0),
            table_updates=table_updates(entries, setup),
        )

    def product_rows(self, setup: Setup) -> int:
        return self.tokens

    def forward_pass(self, setup: Setup, pools: Pools, state: SlotState, host: Mapping[str, Array]) -> _Pass:
        """Its result: hidden states of the rows and what there is to know of them; and the hidden states of all
        tokens, for those who want log-probabilities of the prompt.
        """
        slots, query_lens, flags = host["slots"], host["query_lens"], host["flags"]
        ends = jnp.cumsum(query_lens)
        starts = ends - query_lens
        token = jnp.arange(self.tokens, dtype=jnp.int32)
        row = jnp.minimum((token[:, None] >= ends[None, :]).sum(axis=1), slots.shape[0] - 1)
        is_renewed = (flags & RowFlags.RENEWED) != 0
        active = state.active[slots] | is_renewed
        valid = (token < ends[-1]) & active[row]

        computed = jnp.where(active, state.seq_len[slots] - host["backs"], 0)
        positions = jnp.where(valid, computed[row] + token - starts[row], 0)
        query_starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
        is_decode = (flags & RowFlags.DECODE) != 0  # of the first rows alone
        layers = setup.cache.mixed_layers(
            pools,
            setup.cache.row_tables(state.block_tables, slots),
            active,
            computed + query_lens,
            row,
            positions,
            valid,
            query_starts,
            is_decode.sum(dtype=jnp.int32),
        )
        after = state._replace(seq_len=state.seq_len.at[slots].add(jnp.where(active, query_lens, 0) - host["backs"]))
        tokens = jnp.where((is_decode & ~is_renewed)[row], state.last_token[slots][row], host["tokens"])

        def result(hidden: Float[Array, "tokens hidden"]) -> tuple[Any, ...]:
            # A row without queries that samples was forked from the row before it, whose last hidden state is its own.
            last = jnp.maximum(ends - 1, 0)
            samples = (flags & RowFlags.SAMPLES) != 0
            return hidden[last], Rows(slots, samples, active), hidden

        def state_rows() -> StateRows:
            return StateRows(jnp.where(active, slots, setup.states.null_row), computed == 0, query_starts)

        return _Pass(tokens, positions, valid, layers, after, result, state_rows)


KINDS = (Mixed, Decode, SharedDecode)
