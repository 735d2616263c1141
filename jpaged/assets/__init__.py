"""Files that come with the package."""

from pathlib import Path


def demo_model_path() -> Path:
    """The directory of the embedded demo model: config.json, model.safetensors, tokenizer and chat template."""
    return Path(__file__).parent / "demo_model"
