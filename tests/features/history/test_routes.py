"""The routes of the history over HTTP, and the requests that are refused."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from proxy.features.history.history import History
from proxy.features.history.notes import RequestNote, encode_note, note_name
from proxy.features.history.routes import HistoryRoutes
from proxy.server import ServerConfig
from proxy.server.access import client_tenant
from proxy.server.admin import OpenRoutes
from proxy.server.own_api import BURST, MAX_BODY
from proxy.store.archive_table import ArchiveTable
from proxy.store.conversation_table import ConversationTable
from proxy.summaries.codec import NOTE_VERSION as VERSION
from tests.support.server_fixture import RawMessage, RunningServer, running_server

NAME, ROOT = "abcdefgh-_123456", b"r" * 16
MINE = "Authorization: Bearer mine"
TENANT = client_tenant({"authorization": "Bearer mine"})
JSON = "Content-Type: application/json"
COMPACT = json.dumps({"conversation": NAME}).encode()


def history_of(table: ConversationTable) -> History:
    """The history of the conversations in *table*."""
    return History(table, ArchiveTable(table._access), time.time, compacts=True, summaries="background", budgets=False)


def history_routes(table: ConversationTable) -> OpenRoutes:
    """The routes by which callers read it."""
    return lambda access, limits: HistoryRoutes(access, history_of(table), limits).by_name()


async def known(at: RunningServer) -> None:
    """One conversation of one tenant."""
    last = RequestNote(VERSION, 0, "up,m", "chat", 9, 8192, 7000, 900, 900, "verbatim", (), 0, b"", 0, 0)
    at.register.save_conversation(TENANT, NAME, ROOT, 1.0, long_lived=False)
    at.register.save_note(TENANT, ROOT, note_name(last), encode_note(last), long_lived=False)
    await asyncio.sleep(0)
    while not await history_of(at.register).conversation(TENANT, NAME):  # noqa: ASYNC110 - the register has no event
        await asyncio.sleep(0)


def status(got: RawMessage) -> int:
    return int(got.line.split()[1])


async def test_a_caller_reads_its_own_conversations() -> None:
    """Its list, and one by name, as JSON that nothing keeps; to a HEAD the head alone; never counted or relayed."""
    async with running_server(open_routes=history_routes) as at:
        await known(at)
        got = await at.ask("GET", "/ullage/api/conversations?x=1", b"", MINE)
        assert [each["conversation"] for each in json.loads(got.body)["conversations"]] == [NAME]
        got = await at.ask("GET", f"/ullage/api/conversations/{NAME}", b"", MINE)
        (thread,) = json.loads(got.body)["threads"]
        assert (thread["last"][0]["items"], thread["folds"], thread["compaction_wished"]) == (9, [], False)
        assert (got.all("content-type"), got.all("cache-control")) == (["application/json"], ["no-store"])
        assert (at.stage.heard, at.reports) == ([], [])


@pytest.mark.parametrize("name", [NAME[:-1] + "0", "short", "..%2fstatus", NAME + "/x", "a" * 5000])
async def test_what_is_not_there_is_not_found(name: str) -> None:
    """Another name, another tenant's and what cannot be a name are one and the same 404."""
    async with running_server(open_routes=history_routes) as at:
        await known(at)
        bodies = set()
        for path, headers in ((name, [MINE]), (NAME, ["Authorization: Bearer other"])):
            got = await at.ask("GET", f"/ullage/api/conversations/{path}", b"", *headers)
            assert status(got) == 404
            bodies.add(got.body)
        assert len(bodies) == 1


async def test_a_requested_compaction_may_name_a_share() -> None:
    """How far the conversation goes down is repeated in the answer."""
    async with running_server(open_routes=history_routes) as at:
        await known(at)
        body = json.dumps({"conversation": NAME, "share": 0.25}).encode()
        got = await at.ask("POST", "/ullage/api/compact", body, MINE, JSON)
        assert status(got) == 202
        assert "to 0.25 of its room" in json.loads(got.body)["message"]


async def test_a_compaction_is_requested_for_a_known_conversation() -> None:
    """202 announces it; a second request changes nothing; another tenant's conversation is unknown."""
    async with running_server(open_routes=history_routes) as at:
        await known(at)
        for _ in range(2):
            got = await at.ask("POST", "/ullage/api/compact", COMPACT, MINE, JSON)
            assert status(got) == 202
            assert json.loads(got.body)["expires_in_seconds"] == 3600
        got = await at.ask("GET", f"/ullage/api/conversations/{NAME}", b"", MINE)
        assert json.loads(got.body)["threads"][0]["compaction_wished"]
        assert status(await at.ask("POST", "/ullage/api/compact", COMPACT, "Authorization: Bearer other", JSON)) == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "expected"),
    [
        ("POST", "/ullage/api/compact", COMPACT, [MINE], 400),
        ("POST", "/ullage/api/compact", COMPACT, [MINE, "Content-Type: text/plain"], 400),
        ("POST", "/ullage/api/compact", b"{}", [MINE, JSON], 400),
        ("POST", "/ullage/api/compact", b"[", [MINE, JSON], 400),
        ("POST", "/ullage/api/compact", b'{"conversation": 1}', [MINE, JSON], 400),
        ("POST", "/ullage/api/compact", b'{"conversation": "x", "all": true}', [MINE, JSON], 400),
        *(
            ("POST", "/ullage/api/compact", b'{"conversation": "x", "share": %b}' % share, [MINE, JSON], 400)
            for share in (b"0", b"1", b"-0.5", b'"0.2"', b"true")
        ),
        ("POST", "/ullage/api/compact", b'{"conversation": "' + b"x" * MAX_BODY + b'"}', [MINE, JSON], 413),
        ("GET", "/ullage/api/compact", b"", [MINE], 404),
        ("POST", "/ullage/api/compact/x", COMPACT, [MINE, JSON], 404),
        ("GET", "/ullage/api/archive/" + "A" * 43, b"", [MINE], 404),
        ("GET", "/ullage/api/archive/" + "A" * 43 + "?limit=0", b"", [MINE], 400),
        ("GET", "/ullage/api/archive/x?offset=-1", b"", [MINE], 400),
        ("GET", "/ullage/api/archive", b"", [MINE], 404),
        ("POST", "/ullage/api/archive/" + "A" * 43, b"{}", [MINE, JSON], 404),
        ("DELETE", f"/ullage/api/conversations/{NAME}", b"", [MINE], 404),
        ("GET", "/ullage/api/conversations", b"", ["Host: another.example.com"], 403),
        ("GET", "/ullage/api/conversations", b"", ["Host: localhost"], 200),
        ("GET", "/ullage/api/conversations", b"", [MINE, "Origin: https://evil.example.com"], 403),
        ("POST", "/ullage/api/compact", COMPACT, [MINE, JSON, "Sec-Fetch-Site: cross-site"], 403),
    ],
)
async def test_other_requests_are_refused(
    method: str, path: str, body: bytes, headers: list[str], expected: int
) -> None:
    """Other methods, bodies, sites and callers are refused in words, and the connection's next request is answered."""
    async with running_server(open_routes=history_routes) as at:
        await known(at)
        got = await at.ask(method, path, body, *headers)
        assert status(got) == expected
        assert expected == 200 or "message" in json.loads(got.body)["error"]
        assert status(await at.ask("GET", "/health/live")) == 200


@pytest.mark.parametrize(
    ("path", "says"),
    [("archive/" + "A" * 43, "archive.enabled"), ("memories", "a feature that is off has no pages")],
)
async def test_what_a_feature_that_is_off_would_answer_names_it(path: str, says: str) -> None:
    """A caller who finds nothing is told what has to be on for it."""
    async with running_server(open_routes=history_routes) as at:
        got = await at.ask("GET", f"/ullage/api/{path}", b"", MINE)
        assert status(got) == 404
        assert says in json.loads(got.body)["error"]["message"]


async def test_a_caller_has_a_rate_limit() -> None:
    """Beyond the burst a caller gets 429 and when to come back; others are not affected."""
    async with running_server(open_routes=history_routes) as at:
        requests = (at.ask("GET", "/ullage/api/conversations", b"", MINE) for _ in range(int(BURST) + 70))
        got = await asyncio.gather(*requests)
        refused = [each for each in got if status(each) == 429]
        assert refused
        assert sum(status(each) == 200 for each in got) >= BURST
        assert refused[0].all("retry-after") == ["1"]
        assert status(await at.ask("GET", "/ullage/api/conversations", b"", "X-Api-Key: other")) == 200


async def test_no_path_or_body_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Keys and names are in no log line."""
    async with running_server(ServerConfig("up", admin_key="boss-key"), open_routes=history_routes) as at:
        await at.ask("GET", f"/ullage/api/conversations/{NAME}", b"", "Authorization: Bearer boss-key")
        await at.ask("POST", "/ullage/api/compact", COMPACT, MINE, JSON)
    assert "boss-key" not in caplog.text
    assert NAME not in caplog.text


async def test_a_state_is_exported_and_imported() -> None:
    """Budget and unknown members are taken over; a damaged one changes nothing and says so; others see none of it."""
    async with running_server(open_routes=history_routes) as at:
        path = f"/ullage/api/state/{NAME}"
        assert status(await at.ask("GET", path, b"", MINE)) == 404
        got = await at.ask("PUT", path, b"{", MINE, JSON)
        assert "anew" in json.loads(got.body)["repaired"]
        state = json.dumps({"issue": 7, "budget": {"total": 900, "consumed": 800}}).encode()
        assert status(await at.ask("PUT", path, state, MINE, JSON)) == 200
        got = await at.ask("GET", path, b"", MINE)
        exported = json.loads(got.body)
        assert exported["budget"] == {"total": 900, "consumed": 800, "remaining": 100}
        assert (exported["issue"], exported["version"], exported["history_tail"]) == (7, 2, [])
        got = await at.ask("PUT", path, b"[]", MINE, JSON)
        assert json.loads(got.body).items() >= exported.items()
        assert "stored" in json.loads(got.body)["repaired"]
        assert status(await at.ask("PUT", path, state, MINE)) == 400
        assert status(await at.ask("DELETE", path, b"", MINE)) == 404
        assert status(await at.ask("GET", path, b"", "Authorization: Bearer other")) == 404
