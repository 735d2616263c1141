"""`jpaged convert`: a Hugging Face checkpoint as a sharded Orbax checkpoint."""

import argparse
import logging
import sys
from pathlib import Path
from typing import get_args

from jpaged.api.config import DType
from jpaged.api.errors import CheckpointError
from jpaged.cli.options import add_debug_option


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "convert",
        help="write a checkpoint in Orbax's format",
        description="Write a checkpoint in Orbax's format, from which each device reads only its own part; OUT is then"
        " a model like any other (--model OUT). The model must fit this machine's memory once.",
    )
    parser.add_argument("model", metavar="DIR_OR_ID", help="a directory in Hugging Face layout or a hub id")
    parser.add_argument("out", metavar="OUT", type=Path, help="the directory to write")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the hub")
    parser.add_argument(
        "--dtype",
        choices=get_args(DType),
        default="auto",
        help="type to store; auto: the one that it has (default: auto)",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    add_debug_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not args.debug:  # when writing fails, Orbax's tasks would each log a traceback; the error says why
        for name in ("asyncio", "concurrent.futures"):
            logging.getLogger(name).disabled = True

    import jax

    from jpaged.models import ModelConfig, build, load, resolve
    from jpaged.models.loading import orbax_checkpoint
    from jpaged.models.loading.kv_scales import read_kv_scales, write_kv_scales

    orbax_checkpoint.check_target(args.out)  # before anything is downloaded or loaded
    directory = Path(resolve(args.model, args.revision))
    model = build(ModelConfig.from_directory(directory), args.dtype)
    try:
        scales = read_kv_scales("auto", directory, model.config.layer_keeps_tokens)
    except CheckpointError as error:  # engines read them only where the cache is in FP8
        print(f"jpaged convert: its scales of keys and values are left out: {error}", file=sys.stderr)
        scales = ()
    weights = load(model, directory, device=jax.devices("cpu")[0], progress=not args.quiet and sys.stderr.isatty())
    write_kv_scales(scales, args.out)
    orbax_checkpoint.save(model, weights, args.out)
    orbax_checkpoint.copy_companions(directory, args.out)
    return 0
