"""Opening a store: its kind, its key, its state, and the warnings for the operator."""

from __future__ import annotations

import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.store import (
    StoreMisconfigured,
    StoreState,
    describe_store,
    key_names,
    store_status,
)
from proxy.store.encryption import Sealer
from proxy.store.store import redacted
from tests.store.conftest import Opener, Valkey, eventually

HERE = Path("/data/ullage")
TENANT, ROOT, ROUTE, A, B = b"t" * 32, b"r" * 16, "openai,gpt-5", b"a" * 16, b"b" * 16


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets stores look after themselves many times a second."""
    monkeypatch.setattr("proxy.store.store._CHECK_BROKEN", 0.05)
    monkeypatch.setattr("proxy.store.store._CHECK_WORKING", 0.05)
    return None


async def test_the_embedded_key_is_made_once_and_kept(opener: Opener) -> None:
    """The key file is made at the first start, for its owner's eyes only, and used ever after."""
    first = await opener("embedded")
    path = opener.directory / "master.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = path.read_bytes()
    await first.records.save(TENANT, ROOT, ROUTE, A, b"x")
    await first.close()
    second = await opener("embedded")
    assert path.read_bytes() == secret
    assert second.records.prefix_key(TENANT) == first.records.prefix_key(TENANT)
    assert await second.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"x")
    assert opener.events == []


async def test_a_spoiled_key_file_is_memory_with_a_warning(opener: Opener) -> None:
    """A key file of the wrong size is named in a warning, not replaced, and the store is memory."""
    opener.directory.mkdir()
    (opener.directory / "master.key").write_bytes(b"short")
    store = await opener("embedded")
    assert store.state().kind == "memory"
    assert "master.key holds 5 bytes" in str(opener.warned[0][1]["cause"])
    assert (opener.directory / "master.key").read_bytes() == b"short"


async def test_a_given_key_is_used_everywhere_and_stored_nowhere(valkey: Valkey, opener: Opener) -> None:
    """With a configured key every kind of store derives the same chain keys, and writes the key nowhere."""
    stores = [await opener(url, key=b"k" * 32) for url in ("memory", "embedded", valkey.url)]
    assert len({store.records.prefix_key(TENANT) for store in stores}) == 1
    assert valkey.say(f"EXISTS {key_names.MASTER}").startswith(":0")
    assert not (opener.directory / "master.key").exists()
    assert opener.events == []


async def test_a_start_that_fails_leaves_no_thread(opener: Opener) -> None:
    """When opening fails after the file was opened, its threads end."""
    opener.directory.mkdir()
    (opener.directory / "master.key").write_bytes(b"short")
    before = threading.active_count()
    await opener("embedded")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("store ")]
    assert threading.active_count() <= before + 2, "the loop's own threads may stay"


async def test_a_short_key_is_refused(opener: Opener) -> None:
    """A configured key that could be guessed is an error that names the setting and not the key."""
    with pytest.raises(StoreMisconfigured, match=r"store\.key is 5 bytes") as refusal:
        await opener("memory", key=b"guess")
    assert "guess" not in str(refusal.value)


async def test_a_key_in_the_store_is_warned_of(valkey: Valkey, opener: Opener) -> None:
    """Without a configured key the operator is told who can read summaries."""
    await opener(valkey.url)
    assert opener.events == ["store.key_in_store"]


async def test_a_key_that_vanished_is_put_back(valkey: Valkey, opener: Opener, watchful: None) -> None:
    """When the store loses the master key it gets the same one back, and records stay readable."""
    store = await opener(valkey.url)
    await store.records.save(TENANT, ROOT, ROUTE, A, b"x")
    valkey.say(f"UNLINK {key_names.MASTER}")
    await eventually(lambda: valkey.say(f"EXISTS {key_names.MASTER}").startswith(":1"))
    await eventually(lambda: "store.key_restored" in opener.events)
    assert await store.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"x")
    assert (await opener(valkey.url)).records.prefix_key(TENANT) == store.records.prefix_key(TENANT)


async def test_a_key_that_changed_is_adopted_with_an_alarm(valkey: Valkey, opener: Opener, watchful: None) -> None:
    """If the master key is replaced, every replica adopts the new one and logs it."""
    stores = [await opener(valkey.url) for _ in range(2)]
    old = stores[0].records.prefix_key(TENANT)
    valkey.say(f"SET {key_names.MASTER} {'n' * 32}")
    await eventually(lambda: all(store.records.prefix_key(TENANT) != old for store in stores))
    assert stores[0].records.prefix_key(TENANT) == stores[1].records.prefix_key(TENANT)
    assert opener.events.count("store.key_changed") == 2


async def test_a_key_of_the_wrong_size_is_not_adopted(valkey: Valkey, opener: Opener) -> None:
    """A value that cannot be a master key keeps the store out of use instead of weakening it."""
    valkey.say(f"SET {key_names.MASTER} short")
    store = await opener(valkey.url)
    assert not store.state().up
    assert opener.warned[0] == ("store.down", {"cause": "master_key"})
    assert await store.records.save(TENANT, ROOT, ROUTE, A, b"x") == b"x"


async def test_secrets_never_show(valkey: Valkey, opener: Opener) -> None:
    """Neither warnings nor the state carry a key, a value, a tenant or a chain key."""
    store = await opener(valkey.url, key=b"very secret master key material!")
    await store.records.save(TENANT, ROOT, ROUTE, A, b"very secret summary")
    valkey.kill()
    await store.records.save(TENANT, ROOT, ROUTE, A, b"very secret summary")
    shown = repr(opener.warned) + repr(store.state())
    assert "secret" not in shown
    assert repr(TENANT)[2:-1] not in shown
    assert repr(store.records.prefix_key(TENANT)) not in shown


words = st.text("abc:@/?#%&=.-", max_size=12)


@given(words, st.sampled_from(["redis", "rediss", "redis+sentinel", "redis+cluster"]), words)
def test_no_url_shows_its_password(extra: str, scheme: str, tail: str) -> None:
    """No password is left in the URL that is shown, whatever its characters are, escaped or not."""
    shown = redacted(f"{scheme}://user:PASS{extra}WORD@host:1/{tail}")
    assert "PASS" not in shown
    assert "WORD" not in shown
    assert "PASS" not in redacted(f"unix:///s?password=PASS{extra}WORD")


def test_a_url_without_secrets_stays_readable() -> None:
    """A URL without a secret is shown as it is."""
    assert redacted("redis://127.0.0.1:6379/0") == "redis://127.0.0.1:6379/0"
    assert redacted("redis://u:p@h1:1,h2:2/main?ssl=1") == "redis://***@h1:1,h2:2/main"
    assert [redacted(url) for url in ("memory", "embedded", "unix:///a/b")] == ["memory", "embedded", "unix:///a/b"]


def raw(valkey: Valkey, prefix_hash: bytes) -> bytes:
    """The value of a record, by its hexadecimal form: no byte of it may be lost on the way."""
    each = "function(c) return string.format('%02x', string.byte(c)) end"
    name = key_names.record_name(ROOT, ROUTE, prefix_hash)
    answer = valkey.say(f"EVAL \"return (redis.call('get', KEYS[1]):gsub('.', {each}))\" 1 {name}")
    return bytes.fromhex(answer.split()[1])


OLD, NEW = b"the old master key, long enough!", b"the new master key, long enough!"


async def test_a_new_master_key_finds_and_opens_what_the_old_one_sealed(valkey: Valkey, opener: Opener) -> None:
    """Through a rotation, replica by replica, each finds what any other wrote; then the old key can go."""
    before = await opener(valkey.url, key=OLD)
    await before.records.save(TENANT, ROOT, ROUTE, A, b"old")
    ready = await opener(valkey.url, key=OLD, others=[NEW])
    after = await opener(valkey.url, key=NEW, others=[OLD])
    assert after.records.prefix_key(TENANT) == ready.records.prefix_key(TENANT) == before.records.prefix_key(TENANT)
    assert await after.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"old")
    await after.records.save(TENANT, ROOT, ROUTE, B, b"new")
    assert await ready.records.newest(TENANT, ROOT, ROUTE, [B]) == (0, b"new")
    # The rotation is over: what is in use is sealed anew when it is found.
    last = await opener(valkey.url, key=NEW, others=[OLD])
    for prefix_hash in (A, B):
        assert await last.records.newest(TENANT, ROOT, ROUTE, [prefix_hash])
        await eventually(
            lambda at=prefix_hash: Sealer(NEW).open(TENANT, key_names.record_name(ROOT, ROUTE, at), raw(valkey, at))
        )
    alone = await opener(valkey.url, key=NEW)
    assert await alone.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"old")
    assert alone.records.prefix_key(TENANT) == before.records.prefix_key(TENANT)
    assert await alone.records.newest(TENANT, ROOT, ROUTE, [B]) == (0, b"new")
    assert "store.integrity" not in opener.events


async def test_an_unknown_key_is_not_reported_as_a_change(valkey: Valkey, opener: Opener) -> None:
    """A record under an unknown key is a miss with advice, told apart from one that was changed."""
    late = await opener(valkey.url, key=OLD)
    early = await opener(valkey.url, key=NEW, others=[OLD])
    await early.records.save(TENANT, ROOT, ROUTE, A, b"new")
    assert await late.records.newest(TENANT, ROOT, ROUTE, [A]) is None
    assert "store.unknown_key" in opener.events
    assert "store.integrity" not in opener.events


async def test_a_configured_key_opens_what_the_directorys_own_sealed(opener: Opener) -> None:
    """Setting store.key later loses nothing that the embedded store's own key sealed."""
    first = await opener("embedded")
    await first.records.save(TENANT, ROOT, ROUTE, A, b"kept")
    await first.close()
    second = await opener("embedded", key=NEW)
    assert await second.records.newest(TENANT, ROOT, ROUTE, [A]) == (0, b"kept")


async def test_every_key_is_long_enough(opener: Opener) -> None:
    """A short key is refused with the name of its setting."""
    with pytest.raises(StoreMisconfigured, match=r"store\.other_keys"):
        await opener("memory", key=NEW, others=[b"short"])


def _state(**facts: object) -> StoreState:
    usual = {"kind": "redis", "url_redacted": "redis://h", "up": True, "breaker": "closed"}
    usual |= {"refusal": "", "instead": False, "errors": {}, "hits": 0}
    return StoreState(**{**usual, **facts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (_state(), "redis  (redis://h)"),
        (_state(kind="embedded"), "embedded  (/data/ullage)"),
        (_state(kind="memory"), "memory  (this process only)"),
        (_state(up=False), "redis  (redis://h, not reachable: serving without it)"),
    ],
)
def test_it_is_described_in_a_line(state: StoreState, words: str) -> None:
    """The start-up summary says which store it is and whether it can be used."""
    assert describe_store(state, HERE) == words


def test_a_refusal_is_described_with_its_remedy() -> None:
    """A store that refuses is shown with the reason and what to do, and memory instead of another as such."""
    refused = describe_store(_state(up=False, refusal="readonly"), HERE)
    assert "readonly" in refused
    assert "redis+sentinel://" in refused
    assert "in place of the configured store" in describe_store(_state(kind="memory", up=False, instead=True), HERE)


def test_the_status_names_the_refusal() -> None:
    """JSON has null if nothing is refused."""
    assert store_status(_state())["refusal"] is None
    found = store_status(_state(up=False, refusal="disk", errors={"disk": 3}))
    assert found == {"kind": "redis", "up": False, "breaker": "closed", "refusal": "disk", "errors": {"disk": 3}}
