"""Sessions: what a cookie proves, and how often one may guess."""

from __future__ import annotations

import pytest

from proxy.page.sessions import ATTEMPTS
from proxy.server import ServerConfig
from tests.page.test_routes import KEYED, access, cookie_of, log_in, shown, status


def changed(cookie: str) -> list[str]:
    """Cookies that are nearly *cookie*: another time, another proof, none."""
    name, _, value = cookie.partition("=")
    until, _, proof = value.partition(".")
    values = [
        f"{int(until) + 1}.{proof}",
        f"{until}.{'0' * len(proof)}",
        f"{until}.",
        until,
        "",
        "0." + proof,
        "٣." + proof,
    ]
    return [f"{name}={value}" for value in values]


async def test_a_cookie_that_was_not_given_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither made up, nor of another admin key, nor after its time."""
    async with shown(KEYED) as (at, _):
        cookie = cookie_of(await log_in(at))
        for each in changed(cookie):
            assert await access(at, each) == "login"
    async with shown(ServerConfig("up", admin_key="next-key")) as (at, _):
        assert await access(at, cookie) == "login"
    monkeypatch.setattr("proxy.page.sessions.SESSION_SECONDS", -1)
    async with shown(KEYED) as (at, _):
        assert await access(at, cookie_of(await log_in(at))) == "login"


async def test_guessing_is_slowed_down() -> None:
    """After some attempts even the right key has to wait; who has a session is not touched by it."""
    async with shown(KEYED) as (at, _):
        cookie = cookie_of(await log_in(at))
        answers = [await log_in(at, f"guess-{number}") for number in range(int(ATTEMPTS))]
        assert status(answers[-1]) == 429
        assert answers[-1].all("retry-after") == ["10"]
        assert status(await log_in(at)) == 429
        assert await access(at, cookie) == "session"
