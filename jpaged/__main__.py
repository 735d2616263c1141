"""`python -m jpaged`: the same as the `jpaged` command."""

import sys

from jpaged.cli import run

sys.exit(run())
