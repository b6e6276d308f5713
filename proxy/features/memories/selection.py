"""Chooses the memories for a conversation: by their type and class, and by the words of its first messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from proxy.core.lazy_pattern import UNSPACED, lazy_pattern
from proxy.features.memories.memory import DAY_SECONDS, Memory

MOST_MEMORIES: Final = 6
MOST_WORKING: Final = 5
MOST_SESSIONS: Final = 3
"""Most memories of one block: durable ones and those with priority; working ones; earlier conversations."""

MOST_QUERY_CHARACTERS: Final = 1_200
"""Characters of the newest user messages that memories are chosen by."""

QUERY_MESSAGES: Final = 3
"""The newest user messages that memories are chosen by."""

CLASS_WEIGHTS: Final = {"priority": 80, "durable": 50, "working": 20}
TYPE_WEIGHTS: Final = {"project": 35, "user": 30, "decision": 25, "session": 10}
PINNED: Final = 40
"""Weights of a memory's class, type and pin, whatever the query; docs/features/memories.md lists all weights."""

PHRASE_IS_TITLE, PHRASE_IN_TITLE, PHRASE_IN_CONTENT = 70, 45, 20
"""Weights of the query as a whole."""

TERM_IN_TITLE, TERM_IN_CONTENT = 30, 15
NAME_IN_TITLE, NAME_IN_CONTENT = 42, 24
"""Weights of each word of the query; names, such as ``src/app.py`` or ``MAX_ROWS``, count more."""

SHORTEST_TERM: Final = 3
"""Fewest characters of a word that counts. Scripts without spaces are compared by pairs of characters."""

DECISION_AGES: Final = ((7, 18), (30, 10))
WORKING_AGES: Final = ((11, -35), (7, -20))
"""Days, and the weight of a decision that is younger, or of a working memory that is older."""

_UNSPACED: Final = lazy_pattern(f"[{UNSPACED}]+")
_TERM: Final = lazy_pattern(r"[\w./:@#-]+")
_NAME: Final = lazy_pattern(r"\w[./_:@#-]\w|\d[a-z]|[a-z]\d|[a-z][A-Z]|[A-Z]{2,}")


def query_of(texts: Sequence[str]) -> str:
    """Return the query of a conversation whose user messages are *texts*: the newest ones, from their beginnings."""
    newest = texts[-QUERY_MESSAGES:]
    share = MOST_QUERY_CHARACTERS // max(1, len(newest))
    return "\n".join(text[:share] for text in newest).strip()


def choose(memories: Sequence[Memory], query: str, now: float) -> list[Memory]:
    """Return the *memories* for a conversation about *query* at Unix time *now*.

    Those with priority come first. Of two with equal scores the newer one comes first.
    """
    ordered = ranked(memories, query, now)
    ordered.sort(key=lambda memory: memory.class_ != "priority")  # stable
    return first_of_each(ordered)


def first_of_each(memories: Sequence[Memory]) -> list[Memory]:
    """Return the first *memories* of each kind, as many as a block may have; the most important kind comes first."""
    sessions = [memory for memory in memories if memory.type == "session"]
    working = [memory for memory in memories if memory.class_ == "working" and memory.type != "session"]
    others = [memory for memory in memories if memory.class_ != "working" and memory.type != "session"]
    return [*others[:MOST_MEMORIES], *working[:MOST_WORKING], *sessions[:MOST_SESSIONS]]


def ranked(memories: Sequence[Memory], query: str, now: float) -> list[Memory]:
    """Return *memories*, those with the highest scores for *query* first."""
    terms = _terms(query)
    scores = {memory.id: score(memory, query, terms, now) for memory in memories}
    return sorted(memories, key=lambda memory: (-scores[memory.id], -memory.created_at, memory.id))


def matching(memories: Sequence[Memory], query: str, now: float) -> list[Memory]:
    """Return the *memories* with a word of *query*, the best first; all of them if it is empty."""
    terms = _terms(query)
    matches = [memory for memory in memories if not query.strip() or _match(memory, query, terms)]
    return ranked(matches, query, now)


def score(memory: Memory, query: str, terms: Sequence[tuple[str, bool]], now: float) -> int:
    """Return the score of *memory* for *query*, whose *terms* are words, each with True if it is a name."""
    total = CLASS_WEIGHTS[memory.class_] + TYPE_WEIGHTS[memory.type] + PINNED * memory.pinned
    return total + _match(memory, query, terms) + _age(memory, now)


def _match(memory: Memory, query: str, terms: Sequence[tuple[str, bool]]) -> int:
    """Return the weight of the words of *query* in *memory*."""
    title, content = memory.title.casefold(), memory.content.casefold()
    in_terms = sum(_term_weight(term, title, content, is_name=is_name) for term, is_name in terms)
    return in_terms + _phrase_weight(query.strip().casefold(), title, content)


def _phrase_weight(phrase: str, title: str, content: str) -> int:
    """Return the weight of the query as a whole."""
    if not phrase:
        return 0
    if phrase == title:
        return PHRASE_IS_TITLE
    if phrase in title:
        return PHRASE_IN_TITLE
    if phrase in content:
        return PHRASE_IN_CONTENT
    return 0


def _term_weight(term: str, title: str, content: str, *, is_name: bool) -> int:
    """Return the weight of one word of the query."""
    in_title, in_content = TERM_IN_TITLE, TERM_IN_CONTENT
    if is_name:
        in_title, in_content = NAME_IN_TITLE, NAME_IN_CONTENT
    if term in title:
        return in_title
    if term in content:
        return in_content
    return 0


def _age(memory: Memory, now: float) -> int:
    """Return the weight of the age of *memory*: positive for new decisions, negative for old working memories."""
    days = (now - memory.created_at) / DAY_SECONDS
    if memory.type == "decision":
        return next((weight for most, weight in DECISION_AGES if days < most), 0)
    if memory.class_ == "working":
        return next((weight for least, weight in WORKING_AGES if days > least), 0)
    return 0


def _terms(query: str) -> list[tuple[str, bool]]:
    """Return the words of *query* that count, each once, with True if it is a name."""
    terms: dict[str, bool] = {}
    for run in _UNSPACED.findall(query):
        terms |= {run[at : at + 2]: False for at in range(max(1, len(run) - 1))}
    for word in _TERM.findall(_UNSPACED.sub(" ", query)):
        term = word.strip("./:-").casefold()
        if len(term) >= SHORTEST_TERM:
            terms[term] = terms.get(term, False) or _NAME.search(word) is not None
    return list(terms.items())
