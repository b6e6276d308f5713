"""The list of models, over two real upstreams and as the SDKs read it."""

import json

import pytest

from tests.stub import Fault
from tests.support.loopback import loopback_client
from tests.support.server_fixture import raw_answer, running_server

WINDOW = 32_768


async def get(front, path, **headers):
    """The answer of the proxy to a GET with the client's own key."""
    async with loopback_client() as client:
        return await client.get(f"{front.url}{path}", headers={"authorization": "Bearer sk-mine", **headers})


@pytest.fixture
async def two(stub, proxy):
    """A proxy in front of ``first`` (the default) and ``second``, which serves ``qwen*``."""
    first, second = await stub(), await stub(tells="vllm", windows={"qwen3": 16_384, "hidden": 4_096})
    first.models = ["gpt-4o-mini", "qwen3", "odd"]
    config = {
        "upstreams": [{"name": "first", "base_url": first.url}, {"name": "second", "base_url": second.url}],
        "models": [
            {"name": "qwen*", "upstream": "second"},
            {"name": "named", "upstream": "second", "context_window": WINDOW},
            {"name": "*", "upstream": "first"},
        ],
    }
    return await proxy(first.url, config=config), first, second


@pytest.mark.slow
async def test_the_list_names_each_model_where_a_request_would_go(two):
    """Models of all upstreams are listed once, those that no request would reach are not, configured names are."""
    front, first, second = two
    listed = (await get(front, "/models")).json()
    assert listed["object"] == "list"
    owners = {entry["id"]: entry["owned_by"] for entry in listed["data"]}
    assert owners == {"gpt-4o-mini": "stub", "odd": "stub", "qwen3": "vllm", "named": "second"}
    assert first.seen[-1].header("authorization") == "Bearer sk-mine"
    assert second.seen[-1].header("authorization") == "", "the client's key went to somebody else's server"


@pytest.mark.slow
async def test_windows_are_added_and_the_upstreams_own_members_stay(two):
    """Entries carry the window under the names clients read; what the upstream says itself is not overwritten."""
    front, _, _ = two
    by_name = {entry["id"]: entry for entry in (await get(front, "/models")).json()["data"]}
    assert by_name["named"]["context_length"] == WINDOW
    assert by_name["gpt-4o-mini"]["context_length"] == 128_000
    assert by_name["gpt-4o-mini"]["max_output_tokens"] == 16_384
    assert by_name["qwen3"]["max_model_len"] == 16_384
    assert "context_length" not in by_name["odd"], "a window nobody knows was told"


@pytest.mark.slow
async def test_one_model_is_described_by_its_own_upstream(two):
    """GET /models/NAME goes to the model's upstream; a configured name that is not listed there is answered too."""
    front, first, second = two
    await get(front, "/models/gpt-4o-mini")
    assert first.seen[-1].path.endswith("/models/gpt-4o-mini")
    second.fail(Fault(status=404))
    assert (await get(front, "/models/named")).json()["id"] == "named"


@pytest.mark.slow
async def test_sdks_read_the_list(two):
    """The OpenAI and Anthropic SDKs iterate over it."""
    import anthropic
    import openai

    front, _, _ = two
    async with openai.AsyncOpenAI(base_url=front.url, api_key="sk-mine") as client:
        assert "qwen3" in [model.id async for model in await client.models.list()]
    async with anthropic.AsyncAnthropic(base_url=front.root, api_key="sk-mine") as client:
        names = [model.id async for model in client.models.list()]
    assert "named" in names


@pytest.mark.slow
async def test_one_dead_upstream_costs_only_its_own_models(two):
    """With one upstream gone the others' models are still listed."""
    front, _, second = two
    await second.__aexit__(None, None, None)
    names = [entry["id"] for entry in (await get(front, "/models")).json()["data"]]
    assert names == ["gpt-4o-mini", "odd", "named"]


async def test_an_error_of_the_only_upstream_is_its_own():
    """If no list can be read, the upstream's answer goes to the client as it is."""
    async with running_server() as at:
        at.stage.reply = raw_answer(b'{"error": {"message": "no"}}', "X-Why: key", status="401 Unauthorized")
        got = await at.ask("GET", "/v1/models")
        assert got.line == "HTTP/1.1 401 Unauthorized"
        assert (got.body, got.all("x-why")) == (b'{"error": {"message": "no"}}', ["key"])


async def test_fields_of_an_entry_are_kept_as_they_are():
    """Unknown members of the list and its entries survive, and so does a window that an entry has already."""
    async with running_server() as at:
        listing = {"object": "list", "extra": 1, "data": [{"id": "a", "context_length": 7, "x": [1]}, {"id": "b"}]}
        at.stage.reply = raw_answer(json.dumps(listing).encode())
        got = json.loads((await at.ask("GET", "/models?limit=2", b"", "Accept-Encoding: gzip")).body)
        assert got == {**listing, "data": [listing["data"][0], {"id": "b", "context_length": 4096}]}
        assert at.stage.heard[0].line == "GET /v1/models?limit=2 HTTP/1.1"
        assert at.stage.heard[0].all("accept-encoding") == []


@pytest.mark.parametrize("body", [b"[]", b"no json", b'{"data": 5}', b'{"data": [1, {"id": 2}]}'])
async def test_a_strange_list_is_no_error(body):
    """An answer that is no list of models yields an empty list."""
    async with running_server() as at:
        at.stage.reply = raw_answer(body)
        got = await at.ask("GET", "/v1/models")
        assert got.line == "HTTP/1.1 200 OK"
        assert json.loads(got.body)["data"] == []


@pytest.mark.slow
async def test_a_list_that_cannot_be_had_is_an_error(stub, proxy):
    """With the only upstream down the list is 502, and as soon as it answers, a list."""
    import openai

    server = await stub()
    front = await proxy(server.url)
    await server.__aexit__(None, None, None)
    got = await get(front, "/models")
    assert got.status_code == 502
    assert got.json()["error"]["code"] == "upstream_unreachable"
    async with openai.AsyncOpenAI(base_url=front.url, api_key="sk-mine", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError):
            await client.models.list()


async def test_an_upstream_that_hangs_is_a_timeout(monkeypatch):
    """The only upstream does not answer in time: the list is an error and not empty."""
    monkeypatch.setattr("proxy.server.models.PATIENCE", 0.2)

    async def hang(heard, reader, writer):
        await reader.read()

    async with running_server() as at:
        at.stage.script = hang
        got = await at.ask("GET", "/v1/models")
        assert got.line.startswith("HTTP/1.1 504")


@pytest.mark.slow
async def test_names_from_the_configuration_are_listed_without_any_upstream(stub, proxy):
    """A model that the configuration names is listed although no upstream could be reached."""
    server = await stub()
    config = {"models": [{"name": "named", "context_window": WINDOW}, {"name": "*", "context_window": WINDOW}]}
    front = await proxy(server.url, config=config)
    await server.__aexit__(None, None, None)
    assert [entry["id"] for entry in (await get(front, "/models")).json()["data"]] == ["named"]
