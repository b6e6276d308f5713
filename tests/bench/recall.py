"""How often the recall tool's page shows what left the view: ``python -m tests.bench.recall [--sessions FOLDER]``.

Every conversation of at least 4,000 tokens is fitted into a quarter of its tokens by Ullage; what the view no longer
holds is then asked for. One call of the tool is made for each question, with a query and nothing else, and its page is
searched for the evidence. No model is asked, so the figure says how good search and page are, not how well a model
writes queries. How questions are drawn: ``tests/bench/recall_questions.py``.

The conversations are generated (``tests.bench.sessions``, and talks of two people), or the sessions in a folder as
``tests.bench.quality`` reads them. Those with tool calls are agents' sessions, all others chats.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from proxy.core.decisions import CountedView
from proxy.features.recall.pieces import Piece, pieces_of
from proxy.features.recall.search import Arguments, answer
from proxy.features.recall.settings import Recall
from tests.bench import metrics
from tests.bench.quality import LEAST_TOKENS, RESERVE, read
from tests.bench.recall_questions import Question, drawn, entities_needed, talk
from tests.bench.sessions import generated
from tests.support.engine_fixtures import Replica, count_tokens

Message = dict[str, Any]

TALKS = 10
SHARE = 0.25
AGENTS = "agents' entities"


@dataclass(frozen=True)
class Answered:
    """One question and its page: its group, how it was drawn, if the evidence is there, tokens and seconds."""

    group: str
    kind: str
    shown: bool
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Conversation:
    """A conversation to ask about; its questions, unless they are drawn."""

    name: str
    messages: Sequence[Message]
    questions: Sequence[Question] | None = None

    @property
    def is_agents(self) -> bool:
        """True if tools were called in it."""
        return any(metrics.calls(message) for message in self.messages)

    @property
    def group(self) -> str:
        """The row that its questions count in."""
        if self.is_agents:
            return AGENTS
        text = "".join(metrics.content(message) for message in self.messages[:20])
        if sum("\u3040" <= character <= "\u9fff" for character in text) > len(text) // 3:
            return "chats without spaces"
        return "talks" if self.questions is not None else "chats"


def conversations(folder: Path | None) -> Iterator[Conversation]:
    """Yield the conversations in *folder*, or the generated ones."""
    for name, messages in read(folder) if folder else generated():
        yield Conversation(name, messages)
    if folder is None:
        for seed in range(TALKS):
            yield Conversation(f"talk-{seed}", *talk(seed))


def answers(conversation: Conversation, share: float, limits: Recall) -> Iterator[Answered]:
    """Ask every question of a conversation whose evidence its view at *share* of its tokens no longer holds."""
    messages, future = list(conversation.messages), list[Message]()
    if metrics.size(messages) < LEAST_TOKENS:
        return
    if conversation.is_agents:
        messages, future = metrics.split(messages)
    view = _view(messages, int(share * metrics.size(messages)))
    if view is None or view.edits.record is None:
        return
    pieces, sent = pieces_of(view), json.loads(view.body)["messages"]
    if conversation.is_agents:
        questions: Sequence[Question] = entities_needed(messages, future, sent)
    else:
        questions = _out_of_view(conversation.questions or drawn(conversation.name, messages), sent)
    for question in questions:
        page, seconds = _page(question.query, pieces, limits)
        shown = _flat(question.evidence) in _flat(page)
        yield Answered(conversation.group, question.kind, shown, count_tokens(page), seconds)


def _view(messages: Sequence[Message], budget: int) -> CountedView | None:
    """Return the view of *messages* in *budget* tokens; None if there is none."""
    body = json.dumps({"model": "gpt-4o", "messages": messages}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    plan = asyncio.run(Replica().plan(body, int(budget * RESERVE)))
    if plan.error or not isinstance(plan.decision.view, CountedView):  # type: ignore[union-attr]
        return None
    return plan.view


def _out_of_view(questions: Iterable[Question], sent: Sequence[Message]) -> list[Question]:
    in_view = _flat("\n".join(map(metrics.plain, sent)))
    return [question for question in questions if _flat(question.evidence) not in in_view]


def _flat(text: str) -> str:
    return " ".join(text.split())


def _page(query: str, pieces: Sequence[Piece], limits: Recall) -> tuple[str, float]:
    began = time.perf_counter()
    page = answer(Arguments(query, limit=limits.results), pieces, limits.max_tokens, count_tokens).text
    return page, time.perf_counter() - began


def rows(results: Sequence[Answered]) -> Iterator[list[str]]:
    """Yield the cells of each group, and of each way of drawing in it."""
    by_row: dict[tuple[str, str], list[Answered]] = defaultdict(list)
    for each in results:
        by_row[each.group, "all"].append(each)
        by_row[each.group, each.kind].append(each)
        if each.group != AGENTS:
            by_row["all chats", "all"].append(each)
    for (group, kind), answers_of_row in sorted(by_row.items()):
        figures = fmean(each.shown for each in answers_of_row), fmean(each.tokens for each in answers_of_row)
        slowest = max(each.seconds for each in answers_of_row) * 1e3
        yield [group, kind, str(len(answers_of_row)), f"{figures[0]:.3f}", f"{figures[1]:.0f}", f"{slowest:.0f}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.recall", description=__doc__)
    parser.add_argument("--sessions", type=Path, help="a folder of sessions; else generated ones")
    parser.add_argument("--share", type=float, default=SHARE, help="tokens of a view, as a share of the history")
    parser.add_argument("--tokens", type=int, default=Recall().max_tokens, help="tokens of a page at most")
    parser.add_argument("--results", type=int, default=Recall().results, help="results of a page")
    given = parser.parse_args()
    limits = Recall(results=given.results, max_tokens=given.tokens)
    results = [each for one in conversations(given.sessions) for each in answers(one, given.share, limits)]
    grid = Table(title=f"evidence shown by the default page, views at {given.share:.0%}")
    for heading in ("conversations", "questions", "n", "shown", "tokens", "slowest ms"):
        grid.add_column(heading, justify="left" if heading in ("conversations", "questions") else "right")
    for cells in rows(results):
        grid.add_row(*cells)
    Console(width=120).print(grid)


if __name__ == "__main__":
    main()
