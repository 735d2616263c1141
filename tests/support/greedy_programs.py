"""Engines that compile what greedy decoding and scoring need and nothing else, which halves their start."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from jpaged.engine.interface import SamplingVariant
from jpaged.executor.start.compilation import Compiler
from jpaged.executor.step.blocks import CopyBlocks
from jpaged.executor.step.bodies import Decode, Mixed
from jpaged.executor.step.changes import Update
from jpaged.executor.step.copy_states import CopyStates
from jpaged.executor.step.expert_load import ReadExpertTokens
from jpaged.executor.step.heads import Pool, Sample, Score
from jpaged.executor.step.kinds import step_programs
from jpaged.executor.step.program import StepProgram
from jpaged.executor.step.runner import Runner

_KINDS = (Update, Mixed, Decode, CopyBlocks, CopyStates, ReadExpertTokens, Score, Pool)


@contextmanager
def greedy_programs(*others: type[StepProgram]) -> Iterator[None]:
    """Engines that start within it serve greedy requests without penalties, masks or log-probabilities, and
    scores and embeddings.

    others: kinds of programs that are compiled, too.
    """

    def submit(compiler: Compiler) -> None:
        kinds = (*_KINDS, *others)
        compiler.submit([program for program in step_programs(compiler.setup) if _is_needed(program, kinds)])

    with (
        mock.patch.object(Compiler, "submit_pool_programs", submit),
        mock.patch.object(Compiler, "submit_other_programs"),
        mock.patch.object(Runner, "warm_up"),
    ):
        yield


def _is_needed(program: StepProgram, kinds: tuple[type[StepProgram], ...]) -> bool:
    if isinstance(program, Sample):
        return program.variant == SamplingVariant.GREEDY
    return isinstance(program, kinds)
