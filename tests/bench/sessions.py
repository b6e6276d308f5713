"""Seeded sessions of coding agents and chats, for ``tests.bench.quality``: the same seed, the same sessions.

An agent searches, reads, edits and runs tests in a repository that is made up; its user now and then adds a rule or a
fact. What it says and does next refers back to what it wrote itself, to what its user said, or to what only a tool's
output held. Recorded sessions refer to tools' output more often (docs/benchmarks.md has the shares). In a chat a person
plans an event, and what was agreed is taken up again later.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Message = dict[str, Any]

AGENTS, CHATS = 12, 4
"""Sessions of each kind: some 20,000 to 40,000 and 6,000 tokens long."""

SILENT, OPENER = 0.16, 0.75
"""Share of recorded messages with calls that hold no text, and of the others' first sentences that name nothing."""

OPENERS = (
    "Let me look at this more closely.",
    "That explains part of it.",
    "Good, one step further.",
    "I see what happens here now.",
    "This is not what I expected.",
)

WROTE, TOLD = 0.45, 0.55
"""Where a name that is needed later comes from: up to 0.45 from the agent itself, to 0.55 from its user, else from a
tool's output alone (recorded: .49, .05 and .47)."""

SYSTEM = (
    "You are a coding agent. Work on the repository with the tools you have, one step at a time. Read before you edit, "
    "run the tests after each change, and say briefly what you do and why."
)
PARTS = (
    *["api", "billing", "cache", "config", "export", "gateway", "importer", "ledger", "mailer"],
    *["metrics", "orders", "queue", "reports", "search", "storage", "users"],
)
ACTIONS = (
    *["apply", "build", "check", "collect", "decode", "drain", "expire", "fetch", "flush", "load"],
    *["merge", "normalise", "parse", "publish", "resolve", "rotate"],
)
THINGS = (
    *["account", "batch", "cursor", "entry", "event", "header", "index", "invoice", "limit", "order"],
    *["page", "record", "row", "session", "shard", "token"],
)
ERRORS = ["ConfigError", "DecodeError", "KeyError", "LimitError", "SchemaError", "TimeoutError", "ValueError"]
RULES = (
    "Never change anything under vendor/{part}.",
    "Please keep the public function {name} as it is, other teams call it.",
    "Always write dates as ISO 8601 in {path}.",
    "Do not add a dependency for {thing} handling.",
    "From now on use {error} instead of a bare exception in {path}.",
    "The customer's limit is {figure} {thing}s a minute; it must not be exceeded.",
    "Ticket {ticket} is about this as well, mention it in the last message.",
)
"""What a user adds on the way. Each names something that later work has to keep to."""

_PROSE = (
    "the loop walks over every entry once and stops at the first that does not match what the caller passed in so the "
    "rest of them stay where they are until somebody asks again with a wider range"
)
FILLER = _PROSE.split()


class Agent:
    """One session of a coding agent, round by round."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.messages: list[Message] = []
        self.wrote: list[str] = []
        self.told: list[str] = []
        self.shown: list[str] = []
        self.calls = 0

    def session(self) -> list[Message]:
        """All of its messages, the last one the model's."""
        self.messages.append({"role": "system", "content": SYSTEM})
        path, name = self._path(), self._name()
        loss = f"{name} in {path} loses {self._figure()} rows a night."
        task = f"{loss} Find out why, mend it and add a test. {self._rule()}"
        self.messages.append({"role": "user", "content": task})
        self.told += [path, name]
        for number in range(self.pick.randrange(45, 75)):
            if number and self.pick.random() < 0.08:
                self._interrupt()
            self.pick.choice((self._search, self._read, self._read, self._edit, self._test))()
        self.messages.append({"role": "assistant", "content": f"Done: {self._reference()} and {self._reference()}."})
        return self.messages

    def _interrupt(self) -> None:
        self.messages.append({"role": "assistant", "content": f"I changed {self._reference()}. Shall I go on?"})
        self.messages.append({"role": "user", "content": f"Yes, go on. {self._rule()}"})

    def _rule(self) -> str:
        facts = {"name": self._name(), "path": self._path(), "figure": self._figure(), "ticket": self._ticket()}
        text = self.pick.choice(RULES).format(
            part=self.pick.choice(PARTS),
            thing=self.pick.choice(THINGS),
            error=self.pick.choice(ERRORS),
            **facts,
        )
        self.told += [fact for fact in facts.values() if fact in text]
        return text

    def _search(self) -> None:
        name = self._known(self._name)
        lines = [self._hit(name) for _ in range(self.pick.randrange(5, 25))]
        self._round(f"Where is {name} used?", "grep", {"pattern": name, "path": "src/"}, "\n".join(lines))

    def _hit(self, name: str) -> str:
        path = self._path()
        self.shown += [path] * (self.pick.random() < 0.3)
        return f"{path}:{self.pick.randrange(1, 900)}:    {self.pick.choice(THINGS)} = {name}({self._words(3)})"

    def _read(self) -> None:
        path = self._known(self._path)
        lines = [f"{at}\t{self._line()}" for at in range(1, self.pick.randrange(30, 120))]
        said = f"I look at {path}, because of {self._reference()}."
        self._round(said, "read_file", {"path": path}, "\n".join(lines))

    def _line(self) -> str:
        if self.pick.random() < 0.1:
            name = self._name()
            self.shown.append(name)
            return f"def {name}({self.pick.choice(THINGS)}, {self.pick.choice(THINGS)}):"
        if self.pick.random() < 0.05:
            figure = self._figure()
            self.shown.append(figure)
            return f"    {self.pick.choice(THINGS).upper()}_{self.pick.choice(THINGS).upper()} = {figure}"
        return f"    # {self._words(self.pick.randrange(4, 9))}"

    def _edit(self) -> None:
        path, name = self._known(self._path), self._known(self._name)
        given = {"path": path, "old": f"return {name}(row)", "new": f"return {name}(row, {self._figure()})"}
        self.wrote.append(name)
        said = f"{name} forgets what {self._reference()} says, so I pass it on."
        self._round(said, "edit_file", given, f"{path} was changed.")

    def _test(self) -> None:
        failed, passed = self.pick.randrange(0, 3), self.pick.randrange(100, 900)
        lines = [f"tests/test_{self.pick.choice(PARTS)}.py {'.' * self.pick.randrange(5, 60)}" for _ in range(20)]
        for _ in range(failed):
            test, error = f"test_{self._name()}", self.pick.choice(ERRORS)
            self.shown += [test, self._figure()]
            lines.append(f"FAILED {self._path()}::{test} - {error}: expected {self.shown[-1]}, got {self._figure()}")
        lines.append(f"{failed} failed, {passed} passed")
        self._round(
            f"Now the tests, {self._reference()} first.", "run", {"command": "python -m pytest -q"}, "\n".join(lines)
        )

    def _round(self, said: str, tool: str, given: dict[str, str], result: str) -> None:
        self.calls += 1
        if self.pick.random() < SILENT:
            said = ""
        elif self.pick.random() < OPENER:
            said = f"{self.pick.choice(OPENERS)} {said}"
        function = {"name": tool, "arguments": json.dumps(given)}
        call = {"id": f"call_{self.calls}", "type": "function", "function": function}
        self.messages.append({"role": "assistant", "content": said, "tool_calls": [call]})
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        self.wrote += [value for key, value in given.items() if key in ("path", "pattern")]

    def _reference(self) -> str:
        """Something that was said before: by the agent itself, by its user, or by a tool only."""
        source = self.pick.random()
        known = self.wrote if source < WROTE else self.told if source < TOLD else self.shown
        known = known or self.told
        # What is newer comes up again more often, but not only that.
        found = known[int(len(known) * self.pick.random() ** 0.6)]
        self.wrote.append(found)
        return found

    def _known(self, fresh: Callable[[], str]) -> str:
        """A name of a kind: one that the session knows, or a new one."""
        wants_path = fresh == self._path
        names = (each for each in self.wrote + self.told if not each.isdigit())
        known = [each for each in names if ("/" in each) == wants_path]
        return self.pick.choice(known) if known and self.pick.random() < 0.6 else fresh()

    def _path(self) -> str:
        return f"src/{self.pick.choice(PARTS)}/{self.pick.choice(ACTIONS)}_{self.pick.choice(THINGS)}.py"

    def _name(self) -> str:
        return f"{self.pick.choice(ACTIONS)}_{self.pick.choice(THINGS)}_{self.pick.choice(THINGS)}"

    def _figure(self) -> str:
        return str(self.pick.randrange(1_000, 99_999))

    def _ticket(self) -> str:
        return f"OPS{self.pick.randrange(100, 9_999)}"

    def _words(self, count: int) -> str:
        return " ".join(self.pick.choice(FILLER) for _ in range(count))


PLACES = ["Lisbon", "Graz", "Bergen", "Ghent", "Porto", "Tartu", "Bologna", "Utrecht", "Seville", "Brno"]
PEOPLE = ["Amira", "Boris", "Chen", "Dilek", "Elena", "Farid", "Greta", "Hiro", "Ines", "Jonas"]
TOPICS = ["travel", "rooms", "meals", "speakers", "music", "insurance", "printing", "transport", "tickets", "weather"]

WISHES = ("Please keep {0} below {1}.", "{0} is settled by {2}, at {1}.", "Ask {2} about {0}, number {1}.")


def chat(seed: int) -> list[Message]:
    """A long chat about planning an event, the last message the assistant's."""
    pick = random.Random(seed)
    place, budget = pick.choice(PLACES), pick.randrange(5_000, 90_000)
    agreed = [place, str(budget)]
    opening = f"Help me plan a workshop in {place}. The budget is {budget} euros and must not be exceeded."
    messages: list[Message] = [{"role": "user", "content": opening}]
    for _ in range(pick.randrange(45, 60)):
        person, figure, topic = pick.choice(PEOPLE), str(pick.randrange(100, 9_999)), pick.choice(TOPICS)
        earlier, latest = pick.choice(agreed), agreed[-1]
        advice = " ".join(pick.choice(FILLER) for _ in range(pick.randrange(30, 90)))
        messages.append(
            {"role": "assistant", "content": f"On {topic}: {advice}. That goes with {earlier} and {latest}. What next?"}
        )
        wish = pick.choice(WISHES)
        background = " ".join(pick.choice(FILLER) for _ in range(pick.randrange(10, 40)))
        messages.append({"role": "user", "content": f"{wish.format(topic, figure, person)} {background}."})
        agreed.append(figure)
    messages.append({"role": "assistant", "content": f"Then it is {pick.choice(agreed)} and {pick.choice(agreed)}."})
    return messages


def generated(seed: int = 1) -> Iterator[tuple[str, list[Message]]]:
    """The name and the messages of each session."""
    for at in range(AGENTS):
        yield f"agent-{at}", Agent(seed * 1_000 + at).session()
    for at in range(CHATS):
        yield f"chat-{at}", chat(seed * 1_000 + 500 + at)
