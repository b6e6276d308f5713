"""Worker processes: real ones, started, shared, crashed, drained and killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from proxy import workers
from proxy.workers import Shutdown, Supervisor, reserve

ROOT = Path(__file__).parents[1]

# What the workers run: it writes who it is to a file and obeys what the file `order` says.
MAIN = """
import asyncio, os, signal, socket
from pathlib import Path

async def main(argument, worker):
    folder = Path(argument["folder"])
    if worker.index in argument.get("broken", ()):
        return 3
    requested = asyncio.Event()
    if argument.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, requested.set)
    server = None
    if "port" in argument:
        async def answer(reader, writer):
            await reader.readline()
            writer.write(str(worker.index).encode())
            await writer.drain()
            writer.close()
        server = await asyncio.start_server(answer, "127.0.0.1", argument["port"], reuse_port=True)
        shared = await asyncio.start_server(answer, sock=worker.listener)
    (folder / f"{worker.index}-{os.getpid()}").write_text(f"{worker.count} {os.environ['COLOUR']} {argument['secret']}")
    await requested.wait()
    await asyncio.sleep(argument.get("linger", 0))
    (folder / f"ended-{worker.index}").touch()
    return 0
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "worker_main.py").write_text(MAIN)
    return tmp_path


async def until(holds):
    for _ in range(3000):
        if holds():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came to hold")


class Run:
    """A supervisor under test, its events and its files."""

    def __init__(self, folder, count=2, drain=5.0, on_exit=lambda pid: None, listener=None, **argument):
        self.folder = folder
        self.events = []
        self.shutdown = Shutdown()
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "COLOUR": "red"}
        self.supervisor = Supervisor(
            "worker_main:main",
            {"folder": str(folder), "secret": "s3cret", **argument},
            count,
            environ=environ,
            drain=drain,
            shutdown=self.shutdown,
            log_event=lambda event, **facts: self.events.append((event, facts)),
            on_exit=on_exit,
            listener=listener or reserve("127.0.0.1", 0),
        )
        self.task = asyncio.get_running_loop().create_task(self.supervisor.run())

    def started(self):
        """The pid of every worker that has reported its start, by index (the newest start wins)."""
        files = sorted(self.folder.glob("[0-9]-*"), key=lambda file: file.stat().st_mtime_ns)
        return {int(file.name[0]): int(file.name[2:]) for file in files}

    async def until(self, holds):
        await until(lambda: holds() or self.task.done())
        assert not self.task.done(), self.events

    def names(self):
        return [event for event, _ in self.events]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
async def test_workers_get_their_argument_and_end_cleanly(folder):
    """Every worker gets argument, environment and index; after a signal all end by themselves with exit code 0."""
    exits = []
    run = Run(folder, count=2, on_exit=exits.append)
    await run.until(lambda: len(run.started()) == 2)
    pids = run.started()
    started = {facts["worker"]: facts["pid"] for event, facts in run.events if event == "worker.started"}
    assert pids == started
    assert os.getsid(pids[0]) != os.getsid(0), "a terminal's Ctrl-C would reach the worker past the parent"
    assert (folder / f"0-{pids[0]}").read_text() == "2 red s3cret"
    ps = await asyncio.create_subprocess_exec("ps", "-o", "args=", "-p", str(pids[0]), stdout=subprocess.PIPE)
    shown = (await ps.communicate())[0].decode()
    assert "worker_main:main" in shown
    assert "s3cret" not in shown
    os.kill(os.getpid(), signal.SIGTERM)
    assert await run.task == 0
    assert (folder / "ended-0").exists()
    assert (folder / "ended-1").exists()
    assert sorted(exits) == sorted(pids.values())
    assert "worker.killed" not in run.names()


@pytest.mark.slow
async def test_a_crashed_worker_is_replaced(folder):
    """A killed worker is started again under its index, the others go on, and it is reported with its exit code."""
    run = Run(folder, count=2)
    await run.until(lambda: len(run.started()) == 2)
    before = run.started()
    os.kill(before[1], signal.SIGKILL)
    await run.until(lambda: run.started()[1] != before[1])
    assert run.started()[0] == before[0]
    assert alive(before[0])
    ended = [facts for event, facts in run.events if event == "worker.ended"]
    assert [(facts["worker"], facts["exit_code"]) for facts in ended] == [(1, -signal.SIGKILL)]
    run.shutdown.stop()
    assert await run.task == 0


@pytest.mark.slow
async def test_a_drain_is_waited_for_and_a_second_signal_ends_it(folder):
    """Workers get their time to drain; a second signal ends them at once, so that nothing is left over.

    The exit code is that of one process, which nothing else has to kill: both were asked to end so.
    """
    run = Run(folder, count=1, drain=60, deaf=True)
    await run.until(lambda: len(run.started()) == 1)
    (pid,) = run.started().values()
    run.shutdown.stop()
    await asyncio.sleep(0.3)
    assert alive(pid)
    run.shutdown.stop()
    assert await asyncio.wait_for(run.task, 60) == 0
    assert not alive(pid)
    assert "worker.killed" in run.names()


@pytest.mark.slow
async def test_a_slow_end_within_the_drain_is_clean(folder):
    """A worker that needs part of its drain to end is waited for, not killed."""
    run = Run(folder, count=1, drain=30, linger=0.5)
    await run.until(lambda: len(run.started()) == 1)
    run.shutdown.stop()
    assert await run.task == 0
    assert (folder / "ended-0").exists()


@pytest.mark.slow
async def test_workers_that_ignore_the_drain_are_killed(folder, monkeypatch):
    """After drain and grace a worker that did not end is killed, and the exit code says so."""
    monkeypatch.setattr(workers, "KILL_GRACE", 0.2)
    run = Run(folder, count=1, drain=0.2, deaf=True)
    await run.until(lambda: len(run.started()) == 1)
    (pid,) = run.started().values()
    run.shutdown.stop()
    assert await asyncio.wait_for(run.task, 60) == 1
    assert not alive(pid)


@pytest.mark.slow
async def test_workers_that_never_start_are_given_up(folder):
    """When no worker ever gets going the parent ends with code 1 instead of restarting for ever."""
    run = Run(folder, count=2, broken=[0, 1])
    assert await asyncio.wait_for(run.task, 100) == 1
    assert "worker.given_up" in run.names()
    assert {facts["exit_code"] for event, facts in run.events if event == "worker.ended"} == {3}


@pytest.mark.slow
async def test_one_that_never_starts_does_not_end_the_others(folder):
    """A worker that fails at every start is tried again and again, while the healthy one goes on serving."""
    run = Run(folder, count=2, broken=[1])
    await run.until(lambda: run.names().count("worker.ended") > workers.MAX_FALSE_STARTS)
    assert alive(run.started()[0])
    run.shutdown.stop()
    assert await run.task == 0


async def sharing_workers(folder):
    """Two workers that have started and share a port, and that port."""
    listener = reserve("127.0.0.1", 0)
    port = listener.getsockname()[1]
    run = Run(folder, count=2, listener=listener, port=port)
    await run.until(lambda: len(run.started()) == 2)
    return run, port


@pytest.mark.slow
async def test_workers_share_a_port(folder):
    """All workers answer on the reserved port, and on nothing else's: a second reservation of a served port fails."""
    run, port = await sharing_workers(folder)

    async def ask():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"who\n")
        answer = await reader.read()
        writer.close()
        return answer

    answers = [await ask() for _ in range(60)]
    assert set(answers) == {b"0", b"1"}
    with pytest.raises(OSError, match="in use"):
        reserve("127.0.0.1", port)
    run.shutdown.stop()
    assert await run.task == 0


@pytest.mark.slow
async def test_connections_wait_while_no_worker_runs(folder):
    """When all workers have crashed the port stays open: who connects is answered once one has started again."""
    run, port = await sharing_workers(folder)
    for _ in range(2):
        crashed = set(run.started().values())
        for pid in crashed:
            os.kill(pid, signal.SIGKILL)
        await run.until(lambda: run.names().count("worker.ended") == len(list(folder.glob("[0-9]-*"))))
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        for reader, writer in connections:
            writer.write(b"who\n")
            assert await asyncio.wait_for(reader.read(), 60) in {b"0", b"1"}
            writer.close()
        await run.until(lambda before=crashed: len(set(run.started().values()) - before) == 2)
    run.shutdown.stop()
    assert await run.task == 0
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await asyncio.open_connection("127.0.0.1", port)


PARENT = """
import asyncio, os, sys
from proxy.workers import Shutdown, Supervisor, reserve
supervisor = Supervisor("worker_main:main", {"folder": sys.argv[1], "secret": "x"}, 1, environ=os.environ, drain=5,
                        shutdown=Shutdown(), log_event=lambda event, **facts: print(event, flush=True),
                        on_exit=lambda pid: None, listener=reserve("127.0.0.1", 0))
asyncio.run(supervisor.run())
"""


@pytest.mark.slow
async def test_a_killed_parent_leaves_no_orphans(folder):
    """Workers notice that their parent is gone, and end as after a SIGTERM."""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "COLOUR": "red"}
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, str(folder), env=environ)
    await until(lambda: list(folder.glob("0-*")))
    parent.kill()
    await parent.wait()
    await until((folder / "ended-0").exists)


def ignore(reader, writer):
    """Leave a connection as it is."""


async def test_an_ipv6_address_can_be_shared():
    """A port of an IPv6 address is reserved too, and can be listened on by workers."""
    if not socket.has_ipv6:
        pytest.skip("needs IPv6")
    try:
        held = reserve("::1", 0)
    except OSError:
        pytest.skip("needs an IPv6 loopback address")
    port = held.getsockname()[1]
    with held:
        async with await asyncio.start_server(ignore, "::1", port, reuse_port=True) as server:
            assert server.sockets[0].getsockname()[1] == port


async def test_a_port_on_which_connections_wait_can_be_reserved():
    """A connection that a single process closed first does not keep workers from its port."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    server.close()
    await server.wait_closed()
    with reserve("127.0.0.1", port):
        async with await asyncio.start_server(ignore, "127.0.0.1", port, reuse_port=True):
            pass


async def signalled(shutdown, *numbers):
    for number in numbers:
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.01)
    return shutdown.requested.is_set(), shutdown.immediate.is_set()


@pytest.fixture
def restored():
    """Restore the signal handlers after the test."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it may be ignored where the tests run
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_the_first_signal_asks_and_the_second_hurries(restored, first):
    """Any of the three asks for an end; another one that is no hang-up asks for it at once."""
    shutdown = Shutdown()
    shutdown.handle_signals()
    assert await signalled(shutdown, first) == (True, False)
    assert await signalled(shutdown, signal.SIGTERM) == (True, True)


async def test_a_closed_terminal_tells_twice_and_means_it_once(restored):
    """Shell and kernel each send a hang-up when a terminal is closed: running requests still get their time."""
    shutdown = Shutdown()
    shutdown.handle_signals()
    assert await signalled(shutdown, signal.SIGHUP, signal.SIGHUP, signal.SIGHUP) == (True, False)


async def test_under_nohup_a_hang_up_stays_ignored(restored):
    """A process that was started to outlive its terminal does."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    shutdown = Shutdown()
    shutdown.handle_signals()
    assert await signalled(shutdown, signal.SIGHUP) == (False, False)


async def test_a_second_signal_cuts_a_drain_short():
    """Work is awaited to its end, or only until the end shall be at once; either way nothing is left running."""
    shutdown, done = Shutdown(), []

    async def work(seconds):
        await asyncio.sleep(seconds)
        done.append(seconds)

    running = asyncio.all_tasks()
    await shutdown.run_unless_immediate(work(0.01))
    asyncio.get_running_loop().call_later(0.05, shutdown.immediate.set)
    async with asyncio.timeout(60):
        await shutdown.run_unless_immediate(work(60))
    assert done == [0.01]
    assert asyncio.all_tasks() == running
