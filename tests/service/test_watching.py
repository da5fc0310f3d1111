"""Dashboard and alerts: they ask for nothing that no daemon tells, and every alert has a runbook."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.fake_store import FakeStore
from support.http import NS, running
from support.patience import PATIENCE_S
from support.toy import BLOCK_TOKENS, block

from kvtcd.engine.metrics import Metrics
from kvtcd.engine.remote.figures import Figures

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
    for collector in (*vars(metrics).values(), *vars(Figures(metrics)).values()):
        if hasattr(collector, "_labelnames"):
            (family,) = collector.describe() or collector.collect()
            suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(
                family.type, [""]
            )
            samples |= {family.name + suffix: set(collector._labelnames) for suffix in suffixes}
    return samples


@pytest.mark.asyncio
async def test_every_metric_that_is_asked_for_is_there_in_a_running_daemon() -> None:
    async with running(remote=FakeStore()) as daemon:
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
    paragraphs = dict(re.findall(r"^### (Kvtcd\w+)\n\n(.+?)(?:\n\n|\Z)", readme, re.MULTILINE | re.DOTALL))
    for rule in RULES:
        assert len(paragraphs[rule["alert"]]) > 100, rule["alert"]
        assert rule["annotations"]["runbook"] == f"README.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
    assert len(paragraphs) == len(RULES)


def at_start() -> dict[str, list[dict[str, str]]]:
    """Return the labels of each series that a daemon shows before anything has happened, all of them at 0."""
    metrics = Metrics()
    Figures(metrics)
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            if sample.name.endswith("_total"):
                assert sample.value == 0
                found.setdefault(sample.name, []).append(sample.labels)
    return found


COUNTED = re.findall(
    r"(?:rate|increase)\((kvtcd_[a-z_]+_total)(?:\{([^}]*)\})?\[", " ".join(rule["expr"] for rule in RULES)
)


@pytest.mark.parametrize(("counter", "selected"), COUNTED)
def test_what_alerts_watch_grow_is_there_before_it_grows(counter: str, selected: str) -> None:
    wanted = dict(re.findall(r'([a-z_]+)="([^"]*)"', selected))
    assert [labels for labels in at_start()[counter] if wanted.items() <= labels.items()]


@pytest.mark.asyncio
async def test_traffic_brings_no_series_that_was_not_there_before(tmp_path) -> None:
    """Or alerts would miss the first event of it; a few have labels that cannot be known."""
    async with running(remote=FakeStore(), state=tmp_path / "s") as daemon:
        await daemon.register()
        for number in range(80):  # more than the host has room for
            path = f"{NS}/blocks/{number:02x}ab?tokens={BLOCK_TOKENS}&first_token=0"
            octets = {"Content-Type": "application/octet-stream"}
            async with daemon.request("PUT", path, data=block(number), headers=octets) as answer:
                assert answer.status == 201
        for number in (0, 40, 79, 99):
            async with daemon.request("GET", f"{NS}/blocks/{number:02x}ab") as answer:
                assert answer.status in {200, 404}
        async with daemon.request("GET", "/metrics") as answer:
            families = list(text_string_to_metric_families(await answer.text()))
    before = at_start()
    after = [(one.name, one.labels) for family in families for one in family.samples if one.value]
    counted = [(name, labels) for name, labels in after if name.endswith("_total")]

    assert {name for name, _ in counted} >= {
        f"kvtcd_{name}_total" for name in ("moves", "dropped_copies", "gets")
    }
    assert [(name, labels) for name, labels in counted if labels not in before[name]] == []


CASES = {
    "KvtcdFailures": ('kvtcd_internal_errors_total{where="new"}', "_x20 1x40"),
    "KvtcdDamaged": ('kvtcd_damaged_records_total{error="BadMagic"}', "0x20 1x90"),
    "KvtcdMovesFail": ('kvtcd_moves_total{direction="host-disk",outcome="failed"}', "0x20 1+1x60"),
    "KvtcdPackerBehind": ('kvtcd_lost_total{reason="pressure"}', "0x20 1+1x60"),
    "KvtcdRecordingBehind": ("kvtcd_unrecorded_lines_total", "0x20 1+1x60"),
    "KvtcdQuarantined": ('kvtcd_degraded{what="left-out"}', "0x20 1x60"),
    "KvtcdRemoteAway": ('kvtcd_degraded{what="remote-away"}', "0x20 1x60"),
    "KvtcdRemoteDrops": ('kvtcd_remote_offers_total{outcome="full"}', "0x20 1+1x60"),
    "KvtcdRemoteRefused": ('kvtcd_remote_refused_total{error="BadMagic"}', "0x20 1x90"),
}
RESTARTED = {
    "KvtcdFailures": ('kvtcd_internal_errors_total{where="mover"}', "5x20 0x3 1x40"),
    "KvtcdDamaged": ('kvtcd_damaged_records_total{error="BadMagic"}', "_x20 1x90"),
    "KvtcdRemoteRefused": ('kvtcd_remote_refused_total{error="BadMagic"}', "_x20 1x90"),
}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("cases", [CASES, RESTARTED], ids=["first", "at the start"])
def test_by_prometheus_itself_an_alert_comes_with_the_first_event_and_not_before(tmp_path, cases) -> None:
    quiet = [
        name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"
        for name, series in at_start().items()
        for labels in series
    ]
    tests = []
    for alert, (series, values) in cases.items():
        silent = [{"series": each, "values": "0x120"} for each in quiet if each != series]
        soon = "30m" if alert == "KvtcdFailures" else "40m"  # it looks at a quarter of an hour
        fires = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
        others = f'count(ALERTS{{alertname!="{alert}"}}) or vector(0)'
        tests.append(
            {
                "name": alert,
                "interval": "1m",
                "input_series": [*silent, {"series": series, "values": values}],
                "promql_expr_test": [
                    {"expr": expression, "eval_time": at, "exp_samples": [{"labels": "{}", "value": value}]}
                    for expression, at, value in [(fires, "19m", 0), (fires, soon, 1), (others, soon, 0)]
                ],
            }
        )
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(UNITS / "alerts.yml")], "tests": tests}))
    checked = subprocess.run(
        ["promtool", "test", "rules", str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
