"""The simulated figures: the allocators they compare, the claims they make, and what a user types."""

import json
import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from jpaged import EngineArgs, cli
from jpaged.api.errors import EngineDeadError, InvalidParameterError, OutOfMemoryError
from jpaged.api.sampling_params import SamplingParams
from jpaged.assets import demo_model_path
from jpaged.bench.memory import device, main, paper
from jpaged.bench.memory.buddy import BuddyAllocator
from jpaged.bench.memory.figures import AS_FIGURE_12, Options, Steady, Workload, sustained_rate
from jpaged.bench.memory.lengths import FIGURE_11
from jpaged.bench.memory.reservation import ReservationPool
from jpaged.bench.memory.setups import SETUPS, StepTime, fitted, roofline, step_time
from jpaged.bench.memory.sharing import beam_saving, search
from jpaged.bench.memory.simulate import SYSTEMS, Serving, make_scheduler, simulate
from jpaged.bench.memory.traces import TraceRequest, at_rate, draw_lengths, draw_trace, read_trace
from jpaged.bench.workloads import TRACES
from jpaged.engine.interface import StepPlan
from jpaged.engine.sequences.request import Request
from tests.bench import small_engine
from tests.tiny_models import MAX_LENGTH

OPT_13B = SETUPS["opt-13b"]
STEP = step_time("paper", OPT_13B)


class BuddyMachine(RuleBasedStateMachine):
    """Allocates and frees at random; chunks never overlap, and what is free is as joined as it can be."""

    chunks = Bundle("chunks")

    def __init__(self) -> None:
        super().__init__()
        self.size = 1000  # no power of two
        self.buddies = BuddyAllocator(self.size)
        self.wanted: dict[int, int] = {}

    @rule(target=chunks, n=st.integers(1, 300))
    def allocate(self, n: int) -> int | None:
        if n > self.buddies.largest_free:
            with pytest.raises(OutOfMemoryError):
                self.buddies.allocate(n)
            return None
        start = self.buddies.allocate(n)
        self.wanted[start] = n
        return start

    @rule(start=consumes(chunks))
    def free(self, start: int | None) -> None:
        if start is not None:
            self.buddies.free(start)
            del self.wanted[start]

    @invariant()
    def chunks_tile_the_range(self) -> None:
        allocated, free = self.buddies.chunks()
        everything = sorted(allocated + free)
        assert [start for start, _ in everything] == [0, *np.cumsum([size for _, size in everything])[:-1].tolist()]
        assert sum(size for _, size in everything) == self.size
        assert all(size.bit_count() == 1 and start % size == 0 for start, size in everything)
        assert {start for start, _ in allocated} == set(self.wanted)
        assert all(size // 2 < self.wanted[start] <= size for start, size in allocated)
        assert self.buddies.num_allocated == sum(size for _, size in allocated)

    @invariant()
    def free_buddies_are_joined(self) -> None:
        _, free = self.buddies.chunks()
        assert not {(start ^ size, size) for start, size in free} & set(free)


TestBuddyMachine = BuddyMachine.TestCase
TestBuddyMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_the_memory_of_the_paper_holds_seven_sequences_of_the_greatest_length():
    buddies = BuddyAllocator(OPT_13B.kv_slots)
    starts = [buddies.allocate(2048) for _ in range(7)]
    assert len(set(starts)) == 7
    assert buddies.largest_free == 1024
    with pytest.raises(OutOfMemoryError):
        buddies.allocate(2048)


def test_a_chunk_that_was_never_handed_out_is_not_taken_back():
    with pytest.raises(EngineDeadError):
        BuddyAllocator(64).free(0)


@given(prompt_len=st.integers(1, 1500), output_len=st.integers(1, 500))
def test_reservations_are_what_the_policies_say(prompt_len, output_len):
    final = prompt_len + output_len

    def reserved(policy: str) -> int:
        return ReservationPool(4096, policy, 2048).blocks_to_admit(prompt_len, prompt_len, final)

    assert reserved("orca-max") == 2048
    assert reserved("orca-oracle") == final
    for_output = reserved("orca-pow2") - prompt_len
    assert output_len <= for_output
    assert for_output < 2 * output_len
    assert for_output.bit_count() == 1 or reserved("orca-pow2") == 2048


def test_an_output_of_25_tokens_gets_32_positions():
    assert ReservationPool(4096, "orca-pow2", 2048).blocks_to_admit(20, 20, 45) == 20 + 32


def test_a_reservation_pool_that_cannot_hold_one_sequence_is_refused():
    with pytest.raises(InvalidParameterError, match="max_model_len=2048"):
        ReservationPool(1500, "orca-max", 2048)
    with pytest.raises(InvalidParameterError, match="policy"):
        ReservationPool(4096, "best-fit", 2048)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_gets_contiguous_slots_or_scattered_blocks_and_gives_all_back(system):
    scheduler = make_scheduler(OPT_13B, Serving(system))
    for i, prompt_len in enumerate((30, 500, 7)):
        scheduler.add(Request(str(i), np.ones(prompt_len, np.int32), SamplingParams(max_tokens=50, ignore_eos=True)))
    plan = scheduler.schedule()
    assert isinstance(plan, StepPlan)
    assert len(plan.starts) == 3
    scheduler.check_integrity()
    for start in plan.starts:
        if system != "paged":
            assert (np.diff(start.block_ids[0]) == 1).all()
        assert start.block_ids.shape[1] * scheduler.config.block_size >= len(start.token_ids)
    for i in range(3):
        scheduler.abort(str(i))
    scheduler.check_integrity()
    assert scheduler.pool.num_used == 0


def quick_trace(dataset: str, rate: float, seconds: float, seed: int = 0) -> list[TraceRequest]:
    return draw_trace(dataset, rate, seconds, seed)


@pytest.fixture(scope="module")
def sharegpt_outcomes():
    trace = quick_trace("sharegpt", 2.2, 400)
    window_s = (100, 400)
    return {
        system: simulate(trace, OPT_13B, Serving(system), STEP, drain=False, window_s=window_s) for system in SYSTEMS
    }


def test_paged_memory_holds_tokens_in_more_than_nine_tenths_and_reservations_in_less_than_half(sharegpt_outcomes):
    for system, outcome in sharegpt_outcomes.items():
        memory = outcome.over_steps.memory
        assert sum((memory.token_states, memory.reserved, memory.internal, memory.external)) == pytest.approx(1)
        assert min(memory.token_states, memory.reserved, memory.internal, memory.external) >= 0
        if system != "paged":
            assert memory.token_states == pytest.approx(paper.FIGURE_2[system]["token_states"], abs=0.05)
            assert memory.reserved == pytest.approx(paper.FIGURE_2[system]["reserved"], abs=0.05)
            assert memory.external == pytest.approx(paper.FIGURE_2[system]["external"], abs=0.08)
    assert sharegpt_outcomes["paged"].over_steps.memory.token_states > 0.94
    internal = sharegpt_outcomes["orca-oracle"].over_steps.memory.internal
    assert internal < 0.002  # the last token has a slot and is not computed


def test_reservations_batch_as_many_requests_as_in_the_paper(sharegpt_outcomes):
    for system in ("orca-max", "orca-pow2", "orca-oracle"):
        assert sharegpt_outcomes[system].over_steps.batch == pytest.approx(
            paper.FIGURE_13["sharegpt"][system], rel=0.15
        )
    alpaca = quick_trace("alpaca", 30, 60)
    for system in ("orca-max", "orca-pow2", "orca-oracle"):
        outcome = simulate(alpaca, OPT_13B, Serving(system), STEP, drain=False, window_s=(20, 60))
        assert outcome.over_steps.batch == pytest.approx(paper.FIGURE_13["alpaca"][system], rel=0.15)


def test_the_paged_batch_is_the_papers_at_nine_tenths_of_the_load():
    """Figure 13 looks like runs of a system a tenth faster than Figure 12's; see docs/paper.md."""
    trace = quick_trace("sharegpt", 0.9 * paper.FIGURE_13_RATES["sharegpt"], 600)
    outcome = simulate(trace, OPT_13B, Serving("paged"), STEP, drain=False, window_s=(100, 600))
    assert outcome.over_steps.batch == pytest.approx(paper.FIGURE_13["sharegpt"]["paged"], rel=0.15)


def test_paging_serves_a_rate_under_which_reservations_fall_behind():
    trace = quick_trace("sharegpt", 1.5, 300)
    paged = simulate(trace, OPT_13B, Serving("paged"), STEP)
    oracle = simulate(trace, OPT_13B, Serving("orca-oracle"), STEP)
    assert paged.normalized_latency_s < 0.1
    assert oracle.normalized_latency_s > 3 * paged.normalized_latency_s


def test_a_run_beyond_the_latency_limit_ends_early_and_says_so():
    trace = quick_trace("sharegpt", 2.0, 600)
    whole = simulate(trace, OPT_13B, Serving("orca-max"), STEP)
    cut = simulate(trace, OPT_13B, Serving("orca-max"), STEP, latency_limit_s=0.5)
    assert cut.saturated
    assert not whole.saturated
    assert cut.num_steps < whole.num_steps
    assert 0.5 < cut.normalized_latency_s <= whole.normalized_latency_s


def test_a_lone_request_takes_the_time_of_its_steps():
    step = StepTime(fixed_s=1.0, per_sequence_s=0.1, per_context_token_s=0.01, per_prompt_token_s=0.001)
    outcome = simulate([TraceRequest(0.0, 10, 3)], OPT_13B, Serving("paged"), step)
    prompt, decode = 1 + 0.1 + 0.001 * 10, [1 + 0.1 + 0.01 * length for length in (11, 12)]
    assert outcome.num_steps == 3
    assert outcome.normalized_latency_s == pytest.approx((prompt + sum(decode)) / 3)


def test_a_mean_over_time_weighs_long_steps_and_one_over_steps_does_not():
    """The first request runs for 1 step with the second, whose prompt takes 100 times as long, and 8 steps alone."""
    step = StepTime(fixed_s=1.0, per_sequence_s=0.0, per_context_token_s=0.0, per_prompt_token_s=1.0)
    trace = [TraceRequest(0.0, 1, 10), TraceRequest(1.5, 99, 1)]
    outcome = simulate(trace, OPT_13B, Serving("paged"), step, window_s=(0.0, math.inf))
    assert outcome.num_steps == 10
    assert outcome.over_steps.batch == pytest.approx((9 * 1 + 1 * 2) / 10)
    assert outcome.over_time.batch == pytest.approx((2 + 8 * 1 + 100 * 2) / (2 + 8 + 100))


def test_only_steps_that_begin_in_the_window_count():
    step = StepTime(fixed_s=1.0, per_sequence_s=0.0, per_context_token_s=0.0, per_prompt_token_s=0.0)
    trace = [TraceRequest(0.0, 16, 8), TraceRequest(0.5, 16, 3)]  # side by side in the steps of seconds 1, 2 and 3

    def batch(first_s: float, last_s: float) -> float:
        return simulate(trace, OPT_13B, Serving("paged"), step, window_s=(first_s, last_s)).over_steps.batch

    assert batch(1, 3) == 2
    assert batch(2, 5) == pytest.approx((2 + 2 + 1 + 1) / 4)
    assert batch(4, math.inf) == 1, "what comes after the last arrival counts as well"
    assert simulate(trace, OPT_13B, Serving("paged"), step).over_steps.batch == 1, "up to the last arrival, unless said"


def test_a_shared_prefix_is_held_once_and_computed_once():
    requests = at_rate([TraceRequest(0.0, 341 + 20, 20, prefix_len=341)] * 100, 100.0)
    prompt_only = StepTime(0.01, 0.0, 0.0, per_prompt_token_s=1e-3)
    shared = simulate(requests, OPT_13B, Serving("paged", share_prompts=True), prompt_only)
    alone = simulate(requests, OPT_13B, Serving("paged"), prompt_only)
    assert shared.over_time.saved_blocks > 0.5
    assert alone.over_time.saved_blocks == 0
    assert alone.simulated_s > 5 * shared.simulated_s


def test_samples_of_a_prompt_save_what_the_paper_says_within_three_points():
    options = Options(progress=False)
    workload = Workload("alpaca", "opt-13b", 100.0, options, samples=4)
    outcome = Steady(workload, 9.0, Serving("paged", share_prompts=True)).run()
    assert outcome.over_time.saved_blocks == pytest.approx(paper.FIGURE_15["alpaca"]["parallel"][4], abs=0.03)


@pytest.mark.parametrize(("prompt_len", "width"), [(1, 2), (7, 3), (16, 4), (33, 6)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_beams_hold_a_block_for_each_beginning_that_some_of_them_have_in_common(prompt_len, width, block_size):
    """Counted anew from their tokens: a block is shared by those that are equal up to its end, or to theirs."""
    num_steps = total = 0
    for scheduler in search(prompt_len, 30, width, block_size, 0.5, np.random.default_rng(prompt_len)):
        tokens = [scheduler.slots.known(slot).tolist() for slot in range(width)]
        beginnings = {tuple(t[: i + block_size]) for t in tokens for i in range(0, len(t), block_size)}
        assert scheduler.pool.num_used == len(beginnings)
        scheduler.check_integrity()
        num_steps += 1
        total += len(beginnings) < width * -(-len(tokens[0]) // block_size)
    assert num_steps == 29, "the first token comes of the prompt's step"
    assert total > 0, "something is shared"


def test_beams_save_more_than_samples_and_more_so_the_more_they_are():
    lengths = draw_lengths("alpaca", 40, np.random.default_rng(2))
    savings = [beam_saving(lengths, width) for width in (2, 4, 6)]
    assert savings == sorted(savings)
    for saved, published in zip(savings, paper.FIGURE_15["alpaca"]["parallel"].values(), strict=True):
        assert saved > 2 * published
    assert beam_saving(lengths, 1) == 0


@pytest.mark.parametrize("concentration", [0.02, 10.0])
def test_what_beams_save_hardly_depends_on_how_sure_the_model_is(concentration):
    lengths = draw_lengths("alpaca", 20, np.random.default_rng(3))
    assert beam_saving(lengths, 4, concentration=concentration) == pytest.approx(beam_saving(lengths, 4), abs=0.04)


def test_drawn_lengths_have_the_papers_means_and_fit_the_model():
    for dataset, published in paper.MEAN_LENGTHS.items():
        pairs = np.array(draw_lengths(dataset, 40_000, np.random.default_rng(3)))
        assert pairs.mean(axis=0) == pytest.approx(published, rel=0.03)
        assert pairs.sum(axis=1).max() < 2048
        for histogram, mean in zip(FIGURE_11[dataset], published, strict=True):
            assert histogram.draw(np.random.default_rng(4), 40_000).mean() == pytest.approx(mean, rel=0.03)


def test_log_normal_lengths_are_those_of_the_other_benchmarks():
    pairs = np.array(draw_lengths("sharegpt", 20_000, np.random.default_rng(5), lengths="log-normal"))
    for i, distribution in enumerate(TRACES["sharegpt-like"]):
        expected = distribution.draw(np.random.default_rng(6), 20_000).mean()
        assert pairs[:, i].mean() == pytest.approx(expected, rel=0.03)


def test_traces_of_other_rates_begin_with_the_same_requests():
    slow, fast = draw_trace("alpaca", 2, 100), draw_trace("alpaca", 4, 50)
    assert [(r.prompt_len, r.output_len) for r in slow] == [(r.prompt_len, r.output_len) for r in fast]
    assert slow[-1].arrival_s == pytest.approx(2 * fast[-1].arrival_s)
    assert slow[-1].arrival_s == pytest.approx(100, rel=0.3)


def test_the_step_time_of_the_paper_fits_its_throughputs():
    for batch, tokens_per_s in paper.FIGURE_1_THROUGHPUT.items():
        assert batch / STEP(batch, 0, 0) == pytest.approx(tokens_per_s, rel=0.04)
    assert roofline(OPT_13B)(32, 10_000, 0) < STEP(32, 10_000, 0)


def test_orcas_latencies_are_nearer_to_the_papers_with_the_step_time_that_its_figure_12_asks_for():
    points = [("orca-pow2", 10.0), ("orca-oracle", 17.5)]

    def error(factors: tuple[float, float, float, float]) -> float:
        workload = Workload("alpaca", "opt-13b", 60, Options(progress=False), step_factors=factors)
        ratios = [
            simulate(workload.trace(rate), OPT_13B, Serving(system), workload.step_time()).normalized_latency_s
            / dict(paper.FIGURE_12["alpaca"]["opt-13b"][system])[rate]
            for system, rate in points
        ]
        return float(np.abs(np.log(ratios)).mean())

    assert error(AS_FIGURE_12) < 0.6 * error((1.0, 1.0, 1.0, 1.0))


def test_measured_steps_are_fitted(tmp_path):
    truth = StepTime(0.02, 3e-4, 4e-7, 2e-4)
    rng = np.random.default_rng(7)
    file = tmp_path / "steps.jsonl"
    steps = rng.integers(1, 2000, (20, 3)).tolist()
    lines = [{"sequences": a, "context_tokens": b, "prompt_tokens": c, "seconds": truth(a, b, c)} for a, b, c in steps]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    found = fitted(file, OPT_13B)
    assert found(64, 30_000, 100) == pytest.approx(truth(64, 30_000, 100))


def test_a_step_report_is_fitted_and_prompts_keep_the_cards_speed(tmp_path):
    file = tmp_path / "steps.json"
    results = [{"batch": b, "context": 512, "wall_ms": 4 + 0.01 * b} for b in (1, 32, 256)]
    file.write_text(json.dumps({"benchmark": "steps", "results": results}, indent=1))
    found = fitted(file, OPT_13B)
    assert found(100, 100 * 512, 0) == pytest.approx(5e-3)
    assert found.per_prompt_token_s == roofline(OPT_13B).per_prompt_token_s


@pytest.mark.parametrize("text", ["", "not json", '{"sequences": 1}', '{"sequences": 1, "seconds": 1}\n' * 3])
def test_a_file_without_measured_steps_is_refused(tmp_path, text):
    file = tmp_path / "steps.jsonl"
    file.write_text(text)
    with pytest.raises(InvalidParameterError, match="--step-time"):
        step_time(str(file), OPT_13B)


def test_a_trace_file_is_served_as_it_says(tmp_path, capsys):
    file = tmp_path / "requests.jsonl"
    rows = [{"input_len": 50 + i, "output_len": 20, "arrival": 0.1 * i} for i in range(30)]
    file.write_text("\n".join(json.dumps(row) for row in [*rows, {"input_len": 2000, "output_len": 100}]))
    assert [r.prompt_len for r in read_trace(file)] == [row["input_len"] for row in rows]  # the last is too long
    report = tmp_path / "report.json"
    assert main(["--trace", str(file), "--json", str(report)]) == 0
    results = json.loads(report.read_text())["results"]
    assert [row["system"] for row in results] == list(SYSTEMS)
    assert all(0 < row["latency_s_per_token"] < 1 for row in results)
    assert "30 requests" in capsys.readouterr().out


def test_conversations_are_counted_in_tokens(tmp_path):
    file = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "Tell me a story about a snail."}, {"from": "gpt", "value": "Once " * 30}]
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    with pytest.raises(InvalidParameterError, match="--tokenizer"):
        read_trace(file)
    (request,) = read_trace(file, tokenizer=str(demo_model_path()))
    assert 8 <= request.prompt_len <= 20
    assert 30 <= request.output_len <= 70


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"input_len": "x", "output_len": 3}', "nonsense"])
def test_a_trace_file_without_requests_is_refused(tmp_path, text):
    file = tmp_path / "requests.jsonl"
    file.write_text(text)
    with pytest.raises(InvalidParameterError, match="--trace"):
        read_trace(file, tokenizer="unused")


def test_the_sustained_rate_is_read_between_points():
    curve = [(1.0, 0.1), (2.0, 0.3), (3.0, 0.7)]
    assert sustained_rate(curve, 0.5) == pytest.approx(2.5)
    assert sustained_rate(curve[:2], 0.5) is None


def test_figures_are_printed_drawn_and_written(tmp_path, capsys):
    report = tmp_path / "memory.json"
    arguments = ["--quick", "--duration", "10", "--figure", "13", "--figure", "16", "--figure", "18"]
    pytest.importorskip("matplotlib")
    assert main([*arguments, "--json", str(report), "--plots", str(tmp_path / "images")]) == 0
    written = json.loads(report.read_text())
    assert written["settings"]["figure"] == ["13", "16", "18"]
    by_figure = {row["figure"] for row in written["results"]}
    assert by_figure == {"13", "16", "16, sustained", "18"}
    thirteen = [row for row in written["results"] if row["figure"] == "13"]
    assert {(row["dataset"], row["system"]) for row in thirteen} == {
        (dataset, system) for dataset in ("sharegpt", "alpaca") for system in SYSTEMS
    }
    assert all(row["paper"] == paper.FIGURE_13[row["dataset"]][row["system"]] for row in thirteen)
    assert sorted(file.name for file in (tmp_path / "images").iterdir()) == [
        f"paper-figure-{figure}.{suffix}" for figure in ("13", "16", "18") for suffix in ("png", "svg")
    ]
    assert "figure 13" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--figure", "19"], "--figure 19"),
        (["--jobs", "0"], "--jobs"),
        (["--duration", "-1"], "--duration"),
        (["--trace", "nowhere.jsonl"], "--trace"),
        (["--trace", "x", "--rate", "0"], "--rate"),
        (["--step-time", "fast", "--figure", "13"], "--step-time"),
    ],
)
def test_wrong_options_are_refused_by_name(arguments, named, capsys):
    with pytest.raises(InvalidParameterError, match=named):
        main(arguments)
    assert cli.main(["bench", "memory", *arguments]) == cli.EXIT_USAGE
    assert named in capsys.readouterr().err


@small_engine.GROUP
def test_each_block_size_is_served_on_the_device_and_what_was_measured_is_kept_if_a_later_one_fails(
    tmp_path, monkeypatch
):
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "decode_buckets": (8,), "token_buckets": (64,)}
    monkeypatch.setattr(device, "_FEW_PROGRAMS", sizes)
    monkeypatch.setattr(device, "_BLOCK_SIZES", (16, 32, 48))
    report = tmp_path / "memory.json"
    arguments = ["--figure", "18", "--quick", "--duration", "1", "--model", str(small_engine.write_model(tmp_path))]
    arguments += ["--num-prompts", "4", "--rate", "40", "--max-model-len", str(MAX_LENGTH), "--few-programs"]
    with pytest.raises(InvalidParameterError, match="block_size must be a power of two"):
        main([*arguments, "--num-gpu-blocks", "64", "--json", str(report)])
    rows = [row for row in json.loads(report.read_text())["results"] if row["figure"] == "18, device"]
    assert [(row["dataset"], row["block_size"]) for row in rows] == [
        (dataset, size) for size in (16, 32) for dataset in ("sharegpt", "alpaca")
    ]
    assert all(row["output_tokens_per_s"] > 0 and row["programs"] == "few" for row in rows)


@small_engine.GROUP
def test_block_sizes_and_swapping_are_measured_on_the_device(tmp_path, capsys, monkeypatch):
    sizes = {
        "max_num_seqs": small_engine.MAX_NUM_SEQS,
        "max_num_batched_tokens": small_engine.MAX_NUM_BATCHED_TOKENS,
    }
    monkeypatch.setattr(device, "EngineArgs", partial(EngineArgs, **sizes))
    model = small_engine.write_model(tmp_path)
    report = tmp_path / "memory.json"
    arguments = ["--figure", "19", "--model", str(model), "--tokens", "64"]
    arguments += ["--max-model-len", str(MAX_LENGTH)]
    assert main([*arguments, "--num-gpu-blocks", "64", "--json", str(report)]) == 0
    results = json.loads(report.read_text())["results"]
    assert [row["block_size"] for row in results] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert all(min(row["swap_out_ms"], row["swap_in_ms"], row["recompute_ms"]) > 0 for row in results)
    assert "figure 19" in capsys.readouterr().out
