"""Dashboard and alerts: they ask for nothing that no daemon tells, and every alert has a runbook."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.http import NS, running
from support.toy import BLOCK_TOKENS, block

from kvtcd.engine.metrics import Metrics

UNITS = Path(__file__).parents[2] / "systemd"
DASHBOARD = json.loads((UNITS / "grafana-dashboard.json").read_text())
RULES = yaml.safe_load((UNITS / "alerts.yml").read_text())["groups"][0]["rules"]
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
EXPRESSIONS = [*QUERIES, *(rule["expr"] for rule in RULES)]
OF_THE_SCRAPE = {"instance", "job", "le"}


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\bkvtcd_[a-z_]+", expression))


def labels_in(expression: str) -> set[str]:
    """Return the labels that are selected or grouped by."""
    grouped = re.findall(r"(?:by|on) \(([^)]*)\)", expression)
    selected = re.findall(r'([a-z_]+)(?:=~|!~|!=|=)"', expression)
    return {label.strip() for group in grouped for label in group.split(",")} | set(selected)


def told() -> dict[str, set[str]]:
    """Return every sample that a daemon can show, with its labels."""
    samples: dict[str, set[str]] = {}
    metrics = Metrics()
    for collector in vars(metrics).values():
        if hasattr(collector, "_labelnames"):
            (family,) = collector.describe() or collector.collect()
            suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(
                family.type, [""]
            )
            samples |= {family.name + suffix: set(collector._labelnames) for suffix in suffixes}
    return samples


@pytest.mark.asyncio
async def test_every_metric_that_is_asked_for_is_there_in_a_running_daemon() -> None:
    async with running() as daemon:
        await daemon.register()
        path, octets = f"{NS}/blocks/ab?tokens={BLOCK_TOKENS}&first_token=0", "application/octet-stream"
        async with daemon.request("PUT", path, data=block(1), headers={"Content-Type": octets}) as answer:
            assert answer.status == 201
        async with daemon.request("GET", "/metrics") as answer:
            families = list(text_string_to_metric_families(await answer.text()))
    names = {family.name for family in families} | {family.name + "_total" for family in families}
    names |= {family.name + suffix for family in families for suffix in ("_bucket", "_sum", "_count")}
    asked = set().union(*map(metrics_in, [*EXPRESSIONS, json.dumps(DASHBOARD["templating"])]))

    assert asked - names == set()
    assert len(asked) > 20
    assert told().keys() <= names, "what is told here is what a daemon tells"


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_samples_and_labels_are_those_that_are_counted(expression: str) -> None:
    samples = told()
    metrics = metrics_in(expression)
    known = set().union(*(samples[name] for name in metrics))

    assert metrics or expression.startswith("up{")
    assert labels_in(expression) <= known | OF_THE_SCRAPE


def test_panels_lie_side_by_side_and_say_what_they_show() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        assert panel["title"]
        assert panel["description"].endswith(".")
        taken |= cells


def test_every_alert_has_a_paragraph_that_says_what_to_do() -> None:
    readme = (UNITS / "README.md").read_text()
    paragraphs = dict(re.findall(r"^### (Kvtcd\w+)\n\n(.+?)\n\n", readme, re.MULTILINE | re.DOTALL))
    for rule in RULES:
        assert len(paragraphs[rule["alert"]]) > 100, rule["alert"]
        assert rule["annotations"]["runbook"] == f"README.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
    assert len(paragraphs) == len(RULES)
