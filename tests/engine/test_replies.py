"""Replies that no upstream is asked for."""

from __future__ import annotations

from proxy.engine.replies import DrainedReply, LocalReply
from tests.support.scripted_upstream import JSON, ScriptedReply


async def test_a_drained_reply_is_a_head_without_a_body() -> None:
    """Its status and headers are given back verbatim; its bytes were read before."""
    drained = DrainedReply(ScriptedReply(400, [b"never read"]))
    assert (drained.status, drained.headers, drained.header("Retry-After")) == (400, JSON, "7")
    assert await drained.next_chunk() == b""


async def test_an_answer_of_our_own_comes_once() -> None:
    """It has status 200, its type and its length, and ends."""
    local = LocalReply(b"{}", "application/json")
    assert (local.status, local.header("Content-Length"), local.header("x-none")) == (200, "2", "")
    assert [await local.next_chunk(), await local.next_chunk()] == [b"{}", b""]
