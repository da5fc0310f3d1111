"""The page in Chromium, before a daemon with traffic."""

from __future__ import annotations

import re
import urllib.request
from typing import TYPE_CHECKING

import pytest
from selenium.webdriver.common.keys import Keys
from support.site import key, store
from support.toy import IDENTITY

if TYPE_CHECKING:
    from collections.abc import Iterable

PHONE = 320
SECTIONS = ["tiers", "hour", "namespaces", "prefixes", "notices", "tenants", "policies"]


def enter(browser, site, name: str = "operator") -> None:
    """Open the page with a token, and wait until it shows figures and listens."""
    browser.open(f"{site.address}#{site.tokens[name]}")
    browser.shows("#status", "Connected.")
    browser.shows("#listening", "Live.")


def tiers_told(site) -> dict[str, list[list[float]]]:
    """Return the table of tiers as it should be, from what the daemon tells others."""
    told = {}
    for name, tier in site.stats()["tiers"].items():
        raw, packed = tier.get("raw"), tier.get("packed")
        told[name] = [
            [],
            [tier["used"], tier["capacity"], tier["used"] / tier["capacity"]],
            [tier["withheld"]],
            [raw["blocks"], raw["bytes"]] if raw else [],
            [packed["blocks"], packed["bytes"]] if packed else [],
            [packed["raw_bytes"] / packed["bytes"]] if packed and packed["bytes"] else [],
            [sum(form["hits"] for form in (raw, packed) if form)],
        ]
    return told


def test_figures_are_those_that_the_daemon_tells_others(browser, site):
    with site.client() as client:
        for first in (1, 2, 1):
            client.match("chat", [key(first), key(3)])
    enter(browser, site)
    browser.until(lambda: browser.rows("tiers") == tiers_told(site))
    assert tiers_told(site)["host"][3][0] > 0 < tiers_told(site)["disk"][4][0], "there is something to see"

    def own_told() -> list[list[float]]:
        own = site.stats()["own"]["chat"]
        places = [form for tier in own["tiers"].values() for form in tier.values()]
        packed = [tier["packed"] for tier in own["tiers"].values() if "packed" in tier]
        hits = sum(place["hits"] for place in places)
        ratio = sum(place["raw_bytes"] for place in packed) / sum(place["bytes"] for place in packed)
        nbytes = sum(place["bytes"] for place in places)
        share = hits / (hits + own["misses"])
        return [[], [], [ratio], [], [nbytes], [hits], [own["misses"]], [share], []]

    browser.until(lambda: browser.rows("namespaces").get("chat") == own_told())
    row = browser.text("#namespaces tbody tr")
    assert (IDENTITY.model in row, "lossless" in row, "balanced" in row) == (True, True, True)
    with site.client() as client:
        reason = client.namespace("chat").codec_reason
        prefixes = client.prefixes()
    assert reason
    assert reason in row
    told = {f"{each['key'][:16]}…": ([each["matches"]], [each["blocks"]]) for each in prefixes}
    browser.until(
        lambda: {name: (cells[3], cells[4]) for name, cells in browser.rows("prefixes").items()} == told
    )
    assert prefixes[0]["key"][:16] in browser.text("#prefixes tbody tr"), "the most matched first"

    def host_told() -> list[float]:
        with site.client() as client:
            (own,) = [row["tiers"]["host"] for row in client.tenants() if row["tenant"] == "operator"]
        return [sum(own[form][what] for form in ("raw", "packed")) for what in ("blocks", "bytes")]

    browser.until(lambda: browser.rows("tenants")["operator"][2] == host_told())
    assert "balanced" in browser.text("#policies tbody tr")
    assert "operator" in browser.text("#who")
    assert browser.complaints() == []


def test_what_happens_shows_without_a_reload(browser, site):
    enter(browser, site)
    browser.run("window.same = 'page'")
    before = browser.rows("tiers")["host"][3][0]
    with site.client() as client:
        store(client, 50, 51)
        browser.shows("#notices tbody", key(51).hex()[:16])
        assert "stored" in browser.text("#notices tbody")
        assert "tokens, in host" in browser.text("#notices tbody")
        browser.until(lambda: browser.rows("tiers")["host"][3][0] == before + 2)
        client.delete("chat", key(50))
        client.delete("chat", key(51))
    browser.shows("#notices tbody", "deleted")
    browser.until(lambda: browser.rows("tiers")["host"][3][0] == before)
    assert browser.run("return window.same") == "page"


def test_the_hour_is_drawn_and_told_in_figures(browser, site):
    enter(browser, site)
    with site.client() as client:
        client.get("chat", key(1))
    browser.until(
        lambda: browser.run("return document.querySelector('#bytes path.host').getAttribute('d').length") > 20
    )
    for holder, words in (("bytes", "host: now"), ("hits", " of ")):
        drawing = browser.one(f"#{holder} svg[role=img]")
        assert words in drawing.get_attribute("aria-label")
        assert "NaN" not in browser.run("return arguments[0].outerHTML", drawing)
    browser.one("summary").click()
    browser.shows("#hour tbody", "now")
    with site.client() as client:
        first = client.history()["samples"][0]

    def asked(misses: int, hits: Iterable[int]) -> int:
        return misses + sum(hits)

    before = asked(first["misses"], (tier["hits"] for tier in first["tiers"].values()))

    def told() -> tuple[int, int]:
        sums = tiers(site)
        after = asked(site.stats()["misses"], (form["hits"] for forms in sums.values() for form in forms))
        return sum(form["bytes"] for form in sums["host"]), after - before

    def shown() -> tuple[float, float]:
        rows = browser.rows("hour")
        return rows["now"][1][0], sum(cells[3][0] for cells in rows.values())

    assert told()[1] > 0
    browser.until(lambda: shown() == told())


def tiers(site) -> dict[str, list[dict[str, int]]]:
    """Return the counts of all forms, by tier."""
    told = site.stats()["tiers"]
    return {name: [tier[form] for form in ("raw", "packed") if form in tier] for name, tier in told.items()}


def test_the_token_leaves_the_address_and_is_kept_nowhere(browser, site):
    enter(browser, site)
    token = site.tokens["operator"]
    assert browser.driver.current_url == site.address
    kept = "return JSON.stringify([localStorage, sessionStorage, document.cookie, history.state])"
    assert token not in browser.run(kept)
    assert token not in browser.driver.page_source
    assert browser.run("return document.querySelector('#token').value") == ""
    browser.driver.refresh()
    browser.until(lambda: browser.one("#unlock").is_displayed())
    assert browser.focused() == "token"


def test_without_a_token_a_field_asks_for_one_and_the_keyboard_is_enough(browser, site):
    browser.open(site.address)
    browser.until(lambda: browser.focused() == "token")
    assert not browser.one("#figures").is_displayed()
    assert browser.one("#token").accessible_name == "Token"
    assert browser.one("#token").get_attribute("type") == "password"
    browser.press(site.tokens["operator"], Keys.ENTER)
    browser.shows("#status", "Connected.")
    assert not browser.one("#unlock").is_displayed()
    assert browser.driver.current_url == site.address
    for go, reached in ((browser.onward, "summary"), (browser.back, "a")):
        go()
        assert browser.focused() == reached
        outline = browser.run("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", "one sees where one is"
    browser.one(".skip").send_keys(Keys.ENTER)
    browser.until(lambda: browser.focused() == "main")
    assert browser.text("#status") == "Connected.", "a link within the page is no token"
    browser.one("summary").send_keys(Keys.ENTER)
    assert browser.one("#hour").is_displayed()


@pytest.mark.parametrize(
    ("token", "words"),
    [("kvtcd_wrong", "does not know this token"), ("watcher", "the scope data")],
)
def test_a_token_that_does_not_open_is_said_to_be_so(browser, site, token, words):
    browser.open(f"{site.address}#{site.tokens.get(token, token)}")
    browser.shows("#status", words)
    assert browser.one("#unlock").is_displayed()
    assert not browser.one("#figures").is_displayed()
    assert browser.judged() == []
    browser.one("#token").send_keys("of two words", Keys.ENTER)
    browser.shows("#status", "That is no token")
    browser.one("#token").send_keys(site.tokens["idle"], Keys.ENTER)
    browser.shows("#status", "Connected.")
    assert browser.one("#status").get_attribute("class") == ""


def test_who_has_nothing_is_told_so_and_sees_no_tenants(browser, site):
    enter(browser, site, "idle")
    assert "None yet" in browser.text("#namespaces")
    assert "No match" in browser.text("#prefixes")
    assert "Nothing has happened" in browser.text("#notices")
    assert not browser.one("#admin").is_displayed()
    assert "operator" not in browser.text("body")
    assert browser.judged() == []
    assert browser.complaints() == []


def test_a_daemon_that_goes_is_missed_and_found_again(browser, site):
    enter(browser, site)
    browser.run("window.same = 'page'")
    site.daemon.stop()
    try:
        browser.shows("#status", "Trying again")
        assert "alarm" in browser.one("#status").get_attribute("class")
        browser.shows("#listening", "Not live")
        assert browser.one("#tiers table").is_displayed(), "what was known stays"
        assert browser.driver.title.startswith("kvtcd: ")
        browser.picture("gone")
        assert browser.judged() == []
    finally:
        site.daemon.start()
    browser.shows("#status", "was started anew")
    browser.shows("#listening", "Live.")
    assert browser.driver.title == "kvtcd"
    with site.client() as client:
        store(client, 60)
        browser.shows("#notices", key(60).hex()[:16])
        client.delete("chat", key(60))
    assert browser.run("return window.same") == "page"


def test_pages_in_the_background_hold_nothing(browser, site):
    """A browser has six connections for all pages of one daemon, a daemon sixteen listeners for a tenant."""
    listening = re.compile(r"^kvtcd_listeners (.*)$", re.MULTILINE)
    watcher = {"Authorization": f"Bearer {site.tokens['watcher']}"}

    def listeners() -> float:
        request = urllib.request.Request(f"{site.address}metrics", headers=watcher)  # noqa: S310 - our own
        with urllib.request.urlopen(request) as answer:  # noqa: S310 - our own
            return float(listening.search(answer.read().decode())[1])

    first = browser.driver.current_window_handle
    others = []
    enter(browser, site)
    try:
        for _ in range(7):
            browser.driver.switch_to.new_window("tab")
            others.append(browser.driver.current_window_handle)
            browser.screen(1280)
            enter(browser, site)
        browser.until(lambda: listeners() == 1)
    finally:
        for handle in others:
            browser.driver.switch_to.window(handle)
            browser.driver.close()
        browser.driver.switch_to.window(first)
    with site.client() as client:

        def told() -> bool:
            """Store a block anew, for a page that has only just come to the front; see whether it says so."""
            store(client, 70)
            client.delete("chat", key(70))
            return key(70).hex()[:16] in browser.text("#notices")

        browser.until(told)
    for _ in range(8):  # the browser keeps pages that one has left, with what they had open
        enter(browser, site)
    browser.until(lambda: listeners() == 1)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [PHONE, 768, 1280])
def test_it_can_be_read_on_every_screen_and_by_everybody(browser, site, width, dark):
    browser.screen(width, dark=dark)
    enter(browser, site)
    with site.client() as client:
        client.demote("chat", [key(15)])
        client.get("chat", key(15))
    browser.shows("#notices tbody", "host")
    browser.one("summary").click()
    browser.shows("#hour tbody", "now")
    browser.picture(f"{'dark' if dark else 'light'}-{width}")
    assert browser.run("return document.documentElement.scrollWidth") <= width
    wide = browser.run(
        "return [...document.querySelectorAll('main *')].filter((found) => found.checkVisibility() "
        "&& !found.closest('thead') && found.getBoundingClientRect().right > innerWidth + 1)"
        ".map((found) => found.outerHTML.slice(0, 200))"
    )
    assert wide == []
    broken = browser.run(
        """
        const lines = (node, from, to) => {
          const range = document.createRange();
          range.setStart(node, from);
          range.setEnd(node, to);
          return new Set([...range.getClientRects()].map((found) => found.top)).size;
        };
        const words = (node) => [...node.data.matchAll(/[A-Za-z]+/g)].filter(
          (word) => lines(node, word.index, word.index + word[0].length) > 1).map((word) => word[0]);
        const cells = [...document.querySelectorAll("main thead th, main td:not(.long)")];
        const walkers = cells.map((cell) => document.createTreeWalker(cell, NodeFilter.SHOW_TEXT));
        return walkers.flatMap((walker) => {
          const found = [];
          while (walker.nextNode()) found.push(...words(walker.currentNode));
          return found;
        });
        """
    )
    assert broken == [], "words that two lines share"
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    assert browser.judged() == []


def test_tables_keep_their_meaning_where_rows_are_cards(browser, site):
    browser.screen(PHONE)
    enter(browser, site)
    with site.client() as client:
        client.match("chat", [key(1)])
    browser.until(lambda: browser.rows("prefixes"))
    tree = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = [node["role"]["value"] for node in tree if not node["ignored"]]
    shown = [name for name in SECTIONS if name not in {"hour", "notices"}]
    assert roles.count("table") >= len(shown)
    assert {"columnheader", "rowheader", "cell", "main", "banner", "status", "heading"} <= set(roles)
    regions = {node["name"]["value"] for node in tree if node["role"]["value"] == "region"}
    headings = browser.run("return [...document.querySelectorAll('h2')].map((found) => found.textContent)")
    assert regions == set(headings)
    assert len(headings) == 7
    levels = browser.run("return [...document.querySelectorAll('h1,h2,h3')].map((found) => found.localName)")
    assert levels == ["h1"] + ["h2"] * 7
    tables = browser.run(
        "return [...document.querySelectorAll('table')].map((found) => found.caption?.textContent ?? '')"
    )
    assert tables
    assert all(tables), "each has a caption"


def test_what_is_degraded_is_said_while_it_is_so(browser, site):
    enter(browser, site)
    said = browser.driver.execute_async_script(
        """
        const done = arguments[0];
        import("/page/view.js").then((view) => {
          const found = [{ "set-aside": 2, "new-fault": 1 }, {}].map((faults) => {
            view.degraded(faults);
            const shown = document.getElementById("degraded");
            return [shown.checkVisibility(), shown.textContent];
          });
          done(found);
        });
        """
    )
    assert said[0][0]
    assert "damaged disk environments are set aside" in said[0][1]
    assert "(2); new-fault (1)" in said[0][1]
    assert said[1] == [False, ""]
