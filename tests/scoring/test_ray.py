"""Scoring on a local Ray cluster. Needs `jpaged[ray]`: `make test-ray`."""

import os
import signal

import numpy as np
import pytest

from jpaged.api.errors import InvalidParameterError
from jpaged.scoring import Scorer
from tests.tiny_models import VOCAB_SIZE, tiny_model, write_tiny_model

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray

OPTIONS = {
    "max_model_len": 48,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 256,
    "decode_buckets": (8,),
    "token_buckets": (64,),
    "skip_tokenizer_init": True,
    "verbose": False,
}


@pytest.fixture(scope="module")
def cluster():
    names = ("PYTHONPATH", "JAX_PLATFORMS", "JPAGED_CACHE_DIR")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    ray.init(num_cpus=3, include_dashboard=False, runtime_env={"env_vars": variables}, object_store_memory=2**28)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("model")
    return str(write_tiny_model(tiny_model("llama-gqa-d64-tied"), directory, use_torch=False))


def random_rows(count: int) -> list[dict]:
    rng = np.random.default_rng(0)

    def ids(n):
        return rng.integers(3, VOCAB_SIZE, n).tolist()

    return [{"id": i, "prompt": ids(20), "choices": [ids(1 + j) for j in range(3)]} for i in range(count)]


def assert_scored(model: str, rows: list[dict], found: list[dict]) -> None:
    assert sorted(row["id"] for row in found) == list(range(len(rows)))
    expected = Scorer(model, **OPTIONS).score(rows, use_tqdm=False)
    for row in found:
        score = expected[row["id"]]
        assert row["choices"] == rows[row["id"]]["choices"]
        assert row["score"]["best"] == score.best
        sums = [choice["logprob"] for choice in row["score"]["choices"]]
        np.testing.assert_allclose(sums, [sequence.logprob for sequence in score.sequences], rtol=1e-4)


def test_two_actors_score_a_dataset(cluster, model):
    from jpaged.scoring.ray import score_dataset

    rows = random_rows(120)
    dataset = ray.data.from_items(rows, override_num_blocks=8)
    assert_scored(model, rows, score_dataset(dataset, model=model, num_actors=2, batch_size=10, **OPTIONS).take_all())


def test_the_rows_of_a_killed_actor_are_scored_again(cluster, model, tmp_path):
    from jpaged.scoring import ray as module

    class DiesOnce(module.ScoreActor):
        """The first actor to see row 37 kills its process."""

        def __init__(self, mark: str, **options) -> None:
            super().__init__(**options)
            self._mark = mark

        def __call__(self, batch):
            if 37 in batch["id"].to_pylist() and not os.path.exists(self._mark):
                open(self._mark, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(batch)

    rows = random_rows(60)
    dataset = ray.data.from_items(rows, override_num_blocks=6)
    scorer = {"model": model, **OPTIONS}
    mark = tmp_path / "died"
    kwargs = {"mark": str(mark), "scorer": scorer, "logprobs": False, "on_error": "fail"}
    scored = dataset.map_batches(
        DiesOnce,
        fn_constructor_kwargs=kwargs,
        batch_size=10,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=2),
    )
    assert_scored(model, rows, scored.take_all())
    assert mark.exists()


def test_malformed_rows_are_left_out_and_said_why(cluster, model):
    from jpaged.scoring.ray import score_dataset

    rows = [{"text": [3, 4, 5]}, {"text": [3]}, {"text": [4, 5]}]
    scored = score_dataset(ray.data.from_items(rows), model=model, on_error="skip", **OPTIONS).take_all()
    assert [row["score"] is None for row in scored] == [row["text"] == [3] for row in scored]
    assert [row["error"] for row in scored if row["error"]] == [
        "the text has 1 token; a token is scored after another, so two are needed."
    ]
    with pytest.raises(ray.exceptions.RayTaskError, match="two are needed"):
        score_dataset(ray.data.from_items(rows), model=model, **OPTIONS).take_all()


def test_wrong_arguments_are_refused_before_any_actor_starts(cluster):
    from jpaged.scoring.ray import score_dataset

    dataset = ray.data.from_items([{"text": [3, 4]}])
    for changes, message in (
        ({"num_actors": 0}, "num_actors must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"on_error": "x"}, "on_error must be"),
        ({"modell": 1}, "no option 'modell'"),
        ({"data_parallel_size": 2}, "use num_actors"),
    ):
        with pytest.raises(InvalidParameterError, match=message):
            score_dataset(dataset, **changes)
