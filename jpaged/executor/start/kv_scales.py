"""The scales of an FP8 cache, which are known before any program that writes it is made."""

import logging
from collections.abc import Callable
from pathlib import Path

import jax

from jpaged.api.config import EngineArgs
from jpaged.executor.mesh import WHOLE, DeviceMesh
from jpaged.executor.step.program import int32
from jpaged.models import Model, Weights
from jpaged.models.loading.kv_calibration import KVScales, calibrated_scales, calibration_tokens, largest_of
from jpaged.models.loading.kv_scales import read_kv_scales

log = logging.getLogger("jpaged.startup")


def kv_scales_of(args: EngineArgs, shard: Model, mesh: DeviceMesh, directory: Path, given: Weights | None) -> KVScales:
    """Of each layer, what keys and what values are divided by.

    given: the weights that were loaded, to be calibrated with, where `calculate_kv_scales` says so; else None, and the
        checkpoint's scales are read. No directory's are where its weights are another's: load_format is then "dummy".

    Raises:
        CheckpointError: as `read_kv_scales` and `calibrated_scales`.
    """
    if given is None:
        return read_kv_scales(args.load_format, directory, shard.config.layer_keeps_tokens)
    weights = given

    def largest(weights: Weights, tokens: jax.Array) -> jax.Array:
        return largest_of(shard, weights, tokens)

    longest = calibration_tokens(shard.vocab_size, shard.config.max_position_embeddings).shape[1]
    program: Callable[..., jax.Array] = mesh.jit(largest, (mesh.weights(shard), int32(longest)), WHOLE)
    scales = calibrated_scales(shard, lambda row: program(weights, mesh.whole(row)))
    log.info("scales of keys and values: %s", ", ".join(f"{keys:g} and {values:g}" for keys, values in scales))
    return scales
