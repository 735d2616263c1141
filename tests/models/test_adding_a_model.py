"""The files in docs/adding_a_model.md, as they stand there: a family from outside serves what transformers would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jpaged.models.registry import MODULES_VARIABLE
from tests.parallel.eight_devices import xla_flags

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers

ROOT = Path(__file__).parents[2]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The folder with the files that the page shows."""
    page = (ROOT / "docs" / "adding_a_model.md").read_text(encoding="utf-8")
    shown = re.findall(r'```python title="([\w.]+)"\n(.*?)```', page, re.DOTALL)
    assert [name for name, _ in shown] == ["phi.py", "check_phi.py"]
    for name, code in shown:
        (tmp_path / name).write_text(code, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("option", ["tensor_parallel_size=2", "data_parallel_size=2"])
def test_a_family_in_a_file_gives_the_greedy_tokens_of_transformers(files: Path, option: str) -> None:
    """Over two devices of one process; and in two processes of one device, which learn of it by the environment."""
    environment = os.environ | {
        MODULES_VARIABLE: "phi.py",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": xla_flags(2),
    }
    command = [sys.executable, "-P", "check_phi.py", option]
    done = subprocess.run(command, cwd=files, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "All 48 tokens are those of transformers." in done.stdout
