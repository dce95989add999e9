"""The page's files are there, name each other rightly, ask no other host, and never write markup."""

from __future__ import annotations

import re

import pytest

from coordinator.entrypoints.page.endpoints import INDEX, SECURITY_HEADERS, static_file, static_files
from splitserve.errors import NotFoundError

SCRIPTS = {name: file.content.decode() for name, file in static_files().items() if name.endswith(".js")}
MARKUP = re.compile(r"innerHTML|outerHTML\s*=|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc")


def test_the_index_and_the_scripts_name_all_files() -> None:
    index = re.findall(r'"page/static/([\w.]+)"', static_file(INDEX).content.decode())
    imported = {name for script in SCRIPTS.values() for name in re.findall(r'from "\./([\w.]+)"', script)}
    assert {*index, *imported} == static_files().keys() - {INDEX}


@pytest.mark.parametrize("name", sorted(static_files()))
def test_no_file_asks_another_host_or_writes_markup(name: str) -> None:
    text = static_file(name).content.decode()
    hosts = {host for host in re.findall(r"https?://([\w.]+)", text) if host != "www.w3.org"}
    assert not hosts
    assert not MARKUP.search(text)
    if name == INDEX:
        assert not re.search(r"<script>|<style|style=|\son\w+=", text)


def test_the_policy_allows_own_files_only() -> None:
    headers = dict(SECURITY_HEADERS)
    policy = headers[b"content-security-policy"].decode()
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert headers[b"x-content-type-options"] == b"nosniff"


@pytest.mark.parametrize("name", ["", "..", "../endpoints.py", "__init__.py", "INDEX.HTML", "/etc/passwd"])
def test_other_names_are_not_found(name: str) -> None:
    with pytest.raises(NotFoundError):
        static_file(name)
