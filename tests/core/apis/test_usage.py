import gzip
import itertools
import json
import zlib

import brotli
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.apis.usage import UsageTap, read_usage, read_usage_metadata
from proxy.core.report import NO_USAGE, Usage
from tests.support.linear_time import is_linear

STREAMS = {
    b'data: {"choices":[{"delta":{"content":"\\"usage\\":{\\"prompt_tokens\\":9}"}}],"usage":null}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"x":"}"}}\n\ndata: [DONE]\n\n': Usage(7, 2),
    b'event: message_start\ndata: {"message":{"usage":{"input_tokens":3,"cache_read_input_tokens":10,'
    b'"cache_creation_input_tokens":2,"output_tokens":1}}}\n\n'
    b'event: message_delta\ndata: {"delta":{},"usage":{"output_tokens":40}}\n\n': Usage(15, 40, 10),
    b'data: {"type":"response.created","response":{"usage":null}}\n\ndata: {"type":"response.completed","response":'
    b'{"usage" : {"input_tokens":5,"input_tokens_details":{"cached_tokens":4},"output_tokens":6}}}\n\n': Usage(5, 6, 4),
    b'data: {"candidates":[],"usageMetadata":{"promptTokenCount":9,"totalTokenCount":9}}\r\n\r\n'
    b'data: {"usageMetadata" : {"promptTokenCount":9,"candidatesTokenCount":2,"thoughtsTokenCount":3,'
    b'"cachedContentTokenCount":4,"promptTokensDetails":[{"modality":"TEXT","tokenCount":9}]}}\r\n\r\n': Usage(9, 5, 4),
    b'{"usage":{"prompt_tokens":true}} {"usage":{"prompt_tokens":-1}} {"usage":"x"} "usage" {"usage":{': Usage(),
    b'{"usage":{"prompt_tokens":1' + b" " * 20_000 + b'}, "usage": {"completion_tokens": 3}}': Usage(None, 3),
}


CACHED = {
    # Anthropic's own: beside.
    '{"input_tokens":3,"cache_read_input_tokens":10,"cache_creation_input_tokens":2}': Usage(15, None, 10),
    '{"input_tokens":3,"cache_creation":{"ephemeral_5m_input_tokens":2},"cache_creation_input_tokens":2}': Usage(5),
    '{"input_tokens":0,"cache_read_input_tokens":900,"output_tokens":4}': Usage(900, 4, 900),
    # The same in OpenAI's shape, as gateways have it: inside.
    '{"prompt_tokens":15,"cache_read_input_tokens":10,"cache_creation_input_tokens":2}': Usage(15, None, 10),
    '{"prompt_tokens":15,"input_tokens":15,"cache_read_input_tokens":10}': Usage(15, None, 10),
    '{"prompt_tokens":15,"input_tokens":3,"cache_read_input_tokens":12}': Usage(15, None, 12),
    # OpenAI's and DeepSeek's: inside.
    '{"prompt_tokens":15,"prompt_tokens_details":{"cached_tokens":10}}': Usage(15, None, 10),
    '{"input_tokens":15,"input_tokens_details":{"cached_tokens":10}}': Usage(15, None, 10),
    '{"prompt_tokens":15,"prompt_cache_hit_tokens":10,"prompt_cache_miss_tokens":5}': Usage(15, None, 10),
    # None of these is a figure.
    '{"prompt_tokens":-1}': Usage(),
    '{"prompt_tokens":1e30}': Usage(),
    '{"prompt_tokens":"15"}': Usage(),
}


def test_cached_input_is_counted_once():
    """In every form of reports on cached input, the whole input is counted, and no part of it twice."""
    for text, usage in CACHED.items():
        assert whole(b'{"usage":' + text.encode() + b"}") == usage, text


def test_a_decoded_object_of_geminis_is_read_by_its_own_names():
    """Thoughts are output beside the answer, and what is no object reports nothing."""
    assert read_usage_metadata({"promptTokenCount": 7, "thoughtsTokenCount": 3}) == Usage(7, 3)
    assert read_usage_metadata({"promptTokenCount": 7, "candidatesTokenCount": 1}) == Usage(7, 1)
    assert read_usage_metadata({"prompt_tokens": 7}) == read_usage_metadata(None) == Usage()


@pytest.mark.parametrize(("text", "usage"), CACHED.items())
def test_a_decoded_object_is_read_like_its_bytes(text, usage):
    """A decoded object is read by the same reader."""
    assert read_usage(json.loads(text)) == usage


@pytest.mark.parametrize("value", [None, {}, [], "7", 7, {"prompt_tokens": True}, {"output_tokens": 2**53}])
def test_what_is_no_usage_reports_nothing(value):
    """No object, no figure, or one that no number of tokens can be: nothing is known."""
    assert read_usage(value) == NO_USAGE


def whole(data):
    tap = UsageTap()
    tap.feed(data)
    return tap.usage


def chunked(data, cuts):
    tap = UsageTap()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        tap.feed(data[start:end])
    return tap.usage


def test_the_figures_of_each_api_are_found():
    """Chat, Messages and Responses usage is read; text that only looks like it is not."""
    for data, usage in STREAMS.items():
        assert whole(data) == usage


def test_any_cut_gives_the_same_figures():
    """Every single cut, and bytes one by one, give what the whole gives."""
    for data, usage in STREAMS.items():
        assert chunked(data, range(len(data))) == usage
        for cut in range(0, len(data), max(1, len(data) // 400)):
            assert chunked(data, [cut]) == usage


PIECES = st.sampled_from(
    [
        b'"usage"',
        b'"usage":',
        b"{",
        b"}",
        b":",
        b" ",
        b'"',
        b"\\",
        b'"prompt_tokens":12',
        b",",
        b"null",
        b'"usa',
        b"\xff",
    ]
)


@given(st.lists(PIECES, max_size=40), st.lists(st.integers(0, 400), max_size=12))
def test_any_bytes_in_any_chunks_are_read_alike(pieces, cuts):
    """For any bytes, chunking changes nothing, and nothing raises."""
    data = b"".join(pieces)
    assert chunked(data, cuts) == whole(data)


@given(
    st.dictionaries(st.sampled_from(["prompt_tokens", "completion_tokens"]), st.integers(0, 10**9)),
    st.text(max_size=30),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_real_objects_are_read_exactly(figures, content, cuts):
    """Beside any content, the figures are those that were written."""
    data = json.dumps({"content": content, "usage": figures, "tail": content}).encode()
    assert chunked(data, cuts) == Usage(figures.get("prompt_tokens"), figures.get("completion_tokens"))


def test_compressed_answers_are_read_and_bombs_are_not():
    """A gzip answer's usage is found; one that inflates too far, or is broken, is let pass unread."""
    tap = UsageTap("gzip")
    data = gzip.compress(b'{"usage":{"prompt_tokens":1}}')
    for byte in data:
        tap.feed(bytes([byte]))
    assert tap.usage.input_tokens == 1
    for bad in (gzip.compress(bytes(50_000_000)), b"nonsense"):
        tap = UsageTap("gzip")
        tap.feed(bad)
        tap.feed(bad)
        assert tap.usage == Usage()


@pytest.mark.parametrize(
    "piece",
    [b'"usage":{', b'"usage":{}', b'"usage" ', b'"usage":{"a":{"usage":{"b":"}"}', b'"usage":{"', b'{"usage":"}'],
)
@pytest.mark.slow
def test_a_hostile_answer_costs_no_more_per_byte_than_an_honest_one(piece):
    """Keys, braces and quotes without end are read in time that grows with the answer, however it is cut."""

    def work(size, cut):
        tap = UsageTap()
        data = piece * (size // len(piece))
        for at in range(0, len(data), cut):
            tap.feed(data[at : at + cut])
        assert tap.usage == Usage()

    assert is_linear(lambda size: work(size, 2**16), 500_000)
    assert is_linear(lambda size: work(size, 16), 100_000)


def test_usage_is_found_behind_what_is_none():
    """Unknown members before the figures hide them only up to the limit."""
    for noise in (b'"usage":{', b'"usage":null,', b'"usage":{"a":"'):
        data = noise + b" " * 2**14 + b'{"usage":{"prompt_tokens":7}}'
        assert whole(data) == chunked(data, range(0, len(data), 100)) == Usage(7)


@pytest.mark.parametrize("coding", ["br", "zstd", "deflate"])
def test_every_coding_that_can_be_read_is_read(coding):
    """Figures are found in whichever coding an answer comes."""
    data = b'{"usage":{"prompt_tokens":1}}'
    packed = {"br": brotli.compress, "zstd": zstandard.compress, "deflate": zlib.compress}[coding](data)
    tap = UsageTap(coding)
    tap.feed(packed)
    assert tap.usage.input_tokens == 1
