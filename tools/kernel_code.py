"""Writes the code that compilers make of every kernel, for comparing two checkouts.

    python tools/kernel_code.py before            # in one checkout; needs what h200_compile.py needs
    python tools/kernel_code.py after             # in the other, or after a change; 3 minutes each
    diff -r before after                          # says nothing if the kernels do what they did

A file for each kernel of each program, its PTX without what names sources and lines, and one for the optimized HLO of
the program around them. The programs are those that the tests compile, and attention and sampling in more shapes.

    python tools/kernel_code.py after --only "ragged .* D 256"

By default it writes the Mosaic kernels. With --triton it writes the Triton kernels that `compile_triton.py` compiles,
for GPUs of a compute capability:

    python tools/kernel_code.py after --triton 90
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.pallas_kernels import compile_for_h200 as tested  # isort: skip  (finds the CUDA compiler before JAX starts)

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.common.attention_arguments import Features, Operands
from jpaged.pallas_kernels.decode_attention import hopper as decode_attention
from jpaged.pallas_kernels.decode_attention import hopper_rows as decode_attention_rows
from jpaged.pallas_kernels.ragged_attention import hopper as ragged_attention
from jpaged.pallas_kernels.sample_tokens import hopper as sample_tokens
from jpaged.pallas_kernels.sample_tokens.operands import Operands as SampleOperands

Program = tuple[str, Any, tuple[Any, ...]]
Shape, ids = jax.ShapeDtypeStruct, tested.ids
KV_HEADS, MAX_LEN = 2, 4096

RAGGED: list[tuple[int, int, int, dict[str, Any]]] = [
    *(
        (head_dim, group, block, {})
        for head_dim in (64, 80, 96, 128, 256)
        for group, block in ((1, 16), (4, 16), (8, 64))
    ),
    (16, 1, 16, {}),
    (48, 3, 8, {}),
    (32, 4, 256, {"tokens": 5}),
    (64, 4, 64, {"alibi": True}),
    (80, 7, 16, {"logit_softcap": 30.0}),
    (96, 12, 32, {"causal": False, "alibi": True}),
    (128, 2, 16, {"scale": -1.0}),
    (128, 4, 16, {"sliding_window": 1500}),
    (128, 4, 16, {"causal": False}),
    (128, 5, 16, {"dtype": jnp.float16}),
    (128, 8, 128, {"alibi": True, "sliding_window": 300}),
    (256, 1, 16, {"alibi": True, "logit_softcap": 5.0, "sliding_window": 5}),
    (256, 4, 16, {"sliding_window": 700, "logit_softcap": 20.0}),
]
"""head_dim, query heads a KV head, block size, options."""

UNCUT = decode_attention.Config(tile=64, stages=3, leaf=128, chunk=2048, ctas=1)
ONE_LEAF = decode_attention.Config(tile=64, stages=2, leaf=1024, chunk=1024, ctas=132, q_stages=3, handovers=1)
DECODE: list[tuple[int, int, int, dict[str, Any]]] = [
    *(
        (head_dim, group, block, {})
        for head_dim in (64, 128, 256)
        for group, block in ((1, 16), (4, 16), (7, 64), (8, 16), (32, 64))
    ),
    (64, 4, 16, {"max_len": 1024}),
    (64, 32, 16, {"alibi": True, "sliding_window": 100}),
    (128, 4, 16, {"max_len": 1024}),
    (128, 4, 32, {"max_len": 131_072}),
    (128, 4, 32, {"max_len": 131_072, "sliding_window": 1500}),
    (128, 4, 64, {"config": UNCUT}),
    (128, 4, 64, {"config": UNCUT, "max_len": 1024}),
    (128, 7, 16, {"config": ONE_LEAF, "alibi": True}),
    (128, 8, 128, {"logit_softcap": 30.0}),
    (128, 12, 32, {"dtype": jnp.float16, "alibi": True, "logit_softcap": 3.0, "sliding_window": 900}),
    (256, 1, 64, {"alibi": True}),
    (256, 4, 16, {"sliding_window": 700, "logit_softcap": 20.0}),
]

ONE_CONSUMER = decode_attention_rows.Config(tile=64, stages=4, chunk=1024, ctas=132, consumers=1)
LATE_MERGE = decode_attention_rows.Config(tile=64, stages=3, chunk=1024, ctas=132, overlap_merge=False)
ROWS: list[tuple[int, int, int, dict[str, Any]]] = [
    *((head_dim, group, block, {}) for head_dim in (80, 96) for group, block in ((1, 16), (4, 16), (8, 64))),
    (80, 2, 32, {"dtype": jnp.float16, "alibi": True, "logit_softcap": 3.0, "sliding_window": 900}),
    (80, 4, 16, {"sliding_window": 1500}),
    (80, 4, 16, {"config": ONE_CONSUMER}),
    (80, 7, 16, {"logit_softcap": 30.0}),
    (80, 8, 16, {"config": ONE_CONSUMER, "max_len": 512, "alibi": True}),
    (96, 4, 16, {"max_len": 1024}),
    (96, 4, 64, {"alibi": True}),
    (96, 12, 16, {"config": LATE_MERGE}),
    (96, 32, 128, {"alibi": True, "sliding_window": 100}),
]

SAMPLE = [(5, 1000, {}), (7, 32_000, {"ctas": 4, "tile": 512, "ahead": 3}), (3, 32_000, {"ctas": 1, "warpgroups": 1})]
SAMPLE += [(3, 9000, {"ctas": 2, "warpgroups": 4, "tile": 512}), (2, 262_144, {})]
"""Rows, vocabulary, fields of the kernel's configuration."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="programs whose name this regular expression finds"
    )
    parser.add_argument(
        "--triton", type=int, metavar="CAPABILITY", help="the Triton kernels instead, for such GPUs (80, 86, 90, ..)"
    )
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.triton is not None:
        write_triton(args.folder, args.triton, args.only)
        return
    for name, function, arguments, donated, mesh in programs():
        if not re.search(args.only, name):
            continue
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as dump:
            os.environ["MOSAIC_GPU_DUMP_TO"] = dump
            compiled = tested.compile_for_h200(function, *arguments, donate_argnums=donated, mesh=mesh)
            kernels = sorted(Path(dump).glob("*.ptx"), key=lambda path: int(path.stem.rsplit("_", 1)[1]))
            ptx = [path.read_text() for path in kernels]
        stem = re.sub(r"\W+", "_", name)
        (args.folder / f"{stem}.hlo").write_text(without_sources_hlo(compiled.as_text()))
        for number, text in enumerate(ptx):
            (args.folder / f"{stem}.{number}.ptx").write_text(without_sources_ptx(text))
        print(f"{time.perf_counter() - begun:5.1f} s  {name}", flush=True)


def write_triton(folder: Path, capability: int, only: str) -> None:
    """Writes a file for each kernel that a Triton program launches: how it is launched, and its PTX."""
    from jpaged.pallas_kernels.common.triton_code import bare_ptx
    from tests.pallas_kernels import compile_triton
    from tests.support.triton_compile import launches, ptx_of

    for name, op, arguments in compile_triton.programs():
        if not re.search(only, name):
            continue
        begun = time.perf_counter()
        stem = re.sub(r"\W+", "_", name)
        for number, found in enumerate(launches(partial(op, backend="triton"), arguments, capability)):
            launched = f"// {found.launch} {found.pointers} {found.constants}\n"
            file = folder / f"{stem}.{number}.{found.kernel.fn.__name__}.ptx"
            file.write_text(launched + bare_ptx(ptx_of(found, capability).asm["ptx"]))
        print(f"{time.perf_counter() - begun:5.1f} s  {name}", flush=True)


def programs() -> Iterator[tuple[str, Any, tuple[Any, ...], tuple[int, ...], Any]]:
    """(name, function, arguments, donated arguments, mesh)."""
    for program in (*ragged(), *decode(), *rows(), *sample()):
        yield *program, (), None
    for name, function, arguments, mesh in tested.all_reduces():
        yield name, function, arguments, (0, 1), mesh
    for name, function, arguments, donated in tested.programs():
        yield name, function, arguments, (0,) if donated else (), None


def ragged() -> Iterator[Program]:
    for head_dim, group, block, options in RAGGED:
        rest = dict(options)
        tokens = rest.pop("tokens", 300)
        name, call, (pool, tables, slopes) = _attention("ragged", _ragged_attention, head_dim, group, block, rest)
        q = Shape((tokens, KV_HEADS * group, head_dim), pool.dtype)
        yield name, call, (slopes, q, pool, ids(9, tables), ids(9), ids(10))


def decode() -> Iterator[Program]:
    yield from _decode("decode", decode_attention.decode_attention, DECODE)


def rows() -> Iterator[Program]:
    yield from _decode("rows", decode_attention_rows.decode_attention, ROWS)


def sample() -> Iterator[Program]:
    for count, vocab, fields in SAMPLE:
        floats, whole = Shape((count,), jnp.float32), ids(count)
        logits, seeds = Shape((count, vocab), jnp.float32), Shape((count, 2), jnp.uint32)
        call = partial(_sample_tokens, sample_tokens.Config(**fields))
        yield f"sample {count} x {vocab}{_with(fields)}", call, (logits, floats, whole, floats, floats, seeds, whole)


def _ragged_attention(operands: Operands, features: Features, query_starts: Any, **options: Any) -> Any:
    return ragged_attention.ragged_attention(operands, query_starts, features, **options)


def _sample_tokens(config: sample_tokens.Config, *arrays: Any) -> Any:
    return sample_tokens.sample_tokens(SampleOperands(*arrays), config=config)


def _decode(kind: str, kernel: Any, cases: list[tuple[int, int, int, dict[str, Any]]]) -> Iterator[Program]:
    for head_dim, group, block, options in cases:
        name, call, (pool, tables, slopes) = _attention(kind, kernel, head_dim, group, block, options)
        q = Shape((17, KV_HEADS * group, head_dim), pool.dtype)
        yield name, call, (slopes, q, pool, ids(17, tables), ids(17))


def _attention(
    kind: str, kernel: Any, head_dim: int, group: int, block: int, options: dict[str, Any]
) -> tuple[str, Any, tuple[Any, int, Any]]:
    """(name, function of the slopes and the other arguments, (pool, width of the tables, slopes)).

    kernel: takes operands, features, arrays that the op has besides, and the other options.
    """
    rest = dict(options)
    dtype, alibi, max_len = rest.pop("dtype", jnp.bfloat16), rest.pop("alibi", False), rest.pop("max_len", MAX_LEN)
    given = {name: rest.pop(name) for name in ("scale", "sliding_window", "logit_softcap") if name in rest}
    features = Features(**{"scale": head_dim**-0.5} | given)
    pool = Shape((4096, 2, KV_HEADS, block, head_dim), dtype)
    slopes = Shape((KV_HEADS * group,), jnp.float32) if alibi else None

    def call(slopes: Any, *arguments: Any) -> Any:
        return kernel(Operands(*arguments[:4], slopes), features, *arguments[4:], **rest)

    return (
        f"{kind} {group} a KV head D {head_dim} block {block}{_with(options)}",
        call,
        (pool, max_len // block, slopes),
    )


def _with(options: dict[str, Any]) -> str:
    return f" with {', '.join(options)}" if options else ""


def without_sources_ptx(text: str) -> str:
    """PTX without comments, and without what says from where in the sources an instruction comes."""
    kept = []
    for line in text.splitlines():
        if re.match(r"\s*\.section\s+\.debug", line):
            break
        line = line.split("//")[0].rstrip()
        if line and not re.match(r"\s*\.(loc|file)\b|\$L__(tmp|func)\w*:", line):
            kept.append(line)
    return "\n".join(kept) + "\n"


def without_sources_hlo(text: str) -> str:
    """HLO without names of sources, and without the kernels themselves."""
    text = re.sub(r"\nFileNames\n.*?\n\n(?=[%E])", "\n", text, flags=re.DOTALL)
    text = re.sub(r",? ?metadata=\{[^}]*\}", "", text)
    text = re.sub(r"backend_config=\{kernel_hash.*", "", text)
    return re.sub(r'stack_frame_id=\d+|scheduling_name="[^"]*"|fingerprint_before_lhs="\w*"', "", text)


if __name__ == "__main__":
    main()
