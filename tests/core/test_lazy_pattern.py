"""Patterns that are compiled when they are used."""

import re

import pytest

from proxy.core.lazy_pattern import any_pattern, lazy_pattern


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


def test_any_pattern_matches_where_one_does():
    """Groups of equal names do not matter, and flags inside a group stay inside it."""
    patterns = [r"(?P<name>a+):", r"\[(?P<name>(?i:b))\]|<(?P<arguments>c)>"]
    joined = any_pattern(patterns)
    for text in ("aa:", "[B]", "<c>", "", "A:", "a", "<C>", "b:"):
        assert bool(joined.match(text)) == any(re.match(pattern, text) for pattern in patterns)
    assert joined.groups == 0


@pytest.mark.parametrize("pattern", [r"(a)\1", "(?P<a>b)(?P=a)", "(a)?(?(1)b|c)", "(?i)a", r"\(?P<a>"])
def test_a_pattern_that_stands_alone_is_not_joined(pattern):
    """One that refers to its groups, has flags for all of it, or only looks as if it named a group."""
    assert any_pattern(["x", pattern]) is None


def test_no_patterns_are_not_joined():
    """A pattern of none would match everything."""
    assert any_pattern([]) is None
