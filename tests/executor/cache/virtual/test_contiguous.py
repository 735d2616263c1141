"""Attention that knows no block tables, over the virtual layout: a whole engine by it gives the paged layout's tokens.

cuDNN's place is taken by the op's XLA implementation, registered as a backend from outside. It is given what cuDNN is.
"""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from jpaged import EngineArgs, LLMEngine
from jpaged.api.errors import InvalidParameterError, UnsupportedModelError
from jpaged.pallas_kernels import registry
from jpaged.pallas_kernels.contiguous_attention.reference import contiguous_attention
from tests import test_pressure
from tests.parallel.tensor_parallel_runs import ARGS, prompts, run
from tests.tiny_models import models_of_blocks, tiny_models, write_tiny_model

VIRTUAL: dict[str, Any] = {
    "kv_cache_layout": "virtual",
    "virtual_page_layout": "per-layer",
    "compile_programs": "on_first_use",  # with a backend that is named they are compiled at start
}
SMALL: dict[str, Any] = {field.name: getattr(ARGS, field.name) for field in fields(EngineArgs)}
"""Steps of 32 tokens and prompts of up to 60, which are computed in chunks."""

PRESSURE = SMALL | {
    "max_model_len": 64,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 32,
    "decode_buckets": (16,),
    "token_buckets": (32,),
}


@pytest.fixture
def stand_in() -> Iterator[None]:
    registry.register_backend("stand-in", runs_on=lambda device: False)
    registry.register_implementation("contiguous_attention", "stand-in", contiguous_attention)
    yield
    registry.unregister_backend("stand-in")


def written(name: str, directory: Path) -> str:
    models = tiny_models() + models_of_blocks()
    return str(write_tiny_model(next(one for one in models if one.name == name), directory, use_torch=False))


@pytest.mark.parametrize("name", ["qwen3-tied-d64", "llama-mqa-d80"])
def test_greedy_tokens_are_those_of_the_paged_layout(name: str, tmp_path: Path, request: Any) -> None:
    args = SMALL | {"model": written(name, tmp_path)}
    expected = run(LLMEngine(EngineArgs(**args)), prompts())  # before there is a backend whose programs are not kept
    request.getfixturevalue("stand_in")
    args |= {**VIRTUAL, "num_gpu_blocks_override": 96, "kernel_backend": "stand-in"}
    engine = LLMEngine(EngineArgs(**args))
    assert run(engine, prompts()) == expected
    memory = engine.startup.runner.memory
    assert memory is not None
    memory.mapper.check_integrity()
    assert memory.mapper.counts.num_mapped >= len(prompts())
    engine.startup.close()
    assert memory.backed_bytes == 0


def test_beams_samples_swaps_and_copies_give_the_paged_layout_s_tokens(tmp_path: Path, request: Any) -> None:
    args = PRESSURE | {"model": written("llama-gqa-d64-tied", tmp_path), "num_gpu_blocks_override": 2048}
    expected, _ = test_pressure.run(LLMEngine(EngineArgs(**args)), 50)
    request.getfixturevalue("stand_in")
    few = {"num_gpu_blocks_override": 40, "preemption_mode": "swap", "host_prefix_cache": True, "watermark": 0.0}
    engine = LLMEngine(EngineArgs(**args | few | VIRTUAL | {"kernel_backend": "stand-in"}))
    found, _ = test_pressure.run(engine, 50)
    assert found == expected
    assert engine.get_metrics().num_swapped_in > 0
    assert engine.startup.runner.memory is not None
    engine.startup.runner.memory.mapper.check_integrity()
    engine.startup.close()


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        (
            "gpt2",
            {"kv_cache_layout": "paged", "virtual_page_layout": "sliced"},
            "knows no block tables.* got 'paged'; give kv_cache_layout='virtual'",
        ),
        ("gpt2", {"virtual_page_layout": "sliced"}, "pages of one layer alone, got 'sliced'"),
        ("gpt2", {"shared_prefix_attention": True}, "cannot go with shared_prefix_attention=True"),
        ("mistral-window", {}, "'stand-in' does not serve models with sliding windows; leave it out"),
        ("bloom", {}, "kernel_backend='stand-in' cannot serve this: contiguous attention has no alibi_slopes"),
    ],
)
@pytest.mark.usefixtures("stand_in")
def test_what_it_cannot_do_is_refused_by_name(name: str, options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    args = SMALL | VIRTUAL | {"model": written(name, tmp_path), "kernel_backend": "stand-in", **options}
    with pytest.raises((InvalidParameterError, UnsupportedModelError), match=reason):
        LLMEngine(EngineArgs(**args))


def test_cudnn_is_refused_where_there_is_no_gpu(tmp_path: Path) -> None:
    args = SMALL | VIRTUAL | {"model": written("gpt2", tmp_path), "kernel_backend": "cudnn"}
    with pytest.raises(InvalidParameterError, match=r"8.0 \(Ampere\) or newer, this is CPU"):
        LLMEngine(EngineArgs(**args))
