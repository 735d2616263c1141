"""What a process of ours need not import."""

import sys
from types import ModuleType


def keep_torch_out() -> None:
    """Hides PyTorch from this process, unless it has it already. transformers imports it where it is installed, which
    takes seconds and 250 MB; its tokenizers have no use for it. Where Triton has been imported nothing is hidden: it
    asks whether its arguments are PyTorch's, and what is hidden has no types. (`triton_call` brings Triton later.)
    """
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
    if "triton" not in modules:
        modules.setdefault("torch", None)
