"""A whole engine with Triton's kernels, in Triton's interpreter on a CPU: the tokens of XLA."""

from pathlib import Path
from typing import Any

import pytest

from jpaged import LLM, SamplingParams
from jpaged.executor.start import startup
from jpaged.pallas_kernels.registry import missing
from tests.tiny_models import TINY_ENGINE, tiny_model, write_tiny_model

if missing("triton") is not None:
    pytest.skip(str(missing("triton")), allow_module_level=True)

from jpaged.pallas_kernels.common import triton_interpreted

OPTIONS = TINY_ENGINE | {
    "block_size": 16,
    "num_gpu_blocks_override": 40,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "decode_buckets": (4,),
    "token_buckets": (32,),
}
PROMPTS = [[3, 4, 5], list(range(3, 36))]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    "forked and sampled": SamplingParams(n=2, top_k=30, top_p=0.9, seed=5, max_tokens=3, ignore_eos=True),
}


def tokens(directory: Path, backend: str, **options: Any) -> dict[str, list[list[int]]]:
    llm = LLM(**OPTIONS, **options, model=str(directory), kernel_backend=backend)
    try:
        found = {name: llm.generate(PROMPTS, params, use_tqdm=False) for name, params in PARAMS.items()}
    finally:
        llm.close()
    return {name: [one.token_ids for output in of for one in output.outputs] for name, of in found.items()}


def test_an_engine_with_triton_s_kernels_gives_the_tokens_of_xla(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny_model(tiny_model("llama-gqa-d64-tied"), tmp_path, use_torch=False)
    expected = tokens(directory, "xla")
    interpreted, called = triton_interpreted.call, set()

    def call(kernel: Any, *arguments: Any) -> Any:
        called.add(kernel.fn.__name__)
        return interpreted(kernel, *arguments)

    monkeypatch.setattr(triton_interpreted, "call", call)
    monkeypatch.setattr(startup, "KEPT_PLATFORMS", ())  # kernels are called where programs are traced
    assert tokens(directory, "triton") == expected
    assert {"_rope_and_write", "_scan", "_choose", "_copy_blocks", "_transfer_blocks"} <= called
    assert len(called) > 5, called  # and those of attention


def test_rows_rounded_to_fp8_by_triton_s_kernel_give_the_tokens_of_xla(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny_model(tiny_model("llama-gqa-d64-tied"), tmp_path, use_torch=False)
    fp8 = {"quantization": "fp8", "compile_programs": "on_first_use"}
    expected = tokens(directory, "xla", **fp8)
    interpreted, called = triton_interpreted.call, set()

    def call(kernel: Any, *arguments: Any) -> Any:
        called.add(kernel.fn.__name__)
        return interpreted(kernel, *arguments)

    monkeypatch.setattr(triton_interpreted, "call", call)
    monkeypatch.setattr(startup, "KEPT_PLATFORMS", ())  # kernels are called where programs are traced
    assert tokens(directory, "triton", **fp8) == expected
    assert "_round_rows" in called
