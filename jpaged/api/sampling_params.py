"""Sampling parameters of a request. Names and meanings follow vLLM and the OpenAI API."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from jpaged.api.checks import LARGEST_FLOAT32, check_bool, is_integer, is_number
from jpaged.api.errors import InvalidParameterError, shown
from jpaged.api.structured_outputs import StructuredOutputsParams, structured_outputs
from jpaged.api.unknown_names import SAMPLING, explains_unknown

MAX_LOGPROBS = 20
"""The most alternatives `logprobs` and `prompt_logprobs` can ask for."""
MAX_STOP_TOKEN_IDS = 64
"""Stop tokens a request may have, the model's end-of-sequence tokens included: the device tests them all."""
MAX_LOGIT_BIAS = 300
"""Entries `logit_bias` may have, as in the OpenAI API."""
MAX_BAD_WORDS = 128
"""Most token sequences that `bad_words` may make. A word counts twice if it tokenizes differently after a space."""
MAX_BAD_WORD_TOKENS = 16
"""Most tokens in one of these sequences."""

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy, as in vLLM: float32 logits divided by less say nothing more than the argmax."""

_INTEGER_LIMIT = 2**63
_SMALLEST_FLOAT32 = 1.1754943508222875e-38


class RequestOutputKind(IntEnum):
    """When a request's outputs are returned by `LLMEngine.step`, and how much each holds."""

    CUMULATIVE = 0  # after every token, everything so far
    DELTA = 1  # after every token, what is new
    FINAL_ONLY = 2  # once, when finished


@explains_unknown(SAMPLING)
@dataclass(kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. All of them take effect on the device.

    They may be changed until a request is made with them, which keeps a copy; a change is checked as at first.

    Args:
        n: sequences to return for each prompt. The prompt is computed once, and its blocks are shared. With a seed,
            sequence 0 is what n=1 gives. Greedy sequences are all the same.
        best_of: sequences to generate, of which the n with the greatest cumulative log-probability (under the model,
            see `logprobs`) are returned, best first; n by default. With more than n, outputs come only once, when
            all have finished, since it is not known before which they are.
        temperature: divides the logits; 0 means greedy.
        top_p: keep the fewest most likely tokens whose probabilities reach this sum, in (0, 1]; 1 keeps all.
        top_k: keep this many most likely tokens, with those tied with the last; 0 or -1 keeps all.
        min_p: drop tokens less likely than this fraction of the most likely one, in [0, 1].
        presence_penalty: subtracted from the logits of tokens already in the output, in [-2, 2].
        frequency_penalty: the same, times their count, in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; > 0.
        seed: makes this request's tokens reproducible whatever shares its batch.
        max_tokens: most tokens to generate; None: as many as the context allows.
        min_tokens: stop tokens are not sampled before this many; but where `structured_outputs` allow nothing but an
            end-of-sequence token, the sequence ends there.
        stop: strings that end the output; the text is cut before the first.
        stop_token_ids: tokens that end the output, besides the model's end-of-sequence tokens.
        ignore_eos: do not stop at the end-of-sequence tokens.
        logprobs: return log-probabilities of each sampled token and of this many alternatives, at most 20.
        prompt_logprobs: the same for the tokens of the prompt.
        logit_bias: token id -> value added to its logit, clipped to [-100, 100]; at most 300.
        allowed_token_ids: only these tokens may be sampled; where bad_words and min_tokens leave none of them, they
            give way.
        bad_words: words that may not be generated.
        structured_outputs: what the text must look like (`StructuredOutputsParams`). A token that it does not allow is
            never sampled, whatever the other parameters say. The sequence stops where the constraint is fulfilled, by
            an end-of-sequence token; with `ignore_eos` only where it allows nothing else. It may be incomplete when
            `max_tokens` is reached or a stop string occurs.
        detokenize: produce text. Without it only token ids come back, and `stop` cannot be used.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string, or the stop token's text, at the end of the text.
        output_kind: when `LLMEngine.step` returns outputs; `LLM.generate` sets FINAL_ONLY itself.

    Raises:
        InvalidParameterError: a value of the wrong type or out of range, or two that contradict each other.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __setattr__(self, name: str, value: object) -> None:
        own = vars(self)
        if name not in own:  # the constructor sets it
            if name not in self.__dataclass_fields__:
                raise AttributeError(f"SamplingParams has no parameter {name!r}.")
            own[name] = value
            return
        before = dict(own)
        own[name] = value
        try:
            self.__post_init__()
        except InvalidParameterError:
            own.update(before)
            raise

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
        self._check_contradictions()

    @property
    def num_sequences(self) -> int:
        """The number of sequences that are generated."""
        return self.n if self.best_of is None else self.best_of

    @property
    def sequences_parameter(self) -> str:
        """The parameter that says how many they are."""
        return "n" if self.best_of is None else "best_of"

    @property
    def runs_together(self) -> bool:
        """Whether they must all hold their blocks at once; samples may be preempted one by one."""
        return False

    @property
    def ranks(self) -> bool:
        """Whether more sequences are generated than returned."""
        return self.num_sequences > self.n

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.stop  # type: ignore[return-value]  # normalised to a tuple in __post_init__

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p is asked for and has anything to do."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def uses_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def needs_full_variant(self) -> bool:
        """Whether more than temperature and truncation is asked for (see `SamplingVariant.FULL`)."""
        return bool(
            self.uses_penalties
            or self.min_tokens
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.logprobs is not None
            or self.ranks
        )

    def reporting(self, output_kind: RequestOutputKind) -> "SamplingParams":
        """The same parameters, with outputs of this kind."""
        if self.output_kind == output_kind:
            return self
        return self._unchecked({"output_kind": output_kind})

    def seeded(self, seed: int) -> "SamplingParams":
        """The same parameters, with this seed, a signed 64-bit integer."""
        return self._unchecked({"seed": seed})

    def constrained(self, constraint: StructuredOutputsParams | None) -> "SamplingParams":
        """The same parameters, with this constraint, or without one."""
        return self._unchecked({"structured_outputs": constraint})

    def changed(self, values: Mapping[str, object]) -> "SamplingParams":
        """The same parameters but for these, as `dataclasses.replace`, in half the time.

        Raises:
            InvalidParameterError: a value of the wrong type or out of range, or values that contradict each other.
        """
        other = self._unchecked(values)
        other.__post_init__()
        return other

    def __copy__(self) -> "SamplingParams":
        return self._unchecked({})

    def _unchecked(self, values: Mapping[str, object]) -> "SamplingParams":
        # A request takes several copies: each would be set field by field, and checked again, in some 25 us.
        other = object.__new__(type(self))
        own = vars(other)
        own.update(vars(self))
        own.update(values)
        return other

    def _check_types(self) -> None:
        own = vars(self)
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            own[name] = _number(name, own[name])
        for name in ("n", "top_k", "min_tokens"):
            own[name] = _integer(name, own[name])
        for name in ("best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs"):
            if own[name] is not None:
                own[name] = _integer(name, own[name])
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            check_bool(name, own[name])
        own["stop"] = _strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        own["bad_words"] = _strings("bad_words", self.bad_words)
        own["stop_token_ids"] = _token_ids("stop_token_ids", self.stop_token_ids) or ()
        own["allowed_token_ids"] = _token_ids("allowed_token_ids", self.allowed_token_ids)
        own["logit_bias"] = _logit_bias(self.logit_bias)
        own["structured_outputs"] = structured_outputs(self.structured_outputs)
        try:
            own["output_kind"] = RequestOutputKind(self.output_kind)
        except ValueError:
            raise InvalidParameterError(
                f"output_kind must be a RequestOutputKind, got {shown(self.output_kind)}."
            ) from None

    def _check_ranges(self) -> None:
        if self.n < 1:
            raise InvalidParameterError(f"n must be at least 1, got {self.n}.")
        _within("temperature", self.temperature, 0.0, math.inf)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidParameterError(f"top_p must be in (0, 1], got {self.top_p}; use 1 to keep every token.")
        if self.repetition_penalty < _SMALLEST_FLOAT32:  # as a float32 it would be 0, which divides nothing
            raise InvalidParameterError(f"repetition_penalty must be above 0, got {self.repetition_penalty}.")
        if self.top_k < -1:
            raise InvalidParameterError(f"top_k must be -1 or 0 (keep all) or positive, got {self.top_k}.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidParameterError(f"max_tokens must be at least 1, got {self.max_tokens}.")
        if self.min_tokens < 0:
            raise InvalidParameterError(f"min_tokens must be at least 0, got {self.min_tokens}.")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise InvalidParameterError(f"{name} must be from 0 to {MAX_LOGPROBS}, got {value}.")

    def _check_contradictions(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidParameterError(
                f"best_of={self.best_of} is below n={self.n}; generate at least as many sequences as are returned."
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower one or raise the other."
            )
        if self.stop and not self.detokenize:
            raise InvalidParameterError("stop needs text to search: set detokenize=True, or use stop_token_ids.")


def _number(name: str, value: object) -> float:
    if not is_number(value) or not -LARGEST_FLOAT32 <= value <= LARGEST_FLOAT32:
        raise InvalidParameterError(f"{name} must be a finite number that float32 holds, got {shown(value)}.")
    return float(value)


def _integer(name: str, value: object) -> int:
    if not is_integer(value):
        raise InvalidParameterError(f"{name} must be an integer, got {shown(value)}.")
    if not -_INTEGER_LIMIT <= value < _INTEGER_LIMIT:
        raise InvalidParameterError(f"{name} must fit a signed 64-bit integer, got {shown(value)}.")
    return int(value)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        bounds = f"at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise InvalidParameterError(f"{name} must be {bounds}, got {value:g}.")


def _strings(name: str, values: object) -> tuple[str, ...]:
    if values is None:
        return ()
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise InvalidParameterError(f"{name} must be a list of strings, got {shown(values)}.")
    for value in values:
        if not isinstance(value, str) or not value:
            raise InvalidParameterError(f"{name} must hold non-empty strings, got {shown(value)}.")
        if any("\ud800" <= c <= "\udfff" for c in value):
            raise InvalidParameterError(f"{name} holds a lone surrogate, which is no text: {shown(value)}.")
    return tuple(map(str.__str__, values))


def _token_ids(name: str, values: object) -> tuple[int, ...] | None:
    if values is None:
        return None
    if isinstance(values, str | bytes | bytearray) or not isinstance(values, Sequence):
        raise InvalidParameterError(f"{name} must be a list of token ids, got {shown(values)}.")
    if set(map(type, values)) <= {int}:  # nearly always; a whole vocabulary one by one takes long
        ids = tuple(values)
    else:
        ids = tuple(_integer(f"{name}[{i}]", value) for i, value in enumerate(values))
    if ids and max(ids) >= _INTEGER_LIMIT:
        raise InvalidParameterError(f"{name} must hold token ids, which fit 64 bits, got {shown(max(ids))}.")
    if ids and min(ids) < 0:
        raise InvalidParameterError(f"{name} must hold token ids from 0 up, got {min(ids)}.")
    if name == "allowed_token_ids" and not ids:
        raise InvalidParameterError("allowed_token_ids is empty, so no token could be sampled; name one or pass None.")
    if name == "stop_token_ids" and len(set(ids)) > MAX_STOP_TOKEN_IDS:
        raise InvalidParameterError(
            f"stop_token_ids has {len(set(ids))} tokens; at most {MAX_STOP_TOKEN_IDS} are tested."
        )
    return ids


def _logit_bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise InvalidParameterError(f"logit_bias must map token ids to numbers, got {shown(bias)}.")
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidParameterError(f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS} are supported.")
    result = {}
    for key, value in bias.items():
        is_spelt = isinstance(key, str) and key.isdecimal() and len(key) < 20  # JSON's keys are strings
        token = int(key) if is_spelt else _integer("a key of logit_bias", key)
        if token < 0:
            raise InvalidParameterError(f"a key of logit_bias must be a token id from 0 up, got {token}.")
        result[token] = min(100.0, max(-100.0, _number(f"logit_bias[{token}]", value)))
    return result


def check_token_ids(params: SamplingParams, vocab_size: int, bad_words_token_ids: Sequence[Sequence[int]] = ()) -> None:
    """Checks the token ids of `bad_words`, `logit_bias` and `allowed_token_ids` against a model's vocabulary.

    bad_words_token_ids: `params.bad_words`, tokenized.

    Raises:
        InvalidParameterError: a token id outside the vocabulary, or too many or too long bad words.
    """
    if len(bad_words_token_ids) > MAX_BAD_WORDS:
        raise InvalidParameterError(
            f"bad_words come to {len(bad_words_token_ids)} token sequences; at most {MAX_BAD_WORDS} are supported."
        )
    for word in bad_words_token_ids:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise InvalidParameterError(
                f"bad_words has a word of {len(word)} tokens; it must have from 1 to {MAX_BAD_WORD_TOKENS}."
            )
        _check_in_vocabulary("bad_words", word, vocab_size)
    _check_in_vocabulary("logit_bias", params.logit_bias or (), vocab_size)
    _check_in_vocabulary("allowed_token_ids", params.allowed_token_ids or (), vocab_size)


def _check_in_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    ids = list(token_ids)
    if not ids or 0 <= min(ids) <= max(ids) < vocab_size:
        return
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidParameterError(
                f"{name} names token {token}, but the vocabulary has {vocab_size} tokens (0 to {vocab_size - 1})."
            )
