"""How much a JSON body holds, counted before it is decoded: decoding holds the interpreter, and all streams wait.

    {"prompt": [1, 2, "a, b"], ...}     values: commas outside strings; strings: keys, too; containers: [ and { outside

Counting is done in slices, so a thread that counts lets others in. Quotes are bounded wherever they stand: to tell what
is outside strings each of them is looked at.
"""

from jpaged.serving.errors import ApiError

SMALL_BYTES = 64 << 10
"""Bodies up to this size are not counted: whatever they hold, it is decoded in a few milliseconds."""

MAX_VALUES = 1 << 19
MAX_QUOTES = 1 << 19
MAX_STRINGS = 1 << 16
MAX_CONTAINERS = 1 << 14
MAX_BYTES_OUTSIDE = 8 << 20
"""What a body may hold. Bytes outside strings are those of numbers; one of millions of digits costs by its length."""
MOST_DECODING_S = 0.04
"""What all of it together may take to decode, by these costs of each, measured on one core of a server."""
_VALUE_S, _STRING_S, _CONTAINER_S, _ESCAPE_S = 4e-8, 25e-8, 8e-7, 1e-8

_SLICE = 1 << 20


def check_size(body: bytes) -> None:
    """Raises ApiError if a body holds more than can be decoded at once."""
    if len(body) <= SMALL_BYTES:
        return
    quotes = _count(body, b'"', 0, len(body))
    if quotes > MAX_QUOTES:
        raise _too_much("quotes", MAX_QUOTES)
    escapes = _count(body, b"\\", 0, len(body))
    # Mostly the text has so few of these that it need not be told apart from what is outside strings.
    commas, brackets = _count(body, b",", 0, len(body)), _count_brackets(body, 0, len(body))
    if not _excess(commas, quotes // 2, brackets, escapes, len(body)):
        return
    values = strings = containers = outside = start = 0
    while True:
        quote = body.find(b'"', start)
        end = len(body) if quote < 0 else quote
        values += _count(body, b",", start, end)
        containers += _count_brackets(body, start, end)
        outside += end - start
        if excess := _excess(values, strings, containers, escapes, outside):
            raise _too_much(*excess)
        if quote < 0:
            return
        strings += 1
        start = _end_of_string(body, quote + 1)


def _excess(values: int, strings: int, containers: int, escapes: int, outside: int) -> tuple[str, int] | None:
    """What there is too much of, and the most that there may be; None if a body may hold so much."""
    for what, count, most in (
        ("values", values, MAX_VALUES),
        ("strings", strings, MAX_STRINGS),
        ("lists and objects", containers, MAX_CONTAINERS),
        ("bytes outside strings", outside, MAX_BYTES_OUTSIDE),
    ):
        if count > most:
            return what, most
    cost_s = values * _VALUE_S + strings * _STRING_S + containers * _CONTAINER_S + escapes * _ESCAPE_S
    if cost_s > MOST_DECODING_S:
        return "ms of decoding, with all its values, strings, lists and escapes,", round(1000 * MOST_DECODING_S)
    return None


def _end_of_string(body: bytes, start: int) -> int:
    """The index behind the quote that ends a string whose first character is at `start`."""
    while True:
        quote = body.find(b'"', start)
        if quote < 0:
            return len(body)  # it does not end, which decoding will say
        text = body[start:quote]
        num_escapes = len(text) - len(text.rstrip(b"\\"))
        start = quote + 1
        if num_escapes % 2 == 0:
            return start


def _count_brackets(body: bytes, start: int, end: int) -> int:
    return _count(body, b"[", start, end) + _count(body, b"{", start, end)


def _count(body: bytes, what: bytes, start: int, end: int) -> int:
    return sum(body.count(what, at, min(at + _SLICE, end)) for at in range(start, end, _SLICE))


def _too_much(what: str, most: int) -> ApiError:
    return ApiError(413, f"The body holds more than {most} {what}, the most this server takes.", code="too_large")
