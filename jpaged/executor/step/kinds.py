"""Every kind of program that a step may need."""

from jpaged.executor.step import blocks, bodies, changes, copy_states, expert_load, heads, one_call, tables
from jpaged.executor.step.program import Setup, StepProgram

KINDS: tuple[type[StepProgram], ...] = (
    *bodies.KINDS,
    *heads.KINDS,
    *one_call.KINDS,
    *changes.KINDS,
    *tables.KINDS,
    *blocks.KINDS,
    *copy_states.KINDS,
    *expert_load.KINDS,
)


def step_programs(setup: Setup) -> list[StepProgram]:
    """Every program that a runner may need."""
    return [program for kind in KINDS for program in kind.programs(setup)]


def first_programs(setup: Setup) -> list[StepProgram]:
    """The programs that nearly every first request runs."""
    return [program for kind in KINDS if (program := kind.first(setup)) is not None]


def largest_programs(setup: Setup) -> list[StepProgram]:
    """The programs that may need most memory while they run, or have the largest results."""
    return [program for kind in KINDS if (program := kind.largest(setup)) is not None]
