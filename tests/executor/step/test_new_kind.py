"""A kind of program that nobody has heard of takes part in everything by its declaration alone."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Int

from jpaged.executor.config import ExecutorConfig
from jpaged.executor.mesh import DeviceMesh
from jpaged.executor.start.compilation import Compiler
from jpaged.executor.start.memory import plan_memory
from jpaged.executor.step import kinds
from jpaged.executor.step.changes import InitFull, Update
from jpaged.executor.step.heads import Sample
from jpaged.executor.step.held import initial_held
from jpaged.executor.step.packing import Field, PackedLayout
from jpaged.executor.step.program import Setup, StepProgram
from jpaged.executor.step.runner import Runner
from jpaged.executor.step.state import SlotState
from jpaged.models import ModelConfig, build
from tests.tiny_models import tiny_model

CONFIG = ExecutorConfig(
    max_num_seqs=4, max_model_len=64, block_size=16, num_blocks=8, decode_buckets=(2, 4), token_buckets=(16,)
)
MESH = DeviceMesh(jax.devices()[:1])


@dataclass(frozen=True)
class Drop(StepProgram):
    """Takes drafts back: the sequence lengths of some slots become smaller. Its result says how many are left."""

    batch: int

    kind = "drop"

    @classmethod
    def programs(cls, setup: Setup) -> Iterable[Self]:
        return map(cls, setup.config.decode_buckets)

    @classmethod
    def largest(cls, setup: Setup) -> Self:
        return cls(setup.config.decode_buckets[-1])

    def updates(self, setup: Setup) -> tuple[str, ...]:
        return ("state",)

    def layout(self, setup: Setup) -> PackedLayout:
        return PackedLayout(slots=Field((self.batch,), setup.config.null_slot), counts=Field((self.batch,), 0))

    def body(
        self, setup: Setup, *, state: SlotState, packed: Int[Array, " n"]
    ) -> tuple[dict[str, object], Int[Array, " batch"]]:
        host = self.layout(setup).unpack(packed)
        seq_len = state.seq_len.at[host["slots"]].add(-host["counts"])
        return {"state": state._replace(seq_len=seq_len)}, seq_len[host["slots"]]


@pytest.fixture
def setup(monkeypatch) -> Setup:
    monkeypatch.setattr(kinds, "KINDS", (Update, InitFull, Sample, Drop))
    return Setup.of(build(ModelConfig.from_dict(tiny_model("llama-gqa-d64-tied").config), "float32"), CONFIG)


def test_compiler_memory_plan_warm_up_and_runner_go_by_its_declaration(setup):
    compiler = Compiler(setup, MESH, kept_on=())  # a program of this file, whose source names no kept one
    compiler.submit(kinds.step_programs(setup))
    programs = compiler.results()
    assert {Drop(2), Drop(4)} < programs.keys()
    assert Drop(4).name == "drop_4"
    assert plan_memory(compiler, 2**30, None, 2).programs > 0
    assert Drop(4) in compiler.submit_largest()

    held = initial_held(setup, MESH, setup.model.init(0))
    assert programs[Drop(4)].alias_bytes >= sum(leaf.nbytes for leaf in held["state"])
    held["state"] = held["state"]._replace(seq_len=jnp.array([10, 20, 30, 40, 0], jnp.int32))
    runner = Runner(setup, programs, held)
    runner.warm_up()
    buffer, host = runner._packed(Drop(2))
    host["slots"][:1], host["counts"][:1] = 2, 7
    assert np.asarray(runner._run(Drop(2), packed=buffer)).tolist() == [23, 0]
    assert np.asarray(runner._held["state"].seq_len).tolist() == [10, 20, 23, 40, 0]
