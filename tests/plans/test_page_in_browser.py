"""The page of a plan in a real browser: nothing overflows or touches, everything can be read, clicked and reached by
keys."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.plans.plan import Plan
from autopar.plans.views.what_if import Answer, WhatIf
from tests.helpers.plan_model import solved
from tests.plans.test_stages import staged

selenium = pytest.importorskip("selenium", reason="the browser's driver is not installed: pip install selenium")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="no Chromium: apt-get install chromium chromium-driver"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
WIDTHS = (1280, 800, 390)  # A desktop, a tablet, a telephone.

# Elements that reach beyond the window, but for those in a box that scrolls.
OVERFLOWING = """
const wide = document.documentElement.clientWidth;
return [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, pre, .sr, svg')
  && e.getBoundingClientRect().right > wide + 1).map(e => e.outerHTML.slice(0, 120));
"""
# Cells of a row that touch or overlap each other, or that are cut off.
TOUCHING = """
const bad = [];
for (const row of document.querySelectorAll('.row')) {
  const cells = [...row.children].filter(e => e.innerText.trim() && e.offsetWidth).map(e => {
    const range = document.createRange(); range.selectNodeContents(e);
    return [e, range.getBoundingClientRect()]; });
  for (let i = 0; i < cells.length; i++) for (let k = i + 1; k < cells.length; k++) {
    const [a, b] = [cells[i][1], cells[k][1]];
    if (a.bottom > b.top + 3 && b.bottom > a.top + 3 && a.right + 4 > b.left && b.right + 4 > a.left)
      bad.push([cells[i][0].innerText, cells[k][0].innerText, a.right, b.left]);
  }
}
return bad;
"""
# For each column of figures, the right edges of its cells: aligned if they are one.
EDGES = """
const edges = {};
for (const row of document.querySelectorAll('.row:not(.move)')) [...row.children].forEach((e, i) => {
  if (e.classList.contains('number') && e.offsetWidth) (edges[i] = edges[i] || new Set()).add(
    Math.round(e.getBoundingClientRect().right)); });
return Object.values(edges).map(e => [...e]);
"""
# Texts whose contrast with what is behind them is less than WCAG's AA asks of small ones, 4.5 to 1.
WEAK = """
const parse = c => c.match(/[\\d.]+/g).map(Number);
const light = c => { const [r, g, b] = c.slice(0, 3).map(v => { v /= 255;
  return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const behind = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
  if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
const bad = [];
for (const e of document.querySelectorAll('body *')) {
  if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) || e.closest('title')) continue;
  const style = getComputedStyle(e);
  let text = parse(e.namespaceURI.endsWith('svg') ? style.fill : style.color), back = behind(e);
  if (e.classList.contains('mark')) {
    const box = [...e.parentElement.querySelectorAll('rect.cell, path')].map(x => parse(getComputedStyle(x).fill));
    back = box.sort((x, y) => Math.abs(light(x) - light(text)) - Math.abs(light(y) - light(text)))[0];
  }
  const [a, b] = [light(text), light(back)].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < (e.classList.contains('mark') ? 3 : 4.5)) bad.push([e.textContent.slice(0, 40), ratio, text, back]);
}
return bad;
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    plan, record = solved()[0], folder / "steps.jsonl"
    steps = [{"step": i, "seconds": plan.predicted.step_seconds * (1 + i / 50), "straggler": 2} for i in range(20)]
    record.write_text("\n".join(map(json.dumps, steps)))
    plan.to_html(folder / "small.html", record, whatif=_circumstances(plan))
    staged().to_html(folder / "staged.html")
    return {name: folder / f"{name}.html" for name in ("small", "staged")}


def _circumstances(plan: Plan) -> WhatIf[Plan]:
    """Answers as ``plan.whatif`` gives them, one without a plan, with a long reason."""

    def quicker(times: float) -> Plan:
        return replace(plan, predicted=replace(plan.predicted, step_seconds=plan.predicted.step_seconds / times))

    limits = [Answer("memory_limit", gib << 30, gib << 30, quicker(gib)) for gib in (1, 2, 4, 8)]
    none = Answer("memory_limit", 1 << 20, 1 << 20, None, "nothing fits into 1 MiB: " + 20 * "no placement does; ")
    devices = [Answer("devices", count, count, quicker(count**0.8)) for count in (2, 4, 8, 16)]
    cluster = Answer("cluster", "dgx-h100", 0, quicker(2.0))
    return WhatIf(plan, (none, *limits, *devices, cluster))


def show(browser: Any, page: Path, width: int = 1280, dark: bool = False) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    browser.get(page.as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(e => { e.open = true; })")


@pytest.mark.parametrize("name", ["small", "staged"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows_or_touches(browser: Any, pages: dict[str, Path], name: str, width: int) -> None:
    show(browser, pages[name], width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(OVERFLOWING) == []
    assert browser.execute_script(TOUCHING) == []
    if width == WIDTHS[0]:
        edges = browser.execute_script(EDGES)
        assert len(edges) >= 3 and all(len(column) == 1 for column in edges), edges


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["small", "staged"])
def test_every_text_has_contrast(browser: Any, pages: dict[str, Path], name: str, dark: bool) -> None:
    show(browser, pages[name], dark=dark)
    back = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") != dark
    assert browser.execute_script(WEAK) == []


def test_the_contents_lead_to_the_frontier(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["small"])
    browser.find_element(By.LINK_TEXT, "What if").click()
    top = browser.execute_script("return document.querySelector('#whatif').getBoundingClientRect().top")
    assert abs(top) < 5
    titles = browser.execute_script("return [...document.querySelectorAll('#whatif title')].map(e => e.textContent)")
    assert "1 MiB: no plan" in titles and len(titles) == 9


def test_rows_open_by_click_and_by_key(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["small"])
    browser.execute_script("document.querySelectorAll('details').forEach(e => { e.open = false; })")
    row = browser.find_element(By.CSS_SELECTOR, "#modules details")
    head, inside = (row.find_element(By.CSS_SELECTOR, path) for path in ("summary", ".row:not(summary)"))
    assert not inside.is_displayed()
    head.click()
    assert inside.is_displayed() and "all_gather" in row.text
    head.send_keys(Keys.ENTER)
    assert not inside.is_displayed()
    browser.find_element(By.LINK_TEXT, "Parameters").send_keys(Keys.ENTER)
    assert browser.current_url.endswith("#parameters")
    assert abs(browser.find_element(By.ID, "parameters").rect["y"] - browser.execute_script("return scrollY")) < 900
    reached = set()
    for _ in range(60):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        reached.add(browser.execute_script("return document.activeElement.tagName"))
    assert {"SUMMARY", "DIV"} <= reached


def test_a_screen_reader_hears_what_is_seen(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["staged"])
    nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    shown = [node for node in nodes if not node.get("ignored")]
    names = {
        role: [node["name"]["value"] for node in shown if node.get("role", {}).get("value") == role and "name" in node]
        for role in ("image", "heading", "navigation", "columnheader", "link", "main")
    }
    assert len(names["image"]) >= 3 and all(names["image"])
    assert any("stages" in name for name in names["image"]) and any("Memory of" in name for name in names["image"])
    show(browser, pages["small"])
    pictures = browser.find_elements(By.CSS_SELECTOR, "#whatif svg")
    assert [picture.accessible_name.split(":")[0] for picture in pictures] == [
        "Step time against memory limit",
        "Step time against devices",
    ]
    assert len(browser.find_elements(By.CSS_SELECTOR, "#whatif table")) == 3
    assert {"Stages", "Modules", "Parameters"} <= set(names["heading"])
    assert "peak memory" in names["columnheader"] and "Contents" in names["navigation"]
    assert len(browser.find_elements(By.CSS_SELECTOR, "h1")) == 1
    spoken = browser.find_element(By.CSS_SELECTOR, "#modules summary").get_property("textContent")
    assert "computes" in spoken and "holds" in spoken


def test_nothing_is_fetched_and_nothing_complains(browser: Any, pages: dict[str, Path]) -> None:
    for page in pages.values():
        browser.get_log("performance"), browser.get_log("browser")
        show(browser, page)
        events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        assert asked == [page.as_uri()]
        assert browser.get_log("browser") == []
