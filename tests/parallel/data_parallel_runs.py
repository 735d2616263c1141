"""What `test_data_parallel` has done in a process of eight devices; its replicas have eight each."""

import os
import signal
import tempfile
from dataclasses import replace
from typing import Any

from jpaged import LLM, SamplingParams
from jpaged.errors import EngineDeadError, InvalidParameterError
from jpaged.replicas import ReplicatedEngine
from tests.parallel.models import eight_heads
from tests.parallel.tensor_parallel_runs import ARGS, prompts, run
from tests.tiny_models import write_tiny_model


def two_replicas_of_four_shards(name: str) -> dict[str, Any]:
    """Tokens of one device and of 2 x 4, greedy and sampled without seeds; then the end of a replica."""
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(eight_heads(name, num_hidden_layers=1), directory, use_torch=False)
        options = {key: getattr(ARGS, key) for key in ARGS.__dataclass_fields__} | {"model": directory}
        one = LLM(**options)
        two = LLM(**options | {"tensor_parallel_size": 4, "data_parallel_size": 2})
        engine = two.engine
        assert isinstance(engine, ReplicatedEngine)
        result: dict[str, Any] = {
            kind: [
                [list(output.outputs[0].token_ids) for output in llm.generate(prompts(), params, use_tqdm=False)]
                for llm in (one, two)
            ]
            for kind, params in {
                "greedy": SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
                "sampled": SamplingParams(temperature=1, max_tokens=8, ignore_eos=True),
            }.items()
        }
        result["finished"] = engine.get_metrics().num_finished
        result["by_replica"] = [stats.num_finished for stats in engine._ask_all("get_metrics")]
        result["reset"] = engine.reset_prefix_cache()
        result["wrong_token"] = _error(lambda: two.generate([[3, 10**6]], use_tqdm=False))
        result["still_serves"] = len(run(engine, prompts()[:1])[0])
        os.kill(engine._replicas[1].process.pid, signal.SIGKILL)
        result["killed"] = _error(lambda: two.generate(prompts(), use_tqdm=False))
        result["afterwards"] = _error(lambda: two.generate(prompts(), use_tqdm=False))
        result["others_ended"] = [replica.process.poll() is not None for replica in engine._replicas]
        result["no_start"] = _error(lambda: ReplicatedEngine(replace(ARGS, model=directory, **_TOO_MANY)))
        return result


_TOO_MANY = {"tensor_parallel_size": 16, "data_parallel_size": 2}


def _error(call: Any) -> list[str]:
    try:
        call()
    except (EngineDeadError, InvalidParameterError, ValueError) as error:
        return [type(error).__name__, str(error)]
    return []
