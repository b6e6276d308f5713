"""What one hostile body costs, and how long others wait for it: ``python -m tests.bench.adversarial [--sizes 64]``.

Starts a canned upstream and a real ``ullage serve``, then sends bodies made to be dear to read: many parts, tiny items,
one line, unclosed tags, deep arguments and the like, in all three APIs. Prints CPU seconds of the proxy for each MB of
a body that is alone, and of one beside another client, which sends small requests one after the other, and the longest
wait of that client. In the second case each of its requests costs more than it does alone, because two threads take
turns: that is charged to the body. Each body has a caller of its own, so that nothing of it is known.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from tests.bench.cpu import cpu_seconds, family
from tests.bench.load import loaded
from tests.bench.programs import listening, program
from tests.support.ports import free_port
from tests.support.proxy_process import Proxy
from tests.support.sample_conversations import prose

WINDOW = 32_768
"""Tokens: nearly every body is far above it, because a compaction is the longest way a request can go."""

MOST_ITEMS = 20_000
"""A body of more items is refused, and says nothing about what items cost."""

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
SMALL = {"model": "m", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16}
PAUSE = 0.002
LEAST_SENT = 512 * 1024
"""Bytes of small bodies that are sent one after the other: one of 64 KB takes less than the clock tells."""

JUST_BEFORE = 0.5
"""Seconds before each body in which the other client is alone: what its requests cost changes with the load."""

Turn = dict[str, Any]
Shape = Callable[[str, int, str], dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """What one body cost: seconds until its answer, and CPU seconds in all and for each MB; these beside others, too.

    The waits are the other client's. ``asked`` are the KiB that the body was to have; the bound on items made it
    smaller if ``kib`` says so.
    """

    shape: str
    api: str
    asked: int
    kib: int
    status: int
    seconds: float
    cpu: float
    cpu_per_mb: float
    beside_per_mb: float
    longest_wait_ms: float
    middle_wait_ms: float


def user(text: Any) -> Turn:
    """A message by the user; the same in all three APIs."""
    return {"role": "user", "content": text}


def part(api: str, text: str) -> Turn:
    """A text part of a user message."""
    return {"type": "input_text" if api == "responses" else "text", "text": text}


def call(api: str, name: str, arguments: Any) -> list[Turn]:
    """The model's call of a tool, as items."""
    text = json.dumps(arguments)
    if api == "chat":
        function = {"name": "read_file", "arguments": text}
        return [{"role": "assistant", "tool_calls": [{"id": name, "type": "function", "function": function}]}]
    if api == "messages":
        block = {"type": "tool_use", "id": name, "name": "read_file", "input": arguments}
        return [{"role": "assistant", "content": [block]}]
    return [{"type": "function_call", "call_id": name, "name": "read_file", "arguments": text}]


def result(api: str, name: str, text: str) -> Turn:
    """The result of a call."""
    if api == "chat":
        return {"role": "tool", "tool_call_id": name, "content": text}
    if api == "messages":
        return user([{"type": "tool_result", "tool_use_id": name, "content": text}])
    return {"type": "function_call_output", "call_id": name, "output": text}


def body(api: str, turns: list[Turn], **members: Any) -> dict[str, Any]:
    """A request that holds *turns*."""
    return {"model": "m", "input" if api == "responses" else "messages": turns, **members}


def counted(size: int, of: Any) -> int:
    """How many of *of* fill *size* bytes."""
    return max(1, size // (len(json.dumps(of)) + 2))


def parts(api: str, size: int, salt: str) -> dict[str, Any]:
    """One user message of many tiny parts."""
    many = counted(size, part(api, "a"))
    return body(api, [user([part(api, salt), *[part(api, "a")] * many])])


def tiny_items(api: str, size: int, salt: str) -> dict[str, Any]:
    """As many messages of a letter as are let in."""
    many = min(MOST_ITEMS - 1, counted(size, user("a")))
    return body(api, [user(salt), *[user(f"{at:x}") for at in range(many)]])


def nothings(api: str, size: int, salt: str) -> dict[str, Any]:
    """Items that are empty objects."""
    many = min(MOST_ITEMS - 1, counted(size, {}))
    return body(api, [user(salt), *[{}] * many])


def one_line(api: str, size: int, salt: str) -> dict[str, Any]:
    """One text of one line."""
    return body(api, [user(salt + "abcdefgh" * (size // 8))])


def sentences(api: str, size: int, salt: str) -> dict[str, Any]:
    """One text of short sentences, then a question."""
    text = "Never do it. " * (size // 13)
    return body(api, [user(salt), user(text), user("Why?")])


def words(api: str, size: int, salt: str) -> dict[str, Any]:
    """One text of prose with paths."""
    return body(api, [user(salt), user(cycled(prose(int(salt, 16), 20_000), size)), user("Go on.")])


def many_calls(api: str, size: int, salt: str) -> dict[str, Any]:
    """Rounds of one call and one short result."""
    one = [*call(api, "c000000", {"path": "src/a.py"}), result(api, "c000000", "1\tdone")]
    many = min(MOST_ITEMS // 2 - 2, counted(size, one))
    turns = [user(salt)]
    for at in range(many):
        turns += [*call(api, f"c{at:06}", {"path": f"src/{at}.py"}), result(api, f"c{at:06}", "1\tdone")]
    return body(api, turns)


def parallel_calls(api: str, size: int, salt: str) -> dict[str, Any]:
    """One round of many calls, and their results."""
    one = [*call(api, "c000000", {"path": "src/a.py"}), result(api, "c000000", "1\tdone")]
    many = min(MOST_ITEMS // 2 - 2, counted(size, one))
    calls = [call(api, f"c{at:06}", {"path": f"src/{at}.py"})[0] for at in range(many)]
    member = {"chat": "tool_calls", "messages": "content"}.get(api)
    if member:
        calls = [{"role": "assistant", member: [piece for each in calls for piece in each[member]]}]
    results = [result(api, f"c{at:06}", "1\tdone") for at in range(many)]
    if api == "messages":  # all results of a round stand in one message
        results = [user([block for each in results for block in each["content"]])]
    return body(api, [user(salt), *calls, *results])


def unclosed_tags(api: str, size: int, salt: str) -> dict[str, Any]:
    """Tags that nobody closes, in the system text and the user's."""
    tags = "<memory>\n<Memory>\n<user_memories>\n"
    turns = [user(salt), user(tags * (size // len(tags) // 2))]
    return with_system(api, turns, tags * (size // len(tags) // 2))


def memory_lines(api: str, size: int, salt: str) -> dict[str, Any]:
    """Headings of memories, of all levels in turn."""
    lines = "###### memory\n##### my memories\n# memory\n"
    return body(api, [user(salt), user(lines * (size // len(lines)))])


def tools(api: str, size: int, salt: str) -> dict[str, Any]:
    """Declared tools, and a question."""
    schema = {"type": "object", "properties": {f"p{at}": {"type": "string", "enum": ["a", "b"]} for at in range(8)}}
    bare = {"name": "t000000", "description": f"Does {salt}."}
    key = "input_schema" if api == "messages" else "parameters"
    flat = {**bare, key: schema}
    many = counted(size, {"type": "function", "function": flat})

    def tool(at: int) -> Turn:
        named = {**flat, "name": f"t{at:06}"}
        return {"chat": {"type": "function", "function": named}, "messages": named}.get(
            api, {"type": "function", **named}
        )

    return body(api, [user(salt)], tools=[tool(at) for at in range(many)])


def deep_arguments(api: str, size: int, salt: str) -> dict[str, Any]:
    """A call whose arguments nest, and hold many short texts."""
    deep: Any = "end"
    for _ in range(100):
        deep = {"a": deep}
    many = counted(size, deep)
    turns = [user(salt), *call(api, "c1", {"path": "src/a.py", "all": [deep] * many}), result(api, "c1", "done")]
    return body(api, [*turns, user("Go on.")])


def results_of_names(api: str, size: int, salt: str) -> dict[str, Any]:
    """Long results of nothing but names and errors."""
    line = "src/a_{0:x}/b_{0:x}.py:{0}: ValueError: x_{0:x} failed\n"
    step = 200_000
    turns = [user(salt)]
    for at in range(max(1, size // step)):
        text = "".join(line.format(at * 10_000 + each) for each in range(min(size, step) // 48))
        turns += [*call(api, f"c{at}", {"path": "src/a.py"}), result(api, f"c{at}", text)]
    return body(api, turns)


def system_text(api: str, size: int, salt: str) -> dict[str, Any]:
    """A system text of prose."""
    return with_system(api, [user(salt)], cycled(prose(int(salt, 16), 20_000), size))


def escapes(api: str, size: int, salt: str) -> dict[str, Any]:
    """Members that stand beside the list and spell its name with escapes, which takes the exact scanner."""
    return body(api, [user(salt), user("messages input model " * (size // 21))], metadata={"\\u0041": '"messages"'})


def list_lines(api: str, size: int, salt: str) -> dict[str, Any]:
    """A conversation without tools: the model's list of thousands of lines that are nearly the same."""
    lines = "".join(f"- [ ] do it now with {at} apples\n" for at in range(size // 33))
    return body(api, [user(salt), {"role": "assistant", "content": lines}, user("Go on.")])


def written_results(api: str, size: int, salt: str) -> dict[str, Any]:
    """Rounds of a client that writes calls and results as text."""
    call_text, result_text = (
        "<read_file><path>src/{}.py</path></read_file>",
        "[read_file for 'src/{}.py'] Result:\n1 done",
    )
    one = [{"role": "assistant", "content": call_text.format("000000")}, user(result_text.format("000000"))]
    turns = [user(salt)]
    for at in range(min(MOST_ITEMS // 2 - 2, counted(size, one))):
        turns += [{"role": "assistant", "content": call_text.format(at)}, user(result_text.format(at))]
    return body(api, turns)


def agent(api: str, size: int, salt: str) -> dict[str, Any]:
    """An ordinary agent's history."""
    listing = prose(int(salt, 16), 1_000)
    one = [*call(api, "c000000", {"path": "src/a.py"}), result(api, "c000000", listing)]
    turns = [user(salt)]
    for at in range(min(MOST_ITEMS // 2 - 2, counted(size, one))):
        turns += [*call(api, f"c{at:06}", {"path": f"src/{at}.py"}), result(api, f"c{at:06}", f"{at} {listing}")]
    return body(api, turns)


def with_system(api: str, turns: list[Turn], text: str) -> dict[str, Any]:
    """A request with a system text beside *turns*, in the form the API has."""
    if api == "chat":
        return body(api, [{"role": "system", "content": text}, *turns])
    return body(api, turns, **{"system" if api == "messages" else "instructions": text})


def cycled(text: str, size: int) -> str:
    """*text* again and again, *size* characters of it."""
    return (text * (size // len(text) + 1))[:size]


SHAPES: tuple[Shape, ...] = (
    *(parts, tiny_items, nothings, one_line, sentences, words, many_calls, parallel_calls, unclosed_tags),
    *(memory_lines, tools, deep_arguments, results_of_names, system_text, escapes, list_lines),
    *(written_results, agent),
)


class Neighbour:
    """Another client: sends one small request after the other and notes how long each took.

    It pauses while ``may_send`` is not set.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._waits: list[float] = []
        self.may_send = asyncio.Event()
        self.may_send.set()

    async def run(self) -> None:
        """Send requests until cancelled."""
        data = json.dumps(SMALL).encode()
        head = f"POST {PATHS['chat']} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        request = f"{head}authorization: Bearer sk-other\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            while await self.may_send.wait():
                began = time.perf_counter()
                writer.write(request)
                answer = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = answer.partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length))
                self._waits.append(time.perf_counter() - began)
                await asyncio.sleep(PAUSE)
        finally:
            writer.close()

    def taken(self) -> list[float]:
        """The waits since the last call."""
        waits, self._waits = self._waits, []
        return waits


async def waits_of(port: int) -> None:
    """The other client, as a process of its own.

    Answers each line on its standard input with its waits as JSON, and goes on or pauses if that line says so.
    """
    neighbour = Neighbour(port)
    running = asyncio.ensure_future(neighbour.run())
    while order := (await asyncio.to_thread(sys.stdin.readline)):
        if running.done():
            running.result()
        if order.strip() == "pause":
            neighbour.may_send.clear()
        elif order.strip() == "go on":
            neighbour.may_send.set()
        print(json.dumps(neighbour.taken()), flush=True)
    running.cancel()


async def measure(
    port: int, pids: list[int], other: asyncio.subprocess.Process, shape: Shape, api: str, size: int, limit: float
) -> Row:
    """What a body costs alone and beside the other client. Small ones are sent several times, each a new one."""
    times = max(1, LEAST_SENT // size)
    url = f"http://127.0.0.1:{port}{PATHS[api]}"

    async def send() -> tuple[int, int, float, float]:
        """Status and bytes of a body, and its seconds and CPU seconds, with what other requests took."""
        bodies = [json.dumps(shape(api, size, f"{random.getrandbits(48):x}")).encode() for _ in range(times)]
        before, began = cpu_seconds(pids), time.perf_counter()
        statuses = [await answered(url, data, limit) for data in bodies]
        seconds = time.perf_counter() - began
        await asyncio.sleep(JUST_BEFORE)  # what is done after the answer is part of its cost
        return statuses[0], len(bodies[0]), seconds / times, (cpu_seconds(pids) - before) / times

    await ordered(other, "pause")
    await asyncio.sleep(PAUSE)
    status, sent, seconds, cpu = await send()
    await ordered(other, "go on")
    small, _ = await alone(pids, other, JUST_BEFORE)
    _, _, _, beside = await send()
    waits = await ordered(other)
    beside -= len(waits) * small / times
    return Row(
        shape.__name__,
        api,
        size // 1024,
        sent // 1024,
        status,
        round(seconds, 3),
        round(cpu, 3),
        round(cpu / sent * 2**20, 3),
        round(beside / sent * 2**20, 3),
        round(max(waits, default=seconds) * 1e3, 1),
        round(statistics.median(waits or [seconds]) * 1e3, 2),
    )


async def answered(url: str, data: bytes, limit: float) -> int:
    """The status of the answer to *data* from a new caller; 0 if there was none within *limit* seconds."""
    headers = {"content-type": "application/json", "authorization": f"Bearer sk-{random.getrandbits(48):x}"}
    async with httpx.AsyncClient(trust_env=False, timeout=limit) as client:
        try:
            return (await client.post(url, content=data, headers=headers)).status_code
        except httpx.TransportError:
            return 0


async def alone(pids: list[int], other: asyncio.subprocess.Process, seconds: float) -> tuple[float, list[float]]:
    """CPU seconds of one request of the other client while it is alone, and its waits."""
    await ordered(other)
    before = cpu_seconds(pids)
    await asyncio.sleep(seconds)
    spent, waits = cpu_seconds(pids) - before, await ordered(other)
    return spent / max(1, len(waits)), waits


async def ordered(other: asyncio.subprocess.Process, order: str = "") -> list[float]:
    """The other client's waits since the last call. *order*: it shall ``pause``, or ``go on``."""
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdin.write(f"{order}\n".encode())
    found: list[float] = json.loads(await other.stdout.readline())
    return found


def chosen(names: list[str], apis: list[str]) -> Iterator[tuple[Shape, str]]:
    """The shapes and APIs to run."""
    for shape in SHAPES:
        for api in PATHS:
            if (not names or shape.__name__ in names) and (not apis or api in apis):
                yield shape, api


async def run(sizes: list[int], names: list[str], apis: list[str], limit: float, *, fast: bool = True) -> list[Row]:
    """A row for each body. Unless *fast*, tiktoken counts even if gigatoken is installed."""
    direct = free_port()
    upstream = f"http://127.0.0.1:{direct}/v1"
    models = [{"name": "m", "upstream": "mock", "context_window": WINDOW, "tokenizer": "o200k_base"}]
    config = {"upstreams": [{"name": "mock", "base_url": upstream}], "models": models}
    rows = []
    async with program("tests.bench.mock", str(direct)), Proxy(upstream, config=config, fast=fast) as proxy:
        await listening(direct)
        pids = family(proxy.pid)
        await loaded(proxy.port, pids)
        async with program("tests.bench.adversarial", "--neighbour", str(proxy.port)) as other:
            small, waits = await alone(pids, other, 2)
            print(f"alone: longest wait {max(waits) * 1e3:.1f} ms, CPU {small * 1e3:.2f} ms a request", file=sys.stderr)
            for size in sizes:
                for shape, api in chosen(names, apis):
                    rows.append(await measure(proxy.port, pids, other, shape, api, size * 1024, limit))
                    print(json.dumps(asdict(rows[-1])), file=sys.stderr, flush=True)
    return rows


def markdown(rows: list[Row]) -> str:
    """A table for the documentation: by shape and size CPU seconds for each MB, and the longest wait, in each API."""
    sizes = sorted({row.asked for row in rows})
    heads = [f"{size} KiB, CPU s per MB | beside | wait, ms" for size in sizes]
    lines = [f"| shape | {' | '.join(heads)} |", "| --- |" + " --: | --: | --: |" * len(sizes)]
    for shape in dict.fromkeys(row.shape for row in rows):
        cells = [f"`{shape}`"]
        for size in sizes:
            found = [row for row in rows if (row.shape, row.asked) == (shape, size)]
            cells.append(" / ".join(f"{row.cpu_per_mb:.2f}" for row in found))
            cells.append(" / ".join(f"{max(0.0, row.beside_per_mb):.2f}" for row in found))
            cells.append(" / ".join(f"{row.longest_wait_ms:.0f}" for row in found))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def show(rows: list[Row]) -> None:
    """Print *rows* as a table, and the worst figures."""
    columns = tuple(asdict(rows[0]))
    grid = Table(title="CPU of the proxy, and the waits of another client's small requests")
    for column in columns:
        grid.add_column(column, justify="left" if column in {"shape", "api"} else "right")
    for row in rows:
        grid.add_row(*map(str, asdict(row).values()))
    Console(width=150).print(grid)
    dearest, longest = max(rows, key=lambda row: row.cpu_per_mb), max(rows, key=lambda row: row.longest_wait_ms)
    print(f"dearest: {dearest.shape} ({dearest.api}, {dearest.kib} KiB) {dearest.cpu_per_mb} CPU s per MB")
    print(f"longest wait: {longest.shape} ({longest.api}, {longest.kib} KiB) {longest.longest_wait_ms} ms")


def main() -> None:
    """Run the measurement and print it."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.adversarial", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 1024, 8192], help="KiB of a body")
    parser.add_argument("--shapes", nargs="+", default=[], help="only these")
    parser.add_argument("--apis", nargs="+", default=[], choices=[*PATHS], help="only these")
    parser.add_argument("--limit", type=float, default=120, help="seconds that one answer may take")
    parser.add_argument("--tiktoken", action="store_true", help="count with tiktoken, the reference")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table by shape instead")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    parser.add_argument("--neighbour", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.neighbour:
        asyncio.run(waits_of(given.neighbour))
        return
    rows = asyncio.run(run(given.sizes, given.shapes, given.apis, given.limit, fast=not given.tiktoken))
    if given.markdown:
        print(markdown(rows))
    else:
        show(rows)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
