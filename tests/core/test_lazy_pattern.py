"""Patterns that are compiled when they are used."""

import re

import pytest

from proxy.core.lazy_pattern import lazy_pattern


def test_a_lazy_pattern_does_what_a_compiled_one_does():
    """Also at its second use, and with flags."""
    lazy, compiled = (
        lazy_pattern(r"(?P<word>[a-z]+)\b", re.IGNORECASE),
        re.compile(r"(?P<word>[a-z]+)\b", re.IGNORECASE),
    )
    for text in ("One two", "", "1 THREE", "One two"):
        assert lazy.findall(text) == compiled.findall(text)
        assert lazy.sub("x", text) == compiled.sub("x", text)
        assert [match.span() for match in lazy.finditer(text)] == [match.span() for match in compiled.finditer(text)]
    assert lazy.search("1 a", 1, 3)["word"] == "a"
    assert (lazy.pattern, lazy.flags, lazy.groups) == (compiled.pattern, compiled.flags, compiled.groups)


def test_a_lazy_pattern_is_compiled_once_at_its_first_use(monkeypatch):
    """Nothing is compiled before it is used, nor again."""
    seen = []
    compile_ = re.compile
    monkeypatch.setattr(re, "compile", lambda *given: seen.append(given) or compile_(*given))
    lazy = lazy_pattern("a+")
    assert lazy.pattern == "a+"
    assert seen == []
    for _ in range(3):
        assert lazy.search("aa")[0] == "aa"
    assert seen == [("a+", 0)]


def test_a_wrong_pattern_fails_when_it_is_used():
    """As it does with ``re``."""
    with pytest.raises(re.error):
        lazy_pattern("(").search("a")
