"""`kvtcd ablate` from its options to its files, on few trials; the criteria on figures made up."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats
from typer.testing import CliRunner

from kvtcd.cli import app
from kvtcd.core.errors import ConfigError
from kvtcd.core.identity import Rope, RopeKind
from kvtcd.lab.ablate import budgets, cells, command, measures, real
from kvtcd.lab.ablate.budgets import Found, law
from kvtcd.lab.ablate.cells import Cell, Preset, Row
from kvtcd.lab.ablate.claims import claims
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
    monkeypatch.setattr(command, "grid", lambda *_: SMALL)
    monkeypatch.setattr(cells, "grid", lambda *_: SMALL)
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
    each, others = naive * spread, corrected * SPREAD
    limit = rows * 128 / (rows + 128)
    return Found(
        regime, 128, rows, float(np.median(each)), float(np.median(others)), limit, tuple(each), tuple(others)
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
        (1.0, 1.0, 1 + 30 * (SPREAD - 1)),  # the slope is as it should be in the mean, and hardly known
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


def judged(tables, dimensions=LAW, found=()):
    return {one.finding: one for one in claims(tables, found, dimensions)}


FIRST = "filling by water among the first components comes to equal bits"
FOLLOW = "the dimensions found follow the calibration budget, not the data"


def test_a_finding_that_a_run_has_no_figures_of_is_left_out():
    assert claims([], [], []) == []
    kept = {"tq-kv", "tq-qkv"}
    tables = [table.only(tuple(kept)) for table in world(as_found)]
    assert set(judged(tables, [], contrasts(tables))) == {
        "a sketch of the remainder hurts keys",
        "of the eight schemes plain-kv, tq-kv and tq-qkv are not dominated",
    }


@pytest.mark.parametrize(
    ("alike", "verdict"),
    [(set(), "does not hold"), ({"lowrank"}, "partly"), ({"lowrank", "fattail"}, "partly"), (None, "holds")],
)
def test_bits_by_variance_are_equal_bits_where_their_figures_are_the_very_same(alike, verdict):
    def figure(regime, scheme, budget):
        level = as_found(regime, scheme, budget)
        return level * (1.001 if scheme == "sqb-kv" and alike is not None and regime not in alike else 1)

    claim = judged(world(figure))[FIRST]
    assert claim.verdict == verdict
    assert f"unit_sphere {100 if alike is None else 0}%" in claim.because


def test_filling_is_equal_bits_where_the_spectrum_is_flat_in_a_run_of_real_problems():
    tables = []
    for regime in ("lowrank", "lowrank_steep"):
        cell = Cell(regime, Shape(dim=64, tokens=16, queries=2, rows=512), (2,))
        rows = cells.run(cell, draw(regime, cell.shape, seed=0, trials=range(2)), NAMED)
        tables.append(Table(cell.name, rows))
    claim = judged(tables)[FIRST]
    assert claim.verdict == "partly"
    assert "lowrank 100%, lowrank_steep 0%" in claim.because


@pytest.mark.parametrize(
    ("stopping", "verdict"),
    [((), "holds"), (("fattail",), "partly"), (("unit_sphere", "fattail"), "does not hold")],
)
def test_dimensions_follow_the_budget_where_they_are_those_of_isotropic_rows(stopping, verdict):
    dimensions = [
        replace(one, naive=min(one.naive, 8) if one.regime in stopping else one.naive, limit=one.naive)
        for one in LAW
    ]
    claim = judged(world(as_found), dimensions)[FOLLOW]
    assert claim.verdict == verdict
    assert ("they do nowhere" in claim.because) is (verdict == "does not hold")


def test_all_cells_of_a_regime_are_asked_what_survives():
    """Of two cells of one regime, one has a scheme that nobody expects to survive."""
    finding = "of the eight schemes plain-kv, tq-kv and tq-qkv are not dominated"
    usual = world(lambda r, s, b: as_found(r, s, b) * (0.5 if s == "tq-kv" else 1))[0]
    odd = Table(
        "unit_sphere d=64",
        world(lambda r, s, b: 1e-6 if s == "tq-kfv" else as_found(r, s, b))[0]._rows.values(),
    )
    assert judged([usual])[finding].verdict == "holds"
    for tables in ([usual, odd], [odd, usual]):
        assert judged(tables)[finding].verdict == "partly"


ROPE = Rope(RopeKind.DEFAULT, 10_000.0, 16)


def caches(count, *, queries=True, lengths=(40,), asked=(4,), dim=16):
    """Random ones; lengths, and numbers of queries, of documents in turn."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        length, many = lengths[number % len(lengths)], asked[number % len(asked)]
        keys, values = (torch.randn((length, 3, 2, dim), generator=draw) for _ in "kv")
        made.append(
            Document(keys, values, torch.randn((many, 3, 6, dim), generator=draw) if queries else None)
        )
    return Dump("toy", ROPE if dim == 16 else None, tuple(made))


def edited(number, keys=1, values=1):
    """Caches of which one document is multiplied by something."""
    dump = caches(12)
    dump.documents[number].keys.mul_(keys)
    dump.documents[number].values.mul_(values)
    return dump


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
    told = "the last 24 tokens of each of 6 documents of 40, seen by 12 queries; calibrated on 66 rows of 6"
    assert found["measured"] == f"{told} others"
    assert f"Measured: {told} others." in (tmp_path / "r").read_text()


def ablated(folder, dump):
    """Return what the command finds of a dump."""
    path, out = folder / "dump.safetensors", folder / "out.json"
    write(path, dump)
    result = CliRunner().invoke(app, ["ablate", "--dump", str(path), "--json", str(out)])
    assert result.exit_code == 0, result.exception
    return json.loads(out.read_text())


def test_heads_of_no_power_of_two_are_turned_by_random_rotations(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_REAL", {"ci": (24, 64, (2, 4))})
    found = ablated(tmp_path, caches(12, dim=24))
    assert "random rotations in place of Hadamard transforms, which 24 dimensions" in found["measured"]
    schemes = {row["scheme"] for row in found["cells"][0]["rows"]}
    assert schemes >= set(NAMED)
    assert {one for one in schemes if one.startswith("rotation=")} == {"rotation=none", "rotation=eigen"}
    assert {one for one in grid() if one.startswith("rotation=")} > {"rotation=rht3", "rotation=haar"}


@pytest.mark.parametrize("stream", ["keys", "values"])
def test_heads_that_are_all_zero_are_left_out_and_said_to_be(tmp_path, monkeypatch, stream):
    monkeypatch.setattr(command, "_REAL", {"ci": (24, 64, (2, 4))})
    monkeypatch.setattr(cells, "grid", lambda *_: SMALL)
    dump = caches(12)
    getattr(dump.documents[7], stream)[:, 1, 0] = 0
    assert "1 of 6 heads left out, of keys or values that are all zero" in ablated(tmp_path, dump)["measured"]
    assert real.Site(1, 0) not in real.sites(dump, 6)
    assert len(real.sites(dump, 6)) == 5


def test_keys_that_are_all_alike_have_no_divergence_by_any_scheme(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_REAL", {"ci": (24, 64, (2, 4))})
    dump = replace(caches(12), rope=None)
    for document in dump.documents:
        document.keys[:] = document.keys[:1]
    found = [one["found"] for one in ablated(tmp_path, dump)["contrasts"] if one["figure"] == "kl"]
    assert {(one["delta"], one["lo"], one["hi"], one["p"]) for one in found} == {(0, 0, 0, 1)}


def test_a_document_whose_untouched_output_is_zero_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_REAL", {"ci": (24, 64, (2, 4))})
    monkeypatch.setattr(cells, "grid", lambda *_: SMALL)
    dump = replace(caches(12), rope=None)
    odd = dump.documents[3]
    odd.queries[:] = 1000
    odd.keys[:] = 1
    odd.keys[-1], odd.values[:-1] = -1, 0  # all values are with a key that no query looks at
    write(tmp_path / "d", dump)
    result = CliRunner().invoke(app, ["ablate", "--dump", str(tmp_path / "d")])
    assert isinstance(result.exception, ConfigError)
    assert "3.k: nothing can be told of this document" in str(result.exception)


UNEQUAL = caches(13, lengths=(40, 57, 31, 22, 90, 64, 25), asked=(4, 3, 5))


def test_documents_of_unequal_length_are_measured_by_what_they_have_in_common():
    """The figures of uncompressed keys that are off by a known amount, against attention by hand."""
    what = real.cell(UNEQUAL, 30, 100, (4,))
    tested, others = UNEQUAL.documents[1::2], UNEQUAL.documents[::2]
    assert what.shape.tokens == 18 == min(len(own.keys) for own in tested) - 4
    assert what.shape.queries == 3 * 3 == 3 * min(len(own.queries) for own in tested)
    sites = real.sites(UNEQUAL, 6)
    for trial, document in enumerate(tested):
        problem = real.problem(UNEQUAL, sites, what, seed=0, trial=trial)
        assert problem.key_rows.shape == (6, what.shape.rows, 16)
        noise = torch.randn(problem.keys.shape, generator=torch.Generator().manual_seed(1))
        found = measures.of_output(problem, problem.keys + noise, problem.values)["output"]
        rotated = problem.seen(problem.keys + noise)
        for number, site in enumerate(sites):
            keys, values = (x[-18:, site.layer, site.head].double() for x in (document.keys, document.values))
            asked = (
                document.queries[:3, site.layer, 3 * site.head : 3 * site.head + 3].reshape(9, 16).double()
            )
            want, got = ((asked @ k.T / 4).softmax(-1) @ values for k in (keys, rotated[number].double()))
            assert float(found[number]) == pytest.approx(float((got - want).norm() / want.norm()), rel=1e-3)
    lengths = [len(own.keys) - 4 for own in others]
    share = next(n for n in range(1, 99) if sum(min(n, own) for own in lengths) >= 100)
    assert what.shape.rows == sum(min(share, own) for own in lengths)


def test_rows_to_calibrate_on_are_those_behind_the_sinks_of_the_other_documents():
    dump = replace(UNEQUAL, rope=None)
    what = real.cell(dump, 30, 10_000, (4,))
    others = dump.documents[::2]
    assert what.shape.rows == sum(len(own.keys) - 4 for own in others)
    problem = real.problem(dump, real.sites(dump, 1), what, seed=0, trial=0)
    assert torch.equal(problem.key_rows[0], torch.cat([own.keys[4:, 0, 0] for own in others]))
    assert torch.equal(problem.value_rows[0], torch.cat([own.values[4:, 0, 0] for own in others]))


@pytest.mark.usefixtures("small")
def test_a_dump_of_unequal_documents_runs_and_says_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_REAL", {"ci": (30, 64, (2, 4))})
    write(tmp_path / "d", UNEQUAL)
    result = CliRunner().invoke(
        app, ["ablate", "--dump", str(tmp_path / "d"), "--json", str(tmp_path / "out.json")]
    )
    assert result.exit_code == 0, result.exception
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["measured"].startswith("the last 18 tokens of each of 6 documents of 22 to 90")


def test_trials_of_a_dump_are_its_documents(tmp_path):
    write(tmp_path / "d", caches(12))
    result = CliRunner().invoke(app, ["ablate", "--dump", str(tmp_path / "d"), "--trials", "8"])
    assert isinstance(result.exception, ConfigError)
    assert "--trials: has no effect with --dump" in str(result.exception)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("left", ["0a" * 32 + "\n\n{}\n", "{\n"])
def test_what_another_run_has_left_is_not_overwritten(tmp_path, left):
    out, part = tmp_path / "out.json", tmp_path / "out.json.part"
    out.write_text("figures of another day")
    part.write_text(left)
    result = CliRunner().invoke(app, ["ablate", "--json", str(out)])
    assert isinstance(result.exception, ConfigError)
    assert str(part) in str(result.exception)
    assert (out.read_text(), part.read_text()) == ("figures of another day", left)


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
    ("dump", "words"),
    [
        (caches(11), "11 documents"),
        (caches(12, queries=False), "0.q: is missing: it takes queries"),
        (caches(12, lengths=(40, 40, 40, 19)), "3.k: has 19 tokens, fewer than 20"),
        (edited(5, values=0), "5.v: is zero behind the first 4 tokens"),
        (edited(3, keys=0), "3.k: is zero behind"),
        (edited(2, values=1e30), "2.v: has a vector of length .*float16"),
        (caches(12, dim=1), "0.k: has heads of 1 dimensions; it takes 16"),
    ],
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
    assert "filling by water among the first components" in text.getvalue()
