"""The parts of a pause, as a server's log tells of it when an engine process was started again."""

import re
from datetime import datetime
from typing import Any


def parts_of(begun: float, pause_s: float, says: str) -> dict[str, Any]:
    """A pause in seconds by its parts; only the pause itself where the server did not say more.

    begun: when the process was killed, by `time.time()`. says: the server's line about it.
    """
    pause = {"pause_s": round(pause_s, 2)}
    found = re.match(r"(.{19}),(\d{3}) .*again ([\d.]+) s after.*: ([\d.]+) s until the next was.*\((.*)\)", says)
    if found is None:
        return pause
    down_s, gone_s = map(float, found.group(3, 4))
    ready = datetime.fromisoformat(found[1]).timestamp() + int(found[2]) / 1000
    noticed_s = ready - down_s - begun
    parts = {"noticed": round(noticed_s, 2), "gone": gone_s}
    parts |= {name: float(seconds) for name, seconds in re.findall(r"([a-z ]+?) ([\d.]+)(?:, |$)", found[5])}
    return pause | parts | {"next token": round(pause_s - noticed_s - down_s, 2)}
