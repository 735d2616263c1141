"""Where benchmarks keep the configurations of models that they name."""

import json
import subprocess
import sys
from pathlib import Path

from jpaged.bench.models import CONFIGS

_WRITES = """
import json
from pathlib import Path
from jpaged.bench.models import model_directory, skewed_model_directory
found = [model_directory("qwen3-30b-a3b"), skewed_model_directory("qwen3-30b-a3b", 1.5), model_directory("not/named")]
print(json.dumps([found, json.loads((Path(found[0]) / "config.json").read_text())]))
"""


def test_directories_of_named_models_last_as_long_as_their_process(tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", _WRITES], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    (plain, skewed, other), config = json.loads(run.stdout)
    assert {Path(plain).parent, Path(skewed).parent} == {tmp_path}
    assert plain != skewed
    assert config == CONFIGS["qwen3-30b-a3b"]
    assert not list(tmp_path.iterdir())
    assert other == "not/named"
