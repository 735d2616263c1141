"""Turns among processes: one at a time, and nobody waits for the dead or for ever."""

import subprocess
import sys
import threading

from jpaged.executor.start import turns
from jpaged.executor.start.turns import Turns


def test_one_has_the_turn_at_a_time(tmp_path):
    """Each of three adds to a number, which would lose what another adds between reading and writing it."""
    number, file = tmp_path / "number", tmp_path / "turn"
    number.write_text("0")

    def add() -> None:
        for _ in range(5):
            mine = Turns()
            mine.take(file)
            mine.take(file)  # has it already
            before = int(number.read_text())
            threading.Event().wait(0.001)
            number.write_text(str(before + 1))
            mine.end(file)

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert number.read_text() == "15"
    assert not file.exists()


def test_the_turn_of_a_process_that_is_killed_is_another_s(tmp_path):
    file = tmp_path / "turn"
    script = (
        "import sys, time; from pathlib import Path; from jpaged.executor.start.turns import Turns;"
        "turns = Turns(); turns.take(Path(sys.argv[1])); print('taken', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(file)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "taken\n"
        mine = Turns()
        waiting = threading.Thread(target=mine.take, args=(file,))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        holder.kill()
    waiting.join(60)
    assert not waiting.is_alive()
    assert file.exists()
    mine.end_all()
    assert not file.exists()


def test_patience_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "PATIENCE_S", 0.1)
    first, second = Turns(), Turns()
    first.take(tmp_path / "turn")
    second.take(tmp_path / "turn")
    second.end_all()
    assert (tmp_path / "turn").exists()  # it is still the first one's
    first.end_all()


def test_where_no_file_can_be_made_nobody_waits(tmp_path):
    mine = Turns()
    mine.take(tmp_path / "none" / "turn")
    mine.end_all()
