"""The repository's shape: a test file for every module, nothing unexpected at the top, no trace of a workplace."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TOP_LEVEL = {
    ".ci",
    ".dockerignore",
    ".github",
    ".gitignore",
    "CHANGELOG.md",
    "Dockerfile",
    "LICENSE",
    "README.md",
    "config",
    "docs",
    "helm",
    "proxy",
    "pyproject.toml",
    "tests",
}

# Modules without a test file of their own, and why.
EXEMPT = {
    "proxy/core/apis/base.py": "a protocol, no behaviour",
    "proxy/core/apis/chat.py": "in the table of the APIs: tests/core/apis/test_formats.py",
    "proxy/core/apis/gemini.py": "in the table of the APIs: tests/core/apis/test_formats.py",
    "proxy/core/apis/messages.py": "in the table of the APIs: tests/core/apis/test_formats.py",
    "proxy/core/apis/portable.py": "in the table of the APIs: tests/core/apis/test_formats.py",
    "proxy/core/apis/responses.py": "in the table of the APIs: tests/core/apis/test_formats.py",
    "proxy/engine/ports.py": "protocols and plain values, no behaviour",
    "proxy/upstream/pooled_response.py": "answers of the pool: tests/upstream/test_connection_pool.py",
    "proxy/server/config.py": "plain values with defaults, no behaviour",
}

# In pieces, so that this file does not hold what it looks for.
FOREIGN = [
    "".join(pieces)
    for pieces in [
        ("/wo", "rk/"),
        ("/opt/", "lab"),
        ("py", "pi.org"),
        ("python", "hosted.org"),
        ("npm", "js.org"),
        ("deb.", "debian.org"),
        ("--index", "-url"),
        ("extra-index", "-url"),
    ]
]


def tracked() -> list[str]:
    """Every file of the repository, ignored ones left out."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so nothing says which files belong to it")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def says_nothing(module: Path) -> bool:
    """Whether *module* holds at most a docstring and names taken from elsewhere."""

    def is_quiet(node: ast.stmt) -> bool:
        if isinstance(node, ast.Assign):
            return [target.id for target in node.targets if isinstance(target, ast.Name)] == ["__all__"]
        return isinstance(node, ast.ImportFrom) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))

    return all(map(is_quiet, ast.parse(module.read_text()).body))


def mirror_of(module: str) -> str:
    """Where the tests of *module* belong: ``a/test_b.py`` for ``a/b.py``, ``a/test_a.py`` for the package ``a``."""
    path = Path(module).relative_to("proxy")
    if path.name != "__init__.py":
        return str(Path("tests") / path.parent / f"test_{path.stem.strip('_')}.py")
    package = path.parent
    return str(Path("tests") / package / f"test_{package.name or 'proxy'}.py")


def untested() -> set[str]:
    files = tracked()
    modules = [name for name in files if name.startswith("proxy/") and name.endswith(".py")]
    assert modules
    return {name for name in modules if not says_nothing(ROOT / name) and mirror_of(name) not in files}


@pytest.mark.slow
def test_every_module_has_its_test_file() -> None:
    """A module in proxy/ has its tests at the mirrored place, or a reason in the table above."""
    assert untested() - EXEMPT.keys() == set()


@pytest.mark.slow
def test_no_exemption_is_stale() -> None:
    """The table names only modules that exist and have no test file."""
    assert EXEMPT.keys() - untested() == set()


def test_top_level_holds_only_what_belongs_there() -> None:
    """The repository's root shows the agreed names and no others."""
    assert {name.split("/", 1)[0] for name in tracked()} <= TOP_LEVEL


def test_no_file_names_a_workplace_or_a_registry() -> None:
    """No file carries a path of the machine it was written on or the host of a package registry."""
    found = []
    for name in tracked():
        try:
            text = (ROOT / name).read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name}: {word}" for word in FOREIGN if word in text]
    assert found == []


def test_links_in_documents_lead_somewhere() -> None:
    """Every relative link in README and docs points at a file that exists."""
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    links = [(page, link) for page in documents for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text())]
    assert links
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []
