"""The page of a report in a real browser: Debian's chromium, from disk, without a network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from abnn.report.data import Method, ReportData, Thresholds
from abnn.report.page import render
from report_data import HOSTILE, full, hostile, minimal

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
BROWSER, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER.exists() and DRIVER.exists()),
    reason="Needs Debian's browser: apt-get install chromium chromium-driver.",
)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)


def two(data: ReportData) -> ReportData:
    """The reference and the method that has everything."""
    return replace(data, methods=[data.methods[0], data.methods[2]])


CASES: dict[str, Callable[[], ReportData]] = {
    "full": lambda: two(full()),
    "hostile": lambda: two(hostile()),
    "minimal": minimal,
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    addresses = {}
    for name, make in CASES.items():
        path = folder / f"{name}.html"
        path.write_text(render(make()), encoding="utf-8")
        addresses[name] = path.as_uri()
    return addresses


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(executable_path=str(DRIVER))
    )
    yield made
    made.quit()


@pytest.fixture
def show(driver: Any, pages: dict[str, str]) -> Iterator[Any]:
    """Open a page; afterwards its console must be empty."""
    driver.get_log("browser")

    def opened(name: str, hash_: str = "") -> Any:
        # A blank page in between, so that another hash alone loads the page anew.
        driver.get("about:blank")
        driver.get(pages[name] + hash_)
        return driver

    yield opened
    assert driver.get_log("browser") == []


@contextmanager
def emulated(driver: Any, command: str, on: dict[str, Any], off: dict[str, Any]) -> Iterator[None]:
    driver.execute_cdp_cmd(f"Emulation.{command}", on)
    try:
        yield
    finally:
        driver.execute_cdp_cmd(f"Emulation.{command}", off)


def text(driver: Any, id_: str) -> str:
    return str(driver.execute_script(f"return document.getElementById('{id_}').textContent"))


def put(driver: Any, id_: str, value: object, event: str = "input") -> None:
    """Write into a field, or choose from a list, and say so as a user's action would."""
    driver.execute_script(
        "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        "e.dispatchEvent(new Event(arguments[2], { bubbles: true }))",
        id_, str(value), event,
    )  # fmt: skip


def counts(driver: Any) -> list[str]:
    """What the panel says: mistakes caught, good ones kept, rejected of each dataset, kept."""
    ids = ("wrong", "right", "ood0", "ood1", "coverage")
    return [text(driver, f"out-{name}-count") for name in ids]


def expected(t: Thresholds, i: int) -> list[str]:
    """The same from the data: thresholds up to number i are passed."""
    right, wrong, n = t.right, t.wrong, t.right[-1] + t.wrong[-1]
    return [
        f"{wrong[-1] - wrong[i]} of {wrong[-1]}",
        f"{right[i]} of {right[-1]}",
        *(f"{kept[-1] - kept[i]} of {kept[-1]}" for kept in t.ood.values()),
        f"{right[i] + wrong[i]} of {n}",
    ]


def place(driver: Any) -> int:
    return int(driver.execute_script("return document.getElementById('slider').valueAsNumber"))


def method(i: int) -> Method:
    return CASES["full"]().methods[i]


def test_a_page_from_disk_asks_for_nothing(show: Any) -> None:
    driver = show("full")
    assert driver.execute_script("return performance.getEntriesByType('resource')") == []
    messages = [json.loads(e["message"])["message"] for e in driver.get_log("performance")]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    # The browser's own first page asks for parts of itself.
    asked = [p["request"]["url"] for p in sent if p["documentURL"].startswith("file:")]
    assert set(asked) - {driver.current_url} == {u for u in asked if u.startswith("data:")}
    assert driver.current_url in asked


@pytest.mark.parametrize("share", [0, 50, 90, 99.5, 100])
def test_catching_mistakes_finds_the_threshold_that_keeps_most(show: Any, share: float) -> None:
    driver, t = show("full"), method(1).thresholds["msp"]
    put(driver, "goal-wrong", share)
    total = t.wrong[-1]
    best = [i for i, kept in enumerate(t.wrong) if 100 * (total - kept) >= share * total]
    if not best:
        assert place(driver) == 0
        assert "every prediction is flagged" in text(driver, "sentence")
        return
    assert counts(driver) == expected(t, max(best))
    said = f"({total - t.wrong[max(best)]} of {total}) and loses"
    assert said in text(driver, "sentence")


def test_keeping_good_ones_finds_the_threshold_that_flags_most(show: Any) -> None:
    driver, t = show("full"), method(1).thresholds["msp"]
    put(driver, "goal-right", 95)
    best = min(i for i, kept in enumerate(t.right) if 100 * kept >= 95 * t.right[-1])
    assert counts(driver) == expected(t, best)


def test_rejecting_foreign_inputs_finds_the_threshold_that_keeps_most(show: Any) -> None:
    driver, t = show("full"), method(1).thresholds["msp"]
    put(driver, "dataset", "textures")
    put(driver, "goal-ood", 80)
    kept, total = t.ood["textures"], t.ood["textures"][-1]
    best = max(i for i, k in enumerate(kept) if 100 * (total - k) >= 80 * total)
    assert counts(driver) == expected(t, best)


def test_arrow_keys_move_the_threshold_by_one(show: Any) -> None:
    driver, t = show("full"), method(1).thresholds["msp"]
    before = place(driver)
    slider = driver.find_element("id", "slider")
    slider.send_keys("\ue014\ue014\ue014")  # arrow right, three times
    assert place(driver) == before + 3
    assert counts(driver) == expected(t, before + 2)
    slider.send_keys("\ue012")  # arrow left
    assert counts(driver) == expected(t, before + 1)


def test_the_line_can_be_dragged(show: Any) -> None:
    driver, t = show("full"), method(1).thresholds["msp"]
    plot = driver.find_element("css selector", "#plot svg")
    # The page scrolls smoothly; the mouse must not come down on what is still passing by.
    driver.execute_script(
        "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot
    )
    width = plot.size["width"]
    chain = webdriver.ActionChains(driver, duration=20)
    chain.move_to_element_with_offset(plot, -width // 4, 0).click_and_hold()
    chain.move_by_offset(width // 2, 0).release().move_by_offset(-width // 2, 0).perform()
    assert counts(driver) == expected(t, place(driver) - 1)
    # Three quarters of the way, and where the mouse went after its release does not matter.
    value = t.values[place(driver) - 1] / t.edges[-1]
    assert 0.7 < value < 0.78


def test_a_typed_threshold_passes_what_is_at_most_as_large(show: Any) -> None:
    driver, t = show("full"), method(1).thresholds["msp"]
    put(driver, "number", 0.3)
    assert counts(driver) == expected(t, sum(v <= 0.3 for v in t.values) - 1)


def test_method_and_score_can_be_chosen_and_the_goal_stays(show: Any) -> None:
    driver = show("full")
    put(driver, "method", 0, "change")
    t = method(0).thresholds["msp"]
    best = max(i for i, k in enumerate(t.wrong) if 100 * (t.wrong[-1] - k) >= 90 * t.wrong[-1])
    assert counts(driver) == expected(t, best)
    put(driver, "pick-inputs", 1, "change")
    put(driver, "score", "epistemic", "change")
    t = method(1).thresholds["epistemic"]
    best = max(i for i, k in enumerate(t.wrong) if 100 * (t.wrong[-1] - k) >= 90 * t.wrong[-1])
    assert counts(driver) == expected(t, best)
    shown = driver.execute_script(
        "return [...document.querySelectorAll('[data-method]')].filter(e => !e.hidden)"
        ".map(e => e.dataset.method)"
    )
    assert set(shown) == {"1"}


def test_the_address_restores_a_threshold(show: Any) -> None:
    driver = show("full")
    address = driver.execute_script("return location.hash")
    assert address == ""
    put(driver, "method", 0, "change")
    put(driver, "score", "entropy", "change")
    put(driver, "number", 0.5)
    before, shared = counts(driver), driver.execute_script("return location.hash")
    driver = show("full", shared)
    assert counts(driver) == before
    assert driver.execute_script("return document.getElementById('score').value") == "entropy"
    assert text(show("full", "#method=nobody&threshold=x"), "out-wrong") != ""


def test_marks_on_the_curves_follow_the_threshold(show: Any) -> None:
    driver, t = show("full"), method(1).thresholds["msp"]
    put(driver, "number", 0.3)
    i = place(driver) - 1
    kept, n = t.right[i] + t.wrong[i], t.right[-1] + t.wrong[-1]
    foreign = t.ood["svhn"]
    points = {
        "risk": (kept / n, t.wrong[i] / kept),
        "roc/svhn": ((n - kept) / n, (foreign[-1] - foreign[i]) / foreign[-1]),
    }
    for link, (u, v) in points.items():
        axes, x, y = driver.execute_script(
            "const s = document.querySelector(`svg[data-link='${arguments[0]}']`);"
            "const c = s.querySelector('.marker circle');"
            "return [JSON.parse(s.dataset.axes), +c.getAttribute('cx'), +c.getAttribute('cy')]",
            link,
        )
        left, right, bottom, top, x0, x1, y0, y1 = axes
        assert x == pytest.approx(left + (u - x0) / (x1 - x0) * (right - left))
        assert y == pytest.approx(bottom + (v - y0) / (y1 - y0) * (top - bottom))


def test_curves_of_the_confidence_have_no_mark_of_another_score(show: Any) -> None:
    driver = show("full")
    count = "return document.querySelectorAll('svg[data-axes] .marker').length"
    assert driver.execute_script(count) > 0
    put(driver, "score", "entropy", "change")
    assert driver.execute_script(count) == 0


def test_cost_and_quality_can_be_chosen(show: Any) -> None:
    driver = show("full")
    put(driver, "cost-x", "parameters", "change")
    put(driver, "cost-y", "nll", "change")
    shown = driver.execute_script(
        "return [...document.querySelectorAll('[data-cost]')].filter(e => !e.hidden)"
        ".map(e => e.dataset.cost)"
    )
    assert shown == ["parameters/nll"]


def test_hostile_names_do_nothing(show: Any) -> None:
    driver = show("hostile")
    put(driver, "method", 0, "change")
    put(driver, "goal-ood", 50)
    assert driver.execute_script("return window.hacked") is None
    assert driver.execute_script("return document.querySelectorAll('img[src=x]').length") == 0
    assert driver.title.startswith(HOSTILE[:40])
    address = driver.execute_script("return location.hash")
    before = counts(driver)
    assert counts(show("hostile", address)) == before


@pytest.mark.parametrize("case", CASES)
def test_a_narrow_page_does_not_scroll_sideways(show: Any, driver: Any, case: str) -> None:
    size = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    with emulated(driver, "setDeviceMetricsOverride", size, {"width": 0, "height": 0} | {
        "deviceScaleFactor": 0, "mobile": False
    }):  # fmt: skip
        show(case)
        widths = "return [document.documentElement.scrollWidth, innerWidth]"
        scroll, inner = driver.execute_script(widths)
        assert scroll <= inner == 360


def test_the_page_is_dark_where_the_system_is_and_where_the_reader_wants_it(
    show: Any, driver: Any
) -> None:
    ground = "return getComputedStyle(document.documentElement).backgroundColor"
    ink = (
        "return getComputedStyle(document.querySelector('#fig-reliability text')).fill"
        " + getComputedStyle(document.querySelector('#fig-reliability path')).fill"
    )
    show("full")
    light, drawn = driver.execute_script(ground), driver.execute_script(ink)
    driver.execute_script("document.getElementById('theme').click()")
    dark, in_dark = driver.execute_script(ground), driver.execute_script(ink)
    assert dark != light
    assert in_dark != drawn
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    with emulated(driver, "setEmulatedMedia", {"features": features}, {"features": []}):
        show("full")
        assert driver.execute_script(ground) == dark
        driver.execute_script("document.getElementById('theme').click()")
        assert driver.execute_script(ground) == light


def test_without_scripts_all_that_is_static_is_there(show: Any, driver: Any) -> None:
    with emulated(driver, "setScriptExecutionDisabled", {"value": True}, {"value": False}):
        show("full")
        body = driver.find_element("tag name", "body").text
    assert "This panel needs JavaScript" in body
    for m in CASES["full"]().methods:
        assert f"How uncertain {m.name} is" in body
        assert f"The surest mistakes of {m.name}" in body
    assert "Find the threshold" not in body


def test_a_minimal_page_works(show: Any) -> None:
    driver = show("minimal")
    # The one mistake scores 0.4, with the third of the right ones.
    assert text(driver, "out-wrong-count") == "1 of 1"
    assert text(driver, "out-right-count") == "2 of 3"
    assert driver.execute_script("return document.getElementById('beside').hidden") is True
