"""Scoring a Ray Data dataset with a pool of actors, each an engine on GPUs of its own. Needs `jpaged[ray]`.

    import ray
    from jpaged.scoring.ray import score_dataset

    rows = ray.data.read_parquet("s3://bucket/questions/")      # columns as in `jpaged.scoring.rows`
    scored = score_dataset(rows, model="Qwen/Qwen3-0.6B", num_actors=16)
    scored.write_parquet("s3://bucket/answers/")

Ray schedules: it reads ahead, spreads batches over the actors, starts an actor that died anew and gives it the batches
again that it had.
"""

from typing import Any

from jpaged.api.checks import check_integer
from jpaged.api.errors import InvalidParameterError, MalformedRowError, MissingPackageError
from jpaged.scoring.files import OnError, parquet_schema
from jpaged.scoring.jobs import checked_options
from jpaged.scoring.rows import Row, RowScore, parse_row

try:
    import pyarrow as pa
    import ray
    from ray.data import ActorPoolStrategy, Dataset
except ImportError as error:
    raise MissingPackageError(f"jpaged.scoring.ray needs Ray: pip install 'jpaged[ray]'. ({error})") from error

ROWS_PER_BATCH = 1024
"""Rows that an actor scores at a time; between two batches it runs dry for a moment."""


def score_dataset(
    dataset: Dataset,
    *,
    model: str | None = None,
    num_actors: int = 1,
    batch_size: int = ROWS_PER_BATCH,
    logprobs: bool = False,
    on_error: OnError = "fail",
    window: int | None = None,
    stride: int | None = None,
    add_special_tokens: bool = True,
    **options: Any,
) -> Dataset:
    """Adds a column "score" to a dataset of rows: a struct of the fields that `jpaged score` writes.

    Args:
        dataset: its rows have the columns text, or prompt and completion, or prompt and choices; others stay as they
            are.
        num_actors: engines; where the cluster has GPUs, each takes `tensor_parallel_size` of them (1 by default).
        batch_size: rows that an actor scores at a time.
        logprobs: with every scored token's id and log-probability.
        on_error: "fail" ends the pipeline at a malformed row; "skip" leaves its "score" null and says why in a column
            "error", which only "skip" adds.
        model, window, stride, add_special_tokens, options: as for `Scorer`.
    Returns: a dataset, not yet computed; the order of rows is Ray's affair.
    Raises:
        InvalidParameterError: an argument out of range. What actors raise comes when the dataset is computed.
    """
    for name, value in (("num_actors", num_actors), ("batch_size", batch_size)):
        check_integer(name, value, 1)
    options = checked_options(options)
    if options.get("data_parallel_size", 1) != 1:
        raise InvalidParameterError(
            f"data_parallel_size={options['data_parallel_size']} is for one host; here an actor is one engine: use"
            f" num_actors."
        )
    if on_error not in ("fail", "skip"):
        raise InvalidParameterError(f'on_error must be "fail" or "skip", got {on_error!r}.')
    scorer = {"model": model, "window": window, "stride": stride, "add_special_tokens": add_special_tokens, **options}
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    return dataset.map_batches(
        ScoreActor,
        fn_constructor_kwargs={"scorer": scorer, "logprobs": logprobs, "on_error": on_error},
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(size=num_actors),
        num_gpus=int(options.get("tensor_parallel_size") or 1) if has_gpus else None,
    )


class ScoreActor:
    """Scores batches of rows; one lives in each actor."""

    def __init__(self, scorer: dict[str, Any], logprobs: bool, on_error: OnError) -> None:
        from jpaged.scoring.scorer import Scorer  # JAX starts here, on the GPUs that Ray has given to the actor

        self._scorer = Scorer(**{"verbose": False} | scorer)
        self._logprobs = logprobs
        self._on_error = on_error

    def __call__(self, batch: pa.Table) -> pa.Table:
        """The batch with a column "score", and with on_error "skip" one "error"."""
        rows: list[Row] = []
        places: list[int] = []
        errors: list[str | None] = [None] * len(batch)
        scores: list[dict[str, Any] | None] = [None] * len(batch)
        for i, fields in enumerate(batch.to_pylist()):
            try:
                rows.append(parse_row({name: value for name, value in fields.items() if value is not None}))
                places.append(i)
            except MalformedRowError as error:
                errors[i] = str(error)
        found = self._scorer.score_encoded(rows, self._scorer.encode(rows), lambda num_rows, tokens: None)
        for i, score in zip(places, found, strict=True):
            if isinstance(score, RowScore):
                scores[i] = score.record(i, logprobs=self._logprobs)
            else:
                errors[i] = str(score)
        bad = next((i for i, error in enumerate(errors) if error is not None), None)
        if self._on_error == "fail" and bad is not None:
            raise MalformedRowError(f"{batch.slice(bad, 1).to_pylist()[0]!r:.200}: {errors[bad]}")
        fields = pa.struct([field for field in parquet_schema() if field.name not in ("index", "id")])
        batch = batch.append_column("score", pa.array(scores, fields))
        return batch.append_column("error", pa.array(errors, pa.string())) if self._on_error == "skip" else batch
