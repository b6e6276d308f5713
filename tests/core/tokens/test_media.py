"""Tokens of media parts: by the size in the file's own header, never by the length of its text form."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.tokens.media import (
    DEFAULT_PRICES,
    FAMILIES,
    TILE,
    TILE_BASE,
    Prices,
    Size,
    file_tokens,
    image_size,
    image_tokens,
    is_guess,
    part_tokens,
    prices,
)

UNKNOWN_IMAGE = DEFAULT_PRICES.image.tokens(None, "high")
"""Tokens of an image whose size cannot be read: those of the largest one (2048 x 768: eight tiles)."""


def png(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


def gif(width: int, height: int, version: bytes = b"GIF89a") -> bytes:
    return version + struct.pack("<HHBBB", width, height, 0, 0, 0) + b";"


def riff(kind: bytes, data: bytes) -> bytes:
    chunk = kind + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def webp_extended(width: int, height: int) -> bytes:
    return riff(b"VP8X", b"\x10\0\0\0" + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little"))


def webp_lossy(width: int, height: int) -> bytes:
    # The two upper bits of each figure ask for upscaling.
    frame = b"\x30\x01\x00\x9d\x01\x2a" + struct.pack("<HH", width | 0x4000, height | 0x8000)
    return riff(b"VP8 ", frame + b"\0" * 8)


def webp_lossless(width: int, height: int) -> bytes:
    bits = (width - 1) | (height - 1) << 14 | 1 << 28
    return riff(b"VP8L", b"\x2f" + struct.pack("<I", bits) + b"\0" * 8)


def segment(marker: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


def jpeg(width: int, height: int, before: bytes = b"", frame: int = 0xC0) -> bytes:
    tables = segment(0xE0, b"JFIF\0" + b"\0" * 9) + segment(0xDB, b"\0" * 65) + segment(0xC4, b"\0" * 20)
    size = struct.pack(">BHHB", 8, height, width, 3)
    return b"\xff\xd8" + tables + before + segment(frame, size + b"\0" * 9) + segment(0xDA, b"\0" * 10)


MAKERS = {
    "png": png,
    "gif": gif,
    "gif87": lambda w, h: gif(w, h, b"GIF87a"),
    "webp": webp_extended,
    "webp lossy": webp_lossy,
    "webp lossless": webp_lossless,
    "jpeg": jpeg,
    "jpeg progressive": lambda w, h: jpeg(w, h, frame=0xC2),
    "jpeg with a comment": lambda w, h: jpeg(w, h, segment(0xFE, b"\xff\xc0" + b"x" * 5_000)),
    "jpeg with fill bytes": lambda w, h: jpeg(w, h, b"\xff\xff\xff"),
}


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64," + base64.b64encode(data).decode()


def image(data: str, **detail: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data, **detail}}


@pytest.mark.parametrize("kind", MAKERS)
@given(width=st.integers(1, 16_383), height=st.integers(1, 16_383))
def test_sizes_are_read_from_headers(kind: str, width: int, height: int) -> None:
    """Width and height come from the header, whatever follows it."""
    head = MAKERS[kind](width, height)
    assert image_size(head) == (width, height)
    assert image_size(head + b"\xff\xc0" * 500) == (width, height)


@given(st.sampled_from(sorted(MAKERS)), st.data())
def test_a_torn_header_is_no_size(kind: str, data: st.DataObject) -> None:
    """A header that ends early or is no image at all has no size, or the right one; nothing is raised."""
    head = MAKERS[kind](640, 480)
    torn = head[: data.draw(st.integers(0, len(head)))]
    assert image_size(torn) in (None, (640, 480))
    image_size(data.draw(st.binary(max_size=40)))


@pytest.mark.parametrize(
    "head", [b"", b"BM" + b"\0" * 60, b"\xff\xd8\xff", b"\xff\xd8\xff\xc0\0", b"RIFF\0\0\0\0WEBPVP8 " + b"\0" * 30]
)
def test_other_files_have_no_size(head: bytes) -> None:
    """A file of another format, or one that only claims to be an image, has no size."""
    assert image_size(head) is None


@pytest.mark.parametrize(
    ("width", "height", "detail", "tokens"),
    [
        (1024, 1024, "high", 765),
        (2048, 4096, "high", 1105),
        (4096, 8192, "low", 85),
        (1, 1, "high", TILE_BASE + TILE),
        (512, 512, "auto", TILE_BASE + TILE),
        (513, 512, "auto", TILE_BASE + 2 * TILE),
        (8192, 3072, "high", UNKNOWN_IMAGE),
        (100_000, 1, "high", TILE_BASE + 4 * TILE),
    ],
)
def test_the_tile_formula(width: int, height: int, detail: str, tokens: int) -> None:
    """Images cost what the provider's published examples say."""
    assert image_tokens(url(png(width, height)), detail, DEFAULT_PRICES) == tokens


@given(st.integers(0, 2**31), st.integers(0, 2**31))
def test_no_image_costs_more_than_an_unknown_one(width: int, height: int) -> None:
    """For any size in a header, the cost is between one tile and the most expensive shape."""
    assert TILE_BASE + TILE <= image_tokens(url(png(width, height)), "auto", DEFAULT_PRICES) <= UNKNOWN_IMAGE


@given(st.integers(0, 50_000))
def test_length_never_counts(size: int) -> None:
    """A picture of many bytes costs what one of few bytes costs, if both are as large to look at."""
    assert part_tokens(image(url(png(300, 300) + b"x" * size))) == part_tokens(image(url(png(300, 300))))
    assert part_tokens(image(url(b"x" * size))) == UNKNOWN_IMAGE


@pytest.mark.parametrize(
    "data",
    ["https://x.y/z.png", "data:image/png;base64,!!!", "data:image/png;base64,A", "data:", "", "data:image/svg+xml,"],
)  # fmt: skip
def test_what_cannot_be_seen_counts_as_the_dearest(data: str) -> None:
    """An address, or data that is no picture, counts as the largest image and says that it is a guess."""
    assert part_tokens(image(data)) == UNKNOWN_IMAGE
    assert is_guess(image(data))


def test_wrapped_base64_is_read() -> None:
    """Line breaks inside the data do not hide the header."""
    data = base64.encodebytes(png(512, 512) + b"x" * 500).decode()
    assert image_tokens("data:image/png;base64,\r\n" + data, "auto", DEFAULT_PRICES) == TILE_BASE + TILE


@pytest.mark.parametrize(
    "part",
    [
        image(url(png(512, 512))),
        {"type": "image_url", "image_url": url(png(512, 512))},
        {"type": "input_image", "image_url": url(png(512, 512))},
        {"type": "input_image", "image_url": url(png(512, 512)), "detail": "high"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url(png(512, 512))[22:]}},
    ],
)
def test_shapes_of_image_parts(part: dict[str, Any]) -> None:
    """Each API's way to write an image part is read, and is no guess."""
    assert part_tokens(part) == TILE_BASE + TILE
    assert not is_guess(part)


@pytest.mark.parametrize(
    "part", [image("https://x.y", detail="low"), {"type": "input_image", "image_url": "https://x.y", "detail": "low"}]
)
def test_low_detail_is_known_unseen(part: dict[str, Any]) -> None:
    """At low detail the cost is known without seeing the picture."""
    assert part_tokens(part) == TILE_BASE
    assert not is_guess(part)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "x"},
        {"type": "refusal", "refusal": "x"},
        {"type": "thinking"},
        {"type": None},
        {"type": ["image_url"]},
        {},
        {"image_url": {"url": "x"}},
    ],
)
def test_text_is_no_media(part: dict[str, Any]) -> None:
    """Parts of other types are none of this module's business."""
    assert part_tokens(part) is None


@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        ({"type": "input_audio", "input_audio": {"data": "A" * 32_000, "format": "wav"}}, 32 + 60),
        ({"type": "input_audio", "input_audio": {}}, 32),
        ({"type": "file", "file": {"file_id": "f"}}, UNKNOWN_IMAGE),
        ({"type": "file", "file": {"file_data": "data:application/pdf;base64," + "A" * 40_000}}, 16 + 2_000),
        ({"type": "file", "file": {"file_data": "A" * 40_000, "filename": "a.PDF"}}, 16 + 2_000),
        ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}, 2_016),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x" * 400}}, 16 + 100),
        ({"type": "input_file", "file_data": "data:text/plain;base64," + "A" * 4_000}, 16 + 1_000),
        ({"type": "video_url", "video_url": {"url": "https://x.y"}}, UNKNOWN_IMAGE),
        ({"type": "document", "document": None}, UNKNOWN_IMAGE),
    ],
)
def test_other_media_are_guessed(part: dict[str, Any], tokens: int) -> None:
    """Sound and files count by what they hold, what cannot be seen as a large image; all are guesses."""
    assert part_tokens(part) == pytest.approx(tokens, abs=1)
    assert is_guess(part)


def test_a_pdf_is_not_read_as_text() -> None:
    """The same bytes count for less in a PDF than in a text file."""
    data = ";base64," + "A" * 30_000
    assert file_tokens("data:application/pdf" + data, DEFAULT_PRICES) < file_tokens(
        "data:text/csv" + data, DEFAULT_PRICES
    )


def pdf(pages: int) -> str:
    """A PDF with so many page objects, as a data URL."""
    objects = b"".join(b"%d 0 obj <</Type /Page /Parent 1 0 R>> endobj\n" % (n + 2) for n in range(pages))
    return url(b"%PDF-1.4\n1 0 obj <</Type /Pages>> endobj\n" + objects + b"x" * 90_000, "application/pdf")


@pytest.mark.parametrize(("model", "page"), [("gpt-4o", 2_000), ("claude-3-5-sonnet", 3_000), ("gemini-2.5-pro", 258)])
def test_a_pdf_costs_its_pages(model: str, page: int) -> None:
    """A PDF whose pages can be counted costs them, at its provider's price."""
    for pages in (1, 7, 40):
        assert file_tokens(pdf(pages), prices(model)) == 16 + pages * page


def wav(seconds: int, rate: int) -> bytes:
    fmt = struct.pack("<HHIIHH", 1, 1, rate, rate * 2, 2, 16)
    data = b"\0" * (rate * 2 * seconds)
    return b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + struct.pack("<I", 16) + fmt + b"data" + data


def mp3(seconds: int, tag: bytes = b"") -> bytes:
    return tag + b"\xff\xfb\x90\x00" + b"\0" * (16_000 * seconds - 4)  # 128 kbit/s


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (wav(20, 8_000), "wav"),
        (wav(20, 24_000), "wav"),
        (mp3(20), "mp3"),
        (mp3(20, b"ID3\x04\0\0\0\0\x01\0" + b"t" * 128), "mp3"),
        (b"\0" * 48_000 * 20, "pcm16"),
    ],
)
def test_sound_costs_its_seconds(data: bytes, kind: str) -> None:
    """Sound costs what its length costs, which its header tells, whatever its quality."""
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": kind}}
    assert part_tokens(part) == pytest.approx(32 + 200, abs=2)
    assert part_tokens(part, prices("gemini-2.5-flash")) == pytest.approx(32 + 640, abs=4)
    assert not is_guess(part)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.sampled_from(["data:,", "data:image/png,"]),
    lambda inner: st.dictionaries(st.sampled_from(["url", "data", "detail", "file_data", "image_url", "x"]), inner),
    max_leaves=5,
)  # fmt: skip
kinds = st.sampled_from(["image_url", "input_image", "image", "input_audio", "audio", "file", "document", "video", "x"])


@given(kinds, st.dictionaries(st.sampled_from(["image_url", "input_audio", "file", "video", "detail"]), values))
def test_any_part_is_counted(kind: str, members: dict[str, Any]) -> None:
    """Malformed parts are counted and judged without raising."""
    part = {**members, "type": kind}
    tokens = part_tokens(part)
    assert (tokens is None) == (kind == "x")
    assert tokens is None or tokens > 0
    assert is_guess(part) in (True, False)


MODELS = (
    "gpt-4o", "gpt-4.1", "gpt-4o-mini", "gpt-4.1-mini", "gpt-4.1-nano", "gpt-5", "gpt-5-mini", "gpt-5-nano", "gpt-5.2",
    "gpt-5.4", "gpt-6", "o1", "o3", "o4-mini", "computer-use-preview", "claude-3-5-sonnet", "claude-opus-4-7",
    "claude-sonnet-5", "gemini-2.5-pro", "gemini-3-pro", "qwen2.5-vl-7b", "llama3.2-vision",
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "size", "detail", "tokens"),
    [
        ("gpt-4o", (1024, 1024), "high", 765),
        ("gpt-4o", (2048, 4096), "high", 1105),
        ("gpt-4o", (4096, 8192), "low", 85),
        ("gpt-4.1", (1024, 1024), "auto", 765),
        ("gpt-4o-mini", (1024, 1024), "high", 2833 + 4 * 5667),
        ("gpt-4o-mini", (1024, 1024), "low", 2833),
        ("o1", (1024, 1024), "high", 75 + 4 * 150),
        ("o3-2025-04-16", (1024, 1024), "high", 75 + 4 * 150),
        ("gpt-5", (1024, 1024), "high", 70 + 4 * 140),
        ("gpt-5-chat-latest", (1024, 1024), "low", 70),
        ("computer-use-preview", (1024, 1024), "high", 65 + 4 * 129),
        ("gpt-4.1-mini", (1024, 1024), "high", 1659),
        ("gpt-4.1-mini", (2400, 1800), "high", 2353),
        ("gpt-4.1-nano", (1024, 1024), "high", 2520),
        ("o4-mini", (1024, 1024), "high", 1762),
        ("gpt-5-mini", (1800, 2400), "low", 2353),
        ("gpt-5-nano", (1800, 2400), "auto", 3572),
        ("gpt-5.4", (1600, 1600), "high", 3000),
        ("gpt-5.4", (3200, 3200), "original", 12_000),
        ("claude-3-5-sonnet-20241022", (1000, 1000), "auto", 1334),
        ("claude-3-5-sonnet-20241022", (1092, 1092), "auto", 1590),
        ("claude-sonnet-4-5-20250929", (4000, 4000), "auto", 1600),
        ("anthropic/claude-opus-4-7", (4000, 4000), "auto", 4784),
        ("gemini-2.5-pro", (384, 384), "auto", 258),
        ("gemini-2.5-pro", (960, 540), "auto", 6 * 258),
        ("models/gemini-3-pro-preview", (960, 540), "auto", 1120),
        ("ft:gpt-4o-mini-2024-07-18:us::x", (512, 512), "high", 2833 + 5667),
        ("GPT-4o", (512, 512), "high", 255),
    ],
)
def test_published_examples(model: str, size: Size, detail: str, tokens: int) -> None:
    """Each family's images cost what its provider's examples and figures say."""
    assert prices(model).image.tokens(size, detail) == tokens


@pytest.mark.parametrize("model", MODELS)
@given(
    width=st.integers(0, 20_000),
    height=st.integers(0, 20_000),
    detail=st.sampled_from(["low", "high", "auto", "original", "?"]),
)
@pytest.mark.slow
def test_any_size_has_a_price(model: str, width: int, height: int, detail: str) -> None:
    """Every size costs something, and no more than the provider lets one image cost."""
    assert 0 < prices(model).image.tokens((width, height), detail) <= 50_000
    assert prices(model).image.tokens(None, detail) > 0


@pytest.mark.parametrize("model", ["gpt-4o", "gpt-4o-mini", "gpt-4.1-mini", "gpt-5.4", "o1", "claude-3-opus"])
@given(width=st.integers(1, 20_000), height=st.integers(1, 20_000))
def test_an_unseen_image_is_the_dearest(model: str, width: int, height: int) -> None:
    """An image of unknown size costs at least as much as one of any size."""
    picture = prices(model).image
    assert picture.tokens((width, height), "high") <= picture.tokens(None, "high")


def test_models_without_published_formula_have_default_prices() -> None:
    """A name that no family matches, or none at all, has the usual prices."""
    for model in ("", "house-model", "gpt-4", "gpt-4-turbo", "mistral-large"):
        assert prices(model) is DEFAULT_PRICES


def test_one_name_means_one_price() -> None:
    """Counts are remembered under the name of their prices: two families that share it share everything."""
    by_name: dict[str, Prices] = {DEFAULT_PRICES.name: DEFAULT_PRICES}
    for _, found in FAMILIES:
        assert by_name.setdefault(found.name, found) == found
