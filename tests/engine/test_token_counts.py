"""Token counts, as transcripts: the upstream's count of the view that would be sent, else ours."""

from __future__ import annotations

import json

import pytest

from proxy.core.models import ModelRule
from proxy.engine.token_counts import CountedBy
from tests.support.sample_conversations import prose
from tests.support.scripted_upstream import WINDOW, EngineFixture, agent_request, read_whole
from tests.support.transcript import play

COUNTED = b'{"input_tokens":77}'


async def test_a_count_is_the_upstreams_where_it_has_one() -> None:
    """The view goes up to be counted, and the answer comes back as it is; nothing is recorded."""
    (played,) = await play(
        """
        client   >> session, count
        upstream << stub
        upstream >> 200 counted
        client   << 200 counted
        report   : api=count_tokens
        records  : 0
        """,
        session=(session := agent_request("messages", 40)),
        counted=COUNTED,
    )
    assert len(played.bodies[0]) < len(session)


async def test_a_count_for_a_fallback_takes_no_key_along_and_records_nothing() -> None:
    """If another model would answer, its upstream counts without the client's key, and nothing is recorded."""
    small = ModelRule("small", "stub", 2048, steps=("", "big"))
    body = {**json.loads(agent_request("messages", 40, model="small")), "system": prose(1, 3_000)}
    await play(
        """
        client   >> session, count
        upstream << other, keyless
        upstream >> 200 counted
        client   << 200 counted
        report   : fallback=big
        records  : 0
        """,
        EngineFixture(rules=[ModelRule("big", "other", WINDOW), small]),
        session=json.dumps(body).encode(),
        counted=COUNTED,
    )


@pytest.mark.parametrize("window", [WINDOW, None])
@pytest.mark.parametrize(("counting", "status"), [("auto", 404), ("auto", 405), ("own", 200)])
async def test_a_count_is_ours_where_the_upstream_has_none(
    counting: CountedBy, status: int, window: int | None
) -> None:
    """An upstream that cannot count, or is not to be asked, leaves it to us; so does an unknown window."""
    engine = EngineFixture(window, counting=counting)
    rows = f"upstream << stub\nupstream >> {status} none\nreplies : closed" if counting == "auto" else ""
    for rounds in (1, 8, 40):
        (played,) = await play(
            f"""
            client >> session, count
            {rows}
            """,
            engine,
            session=agent_request("messages", rounds),
            none=b"{}",
        )
        tokens = json.loads(await read_whole(played.answer))["input_tokens"]
        assert 100 * rounds < tokens or tokens < WINDOW
        assert played.answer.reply.status == 200
        assert played.answer.reply.header("Content-Type") == "application/json"


@pytest.mark.parametrize(("counting", "status"), [("relay", 404), ("auto", 401), ("auto", 500)])
async def test_every_other_answer_to_a_count_passes(counting: CountedBy, status: int) -> None:
    """Errors that do not say that there is no such route are the upstream's answer."""
    await play(
        f"""
        client   >> session, count
        upstream << stub
        upstream >> {status} no
        client   << {status} no
        """,
        EngineFixture(counting=counting),
        session=agent_request("messages", 2),
        no=b"no",
    )
