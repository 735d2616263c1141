"""The programs of a step, as pure functions.

    update            requests that start or end: slot state, sampling parameters, first block-table entries
    decode[B]         B slots compute their last token                        |
    shared_decode[B]  the same, a prefix that many share read once for them   |  model body; all return the
    mixed[T]          decode rows and prefill chunks, ragged, T tokens in all |  hidden states that sample
    sample[R, v]      LM head, sampling, stop tests, slot state; v is the sampling variant
    prompt_logprobs[T]  log-probabilities of a mixed step's prompt tokens, with the likeliest alternatives
    score[T]          log-probabilities of given tokens after some of a mixed step's, and nothing else

The body and the head are programs apart so that their counts add up: bodies are large and there is one per bucket;
heads are small and there is one per bucket and variant. What the host tells a program is one buffer, whose layout
stands before it (`packing.py`). The KV pool, the slot state, the sampling state and the all-reduce's inbox are donated
to whichever program writes them and live in place for ever; sampled tokens, until the host has read them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jpaged.api.sampling_params import MAX_LOGPROBS
from jpaged.engine.interface import NO_TOKEN, NULL_BLOCK, FinishCode, SamplingVariant
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.sampling import records as sampling_records
from jpaged.executor.sampling import sampler
from jpaged.executor.sampling import state as sampling_state
from jpaged.executor.sampling.logprobs import TargetScores, TokenLogprobs, logprobs_of, target_scores
from jpaged.executor.step.packing import PackedLayout
from jpaged.executor.step.state import SlotState, append_blocks, end_slots, slot_mapping, start_slots
from jpaged.models import Model
from jpaged.models.collectives import Exchange, ExchangeState
from jpaged.pallas_kernels import decode_attention, mixed_attention, rope_and_write, shared_prefix_attention

Pools = tuple[Float[Array, "blocks 2 kv_heads block_size head_dim"], ...]

STARTS_PER_UPDATE = 32
KNOWN_TOKENS_PER_CALL = 1024
TABLE_UPDATES_PER_UPDATE = 1024
PROMPT_LOGPROB_ROWS = 256
"""Rows of logits held at once when a prompt is scored: 256 x 152,000 float32 are 156 MB."""


SCORE_ROWS = 512
"""Most tokens that one `score` call does: their float32 logits, alive together, take 262 MB at 128,000 tokens."""


class RowKind:
    """Bits of a mixed step's `kinds` field."""

    DECODE = 1  # the query is the slot's last token, which the device has
    SAMPLES = 2  # a token is sampled after the query


class Rows(NamedTuple):
    """What the sampling program needs to know of a step's rows."""

    slots: Int[Array, " rows"]
    samples: Bool[Array, " rows"]


class SampleResult(NamedTuple):
    """What the host reads back. tokens_and_codes: int32 [2, rows], token ids and `FinishCode`s."""

    tokens_and_codes: Int[Array, "2 rows"]
    logprobs: TokenLogprobs | None


@jax.tree_util.register_dataclass
@dataclass
class PagedAttention:
    """The `attend` of one layer: writes K and V into the layer's pool, then attends through block tables.

    A call replaces `pool` by the written one. mixed: (query_starts, num_decodes) of `mixed_attention` where rows have
    several queries, None where each has one (`decode_attention`).
    shared: (num_sharing, shared_len) of `shared_prefix_attention`, in a decode step whose rows may share a prefix; a
        layer with a sliding window does without, since it reads no more than its window.
    """

    pool: Float[Array, "blocks 2 kv_heads block_size head_dim"]
    mapping: Int[Array, " tokens"]
    block_tables: Int[Array, "rows blocks_per_seq"]
    kv_lens: Int[Array, " rows"]
    mixed: tuple[Int[Array, " rows+1"], Int[Array, ""]] | None
    shared: tuple[Int[Array, ""], Int[Array, ""]] | None
    backend: str | None = field(metadata={"static": True})

    def __call__(
        self,
        qkv: Float[Array, "tokens kv_heads group+2 head_dim"],
        *,
        rotation: tuple[Array, Array] | None,
        norms: tuple[Array, Array] | None,
        norm_eps: float,
        sliding_window: int | None = None,
        **features: Any,
    ) -> Any:
        backend = self.backend
        q, self.pool = rope_and_write(
            self.pool, qkv, self.mapping, rotation=rotation, norms=norms, norm_eps=norm_eps, backend=backend
        )
        paged = (self.pool, self.block_tables, self.kv_lens)
        if self.shared is not None and sliding_window is None:
            return shared_prefix_attention(q, *paged, *self.shared, backend=backend, **features)
        if self.mixed is None:
            return decode_attention(q, *paged, sliding_window=sliding_window, backend=backend, **features)
        return mixed_attention(q, *paged, *self.mixed, sliding_window=sliding_window, backend=backend, **features)


def decode_layout(batch: int, shares_prefix: bool = False) -> PackedLayout:
    shared: dict[str, tuple[int, ...]] = {"num_sharing": (), "shared_len": ()} if shares_prefix else {}
    return PackedLayout(slots=(batch,), table_updates=(batch, 4), **shared)


def decode_step(
    model: Model,
    config: ExecutorConfig,
    batch: int,
    shares_prefix: bool,
    weights: Sequence[Array],
    pools: Pools,
    state: SlotState,
    exchange_state: ExchangeState | None,
    packed: Int[Array, " n"],
) -> tuple[Pools, SlotState, ExchangeState | None, Float[Array, "rows hidden"], Rows]:
    """One token for each of `batch` slots. A slot that stopped, like a padded row, writes to the null block.

    shares_prefix: whether what the first rows share is read once for all of them.
    exchange_state: given to shards whose sums take the one-shot all-reduce (`ExecutorConfig.one_shot_rows`).
    """
    host = decode_layout(batch, shares_prefix).unpack(packed)
    slots = host["slots"]
    block_tables = append_blocks(state.block_tables, host["table_updates"])

    active = state.active[slots]
    positions = jnp.where(active, state.seq_len[slots], 0)
    tables = block_tables[slots][:, 0]
    mapping = slot_mapping(tables, jnp.arange(batch), positions, active, config.block_size)
    kv_lens = jnp.where(active, positions + 1, 0)
    shared = (host["num_sharing"], host["shared_len"]) if shares_prefix else None
    layers = [PagedAttention(pool, mapping, tables, kv_lens, None, shared, config.kernel_backend) for pool in pools]

    exchange = _begin(model, config, exchange_state)
    hidden = model.forward(weights, state.last_token[slots], positions, layers, exchange, config.product_backend)
    state = state._replace(seq_len=state.seq_len.at[slots].add(active.astype(jnp.int32)), block_tables=block_tables)
    exchange_state = None if exchange is None else exchange.state
    rows = Rows(slots, jnp.ones((batch,), bool))
    return tuple(layer.pool for layer in layers), state, exchange_state, hidden, rows


def mixed_layout(config: ExecutorConfig, tokens: int) -> PackedLayout:
    rows = config.mixed_rows(tokens)
    return PackedLayout(
        slots=(rows,),
        query_lens=(rows,),
        kinds=(rows,),
        tokens=(tokens,),
        table_updates=(rows + -(-tokens // config.block_size), 4),
    )


def mixed_step(
    model: Model,
    config: ExecutorConfig,
    num_tokens: int,
    weights: Sequence[Array],
    pools: Pools,
    state: SlotState,
    exchange_state: ExchangeState | None,
    packed: Int[Array, " n"],
) -> tuple[Pools, SlotState, ExchangeState | None, Float[Array, "rows hidden"], Rows, Float[Array, "tokens hidden"]]:
    """Decode rows and prefill chunks side by side, each a run of consecutive tokens of its sequence.

    Also returns the hidden states of all tokens, for those who want log-probabilities of the prompt.
    """
    host = mixed_layout(config, num_tokens).unpack(packed)
    slots, query_lens, kinds = host["slots"], host["query_lens"], host["kinds"]
    block_tables = append_blocks(state.block_tables, host["table_updates"])

    ends = jnp.cumsum(query_lens)
    starts = ends - query_lens
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.minimum((token[:, None] >= ends[None, :]).sum(axis=1), slots.shape[0] - 1)
    active = state.active[slots]
    valid = (token < ends[-1]) & active[row]

    computed = jnp.where(active, state.seq_len[slots], 0)
    positions = jnp.where(valid, computed[row] + token - starts[row], 0)
    tables = block_tables[slots][:, 0]
    mapping = slot_mapping(tables, row, positions, valid, config.block_size)
    tables = jnp.where(active[:, None], tables, NULL_BLOCK)  # a row that stopped reads what it just wrote there
    kv_lens = computed + query_lens
    query_starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
    is_decode = (kinds & RowKind.DECODE) != 0  # of the first rows alone
    mixed = query_starts, is_decode.sum(dtype=jnp.int32)
    backend = config.kernel_backend
    layers = [PagedAttention(pool, mapping, tables, kv_lens, mixed, None, backend) for pool in pools]

    tokens = jnp.where(is_decode[row], state.last_token[slots][row], host["tokens"])
    exchange = _begin(model, config, exchange_state)
    hidden = model.forward(weights, tokens, positions, layers, exchange, config.product_backend)
    state = state._replace(
        seq_len=state.seq_len.at[slots].add(jnp.where(active, query_lens, 0)), block_tables=block_tables
    )
    last = jnp.maximum(ends - 1, 0)
    # A row without queries that samples was forked from the row before it, whose last hidden state is thus its own.
    samples = (kinds & RowKind.SAMPLES) != 0
    pools = tuple(layer.pool for layer in layers)
    exchange_state = None if exchange is None else exchange.state
    return pools, state, exchange_state, hidden[last], Rows(slots, samples), hidden


def _begin(model: Model, config: ExecutorConfig, state: ExchangeState | None) -> Exchange | None:
    return None if state is None else Exchange.begin(state, model.collectives, config.kernel_backend)


def sample_step(
    model: Model,
    variant: SamplingVariant,
    head: Sequence[Array],
    hidden: Float[Array, "rows hidden"],
    rows: Rows,
    state: SlotState,
    sampling: sampling_state.SamplingState,
    full: sampling_state.FullSamplingState | None,
    earlier: Int[Array, "2 rows"],
) -> tuple[SlotState, sampling_state.FullSamplingState | None, SampleResult]:
    """The head of a step: logits, one token a row, and the tests that end a sequence on the device.

    earlier: tokens and codes of an earlier step, which those of this one are written over.
    """
    logits = model.head_logits(head, hidden)
    slots = rows.slots
    positions = state.seq_len[slots]  # where the new token will stand
    collectives = model.collectives
    sampled = sampler.sample(logits, slots, positions, sampling, full, variant=variant, collectives=collectives)
    valid = rows.samples & state.active[slots]

    codes = sampler.finish_codes(sampling, slots, positions, sampled.token_ids)
    codes = jnp.where(valid, codes, FinishCode.RUNNING)
    tokens = jnp.where(valid, sampled.token_ids, NO_TOKEN)

    # Rows that sample nothing write to the null slot, so that no real slot is written twice in one scatter.
    null_slot = state.last_token.shape[0] - 1
    written = jnp.where(valid, slots, null_slot)
    state = state._replace(
        last_token=state.last_token.at[written].set(sampled.token_ids),
        active=state.active.at[written].set(valid & (codes == FinishCode.RUNNING)),
    )
    if full is not None:
        full = sampling_state.add_sampled_tokens(full, written, sampled.token_ids, collectives)
    tokens_and_codes = jnp.stack([tokens, codes.astype(jnp.int32)])
    # Not `earlier.at[:].set`: over several devices XLA, of JAX 0.11.2, does not survive compiling that.
    tokens_and_codes = jax.lax.dynamic_update_slice(earlier, tokens_and_codes, (0, 0))
    return state, full, SampleResult(tokens_and_codes, sampled.logprobs)


def prompt_logprobs_step(
    model: Model, head: Sequence[Array], hidden: Float[Array, "tokens hidden"], targets: Int[Array, " tokens"]
) -> TokenLogprobs:
    """Log-probabilities of `targets[t]` after token t, a few rows of logits at a time. NO_TOKEN rows mean nothing."""
    tokens = hidden.shape[0]
    chunk = min(tokens, PROMPT_LOGPROB_ROWS)
    pad = -tokens % chunk
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, chunk, hidden.shape[1])
    targets = jnp.pad(jnp.maximum(targets, 0), (0, pad)).reshape(-1, chunk)

    def score(args: tuple[Array, Array]) -> TokenLogprobs:
        return logprobs_of(model.head_logits(head, args[0]), args[1], MAX_LOGPROBS, model.collectives)

    scored = jax.lax.map(score, (hidden, targets))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], scored)


def widen_step(null_slot: int, size: int, hidden: Float[Array, "rows hidden"], rows: Rows | None) -> tuple:
    """Rows padded up to `size`, for a program that does not exist for fewer. rows: None for tokens, which have none."""
    more = size - hidden.shape[0]
    hidden = jnp.pad(hidden, ((0, more), (0, 0)))
    if rows is None:
        return hidden, None
    slots = jnp.pad(rows.slots, (0, more), constant_values=null_slot)
    return hidden, Rows(slots, jnp.pad(rows.samples, (0, more)))


def score_rows(num_tokens: int) -> int:
    """Tokens that one call of `score[num_tokens]` scores."""
    return min(num_tokens, SCORE_ROWS)


def score_layout(num_tokens: int) -> PackedLayout:
    return PackedLayout(tokens=(score_rows(num_tokens),), targets=(score_rows(num_tokens),))


def score_step(
    model: Model, head: Sequence[Array], hidden: Float[Array, "tokens hidden"], packed: Int[Array, " n"]
) -> TargetScores:
    """Scores `targets[i]` after the step's token `tokens[i]`: the head runs for the tokens asked about alone."""
    host = score_layout(hidden.shape[0]).unpack(packed)
    logits = model.head_logits(head, hidden[host["tokens"]])
    return target_scores(logits, host["targets"], model.collectives)


def update_layout() -> PackedLayout:
    return PackedLayout(
        ends=(STARTS_PER_UPDATE,),
        slots=(STARTS_PER_UPDATE,),
        num_computed_tokens=(STARTS_PER_UPDATE,),
        records=(STARTS_PER_UPDATE, sampling_records.CORE_RECORD_WORDS),
        table_updates=(TABLE_UPDATES_PER_UPDATE, 4),
    )


def update_step(
    config: ExecutorConfig, state: SlotState, sampling: sampling_state.SamplingState, packed: Int[Array, " n"]
) -> tuple[SlotState, sampling_state.SamplingState]:
    """Applies ends, then starts, then block-table entries."""
    host = update_layout().unpack(packed)
    state = end_slots(state, host["ends"])
    state = start_slots(state, host["slots"], host["num_computed_tokens"], config.null_slot)
    state = state._replace(block_tables=append_blocks(state.block_tables, host["table_updates"]))
    return state, sampling_state.start_slots(sampling, host["slots"], host["records"])


def known_tokens_layout() -> PackedLayout:
    return PackedLayout(slot=(), start=(), prompt_len=(), token_ids=(KNOWN_TOKENS_PER_CALL,))


def known_tokens_step(
    model: Model, full: sampling_state.FullSamplingState, packed: Int[Array, " n"]
) -> sampling_state.FullSamplingState:
    """Its known tokens are counted, some at a time."""
    host = known_tokens_layout().unpack(packed)
    known = (host["slot"], host["token_ids"], host["start"], host["prompt_len"])
    return sampling_state.add_known_tokens(full, *known, model.collectives)
