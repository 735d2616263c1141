"""`jpaged quantize`: a checkpoint in 8 or 4 bits, of one that is not quantized."""

import argparse
import sys
from pathlib import Path
from textwrap import dedent

from jpaged.cli.options import add_debug_option

SCHEMES = ("fp8", "fp8-block", "int8", "int4")


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "quantize",
        help="write a checkpoint in 8 or 4 bits",
        description="Write a checkpoint whose attention, MLP and recurrent weights are quantized, in\n"
        "compressed-tensors' safetensors layout, one tensor at a time. OUT is then a model\n"
        "like any other (--model OUT).",
        epilog=dedent("""\
            schemes:
              fp8        8-bit weights, a scale for each output; activations by token
              fp8-block  8-bit weights, a scale for each 128 x 128; activations by 128 inputs
              int8       8-bit integers, a scale for each output; activations by token
              int4       4-bit weights, a scale for each 128 inputs, activations as they are; rounded
                         to the nearest, or by GPTQ to suit the texts of --calibration, which JAX
                         runs on its devices, layer by layer

            examples:
              jpaged quantize meta-llama/Llama-3.1-8B-Instruct llama-fp8 --scheme fp8
              jpaged serve --model llama-fp8
              jpaged quantize meta-llama/Llama-3.1-8B-Instruct llama-int4 --scheme int4 --calibration texts.jsonl

              jpaged quantize meta-llama/Llama-3.1-8B-Instruct llama-fp8 --scheme fp8 --kv-cache fp8 \\
                  --calibration texts.jsonl
              jpaged serve --model llama-fp8 --kv-cache-dtype fp8"""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="DIR_OR_ID", help="a directory in Hugging Face layout or a hub id")
    parser.add_argument("out", metavar="OUT", type=Path, help="the directory to write; must not exist, or be empty")
    parser.add_argument("--scheme", choices=SCHEMES, required=True, help="see below")
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        type=Path,
        help='for int4 and --kv-cache: a text a line, or .jsonl with "text", "prompt" or "messages"',
    )
    parser.add_argument(
        "--kv-cache",
        choices=("fp8",),
        help="write scales of keys and values for --kv-cache-dtype fp8, too; needs --calibration",
    )
    parser.add_argument(
        "--group-size", type=int, metavar="N", help="for int4: inputs that share a scale, 32, 64 or 128 (default: 128)"
    )
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the hub")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    add_debug_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from jpaged.models import quantize_checkpoint

    progress = not args.quiet and sys.stderr.isatty()
    texts = None
    if args.calibration is not None:
        from jpaged.cli.calibration import read_texts
        from jpaged.models.loading.quantize import checked_recipe
        from jpaged.text.tokenizer import Tokenizer

        # Before the tokenizer is fetched and the texts are encoded.
        checked_recipe(args.out, args.scheme, group_size=args.group_size, calibrated=True, kv_cache=args.kv_cache)
        texts = read_texts(args.calibration, Tokenizer.load(args.model, args.revision))
    options = {"group_size": args.group_size, "calibration": texts, "kv_cache": args.kv_cache}
    quantize_checkpoint(args.model, args.out, args.scheme, revision=args.revision, progress=progress, **options)
    return 0
