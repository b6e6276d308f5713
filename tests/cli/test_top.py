"""``ullage top``: the figures of a proxy that runs, read as anyone with its key can read them."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from proxy.cli.top import (
    MOST_CONVERSATIONS,
    MOST_MODELS,
    REQUESTS,
    CannotRead,
    Rate,
    Reading,
    Sample,
    frame,
    quantile,
    read,
)
from tests.conftest import StartProxy, StartStub
from tests.support.forked_ullage import run_ullage
from tests.support.ports import free_port
from tests.support.proxy_process import Client
from tests.support.sample_conversations import agent_session

ROOT = Path(__file__).parents[2]
EXPOSITION = ROOT / "tests" / "data" / "telemetry" / "exposition.txt"
KEY = "an-admin-key-that-is-long-enough"


ROWS = (
    {"name": "older", "tokens": 900, "budget": 1000, "requests": 40, "compactions": 3, "last": 1.0},
    {"name": "newer_1234567890", "tokens": 128_000, "budget": 1_000_000, "requests": 1, "last": 2.0},
    {"name": "fits", "last": 0.5},
)


def reading(at: float = 0.0, factor: float = 1.0) -> Reading:
    """The recorded exposition, with every figure times *factor*."""
    families = text_string_to_metric_families(EXPOSITION.read_text())
    samples = [Sample(each.name, each.labels, each.value * factor) for family in families for each in family.samples]
    return Reading(at, samples, {"workers": 2, "store": {"kind": "embedded"}}, ROWS)


def shown(now: Reading, before: Reading | None = None, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(frame("http://127.0.0.1:8484", now, before, width))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_frame_has_the_figures_of_the_metrics() -> None:
    """Totals, outcomes, the store, what went wrong, and a row for each model, in 80 columns."""
    text = shown(reading())
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "ullage 1.2.3 at http://127.0.0.1:8484, 2 workers"
    requests = reading().total("ullage_requests_total")
    assert lines[1].startswith(f"{requests:.0f} requests, 4 under way, ")
    assert "store embedded up, summaries 1 written, 1 running" in lines
    assert "2 refused connections" in text
    row = next(line for line in lines if line.startswith("gpt-5"))
    of_model = reading().by_label("ullage_requests_total", "model")["gpt-5"]
    assert row.split()[2] == f"{of_model:.0f}"


def test_top_shows_cached_share_cost_and_nearly_full_conversations() -> None:
    """The share that came from caches, the money, and how many conversations are nearly full."""
    page = {"models": {"m": {"input": 1000, "cached": 250}}, "saved": 1.234}
    rows = [{"name": "a", "tokens": 90, "budget": 100}, {"name": "b", "tokens": 10, "budget": 100}]
    text = shown(Reading(0.0, [], {}, rows, page))
    assert "provider cache 25%, at least $1.23 saved, 1 of 2 conversations nearly full" in text
    assert "cache" not in shown(Reading(0.0, []))


def test_conversations_have_bars() -> None:
    """The newest come first; a bar is as long as the conversation is full, and red above 80 %."""
    lines = shown(reading()).splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("conversation"))
    newer, older, bare = lines[start + 1 : start + 4]
    assert newer.split() == ["newer_1234567890", "1", "-", "128k", "1.0M", "13%", "█" * 3 + "░" * 17]
    assert older.split() == ["older", "40", "3", "900", "1,000", "90%", "█" * 18 + "░" * 2]
    assert bare.split()[-1] == "░" * 20
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    console.print(frame("http://h", reading(), None, 100))
    assert "\x1b[31m" + "█" * 18 in console.file.getvalue()  # type: ignore[attr-defined]
    assert "conversation" not in shown(replace(reading(), conversations=()))


def test_a_narrow_terminal_gets_fewer_columns() -> None:
    """In 40 columns each row is whole: its name, how full it is, and a shorter bar."""
    lines = shown(reading(), width=40).splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("conversation"))
    assert lines[start].split() == ["conversation", "fill"]
    assert lines[start + 1].split() == ["newer_1234567890", "13%", "█" + "░" * 9]
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= 40
    row = next(line for line in lines if line.startswith("gpt-5"))
    assert len(row.split()) == 3


def test_long_lists_are_cut() -> None:
    """Only the newest conversations and the models with most requests have a row."""
    rows = [{"name": f"conversation-{at}", "last": float(at)} for at in range(MOST_CONVERSATIONS + 5)]
    samples = [Sample(REQUESTS, {"model": f"model-{at}"}, at + 1.0) for at in range(MOST_MODELS + 5)]
    text = shown(Reading(0.0, samples, {}, rows))
    newest, most = f"conversation-{MOST_CONVERSATIONS + 4} ", f"model-{MOST_MODELS + 4} "
    assert (text.count("conversation-"), text.count("model-")) == (MOST_CONVERSATIONS, MOST_MODELS)
    assert newest in text
    assert most in text


def test_rates_need_two_readings() -> None:
    """Between two readings the growth of a counter is divided by their distance; after a restart it is zero."""
    first, second = reading(10.0), reading(14.0, 3.0)
    name = "ullage_requests_total"
    assert Rate(first, None).figure(name) == "-"
    assert Rate(second, first).figure(name) == f"{2 * first.total(name) / 4:.1f}"
    assert Rate(first, second).figure(name) == "0.0"
    assert f"requests ({Rate(second, first).figure(name)}/s)" in shown(second, first)


def test_a_quantile_is_interpolated() -> None:
    """It lies inside its bucket; in the last one it is that bucket's lower edge."""
    buckets = [(0.1, 10.0), (0.2, 30.0), (float("inf"), 40.0)]
    assert quantile(0.5, buckets) == pytest.approx(0.15)
    assert quantile(0.25, buckets) == pytest.approx(0.1)
    assert quantile(0.99, buckets) == 0.2
    assert Rate(replace(reading(), samples=()), None).times("ullage_overhead_seconds") == "-"


def test_times_are_those_since_the_last_reading() -> None:
    """Observations before the last reading do not count; without new ones the figures since the start are shown."""

    def of(at: float, fast: float, slow: float) -> Reading:
        edges = {"0.001": fast, "1.0": fast + slow, "+Inf": fast + slow}
        return Reading(at, [Sample("h_bucket", {"le": edge}, count) for edge, count in edges.items()])

    slow, later = of(0.0, 0.0, 100.0), of(1.0, 100.0, 100.0)
    assert Rate(later, slow).times("h").startswith("p50 0.5 ms")
    assert Rate(slow, slow).times("h") == Rate(slow, None).times("h")


@pytest.mark.slow
async def test_a_running_proxy_is_watched(stub: StartStub, proxy: StartProxy) -> None:
    """A pipe gets one frame; with an admin key it takes that key, else it says which option is missing."""
    server = await stub(window=8192)
    front = await proxy(server.url, window=8192, environment={"ULLAGE_SERVER__ADMIN_KEY": KEY})
    async with Client(front.url, api_key="k") as client:
        for rounds in (3, 30):
            await client.chat.completions.create(model="m", messages=agent_session(rounds, 300))

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return run_ullage("top", "--url", front.root, *more, environment={"ADMIN": KEY})

    await asyncio.sleep(1.1)  # requests under way are counted once a second
    ran = await asyncio.to_thread(run, "--key-env", "ADMIN")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.search(r"^2 requests, 0 under way, 1 compacted$", ran.stdout, re.MULTILINE)
    assert re.search(r"^m +8,192 +2 +- ", ran.stdout, re.MULTILINE)
    assert "store embedded up" in ran.stdout
    assert re.search(r"^[\w-]{16} +1 +1 +\d,\d{3} +7,\d{3} +\d\d% +█+░+$", ran.stdout, re.MULTILINE)
    assert "store up" in (await asyncio.to_thread(run)).stdout, "metrics are open on this machine, the status is not"


@pytest.mark.slow
async def test_a_terminal_is_kept_up_to_date(stub: StartStub, proxy: StartProxy) -> None:
    """On a terminal the figures change while requests come in, and Ctrl-C ends it with exit code 0."""
    front = await proxy((await stub(window=8192)).url, window=8192)
    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "proxy.cli", "top", "--url", front.root, "--interval", "0.2"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = await asyncio.to_thread(
        subprocess.Popen, command, cwd=ROOT, env=environment, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    seen = ""

    def written() -> bytes:
        try:
            return os.read(main, 65_536)
        except OSError:  # Linux tells the end of the process so
            return b""

    async def until(text: str) -> None:
        nonlocal seen
        async with asyncio.timeout(60):
            while text not in seen:
                seen += (await asyncio.to_thread(written)).decode("utf-8", "replace")

    try:
        await until("0 requests")
        async with Client(front.url, api_key="k") as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello."}])
        await until("1 request")
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            while await asyncio.to_thread(written):
                pass  # a terminal that takes nothing would hold it: what it writes last waits for the frames before
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)


def test_what_cannot_be_read_has_a_sentence() -> None:
    """No listener, no address, and a server that is no Ullage."""
    with pytest.raises(CannotRead, match=r"does not answer: .*\. Name another with --url\."):
        read(f"http://127.0.0.1:{free_port()}", "")
    with pytest.raises(CannotRead, match=r"no http\(s\) URL"):
        read("here", "")


@pytest.mark.parametrize(
    ("status", "problem"),
    [(401, "give --key-env NAME"), (403, "give --key-env NAME"), (404, "telemetry.metrics is off")],
)
async def test_a_closed_proxy_says_what_to_do(status: int, problem: str) -> None:
    """Metrics that need the admin key, or that are off, are told apart by the status."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    async with TestServer(app) as server:
        with pytest.raises(CannotRead, match=problem):
            await asyncio.to_thread(read, str(server.make_url("/")), "")


@pytest.mark.parametrize(
    "text", ['{"object": "chat.completion"}', "process_cpu_seconds_total 3\n", "", "\xe9 1"], ids=repr
)
async def test_a_server_that_is_no_ullage_is_named_so(text: str) -> None:
    """Whatever it answers for ``/metrics``: no metrics, those of something else, or none at all."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=text.encode("latin-1"))

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        with pytest.raises(CannotRead, match="no Ullage"):
            await asyncio.to_thread(read, str(server.make_url("/")), "")


@pytest.mark.parametrize("broken", ["/ullage/api/status", "/ullage/events"])
async def test_routes_that_something_in_front_answers_are_left_out(broken: str) -> None:
    """A gateway may pass the metrics on and answer other paths with a page of its own: the metrics are shown."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/metrics":
            return web.Response(text='ullage_build_info{version="1"} 1\n')
        text = {
            "/ullage/api/status": '{"workers": 2}',
            "/ullage/events": 'data: {"rows": [], "snapshot": {"lag": 1}}\n\n',
        }
        return web.Response(text="data: <html>" if request.path == broken else text[request.path])

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        reading = await asyncio.to_thread(read, str(server.make_url("/")), "")
    assert (bool(reading.status), bool(reading.page)) == (broken != "/ullage/api/status", broken != "/ullage/events")
