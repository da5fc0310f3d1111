"""`kvtcd ablate` from its options to its files, on few trials; the criteria on figures made up."""

import io
import json

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats
from typer.testing import CliRunner

from kvtcd.cli import app
from kvtcd.core.errors import ConfigError
from kvtcd.core.identity import Rope, RopeKind
from kvtcd.lab.ablate import budgets, cells, command, real
from kvtcd.lab.ablate.budgets import Found, law
from kvtcd.lab.ablate.cells import Cell, Preset, Row
from kvtcd.lab.ablate.claims import uniform_share
from kvtcd.lab.ablate.contrasts import Table, contrasts
from kvtcd.lab.ablate.criteria import criteria
from kvtcd.lab.ablate.regimes import Shape, draw
from kvtcd.lab.ablate.schemes import NAMED, grid
from kvtcd.lab.dimension import dimension
from kvtcd.lab.dump import Document, Dump, write
from kvtcd.lab.statistics import interval, mean

SMALL = {name: scheme for name, scheme in grid().items() if name in NAMED or "seed" in name}
SMALL["scale=norm"] = grid()["scale=norm"]


@pytest.fixture
def small(monkeypatch):
    shape = Shape(dim=32, tokens=32, queries=2, rows=64)
    own = tuple(Cell(regime, shape, (2, 4)) for regime in ("unit_sphere", "fattail", "lowrank"))
    monkeypatch.setattr(command, "preset", lambda _: Preset(own, 6))
    monkeypatch.setattr(command, "grid", lambda: SMALL)
    monkeypatch.setattr(cells, "grid", lambda: SMALL)
    monkeypatch.setattr(command, "_AT_ONCE", 2)
    monkeypatch.setattr(budgets, "ROWS", (64, 128))
    monkeypatch.setattr(command, "Shape", lambda *_: shape)


@pytest.mark.usefixtures("small")
def test_figures_report_and_plot_are_written(tmp_path):
    files = [tmp_path / name for name in ("out.json", "out.md", "out.png")]
    options = [
        word for pair in zip(("--json", "--report", "--plot"), map(str, files), strict=True) for word in pair
    ]
    result = CliRunner().invoke(app, ["ablate", "--preset", "ci", *options])
    assert result.exit_code in {0, 1}, result.exception
    found = json.loads(files[0].read_text())
    assert found["command"] == "ablate"
    assert set(found["criteria"]) == {"i", "ii", "iii", "iv", "v"}
    assert all(set(one) == {"pass", "evidence"} for one in found["criteria"].values())
    assert (result.exit_code == 0) == all(one["pass"] for one in found["criteria"].values())
    row = found["cells"][1]["rows"][0]
    assert len(row["measured"]["kl"]) == 6
    assert row["bits"] > row["budget"]
    assert {one["verdict"] for one in found["claims"]} <= {"holds", "partly", "does not hold"}
    text = files[1].read_text()
    assert "arXiv 2607.09683" in text
    assert "6 trials cannot show a difference here" in text
    assert "no p of signed ranks is below 0.031" in text
    assert "![" in text
    assert "scale=norm" in text
    assert files[2].stat().st_size > 10_000
    assert not files[0].with_name("out.json.part").exists()


@pytest.mark.usefixtures("small")
def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    """The second process finds what the first one measured, even with its last line cut off."""
    out, calls = tmp_path / "out.json", []

    def counted(cell, problem):
        calls.append(cell.regime)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return cells.run(cell, problem)

    monkeypatch.setattr(command, "run", counted)
    options = {
        "preset_name": "ci", "dump": None, "trials": None, "seed": 3, "threads": 1, "json": out,
        "report": None, "plot": None,
    }  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        command.command(**options)
    part = out.with_name("out.json.part")
    whole = part.read_text()
    part.write_text(whole[:-40])
    assert "going on" not in capsys.readouterr().err
    command.command(**options)
    assert f"going on from {part}: 3 parts are done\n" in capsys.readouterr().err
    assert (
        calls
        == ["unit_sphere"] * 3 + ["fattail", "fattail", "fattail", "fattail", "fattail"] + ["lowrank"] * 3
    )
    first = json.loads(out.read_text())
    command.command(**{**options, "json": tmp_path / "again.json"})
    again = json.loads((tmp_path / "again.json").read_text())
    assert {**first, "date": ""} == {**again, "date": ""}
    command.command(**{**options, "seed": 4})
    assert json.loads(out.read_text())["cells"] != first["cells"]


def test_the_corrected_dimension_is_that_of_the_law_and_the_naive_one_that_of_the_budget():
    rows = draw("unit_sphere", Shape(dim=128, tokens=2, queries=2, rows=64), seed=0, trials=range(4)).key_rows
    found = [dimension(own) for own in rows]
    assert np.mean([one.naive for one in found]) == pytest.approx(64 * 128 / (64 + 128), rel=0.05)
    assert np.mean([one.corrected for one in found]) == pytest.approx(128, rel=0.1)
    for own, one in zip(rows.double().numpy(), found, strict=True):
        values = np.linalg.eigvalsh(own.T @ own)
        assert one.naive == pytest.approx(values.sum() ** 2 / (values**2).sum(), rel=1e-6)
        gram = own @ own.T
        pairs = [(i, j) for i in range(64) for j in range(64) if i != j]
        above = sum(gram[i, i] * gram[j, j] for i, j in pairs)
        assert one.corrected == pytest.approx(above / sum(gram[i, j] ** 2 for i, j in pairs), rel=1e-6)


def test_filling_the_first_components_is_uniform_where_the_spectrum_is_flat():
    assert uniform_share("lowrank", 0, 4) == 1
    assert uniform_share("lowrank_steep", 0, 4) == 0


def world(kl, *, output=None):
    """Tables in which each scheme has the figures that are said, times a noise of a percent."""
    noise = np.exp(0.01 * np.random.default_rng(0).normal(size=8))
    tables = []
    for regime in (
        "unit_sphere",
        "fattail",
        "lowrank",
        "lowrank_aligned",
        "lowrank_steep",
        "lowrank_misalign",
    ):
        rows = []
        for scheme in NAMED:
            for budget in (2, 4):
                level = kl(regime, scheme, budget)
                other = (output or kl)(regime, scheme, budget)
                own = {"kl": tuple(level * noise), "output": tuple(other * noise[::-1])}
                rows.append(Row(scheme, budget, budget + (0.2 if scheme.count("q") > 1 else 0.1), own))
        tables.append(Table(f"{regime} d=128", rows))
    return tables


def as_found(regime, scheme, budget):
    level = 4.0**-budget
    if scheme in {"sqw-kv", "sqw-kv-raw", "sqw-kv-shared"}:
        level *= 3 if regime in {"fattail", "unit_sphere"} else 0.1
    if scheme.endswith("shared"):
        level *= 40
    return level * (4 if scheme in {"tq-qkv", "tq-fkv", "tq-qkqv", "tq-fkfv"} else 1)


def as_put_out(regime, scheme, budget):
    return as_found(regime, scheme, budget) * (
        4 if scheme in {"tq-kqv", "tq-qkqv", "tq-kfv", "tq-fkfv"} else 1
    )


SPREAD = 1 + 0.01 * np.array([-1.0, 0.3, 0.7, -0.5, 0.9, -0.4])
"""Of six trials."""


def found_by(regime, rows, naive, corrected, spread=SPREAD):
    each, others = naive * spread, corrected * spread
    return Found(
        regime, 128, rows, float(np.median(each)), float(np.median(others)), 0, tuple(each), tuple(others)
    )


LAW = [
    found_by(regime, n, n * 128 / (n + 128), 128.0)
    for regime in ("unit_sphere", "fattail")
    for n in (16, 64, 128, 512, 4096)
]


def test_criteria_hold_on_figures_that_are_as_they_say():
    tables = world(as_found, output=as_put_out)
    assert {
        name: one.holds for name, one in criteria(tables, contrasts(tables), LAW).items()
    } == dict.fromkeys(("i", "ii", "iii", "iv", "v"), True)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("i", lambda r, s, b: 0.1 if (r, s, b) == ("fattail", "sqw-kv-raw", 4) else 1),
        ("ii", lambda r, s, b: 20 if (r, s, b) == ("lowrank_steep", "sqw-kv", 2) else 1),
        ("ii", lambda r, s, b: 0.05 if (r, s, b) == ("lowrank", "sqw-kv-shared", 2) else 1),
        ("iv", lambda r, s, b: 0.2 if (r, s, b) == ("lowrank_misalign", "tq-qkv", 4) else 1),
        ("v", lambda r, s, b: 1e-4 if (r, s, b) == ("unit_sphere", "tq-kqv", 2) else 1),
    ],
)
def test_each_criterion_can_fail(name, spoil):
    tables = world(
        lambda r, s, b: as_found(r, s, b) * spoil(r, s, b),
        output=lambda r, s, b: as_put_out(r, s, b) * spoil(r, s, b),
    )
    assert not criteria(tables, contrasts(tables), LAW)[name].holds


@pytest.mark.parametrize(
    ("naive", "corrected", "spread"),
    [
        (1.6, 1.0, SPREAD),
        (1.0, 1.2, SPREAD),
        (1.0, 1.0, 1 + 30 * (SPREAD - 1)),  # all is as it should be in the mean, and nothing is known of it
    ],
)
def test_the_law_of_dimensions_can_fail(naive, corrected, spread):
    bent = [
        found_by(one.regime, one.rows, naive * one.rows * 128 / (one.rows + 128), corrected * 128, spread)
        for one in LAW
    ]
    tables = world(as_found, output=as_put_out)
    assert not criteria(tables, contrasts(tables), bent)["iii"].holds


def test_the_slope_is_fitted_in_each_trial_and_its_interval_is_over_trials():
    own = budgets.dimensions(seed=5)
    found = law(own, "unit_sphere")
    slopes = []
    for trial in range(6):
        x = [1 / one.rows for one in own if one.regime == "unit_sphere"]
        y = [1 / one.naive_of_trials[trial] for one in own if one.regime == "unit_sphere"]
        slopes.append(stats.linregress(x, y).slope)
    want = interval(mean(slopes), [0] * 6)
    assert (found.slope.value, found.slope.lo, found.slope.hi) == pytest.approx(
        (want.value, want.lo, want.hi)
    )
    assert found.slope.lo < found.slope.value < found.slope.hi


ROPE = Rope(RopeKind.DEFAULT, 10_000.0, 16)


def caches(count, *, queries=True):
    draw = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        keys, values = (torch.randn((40, 3, 2, 16), generator=draw) for _ in "kv")
        made.append(Document(keys, values, torch.randn((4, 3, 6, 16), generator=draw) if queries else None))
    return Dump("toy", ROPE, tuple(made))


@pytest.mark.usefixtures("small")
def test_caches_of_ones_own_are_tested_by_document(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_REAL", {"ci": (24, 64, (2, 4))})
    path, out = tmp_path / "dump.safetensors", tmp_path / "out.json"
    write(path, caches(12))
    result = CliRunner().invoke(
        app, ["ablate", "--dump", str(path), "--json", str(out), "--report", str(tmp_path / "r")]
    )
    assert result.exit_code == 0, result.exception
    found = json.loads(out.read_text())
    assert (found["source"], found["trials"], found["criteria"]) == ("toy", 6, {})
    assert len(found["cells"][0]["rows"][0]["measured"]["kl"]) == 6
    assert "tq-qkv" in result.stdout


def test_keys_are_coded_without_rope_and_looked_at_with_it():
    dump = caches(12)
    what = real.cell(dump, 24, 64, (4,))
    sites = real.sites(dump, 100)
    assert len(sites) == 6
    problem = real.problem(dump, sites, what, seed=0, trial=2)
    document = dump.documents[5]
    for number, site in enumerate(sites):
        want = document.keys[16:, site.layer, site.head]
        assert torch.allclose(problem.seen(problem.keys)[number], want, atol=1e-5)
        assert not torch.allclose(problem.keys[number], want, atol=1e-2)
        assert torch.equal(problem.values[number], document.values[16:, site.layer, site.head])
        group = document.queries[:, site.layer, 3 * site.head : 3 * site.head + 3]
        assert torch.equal(problem.queries[number].sort(dim=0).values, group.flatten(0, 1).sort(dim=0).values)
    assert problem.key_rows.shape[:1] == (6,)
    assert len(set(problem.seeds)) == 6


@pytest.mark.parametrize(
    ("dump", "words"), [(caches(11), "11 documents"), (caches(12, queries=False), "no queries")]
)
def test_too_little_is_said(dump, words, tmp_path):
    write(tmp_path / "dump", dump)
    with pytest.raises(ConfigError, match=words):
        command.command(
            preset_name="ci",
            dump=tmp_path / "dump",
            trials=None,
            seed=0,
            threads=1,
            json=None,
            report=None,
            plot=None,
        )


@pytest.mark.usefixtures("small")
def test_what_is_printed_says_what_failed():
    from kvtcd.lab.ablate.report import show  # noqa: PLC0415 - used here alone

    figures, _ = command._of_regimes("ci", 6, 0, None, command.Phases())
    text = io.StringIO()
    show(Console(file=text, width=200), figures)
    assert "pass" in text.getvalue() or "FAIL" in text.getvalue()
    assert "filling by water" in text.getvalue()
