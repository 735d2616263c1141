"""What a process of ours need not import."""

import sys
from types import ModuleType


def keep_torch_out() -> None:
    """Hides PyTorch from this process, unless it has it already. transformers imports it where it is installed, which
    takes seconds and 250 MB; its tokenizers have no use for it.
    """
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
    modules.setdefault("torch", None)
