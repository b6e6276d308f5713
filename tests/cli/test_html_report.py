"""Reports as one HTML file: everything is in it, it asks for nothing, and no text in it becomes markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from proxy.cli.explain import Breakdown, StageEffect
from proxy.cli.findings import Findings, FreshResult
from proxy.cli.html_report import HEIGHT, MOST_CHARTS, POLICY, bars, chart, fit_page, replay_page
from proxy.cli.replay import PlannedRequest, Replay
from proxy.core.waste import RepeatedParagraph

HOSTILE = '<script src="//x"></script>&"'
FOUND = Findings((RepeatedParagraph(HOSTILE, 3, 200),), (FreshResult(f"read {HOSTILE}", 900, 0.6, 2),), {}, 0.1)
REQUESTS = (
    PlannedRequest(900, 900, 1000, 0, 0, False, ()),
    PlannedRequest(1900, 400, 1000, 0, 900, True, ("fold",)),
    PlannedRequest(99_000, None, 1000, 0, 1900, False, ()),
)


class Reader(HTMLParser):
    """Collects tags, attributes and text, and checks that every tag is closed."""

    EMPTY = ("meta", "line", "polyline", "circle", "rect")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


PAGES = {
    "replay": replay_page([Replay(HOSTILE, HOSTILE, 1200, REQUESTS, findings=FOUND, problem=HOSTILE)]),
    "fit": fit_page(
        HOSTILE,
        Breakdown(
            (("model", HOSTILE),),
            {"system": (10, 10)},
            {"user": (5, 0)},
            {},
            (StageEffect("fold", 2000, 900, 7),),
            FOUND,
        ),
    ),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_alone_in_the_world(name: str) -> None:
    """No script, no link, no image, no address: it opens offline, and a policy forbids everything else."""
    page = PAGES[name]
    reader = read(page)
    assert {"script", "link", "img", "iframe", "a", "base"}.isdisjoint(reader.tags)
    assert {"src", "href", "onclick", "style"}.isdisjoint(reader.attributes)
    assert re.findall(r"https?:|url\(|@import", page) == []
    assert POLICY in page
    assert HOSTILE in reader.texts or any(HOSTILE in text for text in reader.texts)


def test_a_replay_has_total_rows_findings_and_charts() -> None:
    """All of what the command prints is on the page, and a chart for each of the largest conversations."""
    text = " ".join(read(PAGES["replay"]).texts)
    for word in ("1 conversation, 3 requests", "2 answered", "101,800", "repeated paragraph", "60%", "1,200"):
        assert word in text, word
    many = [Replay(f"s{at}", "m", 1200, REQUESTS) for at in range(MOST_CHARTS + 5)]
    assert replay_page(many).count("<figure>") == MOST_CHARTS
    assert "<figure>" not in replay_page([Replay("s", "m", None, (), problem="no window")])


def test_a_chart_stays_inside_its_frame() -> None:
    """Each request is a point; what is far above the budget is drawn at the edge, and compactions are marked."""
    drawn = chart(REQUESTS)
    lines = re.findall(r'points="([^"]+)"', drawn)
    heights = [float(point.split(",")[1]) for line in lines for point in line.split()]
    assert [len(line.split()) for line in lines] == [3, 3]
    assert all(0 <= height <= HEIGHT for height in heights)
    assert drawn.count("<circle") == 1
    assert "<circle" not in chart(REQUESTS[:1])


def test_bars_show_both_figures() -> None:
    """Every row has a bar for what was sent and one for what goes upstream, as long as their tokens."""
    drawn = bars([("system", 100, 100), ("tool", 1000, 250)])
    widths = [int(width) for width in re.findall(r'<rect[^>]+width="(\d+)"', drawn)]
    assert widths[2] == 2 * widths[3] * 2 == 10 * widths[0]
    assert "1,000" in drawn
    assert "<figcaption>Tokens: grey as sent, blue upstream</figcaption>" in drawn
    assert bars([]).startswith("<figure><svg")
    assert "No stage was needed" in fit_page("r", Breakdown((), {}, {}, {}, ()))
