"""Output of commands: the model's text, remarks and warnings."""

import os
import sys
from typing import TextIO

_CONTROLS = {c: None for c in [*range(0x20), *range(0x7F, 0xA0)] if c not in (0x09, 0x0A)}


class Screen:
    """Standard output and error. On a terminal: colours, and no control characters from the model; else plain text."""

    def __init__(self, quiet: bool = False) -> None:
        self.is_terminal = _is_terminal(sys.stdout)
        self.shows_progress = not quiet and _is_terminal(sys.stderr)
        self._coloured = self.is_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._at_line_start = True
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # an ASCII terminal shows "?" instead of ending the program

    def write(self, text: str) -> None:
        """The model's text, at once."""
        if self.is_terminal:
            text = text.translate(_CONTROLS)  # escape sequences could rewrite the screen
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._at_line_start = text.endswith("\n")

    def end_line(self) -> None:
        """Ends the line, unless it has just been ended."""
        if not self._at_line_start:
            self.write("\n")

    def note(self, text: str) -> None:
        """Writes a remark of the program on a line of its own on stderr, where progress is shown."""
        if self.shows_progress:
            self.end_line()
            print(self.dim(text), file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Writes a remark on stderr, terminal or not."""
        self.end_line()
        print(f"jpaged: {text}", file=sys.stderr, flush=True)

    def dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self._coloured else text

    def input_prompt(self, text: str) -> str:
        """For `input`: readline must be told which characters take no room."""
        return f"\x01\x1b[1;36m\x02{text}\x01\x1b[0m\x02" if self._coloured else text


def _is_terminal(stream: TextIO) -> bool:
    return hasattr(stream, "isatty") and stream.isatty()
