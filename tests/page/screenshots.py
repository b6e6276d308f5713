"""Draws the pictures of the page in the papers: ``python -m tests.page.screenshots docs``."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path

from selenium.webdriver import Chrome

from tests.page.test_browser import PHONE, Shown, serve
from tests.support.browser import browser, resize, set_scheme
from tests.support.page_scene import SCENES, play
from tests.support.proxy_process import Proxy

WIDE = (1360, 900)


def draw(proxy: Proxy, driver: Chrome, folder: Path) -> None:
    """Write the pictures of *proxy*'s page to *folder*, with the conversation that was compacted most."""
    shown = Shown(proxy, driver)
    time.sleep(2)  # the lag of the start is over
    shown.open(WIDE)
    playing = threading.Thread(target=lambda: asyncio.run(play(proxy, SCENES, pause=0.08)))
    playing.start()
    playing.join()
    time.sleep(2)
    script = "const most = [...document.querySelectorAll('#list a')].sort((a, b) => b.querySelectorAll('.tick').length"
    script += " - a.querySelectorAll('.tick').length)[0]; location.hash = most.hash"
    driver.execute_script(script)
    shown.until(lambda: shown.all("#detail .compactions"))
    for scheme in ("light", "dark"):
        set_scheme(driver, scheme)
        time.sleep(1)
        driver.save_screenshot(str(folder / f"page-{scheme}.png"))
    driver.execute_script("history.replaceState(null, '', '#'); scrollTo(0, 0)")
    resize(driver, *PHONE)
    set_scheme(driver, "light")
    time.sleep(1)
    driver.save_screenshot(str(folder / "page-phone.png"))


def main(folder: Path) -> None:
    """Write all pictures to *folder*."""
    with serve() as proxy, browser(*WIDE) as driver:
        draw(proxy, driver, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
