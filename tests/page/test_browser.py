"""The page in a real browser: it loads under load, moves by itself, asks no other host, and is fit for everybody."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.page_scene import SCENES, Scene, configuration, play
from tests.support.ports import free_port
from tests.support.proxy_process import ROOT, Proxy, until

pytest.importorskip("selenium", reason="selenium, of the extra 'test', is not installed")
from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.support.browser import CHROMIUM, DRIVER, MISSING, browser, console, requested, resize, set_scheme

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING),
]

WIDE, PHONE, SMALLEST = (1440, 1000), (390, 844), (320, 640)
GROWING = Scene("growing", "qwen3-coder", "billing", tuple(range(2, 40)))


@dataclass
class Shown:
    """A proxy whose page a browser shows."""

    proxy: Proxy
    driver: Chrome

    def open(self, size: tuple[int, int] = WIDE, fragment: str = "") -> None:
        """Load the page anew, with a console and a list of requests of its own."""
        self.driver.get("about:blank")
        resize(self.driver, *size)
        console(self.driver)
        requested(self.driver)
        self.driver.get(f"{self.proxy.root}/ullage/{fragment}")
        self.until(lambda: self.text("#live-text") == "live")

    def text(self, selector: str) -> str:
        """The text of the first element for *selector*, empty if there is none."""
        return str(self.driver.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def all(self, selector: str, attribute: str = "textContent") -> list[str]:
        """The *attribute* of all elements for *selector*."""
        script = "return [...document.querySelectorAll(arguments[0])].map((each) => each[arguments[1]])"
        return list(self.driver.execute_script(script, selector, attribute))

    def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        """Wait until *condition* holds; what a page that is being left cannot answer, the next one is asked."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(WebDriverException):
                if condition():
                    return
            assert time.monotonic() < end, f"not within {seconds} s: {self.text('body')[:400]}"
            time.sleep(0.05)

    def bars(self, name: str) -> dict[str, float]:
        """The widths of the regions of conversation *name* in the list."""
        script = "const all = [...document.querySelectorAll(arguments[0])];"
        script += "return all.map((each) => [each.className.baseVal, each.width.baseVal.value])"
        return dict(self.driver.execute_script(script, f"a[href='#{name}'] .bar rect"))


def accepts(port: int) -> bool:
    """True if something listens on *port*."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def serve(config: dict[str, Any] | None = None) -> Iterator[Proxy]:
    """A proxy in front of the strict upstream, both as processes."""
    port = free_port()
    upstream = subprocess.Popen(
        [sys.executable, "-m", "tests.stub", "--port", str(port), "--window", "400000"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}/v1"
    proxy = Proxy(url, config=configuration(url, **(config or {})), fast=False)
    try:
        asyncio.run(until(lambda: accepts(port), 60))
        asyncio.run(proxy.__aenter__())
        yield proxy
    finally:
        asyncio.run(proxy.__aexit__())
        upstream.terminate()
        upstream.wait()


@pytest.fixture(scope="module")
def shown() -> Iterator[Shown]:
    """A page with the conversations of the scene."""
    with serve() as proxy:
        asyncio.run(play(proxy, SCENES))
        with browser(*WIDE) as driver:
            yield Shown(proxy, driver)


def load_on(proxy: Proxy, stopped: threading.Event) -> None:
    """Keep *proxy* busy until *stopped*."""
    body = json.dumps({"model": "gpt-5-mini", "messages": [{"role": "user", "content": "Hello. " * 60}]})
    headers = {"authorization": "Bearer sk-load", "content-type": "application/json"}
    with httpx.Client(base_url=proxy.url, trust_env=False, headers=headers, timeout=60) as client:
        while not stopped.is_set():
            client.post("/chat/completions", content=body)


def test_it_moves_by_itself_under_load_and_stays_in_its_host(shown: Shown) -> None:
    """Bars move and a compaction appears without a reload; nothing is said on the console, no other host is asked."""
    stopped = threading.Event()
    load = threading.Thread(target=load_on, args=(shown.proxy, stopped))
    load.start()
    try:
        shown.open()
        shown.until(lambda: len(shown.all("#list li")) == len(SCENES))
        present = set(shown.all("#list a", "hash"))
        post(shown.proxy, next(GROWING.bodies()))
        shown.until(lambda: len(shown.all("#list li")) == len(SCENES) + 1)
        (fragment,) = set(shown.all("#list a", "hash")) - present
        name = fragment[1:]
        before = shown.bars(name)
        shown.driver.execute_script("location.hash = arguments[0]; window.unloaded = false", name)
        shown.until(lambda: shown.text(".compactions") == "" and name in shown.text("#detail"))
        asyncio.run(play(shown.proxy, (GROWING,)))
        shown.until(lambda: shown.text(".compactions"))
        shown.until(lambda: shown.bars(name)["summary"] > 0)
        after = shown.bars(name)
        assert after["tool"] > before["tool"]
        assert shown.driver.execute_script("return window.unloaded") is False
        assert "fold" in shown.text(".compactions .stages")
        assert "digest" in shown.text(".compactions .block")
        assert len(shown.all(f"a[href='#{name}'] .trend .tick")) >= 1
    finally:
        stopped.set()
        load.join()
    assert console(shown.driver) == []
    assert {url.split("/ullage/")[0] for url in requested(shown.driver) if url != "about:blank"} == {shown.proxy.root}


def post(proxy: Proxy, body: bytes) -> None:
    headers = {"authorization": "Bearer sk-scene", "content-type": "application/json", **GROWING.headers}
    httpx.post(f"{proxy.url}/chat/completions", content=body, headers=headers, trust_env=False).raise_for_status()


def test_what_is_nearly_full_is_marked_with_advice(shown: Shown) -> None:
    """In the list and in the conversation itself; the name of the tool is there, the file is not."""
    shown.open()
    shown.until(lambda: shown.all(".advice:not([hidden])"))
    assert any(text.endswith("% is one tool result: read_file") for text in shown.all(".advice:not([hidden])"))
    assert "What to do:" in shown.text("#detail .callout")
    assert "bundle.js" not in shown.driver.page_source


def problems(driver: Chrome) -> list[str]:
    """The violations that axe reports as serious or critical."""
    axe = importlib.resources.files("axe_core_python").joinpath("axe.min.js").read_text()
    driver.execute_script(axe)
    violations = driver.execute_async_script("const done = arguments[0]; axe.run().then((all) => done(all.violations))")
    return [
        f"{each['id']}: {each['nodes'][0]['html'][:120]} {each['nodes'][0]['failureSummary'][:200]}"
        for each in violations
        if each["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("size", [WIDE, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_fit_for_everybody(shown: Shown, size: tuple[int, int], scheme: str) -> None:
    """In both themes and at both widths, with one conversation open; nothing is wider than the screen."""
    set_scheme(shown.driver, scheme)
    shown.open(size)
    shown.until(lambda: shown.all("#list a"))
    shown.driver.execute_script("location.hash = document.querySelector('#list a').hash")
    shown.until(lambda: shown.all("#detail .chart"))
    time.sleep(0.6)  # bars move for 0.4 s
    assert problems(shown.driver) == []
    width = shown.driver.execute_script("return document.documentElement.scrollWidth")
    assert width <= size[0]


def test_no_conversation_is_wider_than_the_smallest_screen(shown: Shown) -> None:
    """320 CSS pixels need no scrolling sideways: https://www.w3.org/WAI/WCAG22/Understanding/reflow.html."""
    shown.open(SMALLEST)
    shown.until(lambda: shown.all("#list a .advice"))
    for link in shown.all("#list a", "hash"):
        shown.driver.execute_script("location.hash = arguments[0]", link)
        shown.until(lambda name=link[1:]: shown.text("#detail h2") == name)
        assert shown.driver.execute_script("return document.documentElement.scrollWidth") <= SMALLEST[0], link


def test_it_is_used_by_keyboard(shown: Shown) -> None:
    """Search, move, open, close."""
    shown.open()
    shown.until(lambda: len(shown.all("#list a")) > 2)
    body = shown.driver.find_element(By.TAG_NAME, "body")
    body.send_keys("/")
    search = shown.driver.switch_to.active_element
    assert search.get_attribute("id") == "search"
    search.send_keys("claude")
    shown.until(lambda: len(shown.all("#list a")) == 2)
    search.send_keys(Keys.CONTROL, "a")
    search.send_keys(Keys.DELETE)
    shown.until(lambda: len(shown.all("#list a")) > 2)
    shown.driver.execute_script("document.activeElement.blur()")
    body.send_keys("j")
    body.send_keys("j")
    at = shown.driver.switch_to.active_element
    fragment = at.get_attribute("hash")
    at.send_keys(Keys.ENTER)
    shown.until(lambda: (fragment or "-")[1:] in shown.text("#detail"))
    assert focused(shown) == "detail"
    shown.driver.switch_to.active_element.send_keys("j")
    shown.driver.switch_to.active_element.send_keys("k")
    assert shown.driver.switch_to.active_element.get_attribute("hash") == fragment
    shown.driver.switch_to.active_element.send_keys(Keys.ENTER, Keys.ESCAPE)
    shown.until(lambda: "Choose one" in shown.text("#detail"))
    assert shown.driver.switch_to.active_element.get_attribute("hash") == fragment


def focused(shown: Shown) -> str:
    """The id of the element that has the focus, or its tag."""
    return str(shown.driver.execute_script("const at = document.activeElement; return at.id || at.tagName"))


def test_the_skip_link_and_a_search_lead_to_the_list(shown: Shown) -> None:
    """Neither opens a conversation that there is not; Escape takes the words of a search back."""
    shown.open()
    shown.until(lambda: shown.text("#detail .sub"))
    name = shown.text("#detail h2")
    shown.driver.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB, Keys.ENTER)
    assert focused(shown) == "list"
    assert (shown.text("#detail h2"), shown.driver.execute_script("return location.hash")) == (name, "")
    search = shown.driver.find_element(By.ID, "search")
    search.send_keys("claude")
    shown.until(lambda: len(shown.all("#list a")) == 2)
    search.send_keys(Keys.ESCAPE)
    shown.until(lambda: len(shown.all("#list a")) > 2)
    assert focused(shown) == "list"


def test_an_address_of_nothing_live_says_so(shown: Shown) -> None:
    """In place of another conversation's figures; an address is kept, a proxy is started again."""
    shown.open(fragment="#forgotten")
    shown.until(lambda: "not live" in shown.text("#detail"))
    shown.driver.execute_script("location.hash = document.querySelector('#list a').hash")
    shown.until(lambda: shown.text("#detail .sub"))
    shown.driver.execute_script("location.hash = 'forgotten'")
    shown.until(lambda: "not live" in shown.text("#detail"))


def test_a_proxy_that_was_started_again_has_no_conversation_of_the_one_before() -> None:
    """The page that was open shows what is live now, and says of the chosen conversation that it is not."""
    with serve() as proxy, browser(*WIDE) as driver:
        asyncio.run(play(proxy, SCENES[1:2]))
        shown = Shown(proxy, driver)
        shown.open()
        shown.until(lambda: shown.text("#detail .sub"))
        proxy.end()
        shown.until(lambda: shown.text("#live-text") == "connecting again")
        asyncio.run(proxy.start())
        shown.until(lambda: shown.text("#live-text") == "live")
        shown.until(lambda: "No conversation yet" in shown.text("#empty"))
        assert shown.all("#list li") == []
        shown.until(lambda: "not live" in shown.text("#detail"))


def test_an_address_that_cannot_be_read_shows_the_list(shown: Shown) -> None:
    """A percent sign without two digits behind it, as a mangled link has."""
    shown.open(fragment="#100%")
    shown.until(lambda: shown.all("#list a"))
    shown.driver.execute_script("location.hash = '%E0%A4%A'")
    shown.until(lambda: "not live" in shown.text("#detail"))
    assert all("404" in line for line in console(shown.driver))  # no script failed


def test_a_row_is_written_only_if_its_text_changes(shown: Shown) -> None:
    """A thousand rows are drawn every second: a text that is written anew is laid out anew."""
    shown.open()
    shown.until(lambda: shown.all("#list a"))
    shown.driver.execute_script(
        "window.needless = 0; window.ticks = 0;"
        "const same = ({ removedNodes: [old], addedNodes: [fresh] }) => old?.data && old.data === fresh?.data;"
        "new MutationObserver((records) => { needless += records.filter(same).length })"
        ".observe(document.getElementById('list'), { childList: true, subtree: true });"
        "new EventSource('events').onmessage = () => { ticks += 1 }"
    )
    shown.until(lambda: shown.driver.execute_script("return window.ticks") > 3)
    assert shown.driver.execute_script("return window.needless") == 0


def test_what_is_read_stays_while_requests_come() -> None:
    """The text of a block keeps its place and the focus, also when the conversation is compacted again."""
    reading = Scene("reading", "qwen3-coder", "billing", tuple(range(2, 24)))
    more = Scene("reading", "qwen3-coder", "billing", tuple(range(24, 40)))
    with serve({"telemetry": {"page": {"text": True}}}) as proxy, browser(*WIDE) as driver:
        asyncio.run(play(proxy, (reading,)))
        shown = Shown(proxy, driver)
        shown.open()
        shown.until(lambda: shown.all("#detail details"))
        before = len(shown.all("#detail .compactions li:has(.line1)"))
        driver.execute_script(
            "const text = document.querySelector('#detail details:last-of-type'); text.open = true;"
            "text.querySelector('pre').scrollTop = 40; text.querySelector('pre').focus()"
        )
        asyncio.run(play(proxy, (more,)))
        shown.until(lambda: len(shown.all("#detail .compactions li:has(.line1)")) > before)
        assert focused(shown) == "PRE"
        assert driver.execute_script("return document.activeElement.scrollTop") == 40
        assert all("1 lines" not in text for text in shown.all("#detail .block"))


def test_a_thousand_conversations_stay_readable() -> None:
    """The first are drawn at once and all on request, and the histogram shows where they are."""
    with serve() as proxy:
        headers = {"authorization": "Bearer sk-many", "content-type": "application/json"}
        message = {"role": "user", "content": "Hello. " * 200}
        with httpx.Client(base_url=proxy.url, trust_env=False, headers=headers, timeout=60) as client:
            for number in range(1000):
                rounds = [message] * (1 + number % 17)
                body = json.dumps({"model": "qwen3-coder", "messages": rounds})
                name = {"x-ullage-conversation": f"c{number}"}
                client.post("/chat/completions", content=body, headers=name).raise_for_status()
        with browser(*WIDE) as driver:
            shown = Shown(proxy, driver)
            shown.open()
            shown.until(lambda: shown.text("#count") == "1,000")
            assert len(shown.all("#list li")) == 150
            counts = [int(text or 0) for text in shown.all("#fills b")]
            assert sum(counts) == 1000
            assert sum(count > 0 for count in counts) >= 4
            milliseconds = driver.execute_script(
                "const began = performance.now(); document.getElementById('more').click();"
                "document.body.offsetHeight; return performance.now() - began"
            )
            assert len(shown.all("#list li")) == 1000
            assert milliseconds < 2000
            assert console(driver) == []


def test_the_admin_key_is_exchanged_for_a_session() -> None:
    """A wrong one is refused in words; the right one opens the page; logging out closes it."""
    with serve({"server": {"admin_key": "boss-key"}}) as proxy, browser(*PHONE) as driver:
        shown = Shown(proxy, driver)
        driver.get(f"{proxy.root}/ullage/")
        shown.until(lambda: driver.find_element(By.ID, "key").is_displayed())
        assert problems(driver) == []
        driver.find_element(By.ID, "key").send_keys("no-key", Keys.ENTER)
        shown.until(lambda: "not the admin key" in shown.text("#login-problem"))
        driver.find_element(By.ID, "key").send_keys("boss-key", Keys.ENTER)
        shown.until(lambda: shown.text("#live-text") == "live")
        shown.until(lambda: "No conversation yet" in shown.text("#empty"))
        assert driver.execute_script("return document.cookie") == ""
        driver.find_element(By.ID, "logout").click()
        shown.until(lambda: driver.find_element(By.ID, "key").is_displayed())
