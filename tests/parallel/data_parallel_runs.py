"""What `test_data_parallel` has done in a process of eight devices; its replicas have eight each.

The replicas' pools hold one sequence of the longest length and little more, so they preempt; one device has room for
all.
"""

import os
import signal
import tempfile
from dataclasses import replace
from typing import Any

from jpaged import LLM, RequestOutputKind, SamplingParams
from jpaged.api.errors import JPagedError
from jpaged.processes.replicas import ReplicatedEngine
from tests.parallel.models import eight_heads
from tests.parallel.tensor_parallel_runs import ARGS, embed, prompts, run, score
from tests.tiny_models import write_tiny_model

SIZES = {"max_model_len": 80}
POOL = {"num_gpu_blocks_override": 24}


def two_replicas_of_four_shards(name: str) -> dict[str, Any]:
    """Tokens and scores of one device and of 2 x 4, greedy and sampled without seeds; then the end of a replica."""
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(eight_heads(name, num_hidden_layers=1), directory, use_torch=False)
        options = {key: getattr(ARGS, key) for key in ARGS.__dataclass_fields__} | SIZES | {"model": directory}
        one = LLM(**options)
        two = LLM(**options | POOL | {"tensor_parallel_size": 4, "data_parallel_size": 2})
        engine = two.engine
        assert isinstance(engine, ReplicatedEngine)
        result: dict[str, Any] = {
            kind: [
                [list(output.outputs[0].token_ids) for output in llm.generate(prompts(), params, use_tqdm=False)]
                for llm in (one, two)
            ]
            for kind, params in {
                "greedy": SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
                "sampled": SamplingParams(temperature=1, max_tokens=20, ignore_eos=True),
            }.items()
        }
        stats = engine.get_metrics()
        result["finished"] = stats.num_finished
        result["preemptions_and_hits"] = [stats.num_preemptions, stats.prefix_cache_hits]
        result["by_replica"] = [stats.num_finished for stats in engine.get_replica_metrics()]
        result["scores"] = [score(llm.engine, [[3, 4, *prompt] for prompt in prompts()]) for llm in (one, two)]
        result["embeddings"] = [embed(llm.engine, prompts()) for llm in (one, two)]
        result["wrong_score"] = _error(lambda: engine.add_score_request("x", [3, 4], 2))
        result["reset"] = engine.reset_prefix_cache()
        result |= _pinned(two, engine)
        result["wrong_token"] = _error(lambda: two.generate([[3, 10**6]], use_tqdm=False))
        result["still_serves"] = len(run(engine, prompts()[:1])[0])
        pids = engine.pids
        os.kill(pids[1], signal.SIGKILL)
        result["killed"] = _error(lambda: two.generate(prompts(), use_tqdm=False))
        result["afterwards"] = _error(lambda: two.generate(prompts(), use_tqdm=False))
        result["others_ended"] = [_has_ended(pid) for pid in pids]
        result["no_start"] = _error(lambda: ReplicatedEngine(replace(ARGS, model=directory, **_TOO_MANY)))
        return result


def _pinned(llm: LLM, engine: ReplicatedEngine) -> dict[str, Any]:
    """A prefix pinned while another request runs; one that does not fit; and what a prompt with the first finds."""
    system = [5, 6, 7, 8, 9, 10, 11, 12]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request("beside", prompts()[1], params)
    found = {"pinned_tokens": engine.pin_prefix(system), "too_long": _error(lambda: llm.pin_prefix(prompts()[3]))}
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    found["beside"] = [output.request_id for output in outputs]
    outputs = llm.generate([[*system, i] for i in (3, 4)], params, use_tqdm=False)
    found["hits"] = [output.num_cached_tokens for output in outputs]
    found["unpinned"] = [llm.unpin_prefix(system), llm.unpin_prefix(system), llm.unpin_prefix(prompts()[3])]
    return found


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


_TOO_MANY = {"tensor_parallel_size": 16, "data_parallel_size": 2}


def _error(call: Any) -> list[str]:
    try:
        call()
    except JPagedError as error:
        return [type(error).__name__, str(error)]
    return []
