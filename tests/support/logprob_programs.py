"""Engines that compile what sampled log-probabilities, those of prompts, and scores need, and nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from jpaged.engine.interface import SamplingVariant
from jpaged.executor.start.compilation import Compiler
from jpaged.executor.step.blocks import CopyBlocks, GatherBlocks, ScatterBlocks
from jpaged.executor.step.bodies import Decode, Mixed
from jpaged.executor.step.changes import KINDS as CHANGES
from jpaged.executor.step.heads import PromptLogprobs, Sample, WidenRows, WidenTokens
from jpaged.executor.step.kinds import step_programs
from jpaged.executor.step.runner import Runner

_KINDS = (*CHANGES, Mixed, Decode, CopyBlocks, GatherBlocks, ScatterBlocks, PromptLogprobs, WidenRows, WidenTokens)


@contextmanager
def logprob_programs() -> Iterator[None]:
    """Engines that start within it serve requests with log-probabilities, and none without."""

    def submit(compiler: Compiler) -> None:
        compiler.submit(
            program
            for program in step_programs(compiler.setup)
            if isinstance(program, _KINDS) or (isinstance(program, Sample) and program.variant == SamplingVariant.FULL)
        )

    with (
        mock.patch.object(Compiler, "submit_pool_programs", submit),
        mock.patch.object(Compiler, "submit_other_programs"),
        mock.patch.object(Runner, "warm_up"),
    ):
        yield
