"""What is in hand of an answer while a request is under way."""

from __future__ import annotations

import itertools

from proxy.core.request import Request
from proxy.engine.run import Run
from tests.support.engine_fixtures import TENANT, WINDOW, Replica, chat_body
from tests.support.scripted_upstream import ScriptedReply


def run() -> Run:
    return Run(Request("chat", b"{}", TENANT, "r"), itertools.count().__next__)


def test_only_planning_is_overhead() -> None:
    """Time between a pause and the next resumption is not counted."""
    under_way = run()
    under_way.pause_planning()
    under_way.resume_planning()
    under_way.pause_planning()
    assert under_way.overhead == 2


async def test_the_first_overflow_is_what_the_client_gets_if_nothing_follows() -> None:
    """Every byte of the first refusal is held, later ones are not, and nothing stays open."""
    view = (await Replica().plan(chat_body([{"role": "user", "content": "Hi"}]), WINDOW)).view
    under_way, replies = run(), [ScriptedReply(400, []), ScriptedReply(400, [])]
    for number, reply in enumerate(replies):
        under_way.sending("stub")
        under_way.reply, under_way.taken = reply, [b"no ", b"%d" % number]
        under_way.overflowed(view)
    assert under_way.reply is None
    assert under_way.first_overflow is not None
    assert (under_way.first_overflow.head, under_way.overflows) == (b"no 0", 2)
    assert under_way.instead is not None
    assert under_way.instead[1] == b"no 0"
    assert all(reply.closed for reply in replies)


def test_the_generation_before_is_what_the_client_gets_if_the_next_one_fails() -> None:
    """A reply that was read and set aside is given back while another body is sent."""
    under_way, reply = run(), ScriptedReply(200, [])
    under_way.reply, under_way.taken = reply, [b"first"]
    under_way.set_aside()
    under_way.sending("stub")
    assert under_way.instead is not None
    assert (under_way.instead[0].status, under_way.instead[1]) == (200, b"first")
    assert reply.closed
