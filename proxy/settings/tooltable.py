"""The shape of a table of tools: in a file of its own, or as a section of the configuration."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from proxy.core.tool_table import Kind
from proxy.settings.fields import FilePath, Section, Words

Names = Annotated[tuple[str, ...], Words]


class ToolRule(Section):
    """One tool, or all that a glob matches."""

    kind: Kind = Field(default="unknown", description="What it does.")
    path: Names = Field(default=(), description="Arguments that name its target; empty: the usual ones.")
    patch: Names = Field(default=(), description="Arguments that hold a patch with file headers.")
    base: int = Field(default=1, ge=0, le=1, description="The number of a file's first line.")
    limit: int = Field(default=0, ge=0, description="Lines it reads when not told how many; 0: all.")
    unit: Literal["lines", "bytes"] = Field(default="lines", description="What its range counts.")
    by: str = Field(default="", description="The argument that says what it does this time.")
    cases: dict[str, ToolRule] = Field(default={}, description="By that argument's value; '*' is any other.")


class ToolKeys(Section):
    """The usual argument names, the first that is there."""

    path: Names = Field(default=(), description="A path.")
    many: Names = Field(default=(), description="Lists of paths, or of objects with one.")
    about: Names = Field(default=(), description="What a call that names no path is about.")
    first: Names = Field(default=(), description="The first line of a range.")
    count: Names = Field(default=(), description="How many lines.")
    last: Names = Field(default=(), description="The last line of a range.")
    pair: Names = Field(default=(), description="First and last line in a list.")


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return pattern


Patterns = Annotated[tuple[Annotated[str, AfterValidator(_compiles)], ...], Words]


class WrittenForms(Section):
    """How clients write tool calls and their results as text."""

    calls: Patterns = Field(default=(), description="Regular expressions of a call; groups: name, arguments (JSON).")
    results: Patterns = Field(default=(), description="Regular expressions of how a result begins; group: name.")
    added: Names = Field(default=(), description="How parts begin that the client adds by itself.")


class ToolTable(Section):
    """What a file of tools holds."""

    keys: ToolKeys = ToolKeys()
    written: WrittenForms = WrittenForms()
    protected: Names = Field(default=(), description="Tools whose results are never left out; names or globs.")
    map: dict[str, ToolRule] = Field(default={}, description="Rules by tool name or glob.")


class Tools(ToolTable):
    """What is known of the clients' tools beside the packaged table."""

    file: FilePath | None = Field(default=None, description="A file of the same shape, between the two.")
