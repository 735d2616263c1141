"""Kills `jpaged score` at random moments, ten times or more, and compares what it writes in the end with one whole run.

    python -m tests.drills.scoring_kills --kills 10 --workers 1
    python -m tests.drills.scoring_kills --kills 10 --workers 2 --format parquet
    python -m tests.drills.scoring_kills --kills 0 --full-disks 4       fills the output's disk at random, not kills

The embedded model scores made-up rows of all three kinds. Each kill is a SIGKILL to the command at a random moment
after it has finished a first shard (one kill in five: at a random moment of its start); then the command is started
again. When it ends by itself, its output must be that of the whole run, byte for byte, with every row once; with kills
left, a new output is begun. With --full-disks the output lies on a small file system with too little room, again and
again: the command must say so and exit with 1, and with room it must go on (needs the right to mount a file system).
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.small_disk import filled, small_disk

STORY = "Once upon a time there was a little fox who lived in the house by the sea and had a lantern, a friend, a dog"


def write_input(path: Path, rows: int, rng: random.Random) -> None:
    def text(low: int, high: int) -> str:
        return " ".join(rng.choices(STORY.split(), k=rng.randint(low, high)))

    with open(path, "w") as file:
        for i in range(rows):
            row = (
                {"text": text(20, 300)},
                {"prompt": text(10, 100), "completion": " " + text(1, 20)},
                {"prompt": text(50, 200), "choices": [" " + text(1, 6) for _ in range(4)]},
            )[i % 3]
            file.write(json.dumps(row | {"id": i}) + "\n")


def command(source: Path, output: Path, args: argparse.Namespace) -> list[str]:
    options = ["--shard-size", str(args.shard_size), "--logprobs", "--data-parallel-size", str(args.workers)]
    return [sys.executable, "-m", "jpaged", "score", str(source), "-o", str(output), *options]


def shards_in(manifest: Path) -> int:
    """Finished shards that a manifest lists."""
    try:
        return max(0, manifest.read_bytes().count(b"\n") - 1)
    except FileNotFoundError:
        return 0


def run(
    arguments: list[str], manifest: Path, kill_after_s: float | None = None, *, in_start: bool = False
) -> float | None:
    """Runs the command, and kills it so long after it has finished a shard (after its start, if `in_start`).

    Returns: seconds from its first shard to its end; None if it was killed.
    """
    before = shards_in(manifest)
    process = subprocess.Popen(arguments)
    begun = time.monotonic() if in_start else None
    while process.poll() is None:
        if begun is None and shards_in(manifest) > before:
            begun = time.monotonic()
        if kill_after_s is not None and begun is not None and time.monotonic() - begun > kill_after_s:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            return None
        time.sleep(0.002)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with exit code {process.returncode}.")
    return time.monotonic() - begun if begun is not None else 0.0


def fill_disks(source: Path, whole: Path, args: argparse.Namespace, rng: random.Random) -> None:
    """Scores with too little room, several times for each output, and at last with enough."""
    size = whole.stat().st_size
    # Its shards, the output put together from them, and something to spare.
    with small_disk(whole.parent, 3 * size >> 10) as disk:
        if disk is None:
            raise SystemExit("--full-disks needs the right to mount a file system.")
        output = disk / f"out.{args.format}"
        manifest = Path(f"{output}.parts") / "manifest.jsonl"
        left = sorted(rng.uniform(0, 1.8 * size) for _ in range(args.full_disks))
        for number, left_bytes in enumerate(left, 1):
            taken = sum(path.stat().st_size for path in manifest.parent.glob("*")) if manifest.parent.exists() else 0
            with filled(disk, max(0, int(left_bytes) - taken)):
                ended = subprocess.run(command(source, output, args), stderr=subprocess.PIPE, text=True)
            if ended.returncode != 1 or "free some space" not in ended.stderr:
                raise SystemExit(f"With a full disk it ended with {ended.returncode}: {ended.stderr}")
            if output.exists() or "Traceback" in ended.stderr:
                raise SystemExit(f"With a full disk it left an output, or said: {ended.stderr}")
            print(f"full disk {number}: room for {int(left_bytes)} bytes, {shards_in(manifest)} shards finished")
        run(command(source, output, args), manifest)
        if output.read_bytes() != whole.read_bytes():
            raise SystemExit(f"{output} differs from {whole}.")
        if left_over := [path.name for path in disk.iterdir() if path != output]:
            raise SystemExit(f"{left_over} are left over.")
        print(f"{len(left)} full disks, then the output is identical", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--full-disks", type=int, default=0, metavar="N", help="runs with too little room")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rows", type=int, default=900)
    parser.add_argument("--shard-size", type=int, default=20_000, help="characters")
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl")
    parser.add_argument("--seed", type=int, default=None, help="of the rows and moments; a new one by default")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    rng = random.Random(seed)
    directory = Path(tempfile.mkdtemp(prefix="scoring-kill-drill-"))
    source, whole = directory / "in.jsonl", directory / f"whole.{args.format}"
    write_input(source, args.rows, rng)
    print(f"seed {seed}, {args.rows} rows, {args.workers} worker(s), in {directory}", flush=True)

    def manifest_of(output: Path) -> Path:
        return Path(f"{output}.parts") / "manifest.jsonl"

    seconds = run(command(source, whole, args), manifest_of(whole))
    assert seconds is not None
    print(f"from its first shard on, a whole run takes {seconds:.1f} s", flush=True)
    if args.full_disks:
        fill_disks(source, whole, args, rng)
    if not args.kills:
        return

    kills = outputs = kept = 0
    while kills < args.kills:
        output = directory / f"out{outputs}.{args.format}"
        manifest = manifest_of(output)
        while True:
            in_start = rng.random() < 0.2
            wait_s = rng.uniform(0, 8.0 if in_start else 0.4 * seconds)
            ended = run(
                command(source, output, args), manifest, wait_s if kills < args.kills else None, in_start=in_start
            )
            if ended is not None:
                if manifest.parent.exists():
                    raise SystemExit(f"{manifest.parent} is left over.")
                break
            kills += 1
            if output.exists() and not manifest.exists():
                print(f"kill {kills}: all was done")
                break
            kept = max(kept, shards_in(manifest))
            print(f"kill {kills}: {shards_in(manifest)} shards finished", flush=True)
        if output.read_bytes() != whole.read_bytes():
            raise SystemExit(f"{output} differs from {whole}.")
        if args.format == "jsonl":
            found = [json.loads(line)["index"] for line in output.read_text().splitlines()]
            if found != list(range(args.rows)):
                raise SystemExit(f"{output} has rows lost, doubled or out of order.")
        outputs += 1
        print(f"output {outputs} is identical", flush=True)
    if not kept:
        raise SystemExit("no kill came after a finished shard; use more rows or smaller shards.")
    print(f"{kills} kills, {outputs} outputs: all identical to the uninterrupted run's")


if __name__ == "__main__":
    main()
