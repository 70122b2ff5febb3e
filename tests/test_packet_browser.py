"""The packet in a real browser: nothing runs, nothing is fetched, nothing spills over the edge.

Chromium is driven over its DevTools protocol with the websocket client that we depend on anyway;
the tests are skipped where no Chromium is installed.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import packet_data as data
import pytest

from speccheck.grading import review
from speccheck.grading.blind import AnswerPair, preferred
from speccheck.packet import RunEvidence, build_view, render

T = TypeVar("T")

CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="chromium is not installed: no browser to look with"
    ),
]

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


class Browser:
    """One headless Chromium with one page; events are kept until `open` starts anew."""

    def __init__(self, profile: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._process = subprocess.Popen(
            [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._number = 0
        self.events: list[dict[str, Any]] = []
        port = self._port(profile / "DevToolsActivePort")
        self._session = self._run(self._connect(port))
        for domain in ("Page", "Runtime", "Log", "Network", "DOM", "Accessibility"):
            self.command(f"{domain}.enable")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(work, timeout=120))

    def _port(self, file: Path) -> str:
        for _ in range(600):
            if file.exists() and "\n" in (text := file.read_text()):
                return text.split()[0]
            assert self._process.poll() is None, "chromium ended before it listened"
            time.sleep(0.1)
        raise AssertionError("chromium did not listen within a minute")

    async def _connect(self, port: str) -> aiohttp.ClientSession:
        session = aiohttp.ClientSession()
        async with session.get(f"http://127.0.0.1:{port}/json") as reply:
            (page,) = [target for target in await reply.json() if target["type"] == "page"]
        self._socket = await session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
        return session

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one DevTools command and wait for its result."""
        return self._run(self._command(method, parameters))

    async def _command(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        number = self._number
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message: dict[str, Any] = await self._socket.receive_json()
            if message.get("id") == number:
                assert "error" not in message, message
                found: dict[str, Any] = message["result"]
                return found
            self.events.append(message)

    def open(self, path: Path, *, width: int, scheme: str = "light", scripts: str = "on") -> None:
        """Load a file in a window of this width and wait until it is loaded."""
        self.command("Emulation.setScriptExecutionDisabled", value=scripts == "off")
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.command("Emulation.setEmulatedMedia", media="screen", features=[feature])
        self.events.clear()
        self.command("Page.navigate", url=path.as_uri())
        self._run(self._listen("Page.loadEventFired", 60))
        # What a hostile text might start (an image that fails to load) comes a little later.
        self._run(self._listen("nothing", 0.4))

    async def _listen(self, method: str, seconds: float) -> None:
        """Collect events until one of this kind comes, or the time is over."""
        end = self._loop.time() + seconds
        while (left := end - self._loop.time()) > 0:
            try:
                event: dict[str, Any] = await asyncio.wait_for(self._socket.receive_json(), left)
            except TimeoutError:
                return
            self.events.append(event)
            if event.get("method") == method:
                return

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        reply = self.command("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def said(self) -> list[dict[str, Any]]:
        """Console messages, log entries, exceptions and dialogs since `open`."""
        loud = {
            "Runtime.consoleAPICalled",
            "Runtime.exceptionThrown",
            "Log.entryAdded",
            "Page.javascriptDialogOpening",
        }
        return [event for event in self.events if event["method"] in loud]

    def fetched(self) -> list[str]:
        """URLs asked for since `open`."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        """End the browser."""

        async def leave() -> None:
            await self._socket.close()
            await self._session.close()

        self._run(leave())
        self._loop.close()
        self._process.terminate()
        self._process.wait(timeout=30)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


def page(evidence: RunEvidence, folder: Path) -> Path:
    return render(build_view(evidence), folder)["packet.html"]


@pytest.fixture(scope="module")
def realistic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page(data.realistic(), tmp_path_factory.mktemp("realistic"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page(data.hostile(), tmp_path_factory.mktemp("hostile"))


OPEN_ALL = "document.querySelectorAll('details').forEach(d => d.open = true)"
SPILLED = """
[document.documentElement.scrollWidth - innerWidth, ...[...document.querySelectorAll('body *')]
  .filter(e => !e.closest('.scroll, nav, svg, pre, .skip') &&
               e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.tagName + '.' + e.className + ': ' + e.textContent.slice(0, 60))]
"""
VIEWS = """
[...document.querySelectorAll('[data-view]')].map(e => [e.dataset.view,
  e.querySelector('h2').innerText, e.getBoundingClientRect().height > 200])
"""
THREE_VIEWS = [
    ["1", "View 1: Probability fixture", True],
    ["2", "View 2: Workload decision matrix", True],
    ["3", "View 3: Service latency", True],
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_is_silent_and_fetches_nothing(
    browser: Browser, realistic: Path, width: int, scheme: str
) -> None:
    """No console message, no request but the file itself, no overflow, three visible views."""
    browser.open(realistic, width=width, scheme=scheme)
    assert browser.ask(VIEWS) == THREE_VIEWS
    assert browser.ask(SPILLED) == [0]
    browser.ask(OPEN_ALL)
    assert browser.ask(SPILLED) == [0], "with everything unfolded"
    assert browser.said() == []
    assert {url for url in browser.fetched() if not url.startswith("data:")} == {realistic.as_uri()}


@pytest.mark.parametrize("width", [390, 1280])
def test_hostile_texts_do_nothing(browser: Browser, hostile: Path, width: int) -> None:
    """Payloads do not run, load nothing, and do not push the page apart."""
    browser.open(hostile, width=width)
    browser.ask(OPEN_ALL)
    assert browser.ask("typeof window.pwned") == "undefined"
    assert browser.ask("document.querySelectorAll('script, img, iframe, object').length") == 0
    assert browser.ask("document.querySelectorAll('svg:not(.chart)').length") == 0
    assert browser.ask(VIEWS) == THREE_VIEWS
    assert browser.ask(SPILLED) == [0]
    assert browser.said() == []
    assert {url for url in browser.fetched() if not url.startswith("data:")} == {hostile.as_uri()}


def test_the_hostile_check_can_fail(browser: Browser, tmp_path: Path) -> None:
    """The same payloads in an unescaped page without our policy do run and do fetch."""
    naked = tmp_path / "naked.html"
    naked.write_text(
        f"<!doctype html><body>{data.HOSTILE[0]}<p>{data.HOSTILE[1]}", encoding="utf-8"
    )
    browser.open(naked, width=1280)
    assert browser.ask("window.pwned") == 1
    assert len(browser.fetched()) > 1


def test_the_page_needs_no_script(browser: Browser, realistic: Path) -> None:
    """With JavaScript switched off the same text and the same three views are there."""
    browser.open(realistic, width=1280)
    text = browser.ask("document.body.innerText")
    browser.open(realistic, width=1280, scripts="off")
    assert browser.ask(VIEWS) == THREE_VIEWS
    assert browser.ask("document.body.innerText") == text


def test_details_unfold_without_script(browser: Browser, realistic: Path) -> None:
    """A click on a summary shows what is under it, JavaScript off."""
    browser.open(realistic, width=1280, scripts="off")
    box = browser.ask(
        "(s => {s.scrollIntoView(); const r = s.getBoundingClientRect();"
        "return [r.x + 5, r.y + 5]})(document.querySelector('#fixture summary'))"
    )
    for kind in ("mousePressed", "mouseReleased"):
        browser.command(
            "Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1
        )
    assert browser.ask("document.querySelector('#fixture details').open")


def test_the_page_can_be_walked_by_keyboard(browser: Browser, realistic: Path) -> None:
    """Tab reaches the skip link first, then each section's link, and scroll boxes are reachable."""
    browser.open(realistic, width=1280)
    reached = []
    for _ in range(8):
        for kind in ("keyDown", "keyUp"):
            browser.command(
                "Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9
            )
        reached.append(browser.ask("document.activeElement.getAttribute('href')"))
    assert reached == [
        "#fixture",
        "#fixture",
        "#matrix",
        "#latency",
        "#decisions",
        "#outputs",
        "#compared",
        "#not-proved",
    ]
    assert browser.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    silent = (
        "[...document.querySelectorAll('.scroll')].filter(e => e.tabIndex !== 0 || !e.ariaLabel)"
    )
    assert browser.ask(f"{silent}.length") == 0


def test_charts_have_names_for_those_who_do_not_see_them(browser: Browser, realistic: Path) -> None:
    """In the accessibility tree each chart is one image with a name and a description."""
    browser.open(realistic, width=1280)
    browser.ask(OPEN_ALL)
    nodes = browser.command("Accessibility.getFullAXTree")["nodes"]
    images = [n for n in nodes if n.get("role", {}).get("value") == "image" and not n["ignored"]]
    assert len(images) == browser.ask("document.querySelectorAll('svg.chart').length")
    assert all(len(image["name"]["value"]) > 20 for image in images)


def test_charts_keep_their_lines_inside_the_picture(browser: Browser, realistic: Path) -> None:
    """No label or line of a chart lies outside the chart's own box."""
    browser.open(realistic, width=1280)
    browser.ask(OPEN_ALL)
    outside = """
    [...document.querySelectorAll('svg.chart')].flatMap(svg => {
      const box = svg.getBoundingClientRect();
      return [...svg.querySelectorAll('text')].filter(t => {
        const r = t.getBoundingClientRect();
        return r.left < box.left - 1 || r.right > box.right + 1 || r.bottom > box.bottom + 1;
      }).map(t => svg.querySelector('title').textContent + ': ' + t.textContent);
    })
    """
    assert browser.ask(outside) == []


def test_paper_has_everything_and_no_navigation(browser: Browser, realistic: Path) -> None:
    """Printed, the navigation is gone and folded parts are unfolded."""
    browser.open(realistic, width=1280)
    folded = browser.ask("document.documentElement.scrollHeight")
    browser.command("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.ask("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.ask("document.documentElement.scrollHeight") > 1.2 * folded


def test_a_review_sheet_saves_its_verdicts(browser: Browser, tmp_path: Path) -> None:
    """The page runs no script of an answer, fits, and saves a CSV that the import reads."""
    evil = "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>" + "w" * 3000
    chat = ({"role": "user", "content": evil},)
    pairs = [AnswerPair(f"g:{i}", "chat", "r", chat, f"{evil} {i}", f"b {i}") for i in range(3)]
    sheet = review.make_sheet("run:x", pairs, 9, "key")
    review.write(review.key_path(tmp_path, sheet.sheet_id), review.key_json(sheet))
    path = tmp_path / "sheet.html"
    review.write(path, review.sheet_html(sheet))
    for width in (390, 1280):
        browser.open(path, width=width)
        assert browser.ask("typeof window.pwned") == "undefined"
        assert browser.ask(SPILLED) == [0]
        assert browser.said() == []
    browser.ask(
        "URL.createObjectURL = blob => (blob.text().then(text => window.saved = text), '#');"
        "document.querySelectorAll('article').forEach((a, i) => {"
        " a.querySelector(`input[value=\"${['1', '2', 'tie'][i]}\"]`).click();"
        " a.querySelector('input[type=text]').value = '=1+1, \"so\"'; });"
        "document.getElementById('save').click()"
    )
    assert browser.ask("document.getElementById('count').textContent") == "3 of 3 judged"
    saved = tmp_path / "verdicts.csv"
    saved.write_text(browser.ask("window.saved"), encoding="utf-8")
    _, given = review.read_sheet(saved, tmp_path, "ada")
    expected = [
        preferred(row.first, choice)
        for row, choice in zip(sheet.rows, ("1", "2", "tie"), strict=True)
    ]
    assert [p.verdict for p in given] == expected
    assert {p.note for p in given} == {'\'=1+1, "so"'}


def test_a_whole_run_stays_a_small_file(realistic: Path) -> None:
    """The page of about 3,300 receipts is well under 1.5 MB."""
    assert realistic.stat().st_size < 900_000
