"""The constraints of requests that are regular."""

import json

from jpaged.api.structured_outputs import StructuredOutputsParams
from jpaged.text.grammars import COMPACT_SEPARATORS, WHITESPACE
from jpaged.text.regular.automata import Automaton, NotCovered
from jpaged.text.regular.expressions import Text, Union, compiled
from jpaged.text.regular.json_texts import json_expression
from jpaged.text.regular.regexes import whole


def automaton_of(params: StructuredOutputsParams) -> Automaton:
    """The texts that a constraint allows. Raises NotCovered."""
    if params.kind == "choice":
        return compiled(Union(tuple(Text(text.encode()) for text in params.choice or ())))
    if params.kind == "regex":
        return compiled(whole(str(params.regex)))
    if params.kind != "json":
        raise NotCovered(f"{params.kind} is not translated")
    schema = json.loads(str(params.json))
    if params.disable_any_whitespace:
        return compiled(json_expression(schema, **COMPACT_SEPARATORS))
    return compiled(json_expression(schema, params.whitespace_pattern or WHITESPACE))
