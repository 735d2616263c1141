"""What `test_virtual_memory` has done in a process of eight devices: the virtual layout over several of them."""

import tempfile
from dataclasses import replace
from typing import Any

from jpaged import LLMEngine
from jpaged.executor.cache.virtual.memory import VirtualMemory
from tests.parallel.models import eight_heads
from tests.parallel.tensor_parallel_runs import ARGS, prompts, run
from tests.tiny_models import write_tiny_model

IDLE_S = 0.02
FEW_TOKENS = (176, 150, 130, 110)
"""Room for so many tokens in each cache group, less and less until a request is swapped out."""


def tokens_by_layout(name: str, page_layout: str) -> dict[str, Any]:
    """Greedy tokens of one device with the paged layout, and of the virtual one on 2 and 4, by every path."""
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(eight_heads(name), directory, use_torch=False)
        args = replace(ARGS, model=directory)
        found: dict[str, Any] = {"paged": run(LLMEngine(args), prompts())}
        args = replace(args, kv_cache_layout="virtual", virtual_page_layout=page_layout)
        four = LLMEngine(replace(args, tensor_parallel_size=4))
        found["4"] = {"plain": run(four, prompts()), "awake": _pieces(four.startup.runner.memory)}
        found["2"] = _by_path(replace(args, tensor_parallel_size=2))
        return found


def _by_path(args: Any) -> dict[str, Any]:
    engine = LLMEngine(args)
    startup = engine.startup
    memory = startup.runner.memory
    found: dict[str, Any] = {"plain": run(engine, prompts())}
    page_tokens, groups = startup.config.block_size, len(startup.cache_groups)
    for num_tokens in FEW_TOKENS:
        num_pages = groups * -(-num_tokens // page_tokens) + 1
        few = LLMEngine(replace(args, num_gpu_blocks_override=num_pages, preemption_mode="swap"), startup)
        found["swapped"] = run(few, prompts())
        found["num_swapped_in"] = few.get_metrics().num_swapped_in
        if found["num_swapped_in"]:
            break
    cached = LLMEngine(args, startup)
    run(cached, [prompts()[3]])
    found["hits"] = run(cached, prompts())
    found["num_hits"] = cached.get_metrics().prefix_cache_hits
    assert cached.sleep()
    found["asleep"] = _pieces(memory)
    cached.wake_up()
    found["woken"] = run(cached, prompts())
    found["awake"] = _pieces(memory)
    memory.mapper.check_integrity()
    found["mapped"] = memory.mapper.counts.num_mapped
    startup.close()
    found["left"] = [ranges.driver.memory.num_used for ranges in memory._ranges]
    return found


def _pieces(memory: VirtualMemory) -> list[list[int]]:
    """For each device its memory in use, and that of the pages that the manager counts."""
    return [[ranges.driver.memory.num_used, memory.backed_bytes] for ranges in memory._ranges]


def idle_memory_goes_back() -> dict[str, Any]:
    """Two devices whose pool grows with requests and shrinks when it idles."""
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(eight_heads("llama-gqa-d64-tied"), directory, use_torch=False)
        args = replace(ARGS, model=directory, tensor_parallel_size=2, kv_cache_layout="virtual", block_size=1)
        engine = LLMEngine(replace(args, kv_idle_release_s=IDLE_S))
        memory = engine.startup.runner.memory
        least = memory.backed_bytes
        found: dict[str, Any] = {"tokens": run(engine, prompts()), "served": _pieces(memory), "least": least}
        for _ in range(10_000):
            engine.rest()
            if memory.backed_bytes == least:
                break
        found["rested"] = _pieces(memory)
        found["again"] = run(engine, prompts())
        engine.close()
        return found
