"""The demo model without most of its layers, for tests that need its tokenizer and compile it several times."""

import json
import shutil
import struct
from pathlib import Path

from jpaged.assets import demo_model_path


def small_demo(directory: Path, num_layers: int = 1) -> Path:
    """Writes it there. It no longer tells stories."""
    shutil.copytree(demo_model_path(), directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    _keep_layers(directory / "model.safetensors", num_layers)
    return directory


def _keep_layers(file: Path, num_layers: int) -> None:
    """A safetensors file: the header's length in 8 bytes, the header in JSON, and the tensors' bytes end to end."""
    stored = file.read_bytes()
    (length,) = struct.unpack("<Q", stored[:8])
    header, data = json.loads(stored[8 : 8 + length]), stored[8 + length :]
    kept, pieces, end = {}, [], 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        _, found, behind = name.partition("model.layers.")
        if found and int(behind.split(".")[0]) >= num_layers:
            continue
        first, last = tensor["data_offsets"]
        kept[name] = tensor | {"data_offsets": [end, end + last - first]}
        pieces.append(data[first:last])
        end += last - first
    text = json.dumps(kept).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(pieces))
