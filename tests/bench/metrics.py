"""What a compacted conversation still holds, measured without a model; and the simple ways to compact one.

Nothing here knows how Ullage works: a view is a list of messages, whoever made it. Presence is an upper bound of what a
model recalls, and a paraphrase counts as lost; so compare ways by these figures, and take none as an absolute.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

from tests.support.engine_fixtures import count_tokens
from tests.support.text_entities import entities

Message = dict[str, Any]
Messages = Sequence[Message]

LATER = 0.8
"""Share of a session's tokens that is its history; the rest is what really came next."""

MASKED = 10
"""Newest tool results that masking leaves alone."""

RARE = 3
"""Messages of a history that have a rare word, at most."""

SUMMARY_SHARE = 0.3
"""Share of the budget that first sentences may take."""

_PHRASE = 4
_WORD = re.compile(r"\w+")
_PLAIN = re.compile(r"[^\W\d_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]{4,}")
_WIDE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]{2,}")
_SENTENCE = re.compile(r"(?<=[.!?。！？])\s+|\n+")
_ORDER = re.compile(
    r"\b(?:must|never|always|only|don't|do not|please|should|need to|make sure|avoid|keep|use|require[sd]?|prefer)\b"
    r"|必须|不要|请|只能|务必|需要|禁止",
    re.IGNORECASE,
)
"""Words by which a sentence of the user asks for or forbids something."""

_count = lru_cache(maxsize=200_000)(count_tokens)


def content(message: Message) -> str:
    """The text of a message, without its calls."""
    found = message.get("content")
    if isinstance(found, list):
        return "\n".join(part["text"] for part in found if isinstance(part, dict) and isinstance(part.get("text"), str))
    return found if isinstance(found, str) else ""


def calls(message: Message) -> list[tuple[str, str]]:
    """Name and arguments, as they are sent, of each tool call of a message."""
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    if message.get("function_call"):
        functions.append(message["function_call"])
    return [(str(each.get("name", "")), str(each.get("arguments", ""))) for each in functions]


def plain(message: Message) -> str:
    """All that a message says; arguments of calls as their values, since JSON's escapes would look like names."""
    said = [content(message)]
    for name, arguments in calls(message):
        said.append(name)
        said += _values(arguments)
    return "\n".join(said)


def _values(arguments: str) -> Iterator[str]:
    try:
        stack = [json.loads(arguments)]
    except ValueError:
        yield arguments
        return
    while stack:
        value = stack.pop()
        if isinstance(value, Mapping):
            stack += value.values()
        elif isinstance(value, list):
            stack += value
        elif value is not None and not isinstance(value, bool):
            yield str(value)


def size(messages: Iterable[Message]) -> int:
    """Tokens of *messages* in o200k_base, four more for each."""
    return sum(4 + _count("\n".join([content(each), *(f"{a} {b}" for a, b in calls(each))])) for each in messages)


def is_system(message: Message) -> bool:
    """True for system text, which no way of compacting may touch."""
    return message.get("role") in ("system", "developer")


def is_result(message: Message) -> bool:
    """True for the result of a tool call."""
    return message.get("role") in ("tool", "function")


def rounds(messages: Messages) -> list[list[Message]]:
    """The parts that no cut may divide: a message that calls tools with its results, else a message alone."""
    found: list[list[Message]] = []
    for message in messages:
        if is_result(message) and found:
            found[-1].append(message)
        else:
            found.append([message])
    return found


def split(messages: Messages) -> tuple[list[Message], list[Message]]:
    """The history, ``LATER`` of the tokens, and the real continuation."""
    parts, most = rounds(messages), LATER * size(messages)
    taken, end = 0, len(parts)
    for at, part in enumerate(parts, 1):
        taken += size(part)
        if taken >= most:
            end = at
            break
    return list(chain.from_iterable(parts[:end])), list(chain.from_iterable(parts[end:]))


def requests_of(messages: Messages, steps: int) -> list[list[Message]]:
    """What a client sent before each of the last *steps* messages of the model."""
    spoken = [at for at, message in enumerate(messages) if at and message["role"] == "assistant"]
    return [list(messages[:at]) for at in spoken[-steps:]]


class Held:
    """What a list of messages says, to be searched."""

    def __init__(self, messages: Messages) -> None:
        self.text = "\n".join(map(plain, messages))
        self.names = entities(self.text)
        self.words = _words(self.text)
        self._spaced = " ".join(self.text.split())
        self._phrases = _phrases(self.text)

    def has(self, name: str) -> bool:
        """Whether *name* is there, on its own or inside another."""
        return name in self.names or name in self.text

    def share_of(self, text: str) -> float:
        """1 if *text* is there word for word, else the share of its phrases of four words that are."""
        if " ".join(text.split()) in self._spaced:
            return 1.0
        wanted = _phrases(text)
        return len(wanted & self._phrases) / len(wanted) if wanted else 1.0


def _phrases(text: str) -> set[tuple[str, ...]]:
    words = [word.lower() for word in _WORD.findall(text)]
    return {tuple(words[at : at + _PHRASE]) for at in range(max(1, len(words) - _PHRASE + 1))} if words else set()


def kind_of(name: str) -> str:
    """``path``, ``figure`` or ``name``."""
    if "/" in name or re.fullmatch(r"[\w-]+\.[a-z]{1,4}", name):
        return "path"
    return "figure" if name.isdigit() else "name"


def needed_later(history: Messages, future: Messages) -> list[str]:
    """What the model really used next of what the history names, and nobody had repeated to it since."""
    known = Held(history).names
    supplied: set[str] = set()
    needed: dict[str, None] = {}
    for message in future:
        said = entities(plain(message))
        if message["role"] == "assistant":
            needed |= dict.fromkeys(sorted(said & known - supplied))
        supplied |= said
    return list(needed)


def words_needed_later(history: Messages, future: Messages) -> list[str]:
    """The rare plain words of the history that the model used next before anybody had repeated them to it.

    In Chinese, Japanese and Korean a word is a pair of characters; rare is what at most three messages have.
    """
    having = Counter(chain.from_iterable(_words(plain(message)) for message in history))
    supplied: set[str] = set()
    needed: dict[str, None] = {}
    for message in future:
        said = _words(plain(message))
        if message["role"] == "assistant":
            needed |= dict.fromkeys(sorted(word for word in said - supplied if 0 < having[word] <= RARE))
        supplied |= said
    return list(needed)


def _words(text: str) -> set[str]:
    pairs = (run[at : at + 2] for run in _WIDE.findall(text) for at in range(len(run) - 1))
    return {*_PLAIN.findall(text.lower()), *pairs}


def instructions(messages: Messages) -> list[str]:
    """The user's sentences that ask for or forbid something."""
    sentences = (part.strip() for each in messages if each["role"] == "user" for part in _SENTENCE.split(content(each)))
    return list(dict.fromkeys(part for part in sentences if 8 <= len(part) <= 600 and _ORDER.search(part)))


def mean(values: Iterable[float]) -> float | None:
    """The mean, or None if there is no value."""
    found = list(values)
    return sum(found) / len(found) if found else None


def score(history: Messages, view: Messages, future: Messages, budget: int) -> dict[str, float | None]:
    """What *view* keeps of *history*, each figure from 0 to 1; None if the conversation has nothing of the kind."""
    held = Held(view)
    users = [content(message) for message in history if message["role"] == "user" and content(message).strip()]
    needed = {name: held.has(name) for name in needed_later(history, future)}
    by_kind = {
        f"later_{kind}": mean(float(there) for name, there in needed.items() if kind_of(name) == kind)
        for kind in ("path", "name", "figure")
    }
    before = Held(history)
    return {
        "fits": float(size(view) <= 1.02 * budget),
        "fill": size(view) / max(1, budget),
        "first_task": held.share_of(users[0]) if users else None,
        "last_user": held.share_of(users[-1]) if users else None,
        "instructions": mean(map(held.share_of, instructions(history))),
        "later": mean(map(float, needed.values())),
        **by_kind,
        "words": mean(float(word in held.words) for word in words_needed_later(history, future)),
        "evidence": mean(held.share_of(line) for line in evidence(history, needed)),
        "invented": mean(float(not before.has(name)) for name in held.names),
    }


def evidence(history: Messages, needed: Iterable[str]) -> list[str]:
    """The newest line of *history* that holds each of the *needed* names."""
    lines = [line for message in history for line in plain(message).splitlines()]
    return [next(line for line in reversed(lines) if name in line)[:400] for name in needed]


def repeated_prefix(views: Sequence[Messages]) -> dict[str, float]:
    """Tokens of each view that repeat the start of the one before, as a share; and how often less than all of it is."""
    repeated = sent = breaks = 0
    for before, after in pairwise(views):
        same = 0
        while same < min(len(before), len(after)) and before[same] == after[same]:
            same += 1
        repeated += size(after[:same])
        sent += size(after)
        breaks += same < len(before)
    return {"prefix": repeated / max(1, sent), "breaks": breaks / max(1, len(views) - 1)}


# The simple ways.


def drop_oldest(messages: Messages, budget: int) -> list[Message]:
    """System text, and the newest rounds that fit."""
    return _with_newest([each for each in messages if is_system(each)], messages, budget)


def keep_task(messages: Messages, budget: int) -> list[Message]:
    """System text, the first message of the user, and the newest rounds that fit."""
    first = next((at for at, each in enumerate(messages) if each["role"] == "user"), -1)
    head = [each for at, each in enumerate(messages) if is_system(each) or at == first]
    rest = [each for at, each in enumerate(messages) if at != first]
    return _with_newest(head, rest, budget)


def first_sentences(messages: Messages, budget: int) -> list[Message]:
    """System text, the first sentence of each older message, and the newest rounds."""
    head = [each for each in messages if is_system(each)]
    view = _with_newest(head, messages, budget - int(SUMMARY_SHARE * budget))
    older = [each for each in messages if not is_system(each)][: len(messages) - len(view)]
    lines: list[str] = []
    left = budget - size(view) - 20
    for message in reversed(older):
        line = f"{message['role']}: {_SENTENCE.split(plain(message).strip(), maxsplit=1)[0][:200]}"
        left -= _count(line) + 1
        if left < 0:
            break
        lines.insert(0, line)
    note = {"role": "user", "content": "Earlier in this conversation:\n" + "\n".join(lines)}
    return [*view[: len(head)], note, *view[len(head) :]]


def mask_results(messages: Messages, budget: int) -> list[Message]:
    """All tool results but the newest replaced by a word; then the oldest rounds go as well."""
    results = [at for at, each in enumerate(messages) if is_result(each)]
    masked = set(results[:-MASKED])
    view = [{**each, "content": "[left out]"} if at in masked else each for at, each in enumerate(messages)]
    return view if size(view) <= budget else drop_oldest(view, budget)


def _with_newest(head: list[Message], messages: Messages, budget: int) -> list[Message]:
    left = budget - size(head)
    kept: list[list[Message]] = []
    for part in reversed(rounds([each for each in messages if not is_system(each)])):
        left -= size(part)
        if left < 0 and kept:
            break
        kept.insert(0, part)
    return [*head, *chain.from_iterable(kept)]


SIMPLE: Mapping[str, Callable[[Messages, int], list[Message]]] = {
    "drop the oldest": drop_oldest,
    "keep the task": keep_task,
    "first sentences": first_sentences,
    "mask results": mask_results,
}
"""The simple ways, by name."""
