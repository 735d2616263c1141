"""What web pages may ask of a server: pages of its own, of origins that are allowed, and no others."""

import asyncio
import socket

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jpaged import cli
from jpaged.serving.app import _error_body
from jpaged.serving.browsers import LOCAL_HOSTS, Hosts, Origins, check_json
from jpaged.serving.errors import ApiError
from jpaged.serving.options import AppOptions
from jpaged.serving.server import _guarded

PATHS = ("/", "/health", "/v1/completions", "/v1/messages")


async def answer(request: Request) -> Response:
    return Response("done")


def ask(kind, allowed, method, path="/v1/completions", **headers):
    routes = [Route(route, answer, methods=["GET", "POST"]) for route in PATHS]
    app = Starlette(routes=routes, middleware=[Middleware(kind, allowed=allowed, error_body=_error_body)])

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here:8000") as client:
            return await client.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return asyncio.run(run())


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://here:9000", "http://here", "file://"])
def test_a_page_of_a_foreign_origin_may_look_but_not_post(origin):
    refused = ask(Origins, (), "POST", origin=origin)
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "origin_not_allowed"
    assert ask(Origins, (), "GET", origin=origin).status_code == 200
    assert ask(Origins, (origin,), "POST", origin=origin).status_code == 200
    assert ask(Origins, ("*",), "POST", origin=origin).status_code == 200


def test_the_servers_own_page_and_programs_may_post():
    assert ask(Origins, (), "POST").status_code == 200
    assert ask(Origins, (), "POST", origin="http://here:8000").status_code == 200
    proxied = {"origin": "https://shown.example"}
    assert ask(Origins, (), "POST", **proxied).status_code == 403
    assert ask(Origins, (), "POST", **proxied, sec_fetch_site="same-origin").status_code == 200
    assert ask(Origins, (), "POST", **proxied, sec_fetch_site="cross-site").status_code == 403
    assert ask(Origins, (), "POST", **proxied, x_forwarded_host="shown.example").status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::2]:8000", "a:b:c"])
def test_a_name_that_was_made_to_lead_here_is_refused_but_for_health_checks(host):
    for method in ("GET", "POST"):
        refused = ask(Hosts, LOCAL_HOSTS, method, host=host)
        assert refused.status_code == 403
        assert "--allowed-hosts" in refused.json()["error"]["message"]
    assert ask(Hosts, LOCAL_HOSTS, "GET", "/", host=host).status_code == 403  # nor the page, which would then ask
    assert ask(Hosts, LOCAL_HOSTS, "GET", "/health", host=host).status_code == 200
    assert ask(Hosts, ("*",), "POST", host=host).status_code == 200


@pytest.mark.parametrize(("kind", "header"), [(Hosts, "host"), (Origins, "origin")])
def test_what_is_refused_is_told_in_the_form_of_its_route(kind, header):
    refused = {header: "http://evil.example" if header == "origin" else "evil.example"}
    anthropic = ask(kind, (), "POST", "/v1/messages", **refused).json()
    assert (anthropic["type"], anthropic["error"].keys()) == ("error", {"type", "message"})
    assert anthropic["error"]["type"] == "permission_error"
    assert ask(kind, (), "POST", **refused, anthropic_version="2023-06-01").json() == anthropic
    openai = ask(kind, (), "POST", **refused).json()
    assert openai.keys() == {"error"}
    assert openai["error"]["message"] == anthropic["error"]["message"]
    assert openai["error"].keys() == {"type", "message", "param", "code"}


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:80", "[::1]:8000", "[::1]"])
def test_this_machines_own_names_are_served(host):
    assert ask(Hosts, LOCAL_HOSTS, "POST", host=host).status_code == 200
    assert ask(Hosts, ("[::1]", "shown.example"), "POST", host="shown.example:1").status_code == 200


def test_names_are_checked_by_default_only_without_keys_on_a_loopback_address():
    with socket.create_server(("127.0.0.1", 0)) as local, socket.create_server(("0.0.0.0", 0)) as public:
        assert _guarded(AppOptions(), "127.0.0.1", local).allowed_hosts == (*LOCAL_HOSTS, "127.0.0.1")
        assert _guarded(AppOptions(api_keys=["k"]), "127.0.0.1", local).allowed_hosts is None
        assert _guarded(AppOptions(allowed_hosts=["a"]), "127.0.0.1", local).allowed_hosts == ["a"]
        assert _guarded(AppOptions(), "0.0.0.0", public).allowed_hosts is None
    with socket.socket(socket.AF_UNIX) as unix:
        assert _guarded(AppOptions(), "127.0.0.1", unix).allowed_hosts is None


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_only_json_is_taken_which_a_foreign_page_cannot_send_unasked(kind):
    headers = [] if kind is None else [(b"content-type", kind.encode())]
    with pytest.raises(ApiError) as refused:
        check_json(Request({"type": "http", "headers": headers}))
    assert refused.value.status == 415
    for good in (b"application/json", b"Application/JSON; charset=utf-8"):
        check_json(Request({"type": "http", "headers": [(b"content-type", good)]}))


def test_a_compressed_body_is_refused_by_name():
    json = (b"content-type", b"application/json")
    with pytest.raises(ApiError, match="Content-Encoding 'gzip' is not supported") as refused:
        check_json(Request({"type": "http", "headers": [json, (b"content-encoding", b"gzip")]}))
    assert refused.value.status == 415
    check_json(Request({"type": "http", "headers": [json, (b"content-encoding", b"Identity")]}))


@pytest.mark.parametrize("value", ["", ",", " , "])
def test_a_server_that_was_to_have_keys_and_got_none_does_not_start(monkeypatch, capsys, value):
    monkeypatch.setenv("JPAGED_API_KEY", value)
    assert cli.main(["serve", "--port", "0"]) == 2
    assert "JPAGED_API_KEY is set but holds no key" in capsys.readouterr().err
    assert cli.main(["serve", "--port", "0", "--api-key", " "]) == 2
