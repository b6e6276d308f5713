import pytest

from proxy.core.errors import NotFound
from proxy.tasks import Tasks
from proxy.upstream import Bridge, Bridged, DirectUpstream, Target, Upstreams
from tests.support.server_fixture import ScriptedServer, listening
from tests.support.upstream_fixture import read_body


class Both:
    """An upstream that speaks for itself, one that is bridged, and one that is both, all on one stage."""

    async def __aenter__(self):
        self.stage = ScriptedServer()
        self.listening = listening(self.stage)
        base = f"http://127.0.0.1:{await self.listening.__aenter__()}"
        self.tasks = Tasks(lambda name, error: None)
        direct = DirectUpstream([Target("straight", f"{base}/v1"), Target("both", f"{base}/v1")])
        bridged = [Bridged("bridged", "gemini", base), Bridged("both", "anthropic", base)]
        self.upstreams = Upstreams(direct, Bridge(bridged, self.tasks.spawn))
        return self

    async def __aexit__(self, *failure):
        await self.upstreams.close()
        await self.tasks.finish(1.0)
        await self.listening.__aexit__(*failure)


async def test_each_upstream_is_named_once():
    """All names, those of the direct ones first; only those can be asked for more than chat completions."""
    async with Both() as both:
        assert both.upstreams.names == ("straight", "both", "bridged")
        assert [both.upstreams.speaks(name) for name in both.upstreams.names] == [True, True, False]


@pytest.mark.parametrize(
    ("target", "method", "path"),
    [
        ("straight", "POST", "/v1/chat/completions"),
        ("straight", "GET", "/v1/models"),
        ("both", "POST", "/v1/messages?beta=true"),
        ("both", "GET", "/v1/models"),
    ],
)
async def test_what_an_upstream_understands_goes_straight(target, method, path):
    """Bytes arrive as they were sent."""
    async with Both() as both:
        body = b'{ "model" : "m" }' if method == "POST" else None
        await read_body(await both.upstreams.send(target, method, path, [("x-api-key", "k")], body))
        (heard,) = both.stage.heard
        assert (heard.line, heard.body) == (f"{method} {path} HTTP/1.1", body or b"")


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/embeddings"), ("POST", "/v1/messages"), ("GET", "/v1/chat/completions")]
)
async def test_what_a_provider_has_not_is_not_found(method, path):
    """A bridged upstream answers chat completions; anything else says so and is not sent."""
    async with Both() as both:
        with pytest.raises(NotFound, match="'bridged'"):
            await both.upstreams.send("bridged", method, path, [("x-api-key", "k")], b"{}")
        with pytest.raises(NotFound, match="'bridged'"):
            await both.upstreams.upgrade("bridged", "/v1/realtime", [])
        assert both.stage.heard == []


async def test_nothing_is_loaded_that_nobody_needs():
    """Without bridged upstreams warming up does nothing."""
    upstreams = Upstreams(DirectUpstream([]), bridge := Bridge([], lambda work, name: None))
    await upstreams.warm()
    assert bridge._loading is None
    await upstreams.close()


async def test_added_headers_win():
    """What is added for a model replaces what the client sent."""
    async with Both() as both:
        sent = [("X-Tier", "mine"), ("x-api-key", "k")]
        await read_body(await both.upstreams.send("straight", "POST", "/v1/x", sent, b"{}", {"x-tier": "flex"}))
        assert both.stage.heard[0].all("x-tier") == ["flex"]
