"""The program of a whole decode step, body and head, where the host is slower than the device.

decode_and_sample[B, v]   B slots compute their last token and sample the next; v is the sampling variant

It exists for few rows and the usual variants alone (`ExecutorConfig.is_one_call`), since each is a whole body to
compile. It does what `decode[B]` and `sample[B, v]` do, and gives the same tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
from jaxtyping import Array, Int

from jpaged.engine.interface import SamplingVariant
from jpaged.executor.sampling.state import SamplingState
from jpaged.executor.step.bodies import Decode
from jpaged.executor.step.heads import Sample, SampleResult
from jpaged.executor.step.packing import PackedLayout
from jpaged.executor.step.program import Setup, StepProgram, int32


@dataclass(frozen=True)
class DecodeAndSample(StepProgram):
    """As `Decode`, then `Sample`, in one call."""

    batch: int
    variant: SamplingVariant

    kind = "decode_and_sample"
    reads = (*Decode.reads, "sampling")
    consumes = Sample.consumes

    @classmethod
    def programs(cls, setup: Setup) -> Iterable[Self]:
        config = setup.config
        for head in Sample.programs(setup):
            if config.is_one_call(head.batch, head.variant):
                yield cls(head.batch, head.variant)

    @property
    def _body(self) -> Decode:
        return Decode(self.batch)

    @property
    def _head(self) -> Sample:
        return Sample(self.batch, self.variant)

    def updates(self, setup: Setup) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._body.updates(setup), *self._head.updates(setup))))

    def layout(self, setup: Setup) -> PackedLayout:
        return self._body.layout(setup)

    def inputs(self, setup: Setup) -> dict[str, Any]:
        return {"earlier": int32(self._head.words, self.batch)}

    def product_rows(self, setup: Setup) -> int:
        return self.batch

    def body(
        self,
        setup: Setup,
        *,
        large: Sequence[Array],
        small: Sequence[Array],
        sampling: SamplingState,
        earlier: Int[Array, "words rows"],
        **arrays: Any,
    ) -> tuple[dict[str, object], SampleResult]:
        """arrays: what the body takes beside the weights. earlier: as of `Sample`."""
        weights = setup.bundles.taken_apart(large, small)
        updated, (hidden, rows) = self._body.with_weights(setup, weights=weights, **arrays)
        # The head reads what the body has left in memory, as `Sample` does. Without the barrier XLA fuses it with the
        # norm before it, which rounds hidden states less, so tokens could differ; and it copies slots before their
        # update.
        left = hidden, rows.slots, rows.active, updated["state"]
        hidden, slots, active, state = jax.lax.optimization_barrier(left)
        head, rows = setup.model.head_weights(weights), rows._replace(slots=slots, active=active)
        sampled, result = self._head.body(
            setup, head=head, sampling=sampling, state=state, earlier=earlier, hidden=hidden, rows=rows
        )
        return updated | sampled, result


KINDS = (DecodeAndSample,)
