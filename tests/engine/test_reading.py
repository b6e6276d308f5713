"""Reading requests: the same whatever was read before, each text counted once, and nothing shared by tenants."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter as Tally
from collections.abc import Callable, MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest
from cachebox import LRUCache
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.apis import chat
from proxy.core.apis.base import PER_REPLY
from proxy.core.apis.json_scan import scan
from proxy.core.apis.tool_declarations import tools_tokens
from proxy.core.conversation import ItemText, lay_out, prefix_hashes
from proxy.core.errors import InvalidRequest
from proxy.core.tokens.counting import Meter
from proxy.core.tokens.media import prices
from proxy.engine.reading import (
    PREFIX_FROM,
    CountedBody,
    Prefix,
    PrefixHasher,
    Reader,
    name_in,
    scope_of,
)
from proxy.tasks import LARGE
from tests.support import conversation_strategies
from tests.support.sample_conversations import AGENT_TOOLS, agent_session, chat_turn

ANN, BOB = b"a" * 32, b"b" * 32
KEY = b"k" * 32
Body = tuple[bytes, bytes, str]


class Letters:
    """Counts letters, twice as many in the encoding ``wide``, and remembers the texts that it counted."""

    def __init__(self) -> None:
        self.counted: Tally[str] = Tally()
        self.threads: set[int] = set()

    loaded = ("narrow", "wide")

    def counter(self, encoding: str) -> Callable[[str], int]:
        def count(text: str) -> int:
            self.counted[text] += 1
            self.threads.add(threading.get_ident())
            return len(text) * (2 if encoding == "wide" else 1)

        return count


class ReaderWithCaches:
    """A reader with caches of its own, and its counter."""

    def __init__(self, size: int = 10_000) -> None:
        self.counter = Letters()
        self.memories: list[MutableMapping[Any, Any]] = [LRUCache(size) for _ in range(4)]
        self.reader = Reader(self.counter, *self.memories)

    async def read(self, body: bytes, tenant: bytes = ANN, encoding: str = "narrow", model: str = "") -> CountedBody:
        """The reading of *body*, its structure and links computed as the engine does."""
        reading = await self.reader.read(self.reader.locate(chat, tenant, body), encoding, model)
        reading.layout()
        reading.prefix_hashes(KEY + tenant, "")
        return reading


def view_count(caching: ReaderWithCaches, encoding: str, tenant: bytes) -> Meter:
    """The counter for the texts of a tenant's views."""
    located = caching.reader.locate(chat, tenant, whole([]))
    return caching.reader.count_body(located, encoding).count


def facts(reading: CountedBody, tenant: bytes = ANN) -> tuple[object, ...]:
    """Everything that is known of a body, without what only serves the next reading."""
    outline = reading.envelope
    around = (outline.text, outline.model, outline.stream, outline.requested_output, dict(outline.fields))
    spans = (reading.scan.start, reading.scan.end, reading.scan.spans)
    read = (reading.items, reading.counts.members, reading.counts.fixed, reading.counts.roles.history)
    return spans, around, read, reading.layout(), reading.prefix_hashes(KEY + tenant, "")


def whole(messages: list[dict[str, Any]], **around: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **around}).encode()


def cold(body: bytes, tenant: bytes = ANN, encoding: str = "narrow") -> tuple[object, ...]:
    """What a reader that never read anything knows of *body*."""
    return facts(asyncio.run(ReaderWithCaches().read(body, tenant, encoding)), tenant)


async def test_what_a_reading_says() -> None:
    """Weights are those of the api_format, the fixed part is everything but the history."""
    messages = [{"role": "system", "content": "abc"}, {"role": "user", "content": "hello"}]
    caching = ReaderWithCaches()
    reading = await caching.read(whole(messages, tools=[{"a": 1}], max_tokens=7, response_format=None))
    assert [item.tokens for item in reading.items] == [chat.PER_MESSAGE + 3, chat.PER_MESSAGE + 5]
    assert reading.counts.members == {"tools": len('[{"a": 1}]')}
    assert reading.counts.fixed == PER_REPLY + chat.PER_MESSAGE + 3 + 10
    assert reading.counts.roles.history == chat.PER_MESSAGE + 5
    assert reading.envelope.requested_output == 7
    assert reading.layout() == lay_out(reading.items)
    assert reading.prefix_hashes(KEY, "") == prefix_hashes(KEY, "", reading.items)


fillers = st.sampled_from(["x" * (PREFIX_FROM - 200), "x" * PREFIX_FROM, "é" * 6_000, "x" * 40_000, ""])
steps = st.sampled_from(["append", "append", "append", "repeat", "edit", "fork", "tools", "model", "shrink", "space"])


@st.composite
def sequences(draw: st.DrawFn) -> list[Body]:
    """Bodies as clients send them one after the other: growing, edited, forked, with other tools and white space."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": draw(fillers)}, *draw(talk)]
    around: dict[str, Any] = {"before": {"model": "m"}, "after": {}, "space": ""}
    sent: list[Body] = []
    for step in draw(st.lists(steps, min_size=2, max_size=7)):
        messages = list(messages)
        if step == "append":
            messages += draw(talk)
        elif step == "edit":
            messages[draw(st.integers(0, len(messages) - 1))] = {"role": "user", "content": draw(fillers)}
        elif step == "fork":
            messages[draw(st.integers(1, len(messages))) :] = draw(talk)
        elif step == "shrink":
            del messages[1 : draw(st.integers(1, len(messages)))]
        elif step == "space":
            around["space"] = draw(st.sampled_from(["", " ", "\n\t"]))
        elif step != "repeat":
            side = draw(st.sampled_from(["before", "after"]))
            value: Any = draw(conversation_strategies.tools) if step == "tools" else draw(st.sampled_from(["m", "n"]))
            around = {**around, "before": {**around["before"]}, "after": {**around["after"]}}
            other = "after" if side == "before" else "before"
            around[other].pop(step, None)
            around[side][step] = value
        tenant, encoding = draw(st.sampled_from([ANN, ANN, ANN, BOB])), draw(st.sampled_from(["narrow"] * 3 + ["wide"]))
        sent.append((written(messages, around), tenant, encoding))
    return sent


talk = conversation_strategies.conversations(with_orphans=True, long=False, max_size=2)


def written(messages: list[dict[str, Any]], around: dict[str, Any]) -> bytes:
    space = around["space"]
    listed = f"{space},{space}".join(
        conversation_strategies._write(message, space, True, False) for message in messages
    )
    fields = [f'"{key}":{json.dumps(value)}' for key, value in around["before"].items()]
    fields.append(f'"messages"{space}:{space}[{space}{listed}{space}]')
    fields += [f'"{key}":{json.dumps(value)}' for key, value in around["after"].items()]
    return ("{" + ",".join(fields) + "}").encode()


@settings(max_examples=120)
@given(sequences(), st.sampled_from([2, 10_000]))
@pytest.mark.slow
def test_what_was_read_before_changes_nothing(sent: list[Body], size: int) -> None:
    """Every body reads as it does cold, whatever came before it, however much the memories still hold."""

    async def run() -> list[tuple[object, ...]]:
        caching = ReaderWithCaches(size)
        return [facts(await caching.read(*body), body[1]) for body in sent]

    for read, body in zip(asyncio.run(run()), sent, strict=True):
        assert read == cold(*body)


@settings(max_examples=40)
@given(sequences())
@pytest.mark.slow
def test_readings_may_overlap(sent: list[Body]) -> None:
    """Bodies read at the same time do not disturb each other."""

    async def run() -> list[CountedBody]:
        caching = ReaderWithCaches()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(caching.read(*body)) for body in sent]
        return [task.result() for task in tasks]

    for reading, body in zip(asyncio.run(run()), sent, strict=True):
        assert facts(reading, body[1]) == cold(*body)


async def test_only_new_text_is_counted() -> None:
    """A conversation that grows costs the count of what is new; the same body again costs none."""
    caching = ReaderWithCaches()
    session = agent_session(30, 100)
    for end in range(2, len(session) + 1, 2):
        await caching.read(whole(session[:end], tools=AGENT_TOOLS))
    said = [text for text in caching.counter.counted if len(text) > 40]
    assert len(said) > 30
    assert [text for text in said if caching.counter.counted[text] != 1] == []
    total = caching.counter.counted.total()
    await caching.read(whole(session, tools=AGENT_TOOLS))
    assert caching.counter.counted.total() == total


async def test_items_are_recognised_wherever_they_stand() -> None:
    """An item moved, or said twice in one body, is counted once."""
    caching = ReaderWithCaches()
    one, two = chat_turn(1, 50)
    await caching.read(whole([one, two]))
    total = caching.counter.counted.total()
    await caching.read(whole([two, one, one, two]))
    assert caching.counter.counted.total() == total
    await caching.read(whole([{"role": "user", "content": "new"}] * 5))
    assert caching.counter.counted["new"] == 1


def test_a_short_text_is_counted_once_in_a_pass() -> None:
    """What comes again and again, such as a tool's name, is looked up; another pass counts it anew."""
    caching = ReaderWithCaches()
    count = caching.reader.count("o200k_base")
    assert [count("read_file") for _ in range(3)] == [caching.counter.counter("o200k_base")("read_file")] * 3
    assert caching.counter.counted["read_file"] == 2
    caching.reader.count("o200k_base")("read_file")
    assert caching.counter.counted["read_file"] == 3


async def test_a_short_text_is_counted_once_for_each_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a tool comes with every request; of a tenant that sent very many short texts none is remembered."""
    caching = ReaderWithCaches()
    for number in range(3):
        await caching.read(whole([{"role": "tool", "name": "read_file", "content": f"result {number}"}]))
    assert caching.counter.counted["read_file"] == 1
    await caching.read(whole([{"role": "tool", "name": "read_file", "content": "result 3"}]), BOB)
    assert caching.counter.counted["read_file"] == 2
    monkeypatch.setattr("proxy.engine.reading.KEPT_SHORT", 1)
    for number in range(4, 7):
        await caching.read(whole([{"role": "tool", "name": "read_file", "content": f"result {number}"}]))
    assert caching.counter.counted["read_file"] == 4


@pytest.mark.parametrize("rounds", [2, 60])
async def test_tenants_share_nothing(rounds: int) -> None:
    """A body that one tenant sent is counted anew for another: items, tools and whole prefixes."""
    caching = ReaderWithCaches()
    body = whole(agent_session(rounds, 100), tools=AGENT_TOOLS)
    assert (len(body) > PREFIX_FROM) == (rounds > 2)
    mine = await caching.read(body, ANN)
    asked = Tally(caching.counter.counted)
    assert asked.total() > 0
    theirs = await caching.read(body, BOB)
    assert caching.counter.counted == Tally({text: 2 * times for text, times in asked.items()})
    assert mine.items == theirs.items
    assert mine.prefix_hashes(KEY + ANN, "") != theirs.prefix_hashes(KEY + BOB, "")


async def test_encodings_share_no_counts() -> None:
    """The same bytes in another encoding have other weights, and the structure follows them."""
    caching = ReaderWithCaches()
    body = whole(agent_session(60, 100))
    narrow = await caching.read(body)
    wide = await caching.read(body, encoding="wide")
    assert wide.counts.roles.history > narrow.counts.roles.history
    assert wide.layout() == lay_out(wide.items)
    assert (await caching.read(body)).layout() == lay_out(narrow.items)


async def test_models_share_no_prices() -> None:
    """The same image and tools weigh what each model makes of them, whichever was asked first; text weighs the same."""
    image = {"type": "image_url", "image_url": {"url": "https://x.y/z.png"}}
    said = [{"role": "user", "content": [image]}, *agent_session(60, 100)]
    body, models = whole(said, tools=AGENT_TOOLS), ("gpt-4o", "gpt-4o-mini", "claude-3-haiku", "")
    caching = ReaderWithCaches()
    for model in (*models, *models):
        reading = await caching.read(body, model=model)
        assert reading.items[0].media == prices(model).image.tokens(None, "auto")
        assert reading.items[1:] == (await ReaderWithCaches().read(body)).items[1:]
        declared = tools_tokens(json.dumps(AGENT_TOOLS), len)
        assert reading.counts.members["tools"] == (
            declared if model.startswith("gpt") else len(json.dumps(AGENT_TOOLS))
        )


async def test_labels_and_keys_share_no_links() -> None:
    """Links that were computed under one key or label are not used for another."""
    caching = ReaderWithCaches()
    body = whole(agent_session(60, 100))
    reading = await caching.read(body)
    for key, label in ((KEY, ""), (KEY, "x"), (ANN, "x"), (KEY, "")):
        assert reading.prefix_hashes(key, label) == prefix_hashes(key, label, reading.items)
        again = await caching.read(body)
        assert again.prefix_hashes(key, label) == prefix_hashes(key, label, reading.items)


async def test_much_new_text_is_counted_off_the_loop() -> None:
    """Text above the limit is counted in another thread, less of it is not."""
    caching = ReaderWithCaches()
    await caching.read(whole([{"role": "user", "content": "x" * (LARGE // 2)}]))
    assert caching.counter.threads == {threading.get_ident()}
    await caching.read(whole([{"role": "user", "content": "x" * (LARGE + 1)}]))
    assert len(caching.counter.threads) == 2


async def test_large_tools_are_counted_off_the_loop() -> None:
    """Tools and schemas above the limit are counted in another thread, once."""
    caching = ReaderWithCaches()
    body = whole([], tools=[{"type": "function", "function": {"name": "f", "description": "x" * LARGE}}])
    first = await caching.read(body)
    assert threading.get_ident() not in caching.counter.threads
    asked = caching.counter.counted.total()
    assert (await caching.read(body)).counts.members == first.counts.members
    assert caching.counter.counted.total() == asked


async def test_memories_smaller_than_a_conversation() -> None:
    """A memory that holds fewer items than a conversation has loses none of it."""
    caching = ReaderWithCaches(3)
    session = agent_session(30, 20)
    for end in (3, 9, 31, 61):
        reading = await caching.read(whole(session[:end]))
        assert facts(reading) == facts(await ReaderWithCaches().read(whole(session[:end])))


async def test_no_memory_keeps_a_body_alive() -> None:
    """Nothing that is remembered holds a slice of a body: no bytes but digests, and no text of an item."""
    caching = ReaderWithCaches()
    secret = "remember-me-not"
    await caching.read(
        whole([{"role": "user", "content": secret + "x" * LARGE}, *agent_session(3, 10)], tools=AGENT_TOOLS)
    )
    assert all(caching.memories)
    assert secret not in repr([dict(memory) for memory in caching.memories])


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[1]}',
        b'{"messages":["x"]}',
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"user"}],"tools":"\xff"}',
        b'{"messages":[{"role":"user"}],"tools":"' + b"x" * PREFIX_FROM + b'\xff"}',
        b'{"messages":[{"role":"user"}],"model":1}',
        b'{"model":"a","messages":[{"role":"user"}],"model":"a"}',
        b'{"model":"a","messages":[{"role":"user"}],"\\u006dodel":"a"}',
        b'{"messages":[{"role":"user"}],"input":1,"input":2}',
        b'{"messages":[' + b"[" * 100_000 + b"]" * 100_000 + b"]}",
        b'{"messages":[{"role":"user","content":' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}]}",
        b'{"messages":[{"role":"user"}],"tools":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=range(12),
)
async def test_what_cannot_be_read_is_the_clients_mistake(body: bytes) -> None:
    """A bad item or outline is an InvalidRequest, the first time and the second."""
    caching = ReaderWithCaches()
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            await caching.read(body)


async def test_a_known_beginning_excuses_nothing() -> None:
    """A body that begins like a good one is still refused for what follows."""
    caching = ReaderWithCaches()
    good = whole(agent_session(60, 100))
    await caching.read(good)
    assert len(scan(good, "messages").spans) > 60
    for rest in (b'],"messages":[]}', b'],"\\u006dessages":[1]}', b"]", b",]}", b",1]}", b'],"x":"\xff"}', b"]} x"):
        with pytest.raises(InvalidRequest):
            await caching.read(good[:-2] + rest)
    assert facts(await caching.read(good)) == facts(await ReaderWithCaches().read(good))


async def test_tools_of_ours_are_counted_once_for_each_way_to_read_them() -> None:
    """What is the same for every caller is counted again only for another encoding or another way to read tools."""
    caching, text = ReaderWithCaches(), json.dumps(AGENT_TOOLS)
    plain = caching.reader.tokens_of_tools(text, "wide", "house-model")
    assert plain == 2 * len(text)
    assert caching.reader.tokens_of_tools(text, "wide", "other-model") == plain
    assert caching.counter.counted[text] == 1
    assert caching.reader.tokens_of_tools(text, "narrow", "house-model") == len(text)
    assert caching.reader.tokens_of_tools(text, "wide", "gpt-5") < plain


def test_what_comes_again_is_counted_once_for_each_tenant() -> None:
    """A long text that stands in every view is counted once; another tenant's, or another encoding's, anew."""
    caching, text = ReaderWithCaches(), "a summary " * 200
    for _ in range(3):
        assert view_count(caching, "narrow", ANN)(text) == len(text)
    assert caching.counter.counted[text] == 1
    assert view_count(caching, "wide", ANN)(text) == 2 * len(text)
    assert view_count(caching, "narrow", BOB)(text) == len(text)
    assert caching.counter.counted[text] == 3


def test_a_long_paragraph_of_two_texts_is_counted_once() -> None:
    """The text of a carrier is counted without the long parts of its block, which was counted when it was written."""
    caching, digest = ReaderWithCaches(), "Names mentioned: " + "evict_rows, " * 100
    count = view_count(caching, "narrow", ANN)
    block = f"A summary.\n\n{digest}\n\nThe end."
    carrier = f"The task\n\n{block}"
    assert count(block) == len(block)
    assert count(carrier) == len(carrier)
    assert caching.counter.counted[f"{digest}\n\n"] == 1
    assert not caching.counter.counted[carrier]


async def test_many_items_of_nothing_are_refused() -> None:
    """Thousands of empty objects are no conversation, alone or behind one; as many short messages are."""
    caching = ReaderWithCaches()
    messages = agent_session(4, 2_000)
    start = json.dumps({"model": "m", "messages": messages}).encode()
    await caching.read(start)
    for beginning in ([], messages):
        many = 1_001 if not beginning else 9_000
        body = json.dumps({"model": "m", "messages": [*beginning, *[{}] * many]}).encode()
        with pytest.raises(InvalidRequest, match="hardly anything"):
            caching.reader.locate(chat, ANN, body)
    few = json.dumps({"model": "m", "messages": [{}] * 1_000}).encode()
    short = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}] * 2_000}).encode()
    for body in (few, short):
        assert caching.reader.locate(chat, ANN, body).scan.spans


async def test_items_that_come_again_in_a_body_are_read_once() -> None:
    """Equal short items are one reading, whatever stands between them."""
    caching = ReaderWithCaches()
    messages = [{"role": "user", "content": word} for word in ("yes", "no") * 50]
    reading = await caching.read(json.dumps({"model": "m", "messages": messages}).encode())
    assert [item.tokens for item in reading.items] == [7, 6] * 50
    assert caching.counter.counted["yes"] == 1


async def test_facts_of_an_item_that_comes_again_in_a_body_are_read_once() -> None:
    """The texts of equal answers are read for one of them, and each of them has the facts."""
    caching = ReaderWithCaches()
    messages = [{"role": "assistant", "content": f"See src/{word}.py first."} for word in ("yes", "no") * 50]
    reading = await caching.read(json.dumps({"model": "m", "messages": messages}).encode())
    texts: dict[int, ItemText] = {}
    items = caching.reader.read_facts(chat, reading, texts)
    assert len(texts) == 2
    assert len({item.facts for item in items}) == 2
    assert all(item.facts is not None and item.facts.mentions for item in items)
    assert caching.reader.read_facts(chat, reading, {}) == items


async def test_a_known_beginning_does_not_bring_a_scan_of_all_to_the_loop() -> None:
    """A large body is scanned on a thread if its end does not go on with the known list, however short that end is."""
    caching, threads = ReaderWithCaches(), set[int]()
    body = whole([{"role": "user", "content": f"{at} " + "x" * 500} for at in range(2 * LARGE // 500)])
    await caching.read(body)

    def no_list(_: bytes) -> None:
        threads.add(threading.get_ident())

    watched: Any = SimpleNamespace(**{**vars(chat), "with_item_list": no_list})
    with pytest.raises(InvalidRequest, match="more than once"):
        await caching.reader.located(watched, ANN, body[:-1] + b', "messages": []}')
    assert threads
    assert threading.get_ident() not in threads


BYTES = random.Random(3).randbytes(40_000)


def filed(body: bytes, border: int, tenant: bytes = ANN) -> dict[bytes, Prefix]:
    """A cache that knows *body* up to *border*."""
    prefixes: dict[bytes, Prefix] = {}
    hasher = PrefixHasher(scope_of(tenant, "chat"), body)
    hasher.file(prefixes, Prefix(border, hasher.digest(border)))
    return prefixes


@pytest.mark.parametrize("border", [8_192, 10_000, 16_383, 16_384, 20_000])
@pytest.mark.parametrize("grown", [0, 1, 5_000, 12_000])
def test_a_longer_body_finds_its_prefix(border: int, grown: int) -> None:
    """What a body was known up to is found in a longer one of up to twice its size."""
    prefixes = filed(BYTES[: border + 100], border)
    found = PrefixHasher(scope_of(ANN, "chat"), BYTES[: border + min(grown, border)]).find(prefixes)
    assert found is not None
    assert found.border == border


def test_what_differs_is_not_found() -> None:
    """One other byte before the border, a shorter body, another tenant or another scope: nothing is known."""
    border = 20_000
    prefixes = filed(BYTES, border)
    changed = bytearray(BYTES)
    changed[border - 1] ^= 1
    for tenant, api, body in (
        (ANN, "chat", bytes(changed)),
        (ANN, "chat", BYTES[: border - 1]),
        (BOB, "chat", BYTES),
        (ANN, "messages", BYTES),
    ):
        assert PrefixHasher(scope_of(tenant, api), body).find(prefixes) is None


def test_a_digest_is_that_of_the_bytes_before_it() -> None:
    """In whatever order digests are asked for, each is the one of a hash over these bytes alone."""
    hasher, scope = PrefixHasher(scope_of(ANN), BYTES), scope_of(ANN)
    for end in (1_000, 32_768, 9, 0, 20_000, 40_000, 32_768):
        assert hasher.digest(end) == name_in(BYTES[:end], scope)


async def test_a_large_text_is_counted_once_for_a_tenant() -> None:
    """What clips it counts it again, by the same name; another tenant's is counted anew."""
    caching, text = ReaderWithCaches(), "x" * LARGE
    await caching.read(whole([{"role": "user", "content": text}]))
    assert view_count(caching, "narrow", ANN)(text) == caching.reader.count("narrow", "", ANN)(text) == LARGE
    assert caching.counter.counted[text] == 1
    view_count(caching, "narrow", BOB)(text)
    assert caching.counter.counted[text] == 2


async def test_a_system_text_that_was_cut_inside_a_character_is_counted() -> None:
    """A client that cut its text inside a character is answered all the same."""
    body = rb'{"model":"m","instructions":"cut: \ud83d","messages":[{"role":"user","content":"cut: \ud83d"}]}'
    reading = await ReaderWithCaches().read(body)
    assert reading.counts.members["instructions"] > 0
