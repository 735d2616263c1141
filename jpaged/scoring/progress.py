"""Progress of long work."""

from collections.abc import Callable

from tqdm import tqdm

Progress = Callable[[int, int], None]
"""Called with rows finished and tokens computed since the last call."""


class ProgressBar:
    """Rows done, tokens/s and the time left, on stderr.

    what: the work's name. done: rows that an earlier run finished; they do not count for the speed.
    """

    def __init__(self, total: int, what: str = "scoring", *, done: int = 0, shown: bool = True) -> None:
        self._bar = tqdm(total=total, initial=done, desc=what, unit=" rows", dynamic_ncols=True, disable=not shown)
        self._tokens = 0
        self.num_rows = 0

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def add(self, rows: int, tokens: int) -> None:
        self._tokens += tokens
        self.num_rows += rows
        if not self._bar.disable:
            elapsed = self._bar.format_dict["elapsed"]
            if elapsed:
                self._bar.set_postfix_str(f"{self._tokens / elapsed:,.0f} tokens/s", refresh=False)
            self._bar.update(rows)
