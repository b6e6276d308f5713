"""The upstreams that get requests for a compaction, and the changes to a request before it is planned."""

from __future__ import annotations

import json
import time

import pytest

from proxy.core.report import Report
from proxy.core.request import Request
from proxy.core.tokens.budget import Shares
from proxy.engine.engine import BoundEngine
from proxy.engine.ports import Answer
from proxy.engine.replies import LocalReply
from proxy.engine.run import Run
from proxy.features.client_compaction.compact_endpoint import Kind
from proxy.features.client_compaction.compaction_item import open_items, pack
from proxy.features.client_compaction.feature import ClientCompaction, UpstreamCompaction, is_unable
from tests.features.client_compaction.test_summary_answer import Ready
from tests.support.api_formats import next_request
from tests.support.engine_fixtures import TENANT, Replica
from tests.support.sample_conversations import agent_session


async def test_other_apis_are_not_opened() -> None:
    """An item is opened only in the API that has such items."""
    replica = Replica()
    feature = ClientCompaction(
        replica.reader, replica.book, replica.compactions, replica.catalogue.resolve, Shares(), time.time, {}
    )
    item = {"type": "compaction", "encrypted_content": pack("The port is 50713.", replica.book.item_key())}
    for api in ("chat", "messages"):
        request = Request(api, json.dumps({"messages": [item], "input": [item]}).encode(), TENANT, "r")
        assert await feature.prepare(request, BoundEngine(replica.engine, Run(request, time.monotonic))) is request


@pytest.mark.parametrize(("share", "spent"), [(0.9, 1234), (0.0, 0)])
async def test_a_ready_summary_is_in_the_compaction(share: float, spent: int) -> None:
    """A model's summary that is ready stands in the item, beside the names of all that was folded."""
    replica = Replica(summaries=Ready(share, "## Goal\n- the shard is 50713."))
    own = {"stub": UpstreamCompaction("own")}
    feature = ClientCompaction(
        replica.reader, replica.book, replica.compactions, replica.catalogue.resolve, Shares(), time.time, own
    )
    body = next_request("responses", agent_session(40, 300))
    request = Request("responses", json.dumps(body).encode(), TENANT, "r", purpose="compact")
    outcome = await feature.answer(request, BoundEngine(replica.engine, Run(request, time.monotonic)))
    assert isinstance(outcome, Answer)
    assert outcome.report.summary_tokens == spent
    item = json.loads(await outcome.reply.next_chunk())["output"][-1]
    text = open_items(json.dumps({"input": [item]}).encode(), replica.book.item_key()).body.decode()
    assert ("the shard is 50713" in text) is (share > 0)
    assert "read_file" in text


@pytest.mark.parametrize(
    ("upstream", "endpoint", "trigger"),
    [
        (UpstreamCompaction(), True, False),
        (UpstreamCompaction(is_supported=True), True, True),
        (UpstreamCompaction("relay"), True, True),
        (UpstreamCompaction("own", is_supported=True), False, False),
    ],
)
def test_the_choice_between_upstream_and_own_compaction(
    upstream: UpstreamCompaction, endpoint: bool, trigger: bool
) -> None:
    """A path costs nothing to try; an item only goes to servers that know it, unless it is configured."""
    assert (upstream.is_first_choice("endpoint"), upstream.is_first_choice("trigger")) == (endpoint, trigger)


@pytest.mark.parametrize(
    ("kind", "status", "head", "unable"),
    [
        ("endpoint", 404, b"", True),
        ("endpoint", 405, b"", True),
        ("endpoint", 501, b"", True),
        ("endpoint", 400, b"compaction", False),
        ("endpoint", 200, b"", False),
        ("endpoint", 429, b"", False),
        ("trigger", 404, b"", True),
        ("trigger", 400, b"Invalid value: 'compaction_trigger'", True),
        ("trigger", 422, b"unknown variant compaction_trigger", True),
        ("trigger", 400, b"model not found", False),
        ("trigger", 500, b"compaction_trigger", False),
    ],
)
def test_who_is_unable(kind: Kind, status: int, head: bytes, unable: bool) -> None:
    """A server is unable if it does not know the path or the item, not if it failed for another reason."""
    reply = LocalReply(b"")
    reply.status = status
    assert is_unable(kind, Answer(Report("r", "responses"), reply, head)) is unable
