"""Processes as an operator meets them: workers that crash, proxies that drain, are killed, or do not start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import StartProxy, StartStub
from tests.stub import Answer, Fault, Stub
from tests.support.loopback import loopback_client
from tests.support.process_inspection import (
    kill_all,
    log_lines,
    metrics,
    processes_below,
    request_lines,
    total,
    until_gone,
    worker_pids,
)
from tests.support.proxy_process import ENDED_WITHIN, ROOT, Client, Proxy, until

pytestmark = pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks at processes through /proc")

HELLO: dict[str, Any] = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "Hello there."}]}
STREAM = {**HELLO, "stream": True}

ON_A_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
async def home() -> AsyncIterator[Path]:
    """A home that outlives a proxy, and in which nothing lives on after the test."""
    made = Path(tempfile.mkdtemp(prefix="ulg-"))
    yield made
    kill_all(made)
    shutil.rmtree(made, ignore_errors=True)


async def ask(front: Proxy, body: dict[str, Any] = HELLO) -> httpx.Response:
    """One request on a connection of its own."""
    async with loopback_client() as client:
        return await client.post(f"{front.url}/chat/completions", json=body)


async def read_stream(front: Proxy, begun: asyncio.Event | None = None) -> bytes:
    """What arrives of one stream; without its end if the connection broke. *begun* is set at the first byte."""
    got = bytearray()
    async with loopback_client() as client:
        try:
            async with client.stream("POST", f"{front.url}/chat/completions", json=STREAM) as answer:
                async for chunk in answer.aiter_raw():
                    got += chunk
                    if begun is not None:
                        begun.set()
        except httpx.TransportError:
            pass
    return bytes(got)


def held_streams(server: Stub, count: int = 1) -> asyncio.Event:
    """Let the next *count* answers stop behind their first piece until the event is set."""
    go_on = asyncio.Event()
    server.queue(*[Answer("x" * 20, piece=1)] * count)
    server.fail(Fault(gate=go_on), count)
    return go_on


async def test_two_workers_serve_and_a_crash_costs_only_its_own_requests(
    stub: StartStub, home: Path, proxy: StartProxy
) -> None:
    """A worker killed under load is replaced; streams of the other end well, and no total falls."""
    server = await stub()
    front = await proxy(server.url, window=8192, arguments=["--workers", "2"], home=home)
    assert [(await ask(front)).status_code for _ in range(40)] == [200] * 40
    await until(lambda: len(request_lines(front)) == 40)
    assert len({line["request_id"].partition("-")[0] for line in request_lines(front)}) == 2, (
        "one worker got no request"
    )
    before = await metrics_of(front, 40)

    go_on = held_streams(server, 16)
    streams = [asyncio.ensure_future(read_stream(front)) for _ in range(16)]
    await until(lambda: len(server.chats()) == 56)
    victim = worker_pids(front)[1]
    os.kill(victim, signal.SIGKILL)
    # A dying process leaves /proc/PID/cwd before the kernel closes its listening socket: its parent knows for sure.
    await until(lambda: any(line["event"] == "worker.ended" for line in log_lines(front)))
    assert [await answered(front) for _ in range(10)] == [200] * 10
    go_on.set()
    ends = [answer.endswith(b"data: [DONE]\n\n") for answer in await asyncio.gather(*streams)]
    assert True in ends, "the other worker's streams broke"
    assert False in ends, "no stream ran on the killed worker: nothing was tested"

    await until(lambda: worker_pids(front)[1] != victim)
    await until(lambda: len(processes_below(home)) == 3)
    assert [line["exit_code"] for line in log_lines(front) if line["event"] == "worker.ended"] == [-signal.SIGKILL]
    after = await metrics_of(front, 50 + sum(ends))
    assert all(after.get(key, 0) >= value for key, value in before.items() if key[0].endswith(("_total", "_count")))
    assert front.end() == 0
    await until_gone(home)


async def metrics_of(front: Proxy, requests: int) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The metrics, once they count exactly *requests*: a worker shows its own to the others every second."""
    async with asyncio.timeout(60):
        while total(found := await metrics(front), "ullage_requests_total") != requests:  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.1)
    return found


async def connected(front: Proxy, method: str, path: str, **more: Any) -> httpx.Response:
    """The first answer; a worker without a stream may end while it is being asked."""
    async with loopback_client(base_url=front.root) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                return await client.request(method, path, **more)


@pytest.mark.parametrize("count", [1, 2])
async def test_a_drain_lets_a_stream_finish(stub: StartStub, home: Path, proxy: StartProxy, count: int) -> None:
    """After SIGTERM a running stream comes whole, readiness is 503, new requests are refused; the exit code is 0."""
    server = await stub()
    front = await proxy(server.url, window=8192, arguments=["--workers", str(count)], home=home)
    go_on = held_streams(server)
    begun = asyncio.Event()
    stream = asyncio.ensure_future(read_stream(front, begun))
    await begun.wait()
    os.kill(front.pid, signal.SIGTERM)
    async with asyncio.timeout(60):
        while (unready := await connected(front, "GET", "/health/ready")).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert (unready.status_code, unready.json()) == (503, {"status": "draining"})
        assert (await connected(front, "GET", "/health/live")).status_code == 200
        refused = await connected(front, "POST", "/v1/chat/completions", json=HELLO)
        assert (refused.status_code, int(refused.headers["retry-after"]) > 0) == (503, True)
    go_on.set()
    assert (await stream).endswith(b"data: [DONE]\n\n")
    assert front.process is not None
    assert await asyncio.to_thread(front.process.wait, ENDED_WITHIN) == 0
    await until_gone(home)


@pytest.mark.parametrize("count", [1, 2])
async def test_a_closed_terminal_drains_and_leaves_nothing(
    stub: StartStub, home: Path, proxy: StartProxy, count: int
) -> None:
    """A proxy whose terminal is closed lets its stream finish and ends, with its workers."""
    server = await stub()
    front = await proxy(server.url, window=8192, arguments=["--workers", str(count)], home=home)
    front.end()
    await until_gone(home)
    terminal, slave = os.openpty()
    environment = {**os.environ, "HOME": str(home), "XDG_DATA_HOME": f"{home}/share", "PYTHONPATH": str(ROOT)}
    front.process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
        [sys.executable, "-c", ON_A_TERMINAL, *front._command()],
        cwd=home,
        env=environment,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    await front._ready()
    go_on = held_streams(server)
    begun = asyncio.Event()
    stream = asyncio.ensure_future(read_stream(front, begun))
    await begun.wait()
    os.close(terminal)
    os.kill(front.pid, signal.SIGHUP)  # a shell tells its jobs, too
    await asyncio.sleep(0.5)
    go_on.set()
    assert (await stream).endswith(b"data: [DONE]\n\n")
    await asyncio.to_thread(front.process.wait, ENDED_WITHIN)
    await until_gone(home)


async def test_two_workers_take_over_from_one_while_its_connections_wait(
    stub: StartStub, home: Path, proxy: StartProxy
) -> None:
    """Connections that a single process closed last wait for a minute on its port, which workers can share at once."""
    server = await stub()
    front = await proxy(server.url, window=8192, home=home)
    held = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(5)]
    assert (await ask(front)).status_code == 200
    assert front.end() == 0
    for _, writer in held:
        writer.close()
    front.arguments = ["--workers", "2"]
    await front.start()
    assert (await ask(front)).status_code == 200
    assert front.end() == 0
    front.arguments = []
    await front.start()
    assert (await ask(front)).status_code == 200


async def answered(front: Proxy, tries: int = 100) -> int:
    """The status of an answer, asked for as clients do: again where the connection was dropped or 503 told to wait."""
    status = 0
    for _ in range(tries):
        with contextlib.suppress(httpx.TransportError):
            status = (await ask(front)).status_code
        if status == 200:
            return status
        await asyncio.sleep(0.2)
    return status


@pytest.mark.parametrize("count", [1, 2])
async def test_running_out_of_descriptors_is_reported_and_survived(
    stub: StartStub, home: Path, proxy: StartProxy, count: int
) -> None:
    """When hardly any more files may be opened idle clients make room for new ones; log and metrics tell."""
    server = await stub()
    front = await proxy(server.url, window=8192, arguments=["--workers", str(count)], home=home)
    pids = list(worker_pids(front).values()) or [front.pid]
    for pid in pids:
        limit = len(os.listdir(f"/proc/{pid}/fd")) + 48
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))
    held = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(120)]
    # uvloop takes all that wait at once and drops those beyond the last descriptor: let it come to an end first.
    await until(lambda: any(line["event"] == "server.out_of_descriptors" for line in log_lines(front)))
    assert [await answered(front) for _ in range(10)] == [200] * 10
    for _, writer in held:
        writer.close()
    assert await answered(front) == 200
    # Only now: beside so many clients a worker may have no descriptor for the metrics.
    async with asyncio.timeout(60):
        while not total(await metrics(front), "ullage_out_of_descriptors_total"):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("count", [1, 2])
async def test_a_second_signal_ends_at_once(stub: StartStub, home: Path, proxy: StartProxy, count: int) -> None:
    """A second SIGTERM does not wait for a running stream, and nothing is left over."""
    server = await stub()
    front = await proxy(server.url, window=8192, arguments=["--workers", str(count)], home=home)
    held_streams(server)
    begun = asyncio.Event()
    stream = asyncio.ensure_future(read_stream(front, begun))
    await begun.wait()
    os.kill(front.pid, signal.SIGTERM)
    # Two signals that arrive before either is handled are one: https://man7.org/linux/man-pages/man7/signal.7.html
    await until(lambda: len(processes_below(home)) == count)  # beside a parent, only the worker with the stream is left
    async with asyncio.timeout(60):
        while (await connected(front, "GET", "/health/ready")).status_code != 503:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
    assert front.process is not None
    assert front.process.poll() is None, "it did not wait for the stream"
    os.kill(front.pid, signal.SIGTERM)
    await asyncio.to_thread(front.process.wait, ENDED_WITHIN)
    assert b"server_shutting_down" in await stream, "the client must be told that its stream is incomplete"
    await until_gone(home)


@pytest.mark.parametrize("count", [1, 2])
async def test_signals_to_the_last_moment(stub: StartStub, proxy: StartProxy, count: int) -> None:
    """However many signals come until the process is gone, it ends by itself, with the exit code of a clean end."""
    server = await stub()
    arguments = ["--workers", str(count)]
    front = await proxy(server.url, window=8192, arguments=arguments, fast=True)  # no fork, whose end is shorter
    assert front.process is not None
    while front.process.poll() is None:
        os.kill(front.pid, signal.SIGTERM)
        await asyncio.sleep(0.002)  # a moment without a handler is far longer
    assert front.process.returncode == 0


@pytest.mark.parametrize("count", [1, 2])
async def test_a_signal_during_the_start_leaves_nothing(
    stub: StartStub, home: Path, proxy: StartProxy, count: int
) -> None:
    """Told to end at any moment of its start, the proxy ends, and its workers with it."""
    server = await stub()
    front = await proxy(server.url, window=8192, arguments=["--workers", str(count)], home=home)
    front.end()
    for moment in (0.35, 0.6, 0.8):
        front._spawn({**os.environ, "HOME": str(home), "XDG_DATA_HOME": f"{home}/share"})
        await asyncio.sleep(moment)
        front.end()
        await until_gone(home)


@pytest.mark.parametrize("count", [1, 2])
async def test_a_killed_proxy_leaves_nothing_in_the_way_of_the_next(
    stub: StartStub, home: Path, proxy: StartProxy, count: int
) -> None:
    """After kill -9 workers end by themselves, and the next start on the same port and data serves."""
    server = await stub()
    front = await proxy(server.url, window=8192, arguments=["--workers", str(count)], home=home)
    front.end(signal.SIGKILL)
    await until_gone(home)
    await front.start()
    assert (await ask(front)).status_code == 200
    assert front.end() == 0
    await until_gone(home)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("wrong", ["port", "store", "host"])
async def test_a_start_that_fails_says_why_once_and_leaves_nothing(
    stub: StartStub, home: Path, proxy: StartProxy, count: int, wrong: str
) -> None:
    """A taken port, a foreign address or an unusable store ends the start with one line, code 1 and no process."""
    server = await stub()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = {
            "port": ["--port", str(port)],
            "store": ["--store", "redis://user:CANARY:x@127.0.0.1:bad/0"],
            "host": ["--host", "192.0.2.1"],
        }[wrong]
        with pytest.raises(RuntimeError, match="ended before it was ready"):
            await proxy(server.url, window=8192, arguments=["--workers", str(count), *arguments], home=home)
    said = (home / "ullage.log").read_text()
    assert "Traceback" not in said
    assert "CANARY" not in said
    assert "listening" not in said, "it said that it listens and did not"
    assert len(said.splitlines()) <= 3, said
    named = {"port": f"127.0.0.1:{port}", "store": "store.url", "host": "192.0.2.1"}[wrong]
    assert named in said
    await until_gone(home)


async def test_the_real_client_meets_a_restart_without_an_error(stub: StartStub, home: Path, proxy: StartProxy) -> None:
    """A client that keeps its connections open is answered again after the proxy was replaced."""
    server = await stub()
    front = await proxy(server.url, window=8192, home=home)
    async with Client(front.url) as client:
        for _ in range(2):
            answer = await client.chat.completions.create(**HELLO)
            assert answer.choices[0].message.content == "Understood."
            assert front.end() == 0
            await front.start()
