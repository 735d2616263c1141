"""A model's tokenizer: text and conversations in, token ids out, with errors that say what to do.

The other way, token ids to text as they are sampled, is `jpaged.text.detokenizer`.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from inspect import signature
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from jpaged.api.errors import CheckpointError, InvalidParameterError, InvalidPromptError, ModelNotFoundError, shown
from jpaged.api.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from jpaged.text.chat_prompts import ChatPrompt, ControlTokens
from jpaged.text.rendering import MAX_BYTES, MAX_CHARACTERS, RENDER_TIMEOUT_S, Renderer, Request
from jpaged.text.token_decoders import decode_token, token_bytes
from jpaged.text.turns.grammar import control_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_TOKENIZER_PATTERNS = ("*.tiktoken", "*.bpe.model")


_OUT_OF_BOUNDS = {
    "time": "it took longer than {timeout_s:g} s.",
    "memory": f"it takes more than {MAX_BYTES >> 20} MiB of memory.",
    "long": f"it makes more than {MAX_CHARACTERS} characters.",
    "ended": "it ended the process that renders it.",
}


class _Refused(Exception):
    """The template raised an exception of its own."""


class Tokenizer:
    """A transformers tokenizer behind typed errors.

    Thread safe: encoding takes a lock, because the tokenizers library refuses to be changed (padding, truncation)
    while another thread encodes; reading the vocabulary takes none.

    Args:
        hf: the transformers tokenizer.
        source: what to call it in messages.
    """

    def __init__(self, hf: "PreTrainedTokenizerBase", source: str) -> None:
        self.hf: Any = hf  # transformers types each method's result as a union over its arguments
        self.source = source
        self._lock = Lock()
        self._renderer = Renderer()
        self._renderer_of_given = Renderer()  # what others give may take long; the model's own shall not wait for it

    @classmethod
    def load(cls, source: str | os.PathLike[str], revision: str | None = None) -> "Tokenizer":
        """Loads the tokenizer of a local directory or of a repository on the hub. Never runs code found there.

        Raises:
            ModelNotFoundError: there is no such directory, and the hub does not have it or cannot be reached.
            CheckpointError: it has no tokenizer, or one that is broken or needs code of its own.
        """
        name = str(source)
        try:
            directory = Path(name).expanduser()
            is_local, exists = directory.is_dir(), directory.exists()
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~ of a user that does not exist
            raise ModelNotFoundError(
                f"Tokenizer {shown(name)} cannot be a path; give a directory that holds a tokenizer.json, or a hub id."
            ) from error
        if is_local:
            _check_tokenizer_files(directory)
        elif isinstance(source, Path) or exists or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ModelNotFoundError(
                f"Tokenizer {name} is no directory; give one that holds a tokenizer.json, or a hub id (owner/name)."
            )
        with _without_advice():
            from transformers import AutoTokenizer  # a second or two: not at import

        try:
            hf = AutoTokenizer.from_pretrained(
                str(directory) if is_local else name,
                revision=None if is_local else revision,
                trust_remote_code=False,
                local_files_only=is_local,
            )
        except Exception as error:  # tokenizers raises bare Exception, the hub's client its HTTP library's types
            raise _load_error(name, is_local, error) from error
        if hf.vocab_size <= len(hf.all_special_tokens):  # transformers makes one up for some classes without files
            raise CheckpointError(f"The tokenizer of {name} has no vocabulary; its tokenizer.json is missing.")
        if is_local and not hf.chat_template:
            hf.chat_template = _template_of_processor(directory)
        hf.model_max_length = int(1e30)  # only for warnings, which are not wanted; it may be no number at all
        return cls(hf, name)

    @cached_property
    def name(self) -> str:
        """What it is called where a client may read it: the hub id, or the last part of a directory's path."""
        return Path(self.source).expanduser().resolve().name if os.path.isdir(self.source) else self.source

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id; not every id below need be a token's. The model's embedding may have more
        rows, for padding."""
        return 1 + max(self.hf.get_vocab().values())

    @cached_property
    def max_token_characters(self) -> int:
        """The most characters that a token stands for."""
        return max(len(token) for token in self.hf.get_vocab())

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token, if the tokenizer names one. The model's configuration may name others."""
        return self.hf.eos_token_id

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf.chat_template)

    def use_chat_template(self, template: str) -> None:
        """Takes a Jinja template instead of the model's own."""
        self.hf.chat_template = template

    @cached_property
    def template_options(self) -> frozenset[str]:
        """Names that no variable of a chat template may have: `render_chat` or transformers would take them for its
        own arguments."""
        functions = (self.render_chat, self.chat_prompt, self.hf.apply_chat_template)
        parameters = [one for function in functions for one in signature(function).parameters.values()]
        named = {parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD}
        return frozenset(named | {"self"})  # which the signature of a bound method leaves out

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self.hf)

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Ids by text of the tokens that a grammar names by id (`jpaged.text.turns.grammar.control_tokens`)."""
        return control_tokens(self.hf)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of the tokens that `skip_special_tokens` leaves out."""
        return tuple(token.content for token in self.hf.added_tokens_decoder.values() if token.special)

    @property
    def is_busy(self) -> bool:
        """Whether another thread is encoding. `encode` would wait for it: seconds, if its text is long."""
        return self._lock.locked()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids. add_special_tokens: begin with the begin-of-sequence token, if the model wants one.

        Raises:
            InvalidPromptError: not a string, or one that is no valid Unicode (lone surrogates).
        """
        if not isinstance(text, str):
            raise InvalidPromptError(f"A text prompt must be a string, got {type(text).__name__}.")
        try:
            with self._lock:
                return self.hf.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        except (UnicodeEncodeError, TypeError) as error:
            at = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if at is None:
                raise
            raise InvalidPromptError(
                f"The prompt has a lone surrogate, {text[at]!r}, at index {at}, which no encoding can carry; remove it."
            ) from error

    @cached_property
    def _special_ends(self) -> tuple[list[int], list[int]]:
        """The special tokens that `encode` puts in front of a text and behind it."""
        inner, whole = (self.encode("a", add_special_tokens=special) for special in (False, True))
        begin = next((i for i in range(len(whole)) if whole[i : i + len(inner)] == inner), 0)
        return whole[:begin], whole[begin + len(inner) :]

    def with_special_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Tokens of a text that was encoded without special tokens, between those that `encode` adds."""
        before, behind = self._special_ends
        return [*before, *token_ids, *behind]

    def encode_plain(self, text: str) -> list[int]:
        """Text to token ids; what it spells like a control token stays text.

        Raises:
            InvalidPromptError: as `encode`; a control token cannot be encoded as plain text.
        """
        ((said,), marks) = self._control_tokens.mark([{"role": "user", "content": text}])
        return self.encode_prompt(ChatPrompt(said["content"], marks))

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of many texts at once, which the tokenizers library spreads over the machine's cores."""
        if not texts:
            return []
        try:
            with self._lock:
                batch = self.hf(
                    list(texts),
                    add_special_tokens=add_special_tokens,
                    verbose=False,
                    return_attention_mask=False,
                    return_token_type_ids=False,
                )
        except (UnicodeEncodeError, TypeError):
            return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]  # says which and why
        return batch["input_ids"]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Token ids to text, all at once, without the clean-up of spaces that damages code."""
        return self.hf.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def to_json(self) -> str:
        """The tokenizer in the form of the tokenizers library, added tokens included.

        Raises:
            InvalidParameterError: it is one that this library does not run.
        """
        backend = getattr(self.hf, "backend_tokenizer", None)
        if backend is None:
            raise InvalidParameterError(f"The tokenizer of {self.source} has no tokenizer.json; convert it to one.")
        with self._lock:
            return backend.to_str()

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary spells them: "Ġfox" of a byte-level tokenizer, "▁fox" of a sentencepiece one."""
        return self.hf.convert_ids_to_tokens(list(token_ids))

    def token_text(self, token_id: int) -> str:
        """One token's text as it stands inside a text, with its space; fragments of characters as U+FFFD."""
        return decode_token(self.hf, token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes inside a text, which may be part of a character."""
        return token_bytes(self.hf, token_id)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """A conversation to the token ids of its prompt. Arguments and errors as `chat_prompt` and `encode_prompt`."""
        return self.encode_prompt(self.chat_prompt(messages, **options))

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        control_tokens_in_messages: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> ChatPrompt:
        """A conversation to its prompt, for `encode_prompt`. Other arguments and errors as `render_chat`.

        control_tokens_in_messages: take what messages of users, systems and tools, and documents, spell like a control
            token for one; otherwise only the template writes control tokens.
        documents: for templates that know them.
        """
        conversation, marks = check_messages(messages), None
        try:
            if not control_tokens_in_messages:
                (*conversation, given), marks = self._control_tokens.mark([*conversation, {"documents": documents}])
                documents = given["documents"]
            if documents:
                options["documents"] = documents
            return ChatPrompt(self.render_chat(conversation, **options), marks)
        except RecursionError:
            raise InvalidPromptError("messages, or what comes with them, nest too deeply; make them flatter.") from None

    def encode_prompt(self, prompt: ChatPrompt) -> list[int]:
        """The token ids of a conversation's prompt.

        Raises:
            InvalidPromptError: as `encode`; a message spells a control token that cannot be encoded as plain text.
        """
        if prompt.marks is None:
            return self.encode(prompt.text, add_special_tokens=False)
        with self._lock:
            return self._control_tokens.encode(prompt)

    def check_chat_template(self) -> None:
        """Renders a short conversation, if there is a chat template.

        Raises:
            CheckpointError: the template is broken, or takes too long or too much memory for that.
        """
        if not self.has_chat_template:
            return
        try:
            self.render_chat([{"role": "user", "content": "Hello"}])
        except InvalidPromptError as error:
            if not isinstance(error.__cause__, _Refused):  # else it wants another conversation
                raise CheckpointError(f"The chat template of {self.source} is broken: {error}") from error

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        timeout_s: float = RENDER_TIMEOUT_S,
        **variables: Any,
    ) -> str:
        """A conversation to the text of its prompt, special tokens included. A process of its own renders it, within
        bounds of time, memory and output.

        Args:
            messages: {"role": ..., "content": ...} each, the content a string or a list of {"type": "text"} parts.
            chat_template: a Jinja template instead of the tokenizer's own.
            add_generation_prompt: end with the beginning of an assistant's message; not with continue_final_message.
            continue_final_message: leave the last message open, for the model to continue it.
            tools: JSON schemas of functions that the model may call, for templates that know them.
            timeout_s: for the template.
            variables: more variables for the template; JSON's values.
        Raises:
            InvalidPromptError: malformed messages (named by index and key), no template, or one that refuses them or
                exceeds its bounds.
            InvalidParameterError: a chat_template given that is no template, fails at something else, or exceeds its
                bounds; a variable that is no JSON value.
        """
        if continue_final_message:  # the two contradict, and this one is asked for by name
            add_generation_prompt = False
        conversation = check_messages(messages)
        if not self.has_chat_template and chat_template is None:
            raise InvalidPromptError(
                f"The tokenizer of {self.name} has no chat template; give a plain text prompt, or a chat_template."
            )
        try:
            request = Request(
                self.hf.get_chat_template(chat_template, tools),
                [{key: value for key, value in message.items() if value is not None} for message in conversation],
                [_schema(tool) for tool in tools] if tools else None,
                add_generation_prompt,
                continue_final_message,
                {name: _name(token) for name, token in self.hf.special_tokens_map.items()} | variables,
                timeout_s,
            )
            renderer = self._renderer if chat_template is None else self._renderer_of_given
            answer = renderer.render(request)
        except (TypeError, OverflowError) as error:
            raise InvalidParameterError(f"Messages, tools and variables must be JSON values: {error}.") from error
        except UnicodeEncodeError as error:
            raise InvalidPromptError("messages hold a lone surrogate, which is no text; remove it.") from error
        except ValueError as error:  # several templates and no default
            raise InvalidPromptError(f"The chat template of {self.name} cannot be chosen: {error}") from error
        if answer.kind == "text":
            return answer.text
        said = answer.text or _OUT_OF_BOUNDS[answer.kind].format(timeout_s=timeout_s)
        cause = _Refused() if answer.kind == "refused" else None
        if chat_template is None:
            raise InvalidPromptError(f"The model's chat template does not take these messages: {said}") from cause
        if answer.kind == "refused":  # it is as its author means it to be
            raise InvalidPromptError(f"The chat_template given refuses these messages: {said}")
        raise InvalidParameterError(f"chat_template cannot be rendered: {said}")

    def encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """The token sequences that spell each word, at the beginning of a text, inside it, and after a space.

        Raises:
            InvalidParameterError: a word that the tokenizer cannot spell, too long a word, or too many.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            spelled = self._spellings(word)
            if not spelled:
                raise InvalidParameterError(
                    f"bad_words has {shown(word)}, which no tokens of {self.name} spell; remove it."
                )
            for ids in spelled:
                if len(ids) > MAX_BAD_WORD_TOKENS:
                    raise InvalidParameterError(
                        f"bad_words has {shown(word)}, which is {len(ids)} tokens long; at most"
                        f" {MAX_BAD_WORD_TOKENS} are compared. Shorten it."
                    )
                sequences[ids] = None
        if len(sequences) > MAX_BAD_WORDS:
            raise InvalidParameterError(
                f"bad_words comes to {len(sequences)} token sequences; at most {MAX_BAD_WORDS} are compared."
            )
        return [list(ids) for ids in sequences]

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """Candidates from three surroundings; those count whose text is the word, or the word after a space.

        A sentencepiece tokenizer puts a space in front of the text it is given, others do not; so neither "word" nor
        " word" alone shows both spellings, and the one without a space shows only behind something else.
        """
        bare = word.lstrip() or word
        anchor = self.encode("\n", add_special_tokens=False)
        anchored = self.encode("\n" + bare, add_special_tokens=False)
        candidates = [self.encode(bare, add_special_tokens=False), self.encode(" " + bare, add_special_tokens=False)]
        if anchored[: len(anchor)] == anchor:
            candidates.append(anchored[len(anchor) :])
        context = self.encode("a", add_special_tokens=False)
        before = self.decode(context)
        spelled = []
        for ids in candidates:
            if ids and self.decode([*context, *ids]) in (before + bare, before + " " + bare):
                spelled.append(tuple(ids))
        return list(dict.fromkeys(spelled))


def _schema(tool: Any) -> Any:
    """A tool's JSON schema; functions with type hints and a docstring have one too."""
    if not callable(tool):
        return tool
    from transformers.utils import get_json_schema

    return get_json_schema(tool)


def _name(token: Any) -> Any:
    """A special token as text, or a list of them."""
    return [str(one) for one in token] if isinstance(token, list | tuple) else str(token)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checks a conversation; returns it with contents as strings (text parts joined by newlines).

    Raises:
        InvalidPromptError: names the message's index and key.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidPromptError(f"messages must be a list of messages, got {type(messages).__name__}.")
    if not messages:
        raise InvalidPromptError("messages is empty; give at least one message.")
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidPromptError(f'{where} must be a dict with "role" and "content", got {type(message).__name__}.')
    for key in ("role", "content"):
        if key not in message and not (key == "content" and message.get("tool_calls")):
            raise InvalidPromptError(f'{where} has no "{key}"; it has {", ".join(map(repr, message)) or "no keys"}.')
    if not isinstance(message["role"], str) or not message["role"]:
        raise InvalidPromptError(f'{where}["role"] must be a name such as "user", got {shown(message["role"])}.')
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise InvalidPromptError(f'{where}["content"] is None; give a string.')
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = "\n".join(_text_of_part(f'{where}["content"][{j}]', part) for j, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise InvalidPromptError(f'{where}["content"] must be a string, got {type(content).__name__}.')
    return {**message, "content": content}


def _text_of_part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or "type" not in part:
        raise InvalidPromptError(f'{where} must be {{"type": "text", "text": ...}}, got {shown(part)}.')
    kind = part["type"]
    if kind not in ("text", "refusal"):  # a refusal is what an assistant said
        raise InvalidPromptError(f'{where}["type"] is {shown(kind)}; only "text" is supported.')
    if not isinstance(part.get(kind), str):
        raise InvalidPromptError(f'{where}["{kind}"] must be a string, got {shown(part.get(kind))}.')
    text: str = part[kind]
    return text


def _check_tokenizer_files(directory: Path) -> None:
    if any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return
    if any(any(directory.glob(pattern)) for pattern in _TOKENIZER_PATTERNS):
        return
    raise CheckpointError(
        f"{directory} has no tokenizer ({', '.join(_TOKENIZER_FILES)}); copy the model's tokenizer files there, name"
        " another tokenizer, or use token ids only with skip_tokenizer_init=True."
    )


def _template_of_processor(directory: Path) -> str | None:
    """The chat template of a multimodal checkpoint that has it in chat_template.json, for its processor, alone.

    Raises:
        CheckpointError: the file cannot be read, or holds something else.
    """
    path = directory / "chat_template.json"
    if not path.is_file():
        return None
    try:
        template = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} holds no chat_template ({error}); fetch it anew, or delete it.") from error
    if not isinstance(template, str):
        raise CheckpointError(f"{path}: chat_template must be a string, got {shown(template)}; fetch it anew.")
    return template


def _load_error(name: str, is_local: bool, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())
    if "custom code" in reason or "trust_remote_code" in reason:
        return CheckpointError(
            f"The tokenizer of {name} needs code of its own, which is never run; use a model with a tokenizer.json."
        )
    if is_local and not (Path(name).expanduser() / "tokenizer.json").is_file() and not _reads_sentencepiece():
        models = sorted(path.name for path in Path(name).expanduser().glob("*.model"))
        if models:
            return CheckpointError(
                f"The tokenizer in {name} is a sentencepiece model ({models[0]}) without a tokenizer.json, which needs"
                " two packages to be read: pip install sentencepiece protobuf."
            )
    if is_local:
        return CheckpointError(
            f"The tokenizer in {name} cannot be read ({type(error).__name__}: {reason[:300]}); fetch its files anew."
        )
    return ModelNotFoundError(
        f"No tokenizer for {name}: it is no local directory, and the hub gave none ({reason[:300]}). Check the spelling"
        " and the connection, or give a directory."
    )


def _reads_sentencepiece() -> bool:
    from transformers import utils

    return utils.is_sentencepiece_available() and utils.is_protobuf_available()


@contextmanager
def _without_advice() -> Iterator[None]:
    """Silences what transformers says at import: that PyTorch is missing, which we do not need."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
