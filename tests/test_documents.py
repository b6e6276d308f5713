"""The papers: what README and docs/ state of files, settings, tests and commands is there."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from proxy import app, cli, features
from proxy.core.errors import UllageError
from proxy.features.settings import AllSettings

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GUARANTEES = ROOT / "docs" / "guarantees.md"
PAPERS = [README, *sorted((ROOT / "docs").rglob("*.md"))]
SETTING = re.compile(
    r"`((?:server|store|upstreams\[\]|models\[\]|compression|summaries|archive|telemetry)(?:\.[a-z_]+)+)[`:]"
)
TEST = re.compile(r"`(tests/[a-z_0-9/]+\.py)::([a-zA-Z_0-9]+)`")
MENTIONED = re.compile(r"`((?:proxy|tests|config|docs|helm)/[a-zA-Z_0-9./-]*)(?:::[a-z_0-9]+)?`")
EVENT = re.compile(r'"((?:server|store|summary|upstream)\.[a-z_]+)"')
"""Events of the log: some begin like a section of the configuration."""
PROMISES = 10


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_code(text: str) -> str:
    """*text* without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The fragments under which a hoster shows the headings of *page*."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links() -> Iterator[tuple[Path, str, str]]:
    """Each relative link of the papers: its page, the path it names ("" for the page itself) and its fragment."""
    for page in PAPERS:
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
            if "://" not in target:
                path, _, fragment = target.partition("#")
                yield page, path, fragment


def settings_of(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The members that *schema* allows, looked for behind references, alternatives and lists."""
    if "$ref" in schema:
        return settings_of(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
    if "items" in schema:
        return settings_of(schema["items"], definitions)
    found: dict[str, Any] = dict(schema.get("properties", {}))
    for choice in [*schema.get("anyOf", []), *schema.get("allOf", [])]:
        found |= settings_of(choice, definitions)
    return found


def is_setting(path: str) -> bool:
    schema = AllSettings.model_json_schema()
    definitions = schema.get("$defs", {})
    for key in path.replace("[]", "").split("."):
        members = settings_of(schema, definitions)
        if key not in members:
            return False
        schema = members[key]
    return True


def functions_of(file: Path) -> set[str]:
    """The names of all functions of *file*, methods included."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)}


def test_the_readme_is_short() -> None:
    """The README is at most 10 KB: what does not fit belongs to docs/."""
    assert len(README.read_bytes()) <= 10_000


def test_every_link_leads_to_a_page_and_a_heading() -> None:
    """Every relative link names a file that exists and, behind #, a heading of it."""
    dead = []
    for page, path, fragment in links():
        target = page.parent / path if path else page
        if not target.exists() or (fragment and fragment not in anchors(target)):
            dead.append(f"{name_of(page)}: {path}#{fragment}")
    assert dead == []


def test_every_page_is_reached_from_the_readme() -> None:
    """Following links from the README reaches every page of docs/."""
    reached, ahead, found = {README.resolve()}, [README.resolve()], list(links())
    while ahead:
        here = ahead.pop()
        for page, path, _ in found:
            if page.resolve() != here or not path:
                continue
            target = (page.parent / path).resolve()
            target = target / "README.md" if target.is_dir() else target
            if target not in reached:
                reached.add(target)
                ahead.append(target)
    assert [name_of(page) for page in PAPERS if page.resolve() not in reached] == []


@pytest.mark.slow
def test_every_setting_that_is_named_exists() -> None:
    """A setting in the papers, such as `server.limits.items`, is one of the configuration's schema."""
    named = {(name_of(page), path) for page in PAPERS for path in SETTING.findall(page.read_text())}
    assert len(named) > 30
    events = {name for file in (ROOT / "proxy").rglob("*.py") for name in EVENT.findall(file.read_text())}
    assert sorted(f"{page}: {name}" for page, name in named if name not in events and not is_setting(name)) == []


def test_every_file_that_is_named_exists() -> None:
    """A path in the papers, such as `proxy/engine/engine.py`, leads to a file or folder of the repository."""
    named = {(name_of(page), path) for page in PAPERS for path in MENTIONED.findall(page.read_text())}
    assert len(named) > 30
    assert sorted(f"{page}: {path}" for page, path in named if not (ROOT / path).exists()) == []


@pytest.mark.parametrize("page", [page for page in PAPERS if TEST.search(page.read_text())], ids=name_of)
def test_every_test_that_is_named_exists(page: Path) -> None:
    """A test in the papers, `tests/FILE.py::NAME`, is a function of that file."""
    gone = [f"{file}::{name}" for file, name in TEST.findall(page.read_text()) if not is_test(file, name)]
    assert gone == []


def is_test(file: str, name: str) -> bool:
    return name.startswith("test_") and (ROOT / file).exists() and name in functions_of(ROOT / file)


def test_every_promise_names_its_test() -> None:
    """Each numbered promise of docs/guarantees.md names at least one test that can fail."""
    sections = re.split(r"^## (?=\d+\. )", GUARANTEES.read_text(), flags=re.MULTILINE)[1:]
    assert len(sections) == PROMISES
    assert [section.split("\n", 1)[0] for section in sections if not TEST.search(section)] == []


def test_every_bench_that_is_named_can_be_run() -> None:
    """`python -m tests.bench.NAME` in the papers names a module of tests/bench."""
    named = {name for page in PAPERS for name in re.findall(r"python -m (tests\.bench[a-z_.]*[a-z])", page.read_text())}
    assert "tests.bench.quality" in named
    files = {name: ROOT / name.replace(".", "/") for name in named}
    assert [n for n, f in files.items() if not f.with_suffix(".py").exists() and not (f / "__main__.py").exists()] == []


def kinds_of(error: type[UllageError]) -> Iterator[type[UllageError]]:
    """*error* and everything derived from it."""
    yield error
    for kind in error.__subclasses__():
        yield from kinds_of(kind)


def test_every_error_of_our_own_is_listed() -> None:
    """docs/api.md lists the status and code of each error that the proxy itself answers, and no other."""
    rows = re.findall(r"^\| (\d{3}) \| `([a-z_]+)` \|", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert app, "imported, so that every error is defined"
    for module in pkgutil.walk_packages(features.__path__, "proxy.features."):
        import_module(module.name)  # the process opens them by name
    known = {(str(kind.status), kind.code) for kind in kinds_of(UllageError) if kind.__module__.startswith("proxy.")}
    assert set(rows) == known


def test_every_header_of_our_own_is_listed() -> None:
    """docs/api.md names each `x-ullage-*` header that the code names."""
    page = set(re.findall(r"`(x-ullage-[a-z-]+)`", (ROOT / "docs" / "api.md").read_text()))
    code = "".join(file.read_text() for file in (ROOT / "proxy").rglob("*.py"))
    named = set(re.findall(r"x-ullage-[a-z-]*[a-z]", code))
    assert "x-ullage-outcome" in named
    assert named - page == set()


def test_every_command_has_its_section() -> None:
    """docs/cli.md has a section for each command of `ullage`, and no other."""
    commands = {f"ullage {command.callback.__name__}" for command in cli.app.registered_commands if command.callback}
    sections = re.findall(r"^## (ullage [a-z]+)$", (ROOT / "docs" / "cli.md").read_text(), re.MULTILINE)
    assert set(sections) == commands
