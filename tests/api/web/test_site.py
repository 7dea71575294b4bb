"""What is answered, apart from how it travels."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

import pytest

from ferrule_server.api.web.events import Events
from ferrule_server.api.web.site import Answer, Request, Site


def _site(host: str = "127.0.0.1", *, has_page: bool = True) -> Site:
    async def message() -> bytes:
        return b""

    async def metrics(accept: str) -> tuple[str, bytes]:
        return f"for {accept}", b"up 1\n"

    return Site(metrics, Events(message) if has_page else None, host)


def _answer(site: Site, path: str, headers: Mapping[str, str] | None = None) -> Answer:
    """Return the answer to a GET."""
    return asyncio.run(site.answer(Request("GET", path, headers or {})))


@pytest.mark.parametrize(
    ("listens", "host", "is_served"),
    [
        ("127.0.0.1", "127.0.0.1:9464", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "LOCALHOST:80", True),
        ("127.0.0.1", "127.1.2.3", True),
        ("127.0.0.1", "[::1]:8000", True),
        ("127.0.0.1", "evil.example:9464", False),
        ("127.0.0.1", "127.0.0.1.evil.example", False),
        ("127.0.0.1", "", False),
        ("127.0.0.1", "192.168.1.5", False),
        ("::1", "[::1]:1", True),
        ("::1", "evil.example", False),
        ("0.0.0.0", "ferrule:9464", True),
        ("0.0.0.0", "10.0.0.5", True),
    ],
)
def test_a_web_site_cannot_have_its_name_lead_here(listens: str, host: str, is_served: bool) -> None:
    """Where only this machine can reach the listener, browsers must ask for this machine."""
    status = _answer(_site(listens), "/metrics", {"host": host}).status
    assert status == (200 if is_served else 403)


@pytest.mark.parametrize(
    ("host", "is_served"),
    [
        ("10.0.0.5:9464", True),
        ("[fd00::5]:9464", True),
        ("ferrule:9464", True),
        ("localhost", True),
        ("evil.example", False),
        ("10.0.0.5.evil.example", False),
    ],
)
def test_beyond_this_machine_the_page_is_asked_for_by_address(host: str, is_served: bool) -> None:
    """A port of a container is published on 127.0.0.1 too; scrapers come by any name."""
    site = _site("0.0.0.0")
    for path in ("/ui", "/ui/events", "/ui/main.js"):
        assert _answer(site, path, {"host": host}).status == (200 if is_served else 403)
    assert _answer(site, "/metrics", {"host": host}).status == 200
    named = _site("gpu-3.example.org")
    assert _answer(named, "/ui", {"host": "gpu-3.example.org:9464"}).status == 200


@pytest.mark.parametrize(
    ("site", "is_served"), [("same-origin", True), ("none", True), ("cross-site", False), ("same-site", False)]
)
def test_another_sites_page_cannot_watch(site: str, is_served: bool) -> None:
    """It could not read what comes, but would take the places of those who can."""
    answer = _answer(_site(), "/ui/events", {"host": "localhost", "sec-fetch-site": site})
    assert answer.status == (200 if is_served else 403)
    assert answer.is_stream is is_served


def test_without_a_page_there_are_metrics_alone() -> None:
    """And the way in leads to them."""
    site = _site(has_page=False)
    for path in ("/ui", "/ui/main.js", "/ui/events"):
        assert _answer(site, path).status == 404
    assert _answer(site, "/").headers["Location"] == "metrics"
    assert _answer(_site(), "/").headers["Location"] == "ui"


def test_metrics_come_in_the_format_that_is_asked_for() -> None:
    """The Accept header is handed on."""
    answer = _answer(_site(), "/metrics", {"accept": "openmetrics"})
    assert (answer.content_type, answer.body) == ("for openmetrics", b"up 1\n")


def test_the_page_needs_nothing_but_what_is_served() -> None:
    """Every file that it names is there with its type; nothing is inline, nothing comes from elsewhere."""
    site = _site()
    page = _answer(site, "/ui").body.decode()
    paths = [f"/{link}" for link in re.findall(r'(?:src|href)="(ui/[^"]+)"', page)]
    assert len(paths) == 3
    assert not re.search(r"<script(?![^>]*src)|<style|\son\w+=|\sstyle=", page)
    seen: set[str] = set()
    while paths:
        path = paths.pop()
        if path in seen:
            continue
        seen.add(path)
        answer = _answer(site, path)
        assert answer.status == 200, path
        text = answer.body.decode()
        paths += [f"/ui/{name}" for name in re.findall(r'from "\./([^"]+)"', text)]
        outside = set(re.findall(r"https?://[^\"'\s)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert outside == set(), path
    assert seen == {path for path in site._files if path != "/ui"}


def test_a_slash_behind_the_address_of_the_page_does_no_harm() -> None:
    """The page names its files from beside ``/ui``, so a browser is sent there."""
    answer = _answer(_site(), "/ui/")
    assert (answer.status, answer.headers["Location"]) == (302, "../ui")


def test_sources_of_the_server_are_not_served() -> None:
    """The table has the page's files and no others."""
    site = _site()
    for path in ("/ui/site.py", "/ui/__init__.py", "/ui/index.html", "/ui//main.js", "/main.js"):
        assert _answer(site, path).status == 404
