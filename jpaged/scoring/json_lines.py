"""Output of JSON lines: a shard's records as bytes, and the shards' files as one."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jpaged.scoring.shards import ShardStore


def merge_json_lines(store: ShardStore, target: Path) -> None:
    """The shards' lines, one shard after the other."""
    with open(target, "wb") as file:
        for path in store.shard_files():
            with open(path, "rb") as shard:
                shutil.copyfileobj(shard, file, 1 << 20)


def json_lines(records: Iterable[dict[str, Any]]) -> bytes:
    """An object a line, in UTF-8; a line that holds what UTF-8 cannot (a lone surrogate), in ASCII with escapes."""
    lines = []
    for record in records:
        try:
            lines.append(json.dumps(record, ensure_ascii=False).encode())
        except UnicodeEncodeError:
            lines.append(json.dumps(record).encode())
        lines.append(b"\n")
    return b"".join(lines)
