"""Language models that judge whether a document answers a query, with "yes" or "no" (Qwen3-Reranker).

    query, document --template--> prompt --one token--> p(yes), p(no) --> p(yes) / (p(yes) + p(no))

The prompt is the one that the makers of these models published (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B). What
a query or a document spells like a control token stays text.
"""

import math
from collections.abc import Mapping

from jpaged.api.errors import InvalidParameterError, InvalidPromptError, shown
from jpaged.api.outputs import RequestOutput
from jpaged.api.sampling_params import MAX_LOGPROBS, RequestOutputKind, SamplingParams
from jpaged.text.tokenizer import Tokenizer

_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class Reranker:
    """Makes prompts of pairs, and scores of what comes of them.

    Raises:
        InvalidParameterError: "yes" or "no" is no token of the tokenizer, or there is no tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None:
            raise InvalidParameterError("reranker needs a tokenizer; leave skip_tokenizer_init out.")
        self._tokenizer = tokenizer
        self._answers = []
        for word in ("yes", "no"):
            ids = tokenizer.encode(word, add_special_tokens=False)
            if len(ids) != 1:
                raise InvalidParameterError(f"The tokenizer has no token {word!r}, so the model is no such reranker.")
            self._answers += ids
        self._before = tokenizer.encode(_BEFORE, add_special_tokens=False)
        self._behind = tokenizer.encode(_BEHIND, add_special_tokens=False)

    def prompt(self, query: object, document: object, instruction: str | None = None) -> list[int]:
        """The token ids that ask for a judgement. instruction: what makes a document relevant; None: that it answers a
        web search.

        Raises:
            InvalidPromptError: the query or the document is no text.
        """
        for name, text in (("query", query), ("document", document)):
            if not isinstance(text, str):
                raise InvalidPromptError(f"A reranker takes texts, and the {name} is {shown(text)}.")
        asked = _INSTRUCTION if instruction is None else instruction
        body = f"<Instruct>: {asked}\n<Query>: {query}\n<Document>: {document}"
        return [*self._before, *self._tokenizer.encode_plain(body), *self._behind]

    def params(self, missing: int | None = None) -> SamplingParams:
        """How to ask for both log-probabilities; or for that of one token, which was not among the likeliest."""
        return SamplingParams(
            temperature=1.0,
            seed=0,
            max_tokens=1,
            ignore_eos=True,
            logprobs=MAX_LOGPROBS,
            allowed_token_ids=self._answers if missing is None else [missing],
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def found(self, output: RequestOutput) -> dict[int, float]:
        """Of an output: the log-probabilities of those answers that it tells."""
        ((position,),) = (one.logprobs or [{}] for one in output.outputs)
        return {token: position[token].logprob for token in self._answers if token in position}

    def missing(self, found: Mapping[int, float]) -> int | None:
        """The answer whose log-probability is not told; None if both are."""
        return next((token for token in self._answers if token not in found), None)

    def score(self, found: Mapping[int, float]) -> float:
        """The probability of "yes", of the two, from 0 to 1."""
        yes, no = (found[token] for token in self._answers)
        return 1 / (1 + math.exp(min(no - yes, 700.0)))
