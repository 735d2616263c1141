"""What the metrics say of requests, whether each token is reported or only the end."""

import numpy as np
import pytest

from jpaged.api.sampling_params import RequestOutputKind, SamplingParams
from jpaged.engine.sequences.group import SequenceGroup
from jpaged.engine.sequences.request import Request
from jpaged.engine.stats import STEP_TOKENS_BOUNDS, Counters
from jpaged.processes.request_metrics import NUM_COLUMNS, RequestMetrics


def finished(kind, lengths):
    """A request whose sequences have so many tokens, the longest in 2 s."""
    params = SamplingParams(n=len(lengths), max_tokens=100, output_kind=kind)
    group = SequenceGroup.form(Request("a", [1, 2], params))
    for member, length in zip(group.members, lengths, strict=True):
        member.output_token_ids = list(range(length))
    stats = group.leader.stats
    stats.first_scheduled_time = stats.first_token_time = stats.arrival_time
    stats.last_token_time = stats.finished_time = stats.arrival_time + 2.0
    return group.leader


@pytest.mark.parametrize(("lengths", "intervals"), [((5,), 4), ((5, 3), 6), ((1,), 0), ((0,), 0)])
def test_an_answer_that_is_not_streamed_counts_its_mean_interval_for_each_token(lengths, intervals):
    metrics = RequestMetrics(np.zeros((1, 1, NUM_COLUMNS)), 0)
    metrics.count_finished(0, finished(RequestOutputKind.FINAL_ONLY, lengths))
    counts, total = metrics.histograms["inter_token_latency_seconds"].totals(0)
    assert sum(counts) == intervals
    assert total == pytest.approx(intervals * 2.0 / 4)


def test_intervals_of_a_stream_are_counted_as_its_tokens_come_and_not_again():
    metrics = RequestMetrics(np.zeros((1, 1, NUM_COLUMNS)), 0)
    metrics.count_finished(0, finished(RequestOutputKind.DELTA, (5,)))
    assert sum(metrics.histograms["inter_token_latency_seconds"].totals(0)[0]) == 0


def test_a_step_counts_with_the_tokens_of_prompts_that_it_computed():
    counters = Counters()
    counters.count_step(3, 60)
    counters.count_step(3, 0)
    assert counters.step_tokens[STEP_TOKENS_BOUNDS.index(64)] == 1
    assert counters.step_tokens[STEP_TOKENS_BOUNDS.index(8)] == 1
    assert (counters.prefilled_tokens, counters.generated_tokens) == (60, 6)
