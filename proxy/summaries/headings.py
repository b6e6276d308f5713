"""The headings that a summary may have, and the sections that lines of it open.

The prompt demands that its headings stay as they are, but it also demands the language of the conversation, so models
translate them. A translated heading opens the same section, and is written as the prompt has it.
"""

from __future__ import annotations

from typing import Final

from proxy.core.lazy_pattern import lazy_pattern

SECTIONS: Final = ("Decisions and why", "State", "Pending", "Next", "Instructions from the user")
"""The headings that a summary may have; it must have at least one.

Only a model can write the first four. The prompt does not request the last one, since the block has the user's own
words, but models write it all the same.
"""

MOST_HEADING_WORDS: Final = 4
"""Words of a heading at most; a longer one is a sentence."""

_HEADING = lazy_pattern(r"^(#{1,6})\s*+(.{1,60}?)\s*+[:：]?\s*+$|^\*\*(.{1,60}?)[:：]?\*\*[:：]?\s*+$")

_WORDS: Final = {
    "Decisions and why": (
        "decisions entscheidungen décisions decisiones decisões decisioni beslissingen beslut beslutninger päätökset"
        " decyzje rozhodnutí решения рішення kararlar القرارات قرارات निर्णय"
    ),
    "State": (
        "state stand zustand status état estado stato toestand läge tilanne tila stan stav состояние статус стан durum"
        " الحالة الوضع स्थिति"
    ),
    "Pending": (
        "pending offen offenes ausstehend pendiente pendientes pendente pendentes attente suspens sospeso sospesi"
        " openstaand väntande utestående ventende avoinna keskeneräiset oczekujące zaległe čekající незавершённое"
        " незавершенное ожидает ожидание незавершене bekleyen bekleyenler المعلق المعلقة معلق लंबित"
    ),
    "Next": (
        "next nächstes nächste nächster weiteres suite prochain prochaines siguiente siguientes próximo próximos"
        " próxima prochaine prossimo prossimi volgende vervolg nästa neste næste seuraavaksi seuraava następne"
        " następnie další далее следующее следующие далі наступне sonraki sırada التالي التالية अगला अगले आगे"
    ),
    "Instructions from the user": (
        "instructions anweisungen vorgaben consignes instrucciones instruções istruzioni instructies instruktioner"
        " instrukser ohjeet instrukcje polecenia pokyny инструкции указания інструкції вказівки talimatlar"
        " التعليمات تعليمات निर्देश"
    ),
}
_PARTS: Final = {
    "Decisions and why": "决定 决策 決定 決策 判断 결정",
    "State": "状态 狀態 现状 現狀 状態 現状 状況 状况 进展 進捗 상태 현황 현재",
    "Pending": "待办 待辦 待处理 待處理 未完成 未完了 未解決 未解决 保留 미완료 보류 대기 남은",
    "Next": "下一步 接下来 接下來 后续 後續 次の 次に 今後 다음",
    "Instructions from the user": "指示 指令 要求 지시 지침",
}
"""Words of the headings in some twenty languages; those of scripts without spaces are also found inside longer ones."""

_BY_WORD: Final = {word: section for section in reversed(SECTIONS) for word in _WORDS[section].split()}
_BY_PART: Final = {part: section for section in SECTIONS for part in _PARTS[section].split()}


def opened_section(line: str) -> tuple[str, int]:
    """Return the section that *line* opens, and its number signs; empty and 0 for what a line has none of.

    A section may have a name like its own ("Next steps"), or a translated one.
    """
    match = _HEADING.match(line.strip())
    if not match:
        return "", 0
    signs = len(match[1] or "")
    heading = (match[2] or match[3]).strip("* :：").lower()
    words = heading.split()
    if len(words) > MOST_HEADING_WORDS:
        return "", signs
    sections = {_BY_WORD[word] for word in words if word in _BY_WORD}
    if not heading.isascii():
        sections.update(section for part, section in _BY_PART.items() if part in heading)
    return next((section for section in SECTIONS if section in sections), ""), signs
