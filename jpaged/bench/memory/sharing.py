"""How many blocks beams save by sharing: the engine's own beam search, over made-up probabilities.

    Scheduler --> plan --> BeamDevice: candidates drawn for each beam --> BeamSearch chooses --> tables forked and freed

    prompt of 40 tokens, blocks of 16, after the first new token of each of two beams:

    beam 0   [ block 1 ][ block 2 ][ block 4: copy of 3, 9 tokens ]
    beam 1   [ block 1 ][ block 2 ][ block 3:            9 tokens ]      6 blocks without sharing, 4 with: 33 % saved

Saved blocks are counted as in the paper's Figure 15: those that sharing spares, of those needed without, summed over
all steps of all requests.

Which beams survive depends on the model's probabilities, which a simulation does not have. Here every next token's
distribution is drawn anew from a symmetric Dirichlet distribution over `_NUM_TOKENS` tokens: a low concentration makes
the model sure of one token, a high one undecided. It matters little: from 0.02 to 10 the savings differ by less than
four points, so nothing is fitted.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from jpaged.api.beam_search_params import BeamSearchParams
from jpaged.engine.config import SchedulerConfig
from jpaged.engine.interface import Logprobs, StepPlan, StepResult
from jpaged.engine.scheduler.scheduler import Scheduler
from jpaged.engine.sequences.request import Request

CONCENTRATION = 0.1
_NUM_TOKENS = 64


class BeamDevice:
    """Answers the plans of a beam search with drawn candidates. No two candidates are ever the same token."""

    def __init__(self, num_candidates: int, concentration: float, rng: np.random.Generator) -> None:
        self._num_candidates = num_candidates
        self._concentration = concentration
        self._rng = rng
        self._num_drawn = 0

    def execute(self, plan: StepPlan) -> StepResult:
        shape = (plan.num_rows, self._num_candidates)
        weights = self._rng.standard_gamma(self._concentration, (plan.num_rows, _NUM_TOKENS)) + 1e-30
        likely = np.sort(np.log(weights / weights.sum(axis=1, keepdims=True)), axis=1)[:, ::-1][:, : shape[1]]
        ids = self._num_drawn + np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape)
        self._num_drawn += ids.size
        ranks = np.ones((plan.num_rows,), np.int32)
        likely, ids = likely[:, None].astype(np.float32), ids[:, None]
        logprobs = Logprobs(likely[:, :, 0], ranks[:, None], ids, likely)
        return StepResult(ids[:, :, 0], np.zeros((plan.num_rows,), np.uint8), logprobs)


def search(
    prompt_len: int, output_len: int, width: int, block_size: int, concentration: float, rng: np.random.Generator
) -> Iterator[Scheduler]:
    """Runs one search of `width` beams; gives its scheduler each time that all beams have got room for a token."""
    max_len = prompt_len + output_len
    config = SchedulerConfig(
        block_size=block_size,
        num_blocks=2 + width * -(-max_len // block_size),
        max_num_seqs=width,
        max_num_batched_tokens=prompt_len + width,
        max_model_len=max_len,
        enable_prefix_caching=False,
        watermark=0.0,
        pipeline_depth=0,
    )
    scheduler, device = Scheduler(config), BeamDevice(width, concentration, rng)
    params = BeamSearchParams(beam_width=width, max_tokens=output_len, ignore_eos=True, detokenize=False)
    prompt = np.arange(2**30, 2**30 + prompt_len, dtype=np.int32)
    scheduler.add(Request("search", prompt, params.sampling_params(), beam=params))
    while isinstance(plan := scheduler.schedule(), StepPlan):
        if len(plan.decode_slots):
            yield scheduler
        scheduler.update(plan, device.execute(plan))


def beam_saving(
    lengths: Sequence[tuple[int, int]],
    width: int,
    block_size: int = 16,
    concentration: float = CONCENTRATION,
    seed: int = 0,
) -> float:
    """The share of blocks that the beams of requests save by sharing.

    lengths: prompt and output lengths of the requests.
    concentration: of the Dirichlet distribution that next-token probabilities are drawn from, above 0.
    """
    rng = np.random.default_rng(seed)
    without = used = 0
    for prompt_len, output_len in lengths:
        for scheduler in search(prompt_len, output_len, width, block_size, concentration, rng):
            without += int(scheduler.slots.capacity.sum()) // block_size
            used += scheduler.pool.num_used
    return 1 - used / without
