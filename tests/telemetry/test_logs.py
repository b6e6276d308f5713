"""Logs: facts only, one line per request, and a writer that never waits for the reader."""

import ast
import asyncio
import json
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import ClientSession, web

from proxy.core.report import Report, Usage
from proxy.telemetry.logs import ALLOWED, LONGEST_TEXT, MOST_REFUSALS, LineWriter, Logs

REPORT = Report(
    "req_1",
    "chat",
    model="gpt-5",
    upstream="openai",
    outcome="compacted",
    reason="fold",
    window=8192,
    budget=7000,
    tokens_before=9000,
    tokens_after=3500,
    stages=("fold", "drop"),
    conversation="c0ffee",
    agent="codex",
    files_read=3,
    event=True,
    retries=1,
    overflows=1,
    overhead_seconds=0.0015,
    status=200,
    usage=Usage(3400, 50, 3000),
    regions={"system": 500, "tool": 2900, "reserve": 1000},
    borrowed={"older": 400},
    source="table",
    project="apollo",
    task_size="small",
)


WRITTEN_WITHIN = 30.0
"""Seconds for the writing thread to end: a busy machine may need more than the one that a stopping proxy grants."""


@pytest.fixture
def logged(tmp_path):
    """Logs that write to a file, and a function that ends them and gives the lines."""
    made = []

    def start(level="debug", style="json"):
        fd = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        logs = Logs(level, style, fd)
        made.append((logs, fd))

        def lines():
            logs.close()
            logs.writer.close(WRITTEN_WITHIN)
            return (tmp_path / "log").read_text("utf-8").splitlines()

        return logs, lines

    yield start
    for logs, fd in made:
        logs.close()
        os.close(fd)


def test_a_request_is_one_line_of_facts(logged):
    """request_done writes one JSON line with the report's figures, an ISO time in UTC and the level."""
    logs, lines = logged()
    logs.request_done(REPORT, 1.5)
    (line,) = lines()
    fields = json.loads(line)
    assert fields.pop("timestamp").endswith("Z")
    assert fields == {
        "regions": {"system": 500, "tool": 2900, "reserve": 1000}, "borrowed": {"older": 400},
        "window_source": "table", "project": "apollo", "task_size": "small",
        "event": "proxy.request_done", "level": "info", "request_id": "req_1", "api": "chat", "model": "gpt-5",
        "upstream": "openai", "conversation": "c0ffee", "status": 200, "outcome": "compacted", "reason": "fold",
        "stream": False, "stages": ["fold", "drop"], "tokens_before": 9000, "tokens_after": 3500, "bounded": False,
        "window": 8192, "pressure": 0.5, "compaction": True, "observed": False, "retries": 1, "overflows": 1,
        "fallback": "", "client_compaction": "", "epoch": 0, "agent": "codex", "files_read": 3,
        "input_tokens": 3400, "output_tokens": 50, "cached_tokens": 3000, "overhead_ms": 1.5, "duration_ms": 1500.0,
            "summary_tokens": 0, "recalls": 0, "recall_tokens": 0,
    }  # fmt: skip


def test_fields_that_are_not_on_the_list_never_appear(logged):
    """A field that is not on the list is dropped and named, and an object gives its type only."""
    logs, lines = logged()
    logs.log.info("x", body="CANARY", prompt=["CANARY"], count=1, task={"CANARY": 1}, reason=b"CANARY")
    (line,) = lines()
    assert "CANARY" not in line
    fields = json.loads(line)
    assert fields["dropped_fields"] == ["body", "prompt"]
    assert (fields["count"], fields["task"], fields["reason"]) == (1, "dict", "bytes")


def boom():
    secret = "CANARY"
    raise ValueError(f"cannot read {secret}") from KeyError("CANARY")


@pytest.mark.parametrize("style", ["json", "console"])
def test_exceptions_give_type_and_place_only(logged, style):
    """An exception's text, cause and local values stay out; its type and the frames it came through go in."""
    logs, lines = logged(style=style)
    try:
        boom()
    except ValueError as error:
        logs.task_failed("refresh", error)
        logs.log.error("proxy.failed", exc_info=True)
    first, second = lines()
    assert "CANARY" not in first + second
    for line in (first, second):
        assert "ValueError" in line
        assert "boom" in line
        assert "test_logs.py" in line


async def test_libraries_are_logged_without_data(logged, monkeypatch):
    """Lines of aiohttp and asyncio may hold requests and objects; only their logger, place and type are written."""
    # LiteLLM, if a test before loaded it, filters what asyncio logs, and renders the arguments into the text.
    monkeypatch.setattr(logging.getLogger("asyncio"), "filters", [])
    logs, lines = logged()
    logs.adopt_libraries()
    try:
        boom()
    except ValueError as error:
        logging.getLogger("aiohttp.server").exception("Error handling request from %s", "CANARY", exc_info=error)
        logging.getLogger("aiohttp.server").debug("CANARY")
        logging.getLogger("aiohttp.access").info("GET /CANARY")
        logging.getLogger("asyncio").exception(f"Task exception was never retrieved\nfuture: {error!r}", exc_info=error)  # noqa: TRY401
        logging.getLogger("asyncio").warning("Executing %s took %.3f seconds", error, 1.0)
        logs.loop_failed(asyncio.get_running_loop(), {"message": "Unhandled", "exception": error, "protocol": "CANARY"})
        called = {"message": "Exception in callback note('CANARY')", "exception": error, "handle": object()}
        logs.loop_failed(asyncio.get_running_loop(), called)
        logs.fault("request", "r-1", error)
    written = lines()
    assert "CANARY" not in "".join(written)
    events = [json.loads(line)["event"] for line in written]
    assert events == ["library.log"] * 3 + ["proxy.loop_error"] * 2 + ["proxy.internal_error"]
    fault = json.loads(written[5])
    assert (fault["where"], fault["request_id"], fault["error"]) == ("request", "r-1", "ValueError")
    assert "boom" in fault["frames"][-1]
    assert json.loads(written[0])["template"] == "Error handling request from %s"
    assert json.loads(written[0])["logger"] == "aiohttp.server"
    assert json.loads(written[2])["template"] == "Executing %s took %.3f seconds"
    assert not any(type(handler).__name__ == "_Library" for handler in logging.getLogger().handlers)


async def test_a_real_aiohttp_server_logs_no_request(logged):
    """A handler that fails with content, and bytes that are no HTTP, leave no content in the log."""
    logs, lines = logged()
    logs.adopt_libraries()

    async def fail(request):
        raise RuntimeError(await request.text())

    app = web.Application()
    app.router.add_post("/{path}", fail)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with ClientSession() as session:
        url = f"http://127.0.0.1:{port}/CANARY?key=CANARY"
        async with session.post(url, data="CANARY", headers={"authorization": "CANARY"}) as response:
            assert response.status == 500
    for junk in (b"CANARY CANARY CANARY\r\n\r\n", b"GET / HTTP/1.1\r\nbad header: CANARY\r\n\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(junk)
        assert b"400" in await reader.readline()
        writer.close()
    await runner.cleanup()
    written = lines()
    assert "CANARY" not in "".join(written)
    assert "RuntimeError" in written[0]
    assert "fail" in written[0]


@pytest.mark.parametrize("style", ["json", "console"])
def test_a_clients_text_cannot_forge_or_break_a_line(logged, style):
    """A model name with line ends, escape codes, lone surrogates or great length stays inside one line."""
    logs, lines = logged(style=style)
    for model in ('x\n{"event":"forged"}', "\x1b[31mred\u2028", "\ud83d", "m" * 100_000):
        logs.request_done(Report("r", "chat", model=model, status=200, tokens_before=2**70), 0.1)
    written = lines()
    assert len(written) == 4
    assert "\x1b[31mred" not in "".join(written)
    assert all(len(line) < 4 * LONGEST_TEXT + 1000 for line in written)
    if style == "json":
        assert json.loads(written[0])["event"] == "proxy.request_done"
        assert json.loads(written[0])["tokens_before"] == 2**70


def test_the_level_holds(logged):
    """Lines under the configured level are not written."""
    logs, lines = logged(level="warning")
    logs.request_done(REPORT, 1.0)
    logs.log.warning("y")
    assert [json.loads(line)["event"] for line in lines()] == ["y"]


EVENT = re.compile(r"[a-z]+\.[a-z_]+")


def events_in(module: Path) -> Iterator[tuple[int, set[str]]]:
    """Yield each event that *module* writes: its line, and the names of its facts as far as they are literal."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Call):
            names = [arg for arg in node.args if not isinstance(arg, ast.Dict)]
            given = [each for arg in names for each in ast.walk(arg) if isinstance(each, ast.Constant)]
            if any(isinstance(each.value, str) and EVENT.fullmatch(each.value) for each in given):
                tables = [arg for arg in node.args if isinstance(arg, ast.Dict)]
                said = {str(key.value) for table in tables for key in table.keys if isinstance(key, ast.Constant)}
                yield node.lineno, said | {keyword.arg for keyword in node.keywords if keyword.arg}


@pytest.mark.slow
def test_no_event_carries_a_fact_that_is_dropped() -> None:
    """Every fact that a module logs is in the list of fields, else it would be dropped."""
    modules = sorted((Path(__file__).parents[2] / "proxy").rglob("*.py"))
    found = [(module, line, names) for module in modules for line, names in events_in(module)]
    assert sum(bool(names) for _, _, names in found) > 15
    assert [(module.name, line, names) for module, line, names in found if names - ALLOWED - {"exc_info"}] == []


def test_a_flood_of_refusals_is_counted_instead_of_written(logged):
    """Of requests refused since too many are under way a few get their line; one line tells how many more there were.

    The next second begins anew, other refusals keep their lines, and a quiet second writes nothing.
    """
    logs, lines = logged()
    full = Report("r", "chat", outcome="refused", reason="overloaded", status=503)
    for _ in range(MOST_REFUSALS + 25):
        logs.request_done(full, 0.001)
    logs.request_done(full.with_(reason="request_too_large", status=413), 0.001)
    logs.log_refusals()
    logs.log_refusals()
    logs.request_done(full, 0.001)
    logs.log_refusals()
    written = [json.loads(line) for line in lines()]
    done = [line["reason"] for line in written if line["event"] == "proxy.request_done"]
    assert done == ["overloaded"] * MOST_REFUSALS + ["request_too_large", "overloaded"]
    assert [line["count"] for line in written if line["event"] == "proxy.refused_more"] == [25]


def test_a_full_pipe_costs_lines_not_time():
    """With a reader that does not read, write returns, the buffer is bounded and what did not fit is counted."""
    reader, pipe = os.pipe()
    writer = LineWriter(pipe, most_bytes=100_000)
    line = b"x" * 999 + b"\n"
    done = threading.Event()

    def flood():
        for _ in range(1000):
            writer.write(line)
        done.set()

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    assert done.wait(60)
    lost = writer.dropped
    assert 500 < lost < 1000
    got = bytearray()
    while len(got) < (1000 - lost) * 1000:
        got += os.read(reader, 65536)
    assert set(got) == {ord("x"), ord("\n")}
    lost -= 1
    while writer.dropped != lost:  # the room is free again a moment after the last byte was read
        lost = writer.dropped
        writer.write(b"last\n")
    writer.close(10)
    os.close(pipe)
    assert os.read(reader, 100) == b"last\n"
    os.close(reader)


def test_lines_of_several_workers_do_not_mix():
    """Writers that share a slow pipe, as worker processes do, never tear each other's lines."""
    reader, pipe = os.pipe()
    writers = [LineWriter(pipe) for _ in range(3)]
    for number in range(1500):
        for index, writer in enumerate(writers):
            writer.write(bytes([97 + index]) * (200 + number % 300) + b"\n")
    got = bytearray()
    total = 3 * sum(201 + number % 300 for number in range(1500))
    while len(got) < total:
        got += os.read(reader, 10_000)
    assert all(len(set(line)) == 1 for line in got.splitlines())
    for writer in writers:
        writer.close(10)
        assert writer.dropped == 0
    os.close(pipe)
    os.close(reader)


def test_lines_of_several_workers_do_not_mix_in_a_file(tmp_path):
    """Writers that share a file, as worker processes do, never tear or overwrite each other's lines."""
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    writers = [LineWriter(file) for _ in range(3)]
    for number in range(1500):
        for index, writer in enumerate(writers):
            writer.write(bytes([97 + index]) * (200 + number % 300) + b"\n")
    for writer in writers:
        writer.close(10)
    os.close(file)
    lines = (tmp_path / "log").read_bytes().splitlines()
    assert all(len(set(line)) == 1 for line in lines)
    assert sorted(map(len, lines)) == sorted(200 + number % 300 for number in range(1500) for _ in writers)


def test_a_gone_reader_costs_lines_only():
    """When the reader has closed the pipe, lines are dropped and counted, and closing returns."""
    reader, pipe = os.pipe()
    os.close(reader)
    writer = LineWriter(pipe)
    writer.write(b"a\n")
    writer.close(10)
    writer.write(b"b\n")
    assert writer.dropped == 2
    os.close(pipe)


def test_a_pipe_that_somebody_made_non_blocking_loses_nothing():
    """A full non-blocking pipe is waited for by the writing thread."""
    reader, pipe = os.pipe()
    os.set_blocking(pipe, False)
    writer = LineWriter(pipe)
    sent = b"".join(b"%06d\n" % number for number in range(40_000))
    writer.write(sent)
    got = bytearray()
    while len(got) < len(sent):
        got += os.read(reader, 65536)
    assert got == sent
    writer.close(10)
    os.close(pipe)
    os.close(reader)
