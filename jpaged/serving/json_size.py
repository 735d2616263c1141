"""How much a JSON body holds, counted before it is decoded: decoding holds the interpreter, and all streams wait.

    {"prompt": [1, 2, "a, b"], ...}     values: commas outside strings; quotes; containers: [ and { outside strings

A million numbers take 40 ms to decode, a million strings 90 ms, a million lists half a second. Counting is done in
slices, so a thread that counts lets others in. Quotes are bounded wherever they stand: to tell what is outside strings
each of them is looked at.
"""

from jpaged.serving.errors import ApiError

SMALL_BYTES = 64 << 10
"""Bodies up to this size are not counted: whatever they hold, it is decoded in a few milliseconds."""

MAX_VALUES = 1 << 19
MAX_QUOTES = 1 << 19
MAX_CONTAINERS = 1 << 14
"""What a body may hold. Each of them is decoded in about 25 ms."""

_SLICE = 1 << 20


def check_size(body: bytes) -> None:
    """Raises ApiError if a body holds more than can be decoded at once."""
    if len(body) <= SMALL_BYTES:
        return
    if _count(body, b'"', 0, len(body)) > MAX_QUOTES:
        raise _too_much("quotes", MAX_QUOTES)
    # Mostly the text has so few of these that it need not be told apart from what is outside strings.
    commas, brackets = _count(body, b",", 0, len(body)), _count_brackets(body, 0, len(body))
    if commas <= MAX_VALUES and brackets <= MAX_CONTAINERS:
        return
    values = containers = start = 0
    while True:
        quote = body.find(b'"', start)
        end = len(body) if quote < 0 else quote
        values += _count(body, b",", start, end)
        containers += _count_brackets(body, start, end)
        for what, count, most in (
            ("values", values, MAX_VALUES),
            ("lists and objects", containers, MAX_CONTAINERS),
        ):
            if count > most:
                raise _too_much(what, most)
        if quote < 0:
            return
        start = _end_of_string(body, quote + 1)


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
