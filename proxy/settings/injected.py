"""The marks of injected texts: the packaged file, an own file and the section ``injected``, as ``InjectedRules``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from proxy.core.tokens.counting import INJECTED, InjectedMarks, InjectedRules
from proxy.settings.field_types import FilePath, Section, SplitText
from proxy.settings.packaged_data import packaged
from proxy.settings.yaml_source import parse_inline, read_table

FILE: Final = "injected.yaml"


def _stripped(name: str) -> str:
    """Return *name* without space around it. Raises ``ValueError`` if nothing is left."""
    if not name.strip():
        raise ValueError("is empty")
    return name.strip()


def _tag(name: str) -> str:
    """Return the name of a tag. Raises ``ValueError`` if it is none."""
    bare = name.strip()
    if not bare.isascii() or not bare.replace("_", "").replace("-", "").replace(":", "").isalnum():
        raise ValueError(f"{name!r} is no name of a tag: write it without < and >")
    return bare


Name = Annotated[str, AfterValidator(_stripped)]


class Marks(Section):
    """How the injected texts of one region begin."""

    headings: Annotated[tuple[Name, ...], SplitText] = Field(
        default=(), description="Headings of Markdown, without #; a part ends at the next one of their level."
    )
    tags: Annotated[tuple[Annotated[str, AfterValidator(_tag)], ...], SplitText] = Field(
        default=(), description="Tags, without < and >; a part ends at the closing tag."
    )
    lines: dict[Name, str] = Field(
        default={}, description="Beginnings of lines, each with the text that ends its part; empty: the message's end."
    )


class InjectedTable(Section):
    """The content of a file of marks."""

    memory: Marks = Field(default=Marks(), description="Memories of earlier conversations.")
    skills: Marks = Field(default=Marks(), description="Instructions for one kind of task.")
    knowledge: Marks = Field(default=Marks(), description="Passages from a collection of documents.")
    related: Marks = Field(default=Marks(), description="Results of other tasks.")

    def marks(self) -> Iterator[tuple[str, Marks]]:
        """Yield each region with its marks."""
        for region in INJECTED:
            yield region, getattr(self, region)


class InjectedTexts(InjectedTable):
    """Marks of texts that agents inject into system text and user messages, beside the packaged ones."""

    file: FilePath | None = Field(default=None, description="File of this shape; overrides the packaged one.")


def injected_rules(injected: InjectedTable) -> InjectedRules:
    """Return *injected* merged over the packaged marks, compiled. Reads a file: call it once, or in a thread."""
    marks = merged(_packaged_table(), injected).marks()
    return InjectedRules(
        {
            region: InjectedMarks(region_marks.headings, region_marks.tags, region_marks.lines)
            for region, region_marks in marks
        }
    )


@cache
def _packaged_table() -> InjectedTable:
    """Return the packaged marks. They are read once and not again at each reload."""
    return InjectedTable.model_validate(parse_inline(packaged(FILE).read_text(encoding="utf-8")))


def with_file(injected: InjectedTexts, folder: Path) -> InjectedTexts:
    """Return *injected* merged over its own file, whose relative path starts at *folder*. Raises ``SettingsError``."""
    if injected.file is None:
        return injected
    table = merged(read_table(folder / injected.file, InjectedTable, FILE), injected)
    return InjectedTexts(file=injected.file, **dict(table.marks()))


def merged(below: InjectedTable, above: InjectedTable) -> InjectedTable:
    """Return the marks of both tables; one that *above* has is removed from every region of *below*."""
    named = {name.lower() for _, marks in above.marks() for name in (*marks.headings, *marks.tags, *marks.lines)}
    regions: dict[str, Marks] = {}
    for region, marks in below.marks():
        own: Marks = getattr(above, region)
        regions[region] = Marks(
            headings=(*_without(marks.headings, named), *own.headings),
            tags=(*_without(marks.tags, named), *own.tags),
            lines={**{line: end for line, end in marks.lines.items() if line.lower() not in named}, **own.lines},
        )
    return InjectedTable(**regions)


def _without(names: tuple[str, ...], removed: set[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name.lower() not in removed)
