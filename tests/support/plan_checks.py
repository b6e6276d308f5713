"""What must be true of every plan that an engine makes, and of the messages that go upstream."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from proxy.core.compaction.digest import BEGINNINGS
from proxy.core.compaction.truncate import MARKER, MIDDLE, OMITTED, SHORT_MARKER
from tests.stub.tokens import IMAGE_HIGH, request_tokens
from tests.support.api_formats import SYSTEMS, text_of
from tests.support.engine_fixtures import Message, Planned, message_slices, raw_members
from tests.support.tool_pair_checks import pair_violations

CHANGEABLE = ("messages", "input", "tools", "functions", "max_tokens", "max_completion_tokens", "max_output_tokens")
CHANGEABLE += ("contents", "generationConfig")
"""The members of a body that a plan may change."""
IDENTITIES = ("role", "type", "id", "tool_call_id", "tool_use_id", "call_id", "name", "image_url", "thinking")
IDENTITIES += ("signature", "encrypted_content", "thoughtSignature", "inlineData")
"""Members of a message that no clip may change."""
SHORT = 60
"""Characters of a text that is always small enough to stay whole."""


def plan_problems(body: bytes, plan: Planned, window: int) -> list[str]:
    """One sentence for each promise that *plan* breaks against the client's *body*; none if it refuses."""
    if plan.error is not None:
        return [] if plan.error.code == "context_length_exceeded" else [f"refused with {plan.error.code}"]
    sent = json.loads(plan.body)
    problems = size_problems(json.loads(body), sent, window)
    if plan.report.outcome == "verbatim":
        return problems + ([] if plan.body == body else ["called verbatim and was changed"])
    return problems + outline_problems(body, plan.body) + message_problems(body, plan.body)


def size_problems(raw: Mapping[str, Any], sent: Mapping[str, Any], window: int) -> list[str]:
    """What is wrong with the size of *sent*, counted by the strict upstream's own counter."""
    requested = sent.get("max_completion_tokens") or sent.get("max_tokens")
    wanted = raw.get("max_completion_tokens") or raw.get("max_tokens")
    problems = [f"the output figure rose from {wanted} to {requested}"] if (requested or 0) > (wanted or 0) else []
    reserved = requested or window // 32
    # An image whose size cannot be read is a guess on both sides: where only guesses are too much, the provider judges.
    tokens = request_tokens(sent) - IMAGE_HIGH * sum(map(_unreadable_images, sent["messages"]))
    return problems + ([f"{tokens} + {reserved} > {window}"] if tokens + reserved > window else [])


def _unreadable_images(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    parts = [part for part in content if part.get("type") == "image_url"] if isinstance(content, list) else []
    return sum(part["image_url"].get("detail") != "low" for part in parts)


def outline_problems(body: bytes, sent: bytes) -> list[str]:
    """Members beside those a plan may change that are not the client's own bytes in the client's order."""
    was, now = raw_members(body), raw_members(sent)
    problems = [] if list(was) == list(now) else [f"members {list(was)} became {list(now)}"]
    return problems + [f"{key} was changed" for key in was if key not in CHANGEABLE and was[key] != now.get(key)]


def message_problems(body: bytes, sent: bytes) -> list[str]:
    """What is wrong with the messages of *sent* as a view of *body*'s."""
    raw, view = message_slices(body), message_slices(sent)
    was, now = [list(map(json.loads, pieces)) for pieces in (raw, view)]
    new = Counter(map(_without_position, pair_violations(now))) - Counter(map(_without_position, pair_violations(was)))
    problems = [f"new violation: {sentence}" for sentence in new]
    reasons = [_problem_of_cut(raw, was, view, now, cut) for cut in range(len(raw) + 1)]
    if all(reasons):
        problems.append("not a view at any cut: " + next((r for r in reasons if r and r != "length"), "length"))
    shown = _encodable("\n".join(map(text_of, now)))
    users = [
        _encodable(text_of(message))
        for message in was
        if message["role"] not in (*SYSTEMS, "assistant", "tool", "function")
    ]
    for label, text in (("first task", users[0]), ("newest user text", users[-1])) if users else ():
        if text not in shown and not (len(text) > SHORT and text[:4] in shown):
            problems.append(f"the {label} is neither there nor clipped")
    if sum(m["role"] in SYSTEMS for m in now) != sum(m["role"] in SYSTEMS for m in was):
        problems.append("another number of system messages")
    return problems


def _encodable(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _without_position(sentence: str) -> str:
    return re.sub(r"^messages\[\d+\]: ", "", sentence)


def _problem_of_cut(raw: list[bytes], was: list[Message], view: list[bytes], now: list[Message], cut: int) -> str:
    """Why *view* is not *raw* with everything before *cut* folded; empty when it is."""
    head = [raw[i] for i in range(cut) if was[i]["role"] in SYSTEMS]
    carried = cut < len(raw) and was[cut]["role"] not in (*SYSTEMS, "assistant", "tool", "function")
    start = cut + carried if cut else 0
    frame = len(head) + 1 if cut else 0
    if frame + len(raw) - start != len(view):
        return "length"
    if view[: len(head)] != head:
        return "a folded system message was changed"
    for i in range(start, len(raw)):
        at = frame + i - start
        if view[at] != raw[i] and not is_clip(was[i], now[at]) and not is_replaced(was[i], now[at]):
            return f"messages[{at}] is neither the client's nor a clip of it"
    if not cut:
        return ""
    users = [i for i in range(cut) if was[i]["role"] not in (*SYSTEMS, "assistant", "tool", "function")]
    own = cut if carried else users[0] if users else None
    return _carrier_problem(raw[own] if own is not None else b"", view[len(head)])


def _carrier_problem(own: bytes, carrier: bytes) -> str:
    if not own:
        return "" if set(json.loads(carrier)) == {"role", "content"} else "an invented carrier with odd members"
    was, now = raw_members(own), raw_members(carrier)
    if {k: v for k, v in was.items() if k != "content"} != {k: v for k, v in now.items() if k != "content"}:
        before, after = json.loads(own), json.loads(carrier)
        if {**before, "content": 0} != {**after, "content": 0} or not text_of(after):
            return "the carrier's other members were changed"
    run = was.get("content", b'""')[1:-1].strip()
    before, shown = text_of(json.loads(own)), text_of(json.loads(carrier))
    if run in now["content"] or (len(before) > SHORT and before[:4] in shown):
        return ""
    return "the carrier's own content is not one unchanged run"


def is_clip(was: Any, now: Any) -> bool:
    """True if *now* is *was* with some texts shortened."""
    if isinstance(was, dict) and isinstance(now, dict):
        if was.keys() != now.keys() or any(was[key] != now[key] for key in IDENTITIES if key in was):
            return False
        return all(is_clip(was[key], now[key]) for key in was)
    if isinstance(was, list) and isinstance(now, list):
        return len(was) == len(now) and all(map(is_clip, was, now))
    if isinstance(was, str) and isinstance(now, str) and was != now:
        return _is_clipped_text(was, now) or _is_clipped_json(was, now)
    return bool(was == now)


def is_replaced(was: Any, now: Any) -> bool:
    """True if *now* is the tool result *was* with a line, or head and end of it, in its place."""
    if was.get("role") not in ("tool", "function") or was.keys() | {"content"} != now.keys():
        return False
    if any(was[key] != now[key] for key in was if key != "content"):
        return False
    before, shown = text_of(was), text_of(now)
    if shown.startswith(("[Old ", "[Left out: ")):
        return True
    head, marker, rest = shown.partition(MIDDLE)
    names, tail = _names_and_tail(rest.removeprefix("\n"))
    if not marker or not all(name in before for name in names):
        return False
    return before.startswith(head.removesuffix("\n")) and before.endswith(tail)


def _names_and_tail(rest: str) -> tuple[list[str], str]:
    """The words of the digest's lines at the beginning of *rest*, and what stands behind them."""
    names: list[str] = []
    lines = rest.split("\n")
    while lines and (beginning := next(filter(lines[0].startswith, BEGINNINGS), "")):
        names += [word.strip("“”") for word in lines.pop(0).removeprefix(beginning).split()]
    return names, "\n".join(lines)


def _is_clipped_text(was: str, now: str) -> bool:
    pieces = [now.partition(marker) for marker in (MARKER, SHORT_MARKER) if marker in now]
    return (
        now == OMITTED
        or was.startswith(now)
        or any(was.startswith(head) and was.endswith(tail) for head, _, tail in pieces)
    )


def _is_clipped_json(was: str, now: str) -> bool:
    try:
        return is_clip(json.loads(was), json.loads(now))
    except ValueError:
        return False
