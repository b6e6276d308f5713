"""Stores sentences of the user as memories, verbatim, from the rounds that a compaction folds.

No model is called. A sentence must have a cue that it holds for longer ("we decided", "always", "remember"), come from
a message in the user's own words and from no tool result, and pass the scanner like every memory. It is a working
memory, which expires: a person or a model can pin it or save it for longer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from proxy.core.compaction.steps import SENTENCE_END
from proxy.core.decisions import CountedView
from proxy.core.errors import Conflict, InvalidRequest, StoreUnavailable
from proxy.core.lazy_pattern import lazy_pattern
from proxy.core.report import Report
from proxy.engine.features import Feature
from proxy.features.memories.book import MemoryBook, NewMemory
from proxy.features.memories.memory import LONGEST_TITLE, Type, shortened
from proxy.features.memories.provenance import own_words, speaker_of, spoken_of
from proxy.features.memories.settings import is_named
from proxy.tasks import Spawn, offload

MOST: Final = 3
"""Sentences of one compaction that become memories at most."""

MOST_CANDIDATES: Final = 12
"""The newest sentences of one compaction that are compared with all texts of the conversation."""

SHORTEST, LONGEST = 15, 240
"""Characters of such a sentence."""

TASK_CHARACTERS: Final = 80
"""Characters of a conversation's task, which names it to later conversations."""

_CUES: Final[Sequence[tuple[Type, re.Pattern[str]]]] = (
    (
        "decision",
        lazy_pattern(
            r"\b(?:we|i|let'?s|let us)\b.{0,24}\b(?:decided|agreed|chose|settled on|go with|stick with)\b|^decision\b|"
            r"\b(?:beschlossen|entschieden|vereinbart|einigen uns auf|bleiben bei)\b|\b(?:hemos|he) decidido\b|"
            r"\b(?:on a|nous avons|j'ai) décidé\b",
            re.IGNORECASE,
        ),
    ),
    (
        "user",
        lazy_pattern(
            r"\bi (?:prefer|always want|never want|like it when|hate)\b|\bi(?:'d| would) rather\b|\bfrom now on\b|"
            r"\b(?:please )?(?:always|never) (?:answer|reply|write|use|ask|add|explain|touch|commit|push)\b|"
            r"\bich (?:bevorzuge|möchte (?:immer|nie)|will (?:immer|nie|keine))\b|\bab (?:jetzt|sofort)\b|"
            r"\bbitte (?:immer|nie)\b|\bprefiero\b|\bje préfère\b|\bdésormais\b",
            re.IGNORECASE,
        ),
    ),
    (
        "project",
        lazy_pattern(
            r"\bremember\b|\bnote that\b|\bfor the record\b|\bkeep in mind\b|\bdon'?t forget\b|\bmerk(?:e)? dir\b|"
            r"\bzur info\b|\bdenk daran\b|\brecuerda que\b|\bn'oublie pas\b|记住|請記住|覚えて",
            re.IGNORECASE,
        ),
    ),
)
"""Cues of sentences that hold for longer, by the type of the memory, in six languages."""


class Sentence(msgspec.Struct, frozen=True):
    """A sentence of the user with a cue, and the type of its memory."""

    type: Type
    text: str


class ExtractMemories(Feature):
    """Stores sentences of the user from folded rounds as memories, in *projects*, which are patterns of names."""

    def __init__(self, book: MemoryBook, projects: Sequence[str], spawn: Spawn) -> None:
        self._book = book
        self._projects = tuple(projects)
        self._spawn = spawn

    def answered(self, view: CountedView, report: Report, status: int) -> None:
        """Store sentences from the rounds that *view*, the first with a compaction, folds; in the background."""
        record = view.edits.record
        if status != 200 or not report.event or record is None or not record.compaction.cut:
            return
        if report.observed or report.client_compaction:
            return
        if is_named(view.request.options.project, self._projects):
            self._spawn(self._store(view), "memories")

    async def _store(self, view: CountedView) -> None:
        memories = await offload(len(view.request.body), extracted, view)
        request = view.request
        for memory in memories:
            try:
                await self._book.add(request.tenant, request.options.project, memory)
            except InvalidRequest:
                continue  # the scanner refused it
            except (Conflict, StoreUnavailable):
                return


def extracted(view: CountedView) -> list[NewMemory]:
    """Return the memories from the newest compaction of *view*: sentences, and the conversation's task."""
    record = view.edits.record
    if record is None:
        return []
    measured, previous = view.measured, view.edits.previous
    original = measured.original(view.layout or measured.lay_out())
    spoken = spoken_of(view)
    start = 0
    if previous is not None:
        start = previous.cut  # an earlier compaction folded the rounds before, and their sentences are stored
    sentences: list[Sentence] = []
    for index in range(start, record.compaction.cut):
        item = measured.parsed.items[index]
        if item.role == "user":
            sentences += lasting_sentences(own_words(original.text(index).text))
    # Comparing a sentence with a long conversation takes milliseconds, so only some are compared.
    newest = sentences[-MOST_CANDIDATES:]
    by_user = [sentence for sentence in newest if speaker_of(sentence.text, spoken, is_strict=True) == "user"]
    memories = [_memory(sentence.type, sentence.text) for sentence in _best(by_user)]
    task = _task(spoken.user)
    if task:
        memories.append(_memory("session", task))
    return memories


def lasting_sentences(text: str) -> list[Sentence]:
    """Return the sentences of *text* with a cue, without questions."""
    sentences: list[Sentence] = []
    for part in SENTENCE_END.split(text):
        sentence = " ".join(part.split()).lstrip("-*# ")
        if not SHORTEST <= len(sentence) <= LONGEST or sentence.endswith(("?", "？")):
            continue
        memory_type = next((type_ for type_, cue in _CUES if cue.search(sentence)), None)
        if memory_type is not None:
            sentences.append(Sentence(memory_type, sentence))
    return sentences


def _best(sentences: Sequence[Sentence]) -> list[Sentence]:
    """Return the sentences that are stored: decisions first, and of each type the newest."""
    order = [type_ for type_, _ in _CUES]
    newest_first = list(dict.fromkeys(reversed(sentences)))
    return sorted(newest_first, key=lambda sentence: order.index(sentence.type))[:MOST]


def _task(user_texts: Sequence[str]) -> str:
    """Return the beginning of the first of *user_texts*; empty if there is none."""
    if not user_texts:
        return ""
    return shortened(" ".join(user_texts[0].split()), TASK_CHARACTERS)


def _memory(type_: Type, text: str) -> NewMemory:
    return NewMemory(type_, shortened(text, LONGEST_TITLE), text, "working", origin="user")
