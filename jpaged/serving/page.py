"""The page for people: files of this package, served as they are.

They hold nothing that a key protects, so they need none: a browser opens a page without one, and the page asks its
reader. What it then shows comes from the same routes that every client uses.
"""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/http.js": ("http.js", "text/javascript; charset=utf-8"),
    "/page/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/page/markdown.js": ("markdown.js", "text/javascript; charset=utf-8"),
    "/page/live.js": ("live.js", "text/javascript; charset=utf-8"),
}
PATHS = tuple(_FILES)
"""The routes, none of which needs a key."""

_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes() -> list[Route]:
    """A route for each file."""
    return [_route(path, name, media_type) for path, (name, media_type) in _FILES.items()]


def _route(path: str, name: str, media_type: str) -> Route:
    body = files("jpaged.serving").joinpath("assets", name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(body, headers=_HEADERS, media_type=media_type)

    return Route(path, answer, methods=["GET"])
