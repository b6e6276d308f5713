"""Kinds of values and how they may be spelt."""

import pytest

from proxy.settings import load
from tests.support.settings_files import UPSTREAM, only_problem, write_settings


def test_words_that_yaml_1_1_takes_for_booleans(tmp_path):
    """mode: on, off and the true or false that a YAML 1.1 tool made of them all mean what they say."""
    for word, mode in (("on", "on"), ("off", "off"), ("true", "on"), ("false", "off"), ("observe", "observe")):
        text = f"compression: {{mode: {word}}}\nsummaries: {{mode: off}}\n"
        assert load(write_settings(tmp_path, text), {}, {}).compression.mode == mode


@pytest.mark.parametrize(
    ("text", "size"), [("1048576", 2**20), ("1MiB", 2**20), ("2 gib", 2**31), ("64 KiB", 2**16), ("'7 B'", 7)]
)
def test_sizes_have_units(tmp_path, text, size):
    """Bytes may be given with a binary unit in any case, with a space or without."""
    limits = f"server: {{limits: {{body: {text}, in_flight_bytes: 4GiB}}}}"
    assert load(write_settings(tmp_path, limits), {}, {}).server.limits.body == size


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("128k", "Write 128000, or 131072 if K is meant as 1,024."),
        ("'1.5 M tokens'", "Write 1500000, or 1572864 if K is meant as 1,024."),
        ("32Ki", "Write 32000, or 32768 if K is meant as 1,024."),
    ],
)
def test_tokens_are_written_out(tmp_path, text, remedy):
    """A window in thousands could be two numbers: the problem names both."""
    found = only_problem(tmp_path, f"models: [{{name: m, context_window: {text}}}]")
    assert (found.key, found.remedy) == ("models[0].context_window", remedy)


@pytest.mark.parametrize(
    "url",
    ["redis://h", "redis://:p%40ss@h:1/0?ssl=1", "rediss://[::1]:6379", "unix:///s", "redis+sentinel://a:1,b:2/m",
     "redis+cluster://a:1,b:2"],
)  # fmt: skip
def test_store_urls_that_are_fine(tmp_path, url):
    """Every kind of store may be named by its URL."""
    assert load(write_settings(tmp_path, f"store: {{url: '{url}'}}"), {}, {}).store.url == url


def test_a_store_url_is_refused_without_repeating_it(tmp_path):
    """A problem with a store's URL does not show the password in it."""
    found = only_problem(tmp_path, "store: {url: 'redis://user:CANARY:x@h:bad/0'}")
    assert "CANARY" not in str(found)


def test_a_base_url_loses_its_last_slash(tmp_path):
    """http://h/v1/ and http://h/v1 are the same upstream."""
    text = UPSTREAM.replace("/v1", "/v1/")
    assert load(write_settings(tmp_path, text), {}, {}).upstreams[0].base_url == "http://127.0.0.1:1/v1"


def test_a_header_may_hold_what_headers_hold(tmp_path):
    """A configured header's value may have spaces inside; line ends, outer spaces and nothing at all are refused."""
    text = UPSTREAM.replace("}", ", headers: {Authorization: %s}}")
    (upstream,) = load(write_settings(tmp_path, text % "Bearer key"), {}, {}).upstreams
    assert upstream.headers["Authorization"].get_secret_value() == "Bearer key"
    for wrong in ('"a\\nb"', '" a"', '""', '"\u00e9"'):
        found = only_problem(tmp_path, text % wrong)
        assert (found.key, "no value that an HTTP header" in found.message) == (
            "upstreams[0].headers.Authorization",
            True,
        )
