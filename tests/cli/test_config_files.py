"""Clients' configuration files as documents: read, changed and written in four formats."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.cli.config_files import MISSING, DocumentError, Format, dump, get, parse, path_name, plain, put, remove

TEXTS: dict[Format, str] = {
    "json": '{\n    "a": {\n        "b": 1\n    }\n}\n',
    "toml": "# mine\n[a]\nb = 1 # one\n",
    "yaml": "# mine\na:\n  b: 1  # one\n",
    "env": "# mine\nexport A='x'\nB=\"a b\" # one\n",
}


@pytest.mark.parametrize("file_format", TEXTS)
def test_an_unchanged_document_is_the_same_text(file_format: Format) -> None:
    """Comments, quotes and indentation survive parsing and dumping."""
    text = TEXTS[file_format]
    assert dump(parse(text, file_format), file_format, text) == text


@pytest.mark.parametrize("file_format", ["json", "toml", "yaml"])
def test_a_value_is_set_and_removed(file_format: Format) -> None:
    """A nested value gets the tables it needs, and they go with it; the values beside it stay."""
    text = TEXTS[file_format]
    document = parse(text, file_format)
    put(document, ["a", "c", "d"], "new")
    changed = parse(dump(document, file_format, text), file_format)
    assert plain(changed) == {"a": {"b": 1, "c": {"d": "new"}}}
    remove(changed, ["a", "c", "d"])
    assert plain(changed) == {"a": {"b": 1}}
    remove(changed, ["a", "b"])
    assert plain(changed) == {}


def test_variables_keep_their_lines() -> None:
    """A changed variable stays on its line, a removed one goes with it, and a new one is quoted if it must be."""
    document = parse(TEXTS["env"], "env")
    document["A"] = "y"
    document["C"] = "it's new"
    del document["B"]
    text = dump(document, "env")
    assert text == "# mine\nA=y\nC='it\\'s new'\n"
    assert dict(parse(text, "env")) == {"A": "y", "C": "it's new"}


def test_list_elements_are_found_by_their_members() -> None:
    """An element with the members of a step is replaced where it is; otherwise a new one is appended."""
    document: dict[str, Any] = {"models": [{"id": "a"}, {"id": "b", "size": 1}]}
    path = ["models", {"id": "b"}]
    assert get(document, [*path, "size"]) == 1
    put(document, path, {"id": "b", "size": 2})
    put(document, ["models", {"id": "c"}], {"id": "c"})
    assert document == {"models": [{"id": "a"}, {"id": "b", "size": 2}, {"id": "c"}]}
    remove(document, path)
    assert document == {"models": [{"id": "a"}, {"id": "c"}]}
    assert path_name(path) == "models.b"


def test_what_leads_nowhere_is_missing() -> None:
    """A path through a value of another kind has no value, and setting it is an error that names the path."""
    document = {"a": 1, "n": None}
    assert get(document, ["a", "b"]) is MISSING
    assert get(document, [{"id": "x"}]) is MISSING
    assert get(document, ["n"]) is None
    with pytest.raises(DocumentError, match=r"where a\.b should be"):
        put(document, ["a", "b"], 2)
    put(document, ["n", "b"], 2)
    assert document["n"] == {"b": 2}


@pytest.mark.parametrize(("text", "file_format"), [("{", "json"), ("[", "toml"), ("a: [", "yaml")])
def test_a_malformed_text_is_an_error_with_its_format(text: str, file_format: Format) -> None:
    """The error names the format and holds the first line of the parser's own words."""
    with pytest.raises(DocumentError, match=f"cannot be read as {file_format}: .+") as raised:
        parse(text, file_format)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("file_format", ["json", "yaml"])
def test_only_tables_and_lists_are_documents(file_format: Format) -> None:
    """A bare value is an error; an empty text is no document."""
    assert parse("", file_format) is None
    with pytest.raises(DocumentError, match="neither a table nor a list"):
        parse("7", file_format)
