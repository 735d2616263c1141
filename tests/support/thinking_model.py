"""The demo model with a chat template that switches reasoning on and off, and control tokens around it."""

import json
import shutil
from pathlib import Path

from jpaged.assets import demo_model_path

_RENAMED = {"<|pad|>": "<think>", "<|system|>": "</think>"}
"""Tokens of the model that become the ones around reasoning: no others would have a place in its embedding."""
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] | trim"
    " + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% if enable_thinking %}"
    "{{ '<think>' }}"
    "{% elif enable_thinking is defined %}{{ '<think></think>' }}{% endif %}{% endif %}"
)


def thinking_model(directory: Path) -> Path:
    """Writes it there."""
    shutil.copytree(demo_model_path(), directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    for token in tokenizer["added_tokens"]:
        token["content"] = _RENAMED.get(token["content"], token["content"])
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {_RENAMED.get(text, text): index for text, index in vocabulary.items()}
    path.write_text(json.dumps(tokenizer))
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {"pad_token": config["eos_token"], "chat_template": _TEMPLATE}
    config["extra_special_tokens"] = ["<|user|>", "<|assistant|>"]
    path.write_text(json.dumps(config))
    return directory
