"""Counting tokens: exactly, offline, from many threads; and what happens where the vocabulary is missing."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken import registry

from proxy import tokenizers as module
from proxy.core.apis import chat
from proxy.core.tokens.counting import long_paragraphs
from proxy.long_texts import CHUNK, RUN, shortened
from proxy.tokenizers import (
    VOCABULARIES,
    FastCounter,
    Tokenizers,
    estimate,
    packaged_vocabularies,
    without_lookahead,
)
from tests.bench.counting_messages import messages, original
from tests.bench.counting_messages import reference as reference_of_message
from tests.stub import tokens as stub
from tests.support import conversation_strategies
from tests.support.sample_conversations import log, prose

ROOT = Path(__file__).parents[1]
ENCODINGS = sorted(VOCABULARIES)
SHARED = Tokenizers()
EXACT = Tokenizers(fast=False)
HAS_FAST = importlib.util.find_spec("gigatoken") is not None
needs_fast = pytest.mark.skipif(not HAS_FAST, reason="gigatoken is not installed: pip install 'ullage[fast]'")
LIBRARIES = [
    pytest.param(EXACT, id="tiktoken"),
    pytest.param(SHARED, id="gigatoken", marks=needs_fast),
]
by_library = pytest.mark.parametrize("tokenizers", LIBRARIES)


SPLIT_DIFFERENTLY = [*" \t\n\r\x0b\x85\u3000aBs1'/!.ßǅⅧʰſ中\u0301٣😀", "'ll", "'Re", "  ", "\r\n"]
"""Characters between which the patterns of the encodings split, or do not."""


def reference(encoding: str, text: str) -> int:
    """Tokens as tiktoken itself has them; lone surrogates as the replacement character."""
    sound = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return len(original(encoding).encode(sound, disallowed_special=()))


@by_library
@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(max_examples=100)
@given(text=conversation_strategies.texts() | st.text())
def test_counts_are_tiktokens(tokenizers: Tokenizers, encoding: str, text: str) -> None:
    """Any text, lone surrogates and special-token text included, counts as tiktoken counts it as text."""
    assert tokenizers.count(encoding, text) == reference(encoding, text)


@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(max_examples=400)
@given(text=st.lists(st.sampled_from(SPLIT_DIFFERENTLY), max_size=20).map("".join) | st.text(max_size=40))
def test_the_faster_pattern_splits_alike(encoding: str, text: str) -> None:
    """With the faster pattern tiktoken gives the same tokens for any text, in the same order."""
    SHARED.counter(encoding)
    faster, published = tiktoken.get_encoding(encoding), original(encoding)
    assert faster is not published
    assert faster.encode_ordinary(text) == published.encode_ordinary(text)


@pytest.mark.slow
@by_library
@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(max_examples=300)
@given(
    text=st.lists(st.sampled_from([*SPLIT_DIFFERENTLY, "\n\n"]), max_size=30).map("".join) | st.text(max_size=40),
    least=st.integers(1, 6),
)
def test_the_tokens_of_paragraphs_add_up(tokenizers: Tokenizers, encoding: str, text: str, least: int) -> None:
    """No token reaches across the end of a paragraph, so that each can be counted by itself."""
    count = tokenizers.counter(encoding)
    assert sum(map(count, long_paragraphs(text, least))) == count(text)


def test_only_a_pattern_of_a_known_form_is_changed() -> None:
    """Nothing is known of a pattern of another form, and only known repeats stop being possessive."""
    assert without_lookahead(r"\p{L}++|\s+") is None
    assert without_lookahead(r"\p{L}++|\s+(?!\S)|\s{2}") is None
    assert without_lookahead(r"a?+\p{L}++|\p{N}{1,3}+|\n*+|\s+(?!\S)|\s") == r"a?\p{L}+|\p{N}{1,3}|\n*|\s+"


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("blanks", [" ", "\t", " \t", "\u2003\xa0 ", "\x85\u3000"])
@pytest.mark.parametrize("after", ["x", ".", "7", "\n", "\r\nx", "", "\x1c", "的", "\u0301"])
def test_blanks_of_any_number_and_kind(encoding: str, blanks: str, after: str) -> None:
    """Runs of blanks before letters, digits, signs, ends of lines and the end of the text count as published."""
    run = blanks * 3
    text = "\n".join([*[f"y{run[:length]}{after}" for length in range(len(run) + 1)], f"{run}{after}"])
    for whole in (text, text.replace("y", ";"), f"{text} ", f"{text}\n\n{run}"):
        assert EXACT.count(encoding, whole) == reference(encoding, whole)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_encoding_that_others_loaded_counts_as_well(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users of tiktoken may have loaded an encoding with its own pattern."""
    monkeypatch.setitem(registry.ENCODINGS, encoding, original(encoding))
    text = "def f():\n    return  1\n"
    assert Tokenizers(fast=False).count(encoding, text) == EXACT.count(encoding, text) == reference(encoding, text)


@pytest.mark.slow
@by_library
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_messages_count_exactly(tokenizers: Tokenizers, encoding: str) -> None:
    """Messages of every kind (code, CJK, base64, tools, odd text) count as tiktoken and the documented frames give."""
    own, exact = tokenizers.counter(encoding), original(encoding)
    for message in messages(200):
        counted = chat.read_item(json.dumps(message).encode(), own).tokens
        assert counted == reference_of_message(exact, message), message


@settings(max_examples=60)
@given(conversation_strategies.texts())
def test_the_strict_upstream_counts_alike(text: str) -> None:
    """The upstream of the tests, which reads the vocabulary by itself, bills the same."""
    assert SHARED.count("o200k_base", text) == stub.count(text)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_vocabulary_is_in_memory_once(encoding: str) -> None:
    """Python's copy of a vocabulary is emptied after loading; tiktoken's own users still encode and decode."""
    SHARED.counter(encoding)
    loaded = tiktoken.get_encoding(encoding)
    assert not loaded._mergeable_ranks
    assert loaded.decode(loaded.encode("Ünïcode, 你好 and code();")) == "Ünïcode, 你好 and code();"
    assert loaded.decode_single_token_bytes(loaded.encode_single_token(" the")) == b" the"
    assert loaded.encode("<|endoftext|>", allowed_special="all") == [loaded.eot_token]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_special_token_is_text(encoding: str) -> None:
    """Text that spells a special token weighs what its letters weigh, and raises nothing."""
    assert SHARED.count(encoding, "<|endoftext|>") > 3
    assert SHARED.count(encoding, "<|endoftext|>" * 50) > 150
    assert SHARED.count(encoding, "") == 0


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_long_texts(length: int) -> None:
    """A text beyond one piece counts a few tokens a cut more, never less."""
    text = (prose(1, 400) * (length // 1_000))[:length]
    assert len(text) == length
    counted, exact = SHARED.count("o200k_base", text), reference("o200k_base", text)
    assert exact <= counted <= exact + 3 * (length // CHUNK)
    assert length > CHUNK or counted == exact


@pytest.mark.parametrize("letter", ["a", " ", "\n", "\t", "0", "=", "_", "的", "é", "\ud83d", "👩"])
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.slow
def test_runs_of_one_character(encoding: str, letter: str) -> None:
    """Runs of one character count as tiktoken counts them, wherever they stand in a text."""
    for length in (2 * RUN + 1, 10 * RUN + 777):
        run = letter * length
        for text in (run, prose(1, 100) + run, run + prose(2, 100), f"x{run}y", f"{run}b{run}"):
            assert SHARED.count(encoding, text) == reference(encoding, text)


@pytest.mark.parametrize("letter", ["a", " ", "\n", "的"])
def test_a_megabyte_of_one_character(letter: str) -> None:
    """Of a megabyte of one character a few thousand are left to be encoded, and the count is what all of it gives."""
    for text in (letter * 2**20, "x" + letter * 2**20, (letter * 300_000 + "\u00e9") * 3):
        assert len(shortened(text)[0]) < 12 * RUN
    counted = SHARED.count("o200k_base", letter * (2**20 // RUN * RUN))
    assert counted == 2**20 // RUN * SHARED.count("o200k_base", letter * RUN)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    "text",
    ["<|endoftext|>" * 8_000, "<|im_start|>system\n" * 4_000, "的" * 100_000, "aB" * 50_000, "\r\n" * 50_000],
    ids=range(5),
)
def test_odd_texts(encoding: str, text: str) -> None:
    """Special-token text and other repeated text of any length counts as tiktoken counts it."""
    assert SHARED.count(encoding, text) == reference(encoding, text)


def test_many_threads() -> None:
    """Threads that all begin with a fresh counter get the same counts."""
    counter = Tokenizers()
    texts = [prose(seed, 200) for seed in range(24)]
    expected = [reference("cl100k_base", text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert list(pool.map(lambda text: counter.count("cl100k_base", text), texts)) == expected
    assert counter.estimated == set()


@pytest.mark.slow
def test_nothing_is_estimated_that_can_be_counted() -> None:
    """The installed packages bring both vocabularies."""
    counter = Tokenizers()
    for encoding in ENCODINGS:
        counter.counter(encoding)
    assert counter.estimated == set()
    folder = packaged_vocabularies()
    assert folder is not None
    assert all((folder / name).is_file() for name, _ in VOCABULARIES.values())


def spoiled(folder: Path) -> None:
    """A folder whose o200k_base has one byte changed."""
    packaged = packaged_vocabularies()
    assert packaged is not None
    name = VOCABULARIES["o200k_base"][0]
    shutil.copyfile(packaged / name, folder / name)
    with (folder / name).open("r+b") as file:
        file.write(b"!")


@pytest.mark.parametrize("kind", ["empty", "spoiled", "missing", "a folder in its place"])
def test_without_a_sound_vocabulary_tokens_are_estimated(kind: str, tmp_path: Path) -> None:
    """A vocabulary that is missing or not what it should be is neither used nor fetched; the estimate says so."""
    folder = tmp_path / "none" if kind == "missing" else tmp_path
    if kind == "spoiled":
        spoiled(folder)
    if kind == "a folder in its place":
        (folder / VOCABULARIES["o200k_base"][0]).mkdir()
    counter = Tokenizers(folder)
    text = prose(3, 500)
    assert counter.count("o200k_base", text) == estimate(text)
    assert counter.estimated == {"o200k_base"}
    kept = [VOCABULARIES["o200k_base"][0]] if kind in ("spoiled", "a folder in its place") else []
    assert kind == "missing" or [file.name for file in folder.iterdir()] == kept


def test_an_encoding_nobody_knows_is_estimated() -> None:
    """An unknown encoding is estimated and flagged, beside others that are counted."""
    counter = Tokenizers()
    assert counter.count("klingon", "hello there") == estimate("hello there")
    assert counter.count("o200k_base", "hello there") == 2
    assert counter.estimated == {"klingon"}


NO_NETWORK = """
import socket, sys
def refused(*_):
    raise AssertionError("the network was used")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refused
from pathlib import Path
from proxy.tokenizers import Tokenizers
for folder in (None, Path(sys.argv[1])):
    counter = Tokenizers(folder)
    counts = [counter.count(name, "hello there") for name in ("o200k_base", "cl100k_base", "x")]
    print(counts, sorted(counter.estimated))
print("litellm" in sys.modules)
"""


@pytest.mark.slow
def test_nothing_is_downloaded(tmp_path: Path) -> None:
    """A process that may not reach the network counts all the same, and never imports the package it reads from."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TIKTOKEN_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", NO_NETWORK, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    guess = estimate("hello there")
    assert done.stdout.splitlines() == [
        f"[2, 2, {guess}] ['x']",
        f"[{guess}, {guess}, {guess}] ['cl100k_base', 'o200k_base', 'x']",
        "False",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("before", [None, "/somewhere/else"])
def test_the_environment_is_left_as_it_was(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a vocabulary changes no variable for the rest of the process."""
    if before is None:
        monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    else:
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", before)
    Tokenizers().counter("o200k_base")
    assert os.environ.get("TIKTOKEN_CACHE_DIR") == before


@pytest.mark.parametrize(
    "text",
    [
        prose(1, 2_000),
        log(1, 2_000),
        "不要修改数据库结构。" * 100,
        "検索結果は三件です。" * 100,
        "한국어 문장입니다. " * 100,
        "def f(x):\n    return x + 1\n" * 100,
        '{"path": "src/a.py", "line": 17}\n' * 100,
        '{"a":[1,2,{"b":null}],"c":"x"}' * 100,
        "Не трогайте эту папку, пожалуйста. " * 50,
        "Μην αγγίζετε αυτόν τον φάκελο. " * 50,
        "कृपया इस फ़ोल्डर को न छुएं। " * 50,
        "من فضلك لا تلمس هذا المجلد. " * 50,
        "👩🏽‍💻🎉 🇨🇭 ☃️" * 50,
        base64.b64encode(random.Random(1).randbytes(3_000)).decode(),
        random.Random(2).randbytes(1_500).hex(),
    ],
    ids=range(15),
)
def test_an_estimate_errs_on_the_safe_side(text: str) -> None:
    """For what people really send, the estimate is below no vocabulary's count, and not far above the largest."""
    counted = max(SHARED.count(encoding, text) for encoding in ENCODINGS)
    assert counted <= estimate(text) <= 2.2 * counted


@given(st.text(max_size=200), st.text(max_size=50))
def test_an_estimate_grows_with_its_text(text: str, more: str) -> None:
    """More text is never estimated as less, nothing as nothing, and anything as something."""
    assert estimate(text) <= estimate(text + more)
    assert (estimate(text) > 0) == bool(text)


@pytest.mark.parametrize("text", ["\ud83d" * 50, "abc" * 30 + "\udfff" * 50])
def test_lone_surrogates_do_not_hide_text(text: str) -> None:
    """Broken characters are estimated like whole ones, and take nothing from their neighbours."""
    assert estimate(text) >= estimate(text.replace("\ud83d", "字").replace("\udfff", "字"))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_cut_changes_no_count(encoding: str) -> None:
    """Texts that are encoded in pieces count exactly as whole ones, with and without spaces to cut at."""
    pick = random.Random(7)
    letters = "".join(pick.choice("abcdefghijklmnop") for _ in range(40_000))
    texts = [
        "Some words, 12 of them;  and   spaces.\n\t" * 2_500,
        letters,
        base64.b64encode(pick.randbytes(60_000)).decode(),
    ]
    for text in texts:
        assert SHARED.count(encoding, text) == reference(encoding, text)


# The faster library.


@needs_fast
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_faster_library_counts_if_it_is_installed(encoding: str) -> None:
    """It passes its comparison with tiktoken, and says that it counts; without it tiktoken does."""
    SHARED.counter(encoding)
    EXACT.counter(encoding)
    assert SHARED.counted_by()[encoding] == "gigatoken"
    assert EXACT.counted_by()[encoding] == "tiktoken"


@needs_fast
@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(max_examples=60)
@given(
    text=st.text(
        st.characters(categories=["L", "M", "N", "P", "S", "Z", "Cc", "Cf"]) | st.sampled_from("'sStT \n\r\t/"),
        max_size=400,
    )
)
def test_both_libraries_count_alike(encoding: str, text: str) -> None:
    """Letters, marks, digits, signs and spaces of any script, in any order."""
    assert SHARED.count(encoding, text) == EXACT.count(encoding, text)


@needs_fast
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_both_libraries_count_our_own_files_alike(encoding: str) -> None:
    """Code, Markdown, YAML and recorded conversations of this repository, file by file."""
    kinds = ("*.py", "*.md", "*.yaml", "*.json", "*.jsonl", "*.js", "*.css")
    files = [file for kind in kinds for file in ROOT.glob(f"[cdpt]*/**/{kind}") if file.stat().st_size < 200_000]
    assert len(files) > 400
    for file in files[::3]:
        text = file.read_text(errors="surrogateescape")
        assert SHARED.count(encoding, text) == EXACT.count(encoding, text), file


def letters(text: str) -> list[str]:
    """An encoder whose tokens are characters."""
    return list(text)


def test_a_library_that_differs_is_not_used() -> None:
    """One that counts a single text of the comparison otherwise counts nothing."""
    counter = FastCounter(lambda: letters, lambda text: len(text) + text.count("Ångström"))
    assert counter.rejected
    assert counter.count("Ångström") == 9


def test_a_difference_on_the_way_ends_its_use(caplog: pytest.LogCaptureFixture) -> None:
    """One text of many is counted by both; if they differ, tiktoken counts from there on, and the log says so once."""
    counter = FastCounter(lambda: letters, lambda text: len(text) + text.count("ŧ"))
    assert not counter.rejected
    counts = [counter.count("ŧ") for _ in range(2 * module.COMPARE_EVERY)]
    assert counter.rejected
    assert counts[0] == 1
    assert counts[-1] == 2
    assert 0 < counts.index(2) <= module.COMPARE_EVERY
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "ŧ" not in caplog.text


def test_a_text_without_utf8_is_tiktokens() -> None:
    """What the library refuses is counted by tiktoken, and the next text by the library again."""

    def refusing(text: str) -> list[str]:
        if "\ud800" in text:
            raise TypeError("expected str")
        return letters(text)

    counter = FastCounter(lambda: refusing, lambda text: len(text) + 100 * text.count("\ud800"))
    assert counter.count("a\ud800b") == 103
    assert counter.count("ab") == 2
    assert not counter.rejected


@pytest.mark.slow
def test_an_encoder_is_built_anew_in_a_quiet_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is bounded: once it is up, and nothing was counted for a while, there is a new one."""
    monkeypatch.setattr(module, "ENCODER_SECONDS", 0.02)
    monkeypatch.setattr(module, "IDLE_SECONDS", 1.0)
    built = 0

    def build() -> Callable[[str], list[str]]:
        nonlocal built
        built += 1
        return slow

    def slow(text: str) -> list[str]:
        if text == "slow":
            time.sleep(0.005)
        return letters(text)

    exact: list[str] = []

    def count_exactly(text: str) -> int:
        exact.append(text)
        return len(text)

    counter = FastCounter(build, count_exactly)
    exact.clear()
    while not exact:  # its time is up: tiktoken counts
        assert counter.count("slow") == 4
    assert built == 1  # it was never quiet
    deadline = time.monotonic() + 60
    while built == 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert built == 2
    while exact and time.monotonic() < deadline:  # the new one is in use a moment after it was built
        exact.clear()
        assert counter.count("four") == 4
    assert not exact


@pytest.mark.parametrize(("idle", "most"), [(0.2, 60.0), (60.0, 0.2)])
def test_the_first_encoder_may_be_built_later(monkeypatch: pytest.MonkeyPatch, idle: float, most: float) -> None:
    """When nothing was counted for a while, or after the longest wait, by a thread; tiktoken counts until then."""
    monkeypatch.setattr(module, "IDLE_SECONDS", idle)
    monkeypatch.setattr(module, "MOST_SECONDS", most)
    builders: list[int] = []

    def build() -> Callable[[str], list[str]]:
        builders.append(threading.get_ident())
        return letters

    exact: list[str] = []

    def count_exactly(text: str) -> int:
        exact.append(text)
        return len(text)

    counter = FastCounter(build, count_exactly, later=True)
    assert counter.count("four") == 4
    assert exact[:1] == ["four"]
    deadline = time.monotonic() + 60
    while not counter.is_built and time.monotonic() < deadline:
        time.sleep(0.01)
    exact.clear()
    assert counter.count("four") == 4
    assert exact == []
    assert len(builders) == 1
    assert threading.get_ident() not in builders


def test_an_encoder_is_set_up_before_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request waits for what a new encoder does at its first texts: the thread that built it had it read some."""
    monkeypatch.setattr(module, "ENCODER_SECONDS", 0.0)
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.0)
    readers: list[list[tuple[int, str]]] = []

    def build() -> Callable[[str], list[str]]:
        read: list[tuple[int, str]] = []
        readers.append(read)

        def encode(text: str) -> list[str]:
            read.append((threading.get_ident(), text))
            return letters(text)

        return encode

    counter = FastCounter(build, len)
    deadline = time.monotonic() + 60
    while (len(readers) < 2 or not readers[1]) and time.monotonic() < deadline:
        assert counter.count("four") == 4
        time.sleep(0.01)
    assert threading.get_ident() not in [thread for thread, _ in readers[1][: len(module._PROBES)]]
    assert "four" not in [text for _, text in readers[1][: len(module._PROBES)]]


@pytest.mark.parametrize("error", module.UNUSABLE)
def test_a_version_that_cannot_be_used_costs_nothing(error: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    """If no encoder can be built, at the start or later, tiktoken counts, and the log says so once."""

    def broken() -> Callable[[str], list[str]]:
        raise error("of another version")

    counter = FastCounter(broken, len)
    assert counter.rejected
    assert counter.count("four") == 4
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert error.__name__ in caplog.text


def test_an_encoder_that_cannot_be_built_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is removed while the proxy runs leaves the counting to tiktoken."""
    monkeypatch.setattr(module, "ENCODER_SECONDS", 0.0)
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.0)
    encoders = iter([letters])

    def build() -> Callable[[str], list[str]]:
        encode = next(encoders, None)
        if encode is None:
            raise ImportError("no module named gigatoken")
        return encode

    counter = FastCounter(build, len)
    deadline = time.monotonic() + 60
    while not counter.rejected and time.monotonic() < deadline:
        assert counter.count("four") == 4
        time.sleep(0.01)
    assert counter.rejected
    assert counter.count("four") == 4


@needs_fast
@pytest.mark.slow
def test_counts_stay_the_same_while_the_encoder_is_built_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that nobody has seen before bring about new encoders; counts before, meanwhile and after are tiktoken's."""
    monkeypatch.setattr(module, "ENCODER_SECONDS", 0.05)
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.0)
    released: list[float] = []
    counter, pick = Tokenizers(release=lambda: released.append(time.monotonic())), random.Random(5)
    some_letters = bytes(ord("abcdefghijklmnopqrstuvwxyz "[n % 27]) for n in range(256))
    deadline = time.monotonic() + 60
    while len(released) < 5 and time.monotonic() < deadline:
        text = pick.randbytes(8_000).translate(some_letters).decode()
        assert counter.count("o200k_base", text) == EXACT.count("o200k_base", text)
    assert len(released) >= 5  # once after loading, and twice each time that one is built anew
    assert counter.counted_by() == {"o200k_base": "gigatoken"}


@pytest.mark.slow
@needs_fast
def test_long_texts_are_counted_beside_other_threads() -> None:
    """While gigatoken encodes a long text, another thread goes on; what it counts is the same either way."""
    folder = packaged_vocabularies()
    assert folder is not None
    encode = module._fast_encoder(folder, "o200k_base")
    text = "The cache of rows_412 is evicted at 16:30:00, see src/cache/evict_rows.py. " * 100
    assert [len(encode(text[:size])) for size in (0, module.BATCH_FROM - 1, module.BATCH_FROM, len(text))] == [
        SHARED.count("o200k_base", text[:size]) for size in (0, module.BATCH_FROM - 1, module.BATCH_FROM, len(text))
    ]
    long, beats, done = text * 500, [time.perf_counter()], threading.Event()

    def beat() -> None:
        while not done.is_set():
            beats.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=beat)
    thread.start()
    while len(beats) < 3:
        time.sleep(0.001)
    meanwhile = 0
    for _ in range(20):  # a busy machine may not let the other thread run for once
        began = time.perf_counter()
        encode(long)
        ended = time.perf_counter()
        meanwhile = len([at for at in beats if began < at < ended])
        if meanwhile >= 3:
            break
    done.set()
    thread.join()
    assert meanwhile >= 3


@needs_fast
def test_a_long_text_in_one_thread_breaks_no_count_in_another() -> None:
    """The encoder is in use while it counts without the interpreter's lock; other texts are counted all the same."""
    count = SHARED.counter("o200k_base")
    texts = [prose(1, 12_000), "a short text"]
    expected = [EXACT.count("o200k_base", text) for text in texts]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda at: count(texts[at % 2]), range(400)))
    assert found == expected * 200
