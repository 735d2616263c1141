"""A model whose layers differ in what they keep: block tables of each group, and blocks that a window gives back."""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.api.errors import InvalidParameterError, OutOfMemoryError
from jpaged.api.sampling_params import SamplingParams
from jpaged.engine.interface import NULL_BLOCK, Chunk, HostCopy, SamplingVariant, SlotStart, StepPlan
from jpaged.executor.config import ExecutorConfig
from jpaged.executor.mesh import DeviceMesh
from jpaged.executor.start.compilation import Compiler
from jpaged.executor.start.shapes import fit_to_pool
from jpaged.executor.step.blocks import GatherBlocks, ScatterBlocks
from jpaged.executor.step.bodies import Decode, Mixed
from jpaged.executor.step.changes import Update
from jpaged.executor.step.heads import Sample
from jpaged.executor.step.held import initial_held
from jpaged.executor.step.program import Setup
from jpaged.executor.step.runner import Runner
from jpaged.models import ModelConfig, build
from tests.executor.step import dense
from tests.tiny_models import VOCAB_SIZE, WINDOW, tiny_model

pytestmark = pytest.mark.xdist_group("cache-groups")  # one worker, which compiles once

SIZE = 4
CHUNK = 8
CONFIG = ExecutorConfig(
    max_num_seqs=4, max_model_len=64, block_size=SIZE, num_blocks=64, decode_buckets=(4,), token_buckets=(16,)
)
MESH = DeviceMesh(jax.devices()[:1])
MODELS = {
    "two groups of two layers": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "a group of one layer, and two of another kind": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


@pytest.fixture(scope="module", params=MODELS)
def setup(request) -> Setup:
    config = tiny_model("qwen3-layer-types").config | MODELS[request.param]
    return Setup.of(build(ModelConfig.from_dict(config), "float32"), CONFIG)


@pytest.fixture(scope="module")
def weights(setup):
    return setup.model.init(0)


@pytest.fixture(scope="module")
def programs(setup):
    compiler = Compiler(setup, MESH)
    compiler.submit(
        [Update(), Mixed(16), Decode(4), Sample(4, SamplingVariant.GREEDY), GatherBlocks(), ScatterBlocks()]
    )
    return compiler.results()


@dataclass
class Device:
    """A runner, with blocks handed out in turn. What holds no token that may be read is NaN."""

    setup: Setup
    runner: Runner
    tables: dict[int, list[list[int]]] = field(default_factory=dict)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.free = list(range(1, CONFIG.num_blocks))
        np.random.default_rng(0).shuffle(self.free)
        self.poison(self.free)

    def poison(self, block_ids: list[int]) -> None:
        pools = self.runner._held["pools"]
        self.runner._held["pools"] = tuple(pool.at[jnp.array(block_ids, jnp.int32)].set(jnp.nan) for pool in pools)

    def grow(self, slot: int, num_tokens: int) -> np.ndarray:
        """Blocks for so many tokens in every group. Returns the new entries, as in `StepPlan.table_updates`."""
        entries = []
        for group, table in enumerate(self.tables[slot]):
            while len(table) * SIZE < num_tokens:
                table.append(self.free.pop())
                entries.append((slot, group, len(table) - 1, table[-1]))
        return np.array(entries, np.int32).reshape(-1, 4)

    def give_back(self, slot: int, num_computed: int) -> None:
        """Frees the blocks of tokens that no later query sees."""
        for group, table in zip(self.setup.cache.groups, self.tables[slot], strict=True):
            if group.window is not None:
                for index in range(max(0, num_computed + 1 - group.window) // SIZE):
                    if table[index] != NULL_BLOCK:
                        self.poison([table[index]])
                        self.free.insert(0, table[index])
                        table[index] = NULL_BLOCK

    def start(self, slot: int, tokens: np.ndarray, num_computed: int = 0) -> SlotStart:
        return SlotStart(
            slot=slot,
            token_ids=tokens,
            prompt_len=len(tokens),
            block_ids=np.array(self.tables[slot], np.int32),
            num_computed_tokens=num_computed,
            max_len=CONFIG.max_model_len,
            sampling=SamplingParams(temperature=0),
            seed=0,
            stop_token_ids=(),
        )

    def run(self, **fields) -> list[int]:
        """The tokens of a step's rows."""
        plan = StepPlan(step_id=self.num_steps, variant=SamplingVariant.GREEDY, **fields)
        self.num_steps += 1
        return self.runner.execute(plan).result().token_ids[:, 0].tolist()

    def prefill(self, slot: int, prompt: np.ndarray) -> int:
        """In chunks, each with blocks for itself alone. Returns the first token."""
        self.tables[slot] = [[] for _ in self.setup.cache.groups]
        for first in range(0, len(prompt), CHUNK):
            chunk = prompt[first : first + CHUNK]
            end = first + len(chunk)
            updates = self.grow(slot, end)
            starts = () if first else (self.start(slot, prompt),)
            chunks = (Chunk(slot, first, chunk, samples=end == len(prompt)),)
            (token,) = self.run(starts=starts, table_updates=updates if first else updates[:0], chunks=chunks)
            self.give_back(slot, end)
        return token

    def decode(self, lengths: dict[int, int]) -> list[int]:
        """One token of each of these slots, which have so many computed."""
        updates = np.concatenate([self.grow(slot, length + 1) for slot, length in lengths.items()])
        tokens = self.run(decode_slots=np.array([*lengths], np.int32), table_updates=updates)
        for slot, length in lengths.items():
            self.give_back(slot, length + 1)
        return tokens


@pytest.fixture
def device(setup, weights, programs) -> Device:
    return Device(setup, Runner(setup, programs, initial_held(setup, MESH, weights)))


greedy = partial(dense.greedy, length=CONFIG.max_model_len)


def prompts(lengths: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, VOCAB_SIZE, length).astype(np.int32) for length in lengths]


def test_each_group_attends_through_its_own_tables_and_needs_no_more_than_its_window(setup, weights, device):
    """Prompts longer than the window, side by side, with the blocks that a window gave back reused by others."""
    count, lengths = 2 * SIZE + 2, {0: 3 * WINDOW, 2: WINDOW + 3}
    expected = {
        slot: greedy(setup.model, weights, prompt, count)
        for slot, prompt in zip(lengths, prompts([*lengths.values()]), strict=True)
    }
    found = {
        slot: [device.prefill(slot, prompt)] for slot, prompt in zip(lengths, prompts([*lengths.values()]), strict=True)
    }
    while len(found[0]) < count:
        for slot, token in zip(lengths, device.decode(lengths), strict=True):
            found[slot].append(token)
            lengths[slot] += 1
    assert found == expected
    for slot in lengths:
        for group, table in zip(setup.cache.groups, device.tables[slot], strict=True):
            num_held = len(table) - table.count(NULL_BLOCK)
            assert num_held == len(table) if group.window is None else num_held <= -(-group.window // SIZE) + 1


def test_a_sequence_comes_back_from_host_memory_with_the_blocks_it_still_needs(setup, weights, device):
    (prompt,) = prompts([2 * WINDOW])
    expected = greedy(setup.model, weights, prompt, 4)
    found = [device.prefill(1, prompt)]
    found += device.decode({1: len(prompt)})
    old, computed = [block for table in device.tables[1] for block in table if block != NULL_BLOCK], len(prompt) + 1
    chunks = [np.array(old[first : first + 16], np.int32) for first in range(0, len(old), 16)]
    device.run(ends=np.array([1], np.int32), swap_outs=tuple(HostCopy(i, ids) for i, ids in enumerate(chunks)))
    device.poison(old)
    new = {block: device.free.pop() for block in old}
    device.tables[3] = [[new.get(block, NULL_BLOCK) for block in table] for table in device.tables[1]]
    known = np.array([*prompt, *found], np.int32)
    back = tuple(
        HostCopy(i, np.array([new[block] for block in ids.tolist()], np.int32)) for i, ids in enumerate(chunks)
    )
    updates = device.grow(3, len(known))
    chunk = Chunk(3, computed, known[computed:], samples=True)
    found += device.run(
        starts=(device.start(3, known, computed),), swap_ins=back, table_updates=updates, chunks=(chunk,)
    )
    found += device.decode({3: len(known)})
    assert found == expected


def test_blocks_of_another_number_of_groups_are_refused(setup, device):
    (prompt,) = prompts([3])
    device.tables[0] = [[1]]
    with pytest.raises(
        InvalidParameterError, match=f"1 cache groups, but the model's layers form {len(setup.cache.groups)}"
    ):
        device.run(starts=(device.start(0, prompt),), chunks=(Chunk(0, 0, prompt, samples=True),))


def test_a_pool_too_small_for_the_longest_sequence_says_how_many_groups_share_it(setup):
    groups = len(setup.cache.groups)
    with pytest.raises(OutOfMemoryError, match=rf"max_model_len=64 .* \(7 blocks of {SIZE}, which {groups} groups"):
        fit_to_pool(setup.model, CONFIG, 8, CONFIG.max_model_len)
