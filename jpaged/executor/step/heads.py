"""The programs that make tokens and scores of hidden states: the LM head, and what follows it.

sample[B, v]         logits, sampling, stop tests, slot state; v is the sampling variant
prompt_logprobs[T]   log-probabilities of a mixed step's prompt tokens, with the likeliest alternatives
score[T]             log-probabilities of given tokens after some of a mixed step's, and nothing else
pool[T]              sums of a mixed step's hidden states, by row
widen_rows, widen_tokens   hidden states padded to a size that programs which few requests need exist for
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jpaged.api.sampling_params import MAX_LOGPROBS
from jpaged.engine.interface import NO_TOKEN, NUM_RANKED, FinishCode, SamplingVariant
from jpaged.executor.buckets import bucket_for
from jpaged.executor.sampling import sampler
from jpaged.executor.sampling import state as sampling_state
from jpaged.executor.sampling.logprobs import DeviceScores, TokenLogprobs, log_sums_of, logprobs_of, target_scores
from jpaged.executor.sampling.tables import GrammarTables, masks_at, next_places
from jpaged.executor.step.bodies import Rows
from jpaged.executor.step.masks import MaskRoom, take_masks
from jpaged.executor.step.packing import Field, PackedLayout
from jpaged.executor.step.program import Setup, StepProgram, int32
from jpaged.executor.step.state import SlotState
from jpaged.models import Model
from jpaged.models.row_tiles import in_row_tiles, with_weights

PROMPT_LOGPROB_ROWS = 256
"""Rows of logits held at once when a prompt is scored: 256 x 152,000 float32 are 156 MB."""

SCORE_ROWS = 512
"""Most tokens that one `score` call does: their float32 logits, alive together, take 262 MB at 128,000 tokens."""


class SampleResult(NamedTuple):
    """What the host reads back. tokens_and_codes: int32 [2, rows], token ids and `FinishCode`s; of MASKED also, below
    them, those of `StepResult.ranked` after the first.
    """

    tokens_and_codes: Int[Array, "words rows"]
    logprobs: TokenLogprobs | None


def logits_and_sums(
    model: Model,
    head: Sequence[Array],
    hidden: Float[Array, "rows hidden"],
    live: Bool[Array, " rows"],
    backend: str | None = None,
) -> tuple[Float[Array, "rows vocab"], Float[Array, "rows 1"]]:
    """Logits and their log-sum-exp, each row's by itself (`models.row_tiles`): of a batch_invariant engine, and of who
    wants the same bits.

    live: which rows count. backend: as of `pallas_kernels.invariant_product`.
    """
    logits = with_weights(model.head_logits, head, live, hidden, backend)
    return logits, in_row_tiles(lambda rows: log_sums_of(rows, model.collectives), live, logits)


def _logits(
    setup: Setup, head: Sequence[Array], hidden: Float[Array, "rows hidden"], live: Bool[Array, " rows"] | None
) -> tuple[Float[Array, "rows vocab"], Float[Array, "rows 1"] | None]:
    """As `logits_and_sums`; without `live` in one product, and nothing summed."""
    if live is None:
        return setup.model.head_logits(head, hidden), None
    return logits_and_sums(setup.model, head, hidden, live, setup.config.optional_backend)


def sampled_words(variant: SamplingVariant) -> int:
    """int32 words of a row that `SampleResult.tokens_and_codes` has."""
    return 1 + NUM_RANKED if variant == SamplingVariant.MASKED else 2


def abstract_rows(count: int) -> Rows:
    """The shapes of so many rows."""
    return jax.eval_shape(lambda slots: Rows(slots, slots > 0, slots > 0), int32(count))


@dataclass(frozen=True)
class Sample(StepProgram):
    """The head of a step: logits, one token a row, and the tests that end a sequence on the device. The masked variant
    first writes the masks that the host sends.

    variant: of those that programs exist for (`Setup.program_variant`).
    """

    batch: int
    variant: SamplingVariant

    kind = "sample"
    reads = ("head", "sampling")
    consumes = ("earlier",)

    @classmethod
    def programs(cls, setup: Setup) -> Iterable[Self]:
        for variant in SamplingVariant:
            if setup.program_variant(variant) == variant:
                yield from (cls(batch, variant) for batch in setup.config.sample_buckets(variant))

    @classmethod
    def first(cls, setup: Setup) -> Self:
        return cls(setup.config.decode_buckets[0], SamplingVariant.GREEDY)

    @classmethod
    def largest(cls, setup: Setup) -> Self:
        return cls(setup.config.decode_buckets[-1], SamplingVariant.FULL)

    def reads_also(self, setup: Setup) -> tuple[str, ...]:
        masks = ("masks",) if self.variant == SamplingVariant.FULL else ()
        return (*masks, "tables") if self.is_constrained else ()

    def updates(self, setup: Setup) -> tuple[str, ...]:
        more = {SamplingVariant.FULL: ("full",), SamplingVariant.MASKED: ("masks",)}
        return ("state", *more.get(self.variant, ()), *(("places",) if self.is_constrained else ()))

    @property
    def is_constrained(self) -> bool:
        """Whether it heeds constraints."""
        return self.variant in (SamplingVariant.TABLE, SamplingVariant.MASKED, SamplingVariant.FULL)

    def mask_room(self, setup: Setup) -> MaskRoom | None:
        """How many masks the masked variant is sent; None for the others."""
        is_masked = self.variant == SamplingVariant.MASKED
        return MaskRoom.of(self.batch, setup.config.whole_masks(self.batch)) if is_masked else None

    def layout(self, setup: Setup) -> PackedLayout | None:
        room = self.mask_room(setup)
        return None if room is None else PackedLayout(**room.fields(setup))

    def inputs(self, setup: Setup) -> dict[str, Any]:
        return {
            "earlier": int32(self.words, self.batch),
            "hidden": setup.hidden(self.batch),
            "rows": abstract_rows(self.batch),
        }

    @property
    def words(self) -> int:
        """That come back of a row."""
        return sampled_words(self.variant)

    def product_rows(self, setup: Setup) -> int:
        return self.batch

    def body(
        self,
        setup: Setup,
        *,
        head: Sequence[Array],
        sampling: sampling_state.SamplingState,
        state: SlotState,
        earlier: Int[Array, "words rows"],
        hidden: Float[Array, "rows hidden"],
        rows: Rows,
        masks: Array | None = None,
        full: sampling_state.FullSamplingState | None = None,
        tables: GrammarTables | None = None,
        places: Int[Array, " slots"] | None = None,
        packed: Int[Array, " n"] | None = None,
    ) -> tuple[dict[str, object], SampleResult]:
        """earlier: tokens and codes of an earlier step, which those of this one are written over."""
        model, live = setup.model, None
        if setup.config.batch_invariant:
            live = rows.slots != setup.config.null_slot
            logits = with_weights(model.head_logits, head, live, hidden, setup.config.optional_backend)
        else:
            logits = model.head_logits(head, hidden)
        layout = self.layout(setup)
        if layout is not None and masks is not None and packed is not None:
            masks = take_masks(masks, layout.unpack(packed))
        slots, collectives = rows.slots, model.collectives
        positions = state.seq_len[slots]  # where the new token will stand
        sampled = sampler.sample(
            logits,
            slots,
            positions,
            sampling,
            full,
            masks,
            variant=self.variant,
            collectives=collectives,
            backend=setup.config.optional_backend,
            logprobs_mode=setup.config.logprobs_mode,
            live=live,
            allowed=None if tables is None or places is None else masks_at(tables, places[slots]),
        )
        valid = rows.samples & rows.active

        codes = sampler.finish_codes(sampling, slots, positions, sampled.token_ids)
        codes = jnp.where(sampled.is_finite, codes, FinishCode.NOT_FINITE)
        codes = jnp.where(valid, codes, FinishCode.RUNNING)
        tokens = jnp.where(valid, sampled.token_ids, NO_TOKEN)

        # Rows that sample nothing write to the null slot, so that no real slot is written twice in one scatter.
        written = jnp.where(valid, slots, setup.config.null_slot)
        state = state._replace(
            last_token=state.last_token.at[written].set(sampled.token_ids),
            active=state.active.at[written].set(valid & (codes == FinishCode.RUNNING)),
        )
        updated: dict[str, object] = {"state": state}
        if layout is not None:
            updated["masks"] = masks
        if tables is not None and places is not None:
            updated["places"] = places.at[written].set(next_places(tables, places[slots], sampled.token_ids))
        if full is not None:
            updated["full"] = sampling_state.add_sampled_tokens(full, written, sampled.token_ids, collectives)
        tokens_and_codes = jnp.stack([tokens, codes.astype(jnp.int32)])
        if sampled.ranked is not None:
            others = jnp.where(valid[:, None], sampled.ranked[:, 1:], NO_TOKEN)
            tokens_and_codes = jnp.concatenate([tokens_and_codes, others.T])
        # Not `earlier.at[:].set`: over several devices XLA, of JAX 0.11.2, does not survive compiling that.
        tokens_and_codes = jax.lax.dynamic_update_slice(earlier, tokens_and_codes, (0, 0))
        return updated, SampleResult(tokens_and_codes, sampled.logprobs)


@dataclass(frozen=True)
class _Widen(StepProgram):
    """Hidden states of `rows` rows, padded up to `size`."""

    rows: int
    size: int

    def widened(self, hidden: Float[Array, "rows hidden"]) -> Float[Array, "size hidden"]:
        return jnp.pad(hidden, ((0, self.size - self.rows), (0, 0)))


@dataclass(frozen=True)
class WidenRows(_Widen):
    """Rows padded up to `size`, for a sampling variant whose programs do not exist for fewer."""

    kind = "widen_rows"

    @classmethod
    def programs(cls, setup: Setup) -> Iterable[Self]:
        for sizes in {setup.config.sample_buckets(variant) for variant in SamplingVariant}:
            for rows in set(setup.config.decode_buckets) - set(sizes):
                yield cls(rows, bucket_for(rows, sizes))

    def inputs(self, setup: Setup) -> dict[str, Any]:
        return {"hidden": setup.hidden(self.rows), "rows": abstract_rows(self.rows)}

    def body(
        self, setup: Setup, *, hidden: Float[Array, "rows hidden"], rows: Rows
    ) -> tuple[dict[str, object], tuple[Float[Array, "size hidden"], Rows]]:
        more = self.size - self.rows
        slots: Int[Array, " size"] = jnp.pad(rows.slots, (0, more), constant_values=setup.config.null_slot)
        flags = (jnp.pad(flag, (0, more)) for flag in (rows.samples, rows.active))
        return {}, (self.widened(hidden), Rows(slots, *flags))


@dataclass(frozen=True)
class WidenTokens(_Widen):
    """Hidden states of a step's tokens padded up to `size`, for programs that score them."""

    kind = "widen_tokens"

    @classmethod
    def programs(cls, setup: Setup) -> Iterable[Self]:
        sizes = setup.config.scored_buckets
        for tokens in set(setup.config.token_buckets) - set(sizes):
            yield cls(tokens, bucket_for(tokens, sizes))

    def inputs(self, setup: Setup) -> dict[str, Any]:
        return {"hidden": setup.hidden(self.rows)}

    def body(
        self, setup: Setup, *, hidden: Float[Array, "tokens hidden"]
    ) -> tuple[dict[str, object], Float[Array, "size hidden"]]:
        return {}, self.widened(hidden)


@dataclass(frozen=True)
class _OfHidden(StepProgram):
    """Computes something of the hidden states of a step of `tokens` tokens."""

    tokens: int

    @classmethod
    def programs(cls, setup: Setup) -> Iterable[Self]:
        return map(cls, setup.config.scored_buckets)

    @classmethod
    def largest(cls, setup: Setup) -> Self:
        return cls(setup.config.token_buckets[-1])

    def inputs(self, setup: Setup) -> dict[str, Any]:
        return {"hidden": setup.hidden(self.tokens)}


@dataclass(frozen=True)
class _Scoring(_OfHidden):
    """Log-probabilities after tokens of a step."""

    reads = ("head",)


@dataclass(frozen=True)
class PromptLogprobs(_Scoring):
    """Log-probabilities of `targets[t]` after token t, a few rows of logits at a time. NO_TOKEN rows mean nothing."""

    kind = "prompt_logprobs"

    def layout(self, setup: Setup) -> PackedLayout:
        return PackedLayout(targets=Field((self.tokens,), 0))

    def product_rows(self, setup: Setup) -> int:
        return self.tokens

    def body(
        self, setup: Setup, *, head: Sequence[Array], hidden: Float[Array, "tokens hidden"], packed: Int[Array, " n"]
    ) -> tuple[dict[str, object], TokenLogprobs]:
        targets = self.layout(setup).unpack(packed)["targets"]
        chunk = min(self.tokens, PROMPT_LOGPROB_ROWS)
        pad = -self.tokens % chunk
        hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, chunk, hidden.shape[1])
        asked = None
        if setup.config.batch_invariant:
            asked = jnp.pad(targets != NO_TOKEN, (0, pad)).reshape(-1, chunk)
        targets = jnp.pad(jnp.maximum(targets, 0), (0, pad)).reshape(-1, chunk)

        def score(args: tuple[Array, Array, Array | None]) -> TokenLogprobs:
            logits, sums = _logits(setup, head, args[0], args[2])
            return logprobs_of(logits, args[1], MAX_LOGPROBS, setup.model.collectives, sums)

        scored = jax.lax.map(score, (hidden, targets, asked))
        return {}, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: self.tokens], scored)


@dataclass(frozen=True)
class Score(_Scoring):
    """Scores `targets[i]` after the step's token `tokens[i]`: the head runs for the tokens asked about alone.

    tokens: of the step. One call scores `at_once` of them.
    """

    kind = "score"

    @property
    def at_once(self) -> int:
        return min(self.tokens, SCORE_ROWS)

    def layout(self, setup: Setup) -> PackedLayout:
        return PackedLayout(tokens=Field((self.at_once,), 0), targets=Field((self.at_once,), 0))

    def product_rows(self, setup: Setup) -> int:
        return self.at_once

    def body(
        self, setup: Setup, *, head: Sequence[Array], hidden: Float[Array, "tokens hidden"], packed: Int[Array, " n"]
    ) -> tuple[dict[str, object], DeviceScores]:
        host = self.layout(setup).unpack(packed)
        live = host["targets"] != NO_TOKEN if setup.config.batch_invariant else None
        logits, sums = _logits(setup, head, hidden[host["tokens"]], live)
        return {}, target_scores(logits, host["targets"], setup.model.collectives, sums)


@dataclass(frozen=True)
class Pool(_OfHidden):
    """Sums of hidden states: `rows[t]` says to which sum the step's token t belongs. Sums are in float32."""

    kind = "pool"

    def num_sums(self, setup: Setup) -> int:
        return setup.config.mixed_rows(self.tokens)

    def layout(self, setup: Setup) -> PackedLayout:
        return PackedLayout(rows=Field((self.tokens,), self.num_sums(setup)))  # by default of no row

    def body(
        self, setup: Setup, *, hidden: Float[Array, "tokens hidden"], packed: Int[Array, " n"]
    ) -> tuple[dict[str, object], Float[Array, "rows hidden"]]:
        rows, count = self.layout(setup).unpack(packed)["rows"], self.num_sums(setup)
        wanted = jnp.where((rows < count)[:, None], hidden.astype(jnp.float32), 0)  # padding may hold anything
        return {}, jax.ops.segment_sum(wanted, rows, count + 1)[:count]


KINDS = (Sample, WidenRows, WidenTokens, PromptLogprobs, Score, Pool)
