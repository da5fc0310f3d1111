"""`kvtcd eval rd` on a tiny model, against byte counts by hand; and the whole command on a real one."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console
from support.calibration import TEXTS, Tokenizer, run, tiny_model
from support.models import real_model
from typer.testing import CliRunner

from kvtcd.cli import app
from kvtcd.codec.ports import Reason
from kvtcd.codec.profile import store
from kvtcd.core.blob import Kind, parse
from kvtcd.core.errors import ConfigError, Unavailable
from kvtcd.core.layout import Dtype
from kvtcd.lab import evaluate, models, rd
from kvtcd.lab.codec_source import ProfileSource, open_codecs
from kvtcd.lab.codec_spec import Spec, spelled
from kvtcd.lab.figures import write_json
from kvtcd.lab.rd_plot import draw
from kvtcd.lab.rd_points import EqualKl, Means, equal_kl, points
from kvtcd.lab.rd_ranking import Surpassed
from kvtcd.lab.rd_report import show

CONTEXT, CONTINUATION, WINDOWS = 200, 20, 3
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "checkpoints").mkdir()
    loaded = tiny_model(folder / "model")
    named = models.identity(loaded, Dtype.F32, block_tokens=64)
    source = ProfileSource(store(run(loaded, folder / "checkpoints").data, folder), named)
    specs = [Spec.parse(text) for text in ("kvtc:16", "kvtc", "lossless")]
    return loaded, named, open_codecs(named, specs, source)


@pytest.fixture(scope="module")
def measured(world):
    loaded, named, codecs = world
    documents = rd.cut(loaded, TEXTS[:2], CONTEXT, CONTINUATION, WINDOWS)
    steps: list[int] = []
    results, noise = rd.measure(loaded, named, documents, CONTEXT, codecs=codecs, advance=steps.append)
    assert steps == [1, 2, 3, 4]
    return documents, results, noise


@pytest.fixture(scope="module")
def figures(world, measured) -> rd.Figures:
    documents, results, noise = measured
    groups = [document.file for document in documents]
    return rd.Figures(
        model="toy",
        profile=None,
        files=("long", "short"),
        context=CONTEXT,
        continuation=CONTINUATION,
        windows=WINDOWS,
        documents=len(documents),
        file_of_documents=tuple(groups),
        digest_of_documents=rd.digest(documents),
        noise=Means.of(noise, groups),
        points=tuple(points(results, groups, 16 * world[1].layout.token_elements)),
        equal_kl=tuple(equal_kl(results, groups)),
    )


def test_documents_are_windows_spread_over_each_file(world) -> None:
    loaded = world[0]
    documents = rd.cut(loaded, TEXTS[:2], CONTEXT, CONTINUATION, WINDOWS)
    letters = {n: [ord(letter) % 64 for letter in TEXTS[n].text] for n in (0, 1)}
    found = [(document.file, letters[document.file].index(document.tokens[0])) for document in documents]
    assert [file for file, _ in found] == [0, 1, 0, 0]
    starts = [0, 3 * 220, 6 * 220]  # of the nine windows of 220 tokens that 2,000 letters have
    long = [document.tokens for document in documents if document.file == 0]
    assert long == [tuple(letters[0][start : start + 220]) for start in starts]


def test_figures_are_read_as_they_were_written(figures, tmp_path) -> None:
    write_json(tmp_path / "rd.json", "eval rd", dataclasses.asdict(figures))
    found = rd.read_figures(tmp_path / "rd.json")
    assert repr(found) == repr(dataclasses.replace(figures, equal_kl=()))  # NaN is not equal to itself


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no figures", "is no output"),
        ("[]", "is no output"),
        ('{"command": "eval guard"}', "is of `kvtcd eval guard`"),
        ('{"command": "eval rd", "model": "toy"}', "is no output of this version"),
        ('{"command": "eval rd", "noise": 1, "points": 3}', "is no output"),
        (None, "cannot be read: No such file"),
    ],
)
def test_what_is_no_figures_is_refused(tmp_path, text, said) -> None:
    path = tmp_path / "rd.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        rd.read_figures(path)


def test_documents_have_a_digest_of_their_own(world) -> None:
    documents = rd.cut(world[0], TEXTS[:2], CONTEXT, CONTINUATION, WINDOWS)
    assert rd.digest(documents) == rd.digest(rd.cut(world[0], TEXTS[:2], CONTEXT, CONTINUATION, WINDOWS))
    assert len({rd.digest(part) for part in (documents, documents[:-1], documents[::-1])}) == 3


def test_each_document_begins_with_the_bos_of_its_model(world) -> None:
    loaded = dataclasses.replace(world[0], tokenizer=Tokenizer((9, 8)))
    for document in rd.cut(loaded, TEXTS[:1], CONTEXT, CONTINUATION, WINDOWS):
        assert document.tokens[:2] == (9, 8)
        assert len(document.tokens) == 220


def test_a_text_shorter_than_a_document_is_refused(world) -> None:
    with pytest.raises(ConfigError, match="tiny: has 31 tokens, less than the 220 of one document"):
        rd.cut(world[0], TEXTS, CONTEXT, CONTINUATION, WINDOWS)


def test_ratios_are_the_bytes_of_blobs(world, measured, figures) -> None:
    """Of 200 tokens, 4 are sinks and 128 the window; the other 68 stand in the first two blocks."""
    loaded, named, codecs = world
    documents = measured[0]
    bytes_of = {"kvtc": 0, "lossless": 0}
    whole = dict(bytes_of)
    for document in documents:
        blocks = evaluate.read(loaded, named, document.tokens, CONTEXT).blocks
        for spec in (Spec("kvtc", 16), Spec("lossless")):
            encoder = codecs[spec].encoder
            blobs = [
                encoder.encode(b.raw, tokens=b.tokens, first_token=b.first_token, after=b.after).blob
                for b in blocks
            ]
            whole[spec.name] += sum(map(len, blobs))
            for blob, coded, tokens in zip(blobs[:2], (60, 8), (64, 64), strict=True):
                sections = parse(memoryview(blob)).sections
                exact = sum(section.nbytes for section in sections if section.kind is Kind.PLANE)
                if spec.name == "kvtc":  # exact sections are of other tokens, all else of the coded ones
                    bytes_of["kvtc"] += len(blob) - exact
                else:  # one section of all tokens
                    bytes_of["lossless"] += len(blob) - exact + exact * coded / tokens
    raw = 2 * named.layout.token_elements  # at 16 bits, whatever the cache has
    found = {point.codec: point for point in figures.points if point.dial in {None, 16}}
    for name in ("kvtc", "lossless"):
        assert found[name].ratio == pytest.approx(4 * 68 * raw / bytes_of[name])
        assert found[name].bits_per_token == pytest.approx(8 * bytes_of[name] / (4 * 68))
        assert found[name].ratio_all == pytest.approx(4 * 200 * raw / whole[name])


def test_a_point_for_every_codec_and_plan(figures) -> None:
    stands = [(point.codec, point.dial) for point in figures.points]
    # not at 64, which leaves so small a model no bit: a sweep goes as far as it can
    assert stands == [("kvtc", 16), ("kvtc", 8), ("kvtc", 32), ("lossless", None)]
    by_ratio = sorted((point for point in figures.points if point.kl), key=lambda point: point.ratio)
    assert [point.kl for point in by_ratio] == sorted(point.kl for point in by_ratio)
    assert figures.points[-1].kl == figures.points[-1].kl_hi == 0
    assert all(point.kl_lo < point.kl < point.kl_hi for point in by_ratio)


def test_rounding_alone_is_far_below_any_codec_in_float32(figures) -> None:
    assert 0 <= figures.noise.kl < 1e-6 < min(point.kl for point in figures.points if point.kl)
    assert figures.noise.top1 == 1


def with_gain(figures: rd.Figures) -> rd.Figures:
    gains = (
        EqualKl("kvtc2", "kvtc:16", 0.02, 2.2, 2.0, 2.4),
        EqualKl("kvtc2", "kvtc:32", 0.1, *[float("nan")] * 3, more_than=3.8),
        EqualKl("kvtc2", "kvtc:64", 0.1, *[float("nan")] * 3, less_than=1.5),
    )
    return dataclasses.replace(figures, equal_kl=gains)


def test_what_was_stored_otherwise_is_said_with_its_reason(figures) -> None:
    first = dataclasses.replace(
        figures.points[0], codec="kvtc2", dial=16.0, finer=3, refused=6,
        reasons={Reason.UNUSUAL: 4, Reason.RANGE: 2},
    )  # fmt: skip
    console = Console(width=400, record=True, file=io.StringIO())
    show(console, dataclasses.replace(figures, points=(first, *figures.points[1:])))
    (line,) = [line for line in console.export_text().splitlines() if line.startswith("kvtc2:16 stored")]
    assert "3 blocks finer than asked (its guard: their error" in line
    assert "4 blocks losslessly (its guard: a layer or head is not spread" in line
    assert "2 blocks losslessly (values are beyond its codes" in line


def test_one_document_has_no_interval(figures) -> None:
    nothing = float("nan")
    alone = dataclasses.replace(figures.points[0], kl=0.5, kl_lo=nothing, kl_hi=nothing)
    console = Console(width=400, record=True, file=io.StringIO())
    show(console, dataclasses.replace(figures, points=(alone,), equal_kl=(), surpassed=()))
    (row,) = [line for line in console.export_text().splitlines() if ".5000" in line]
    assert row.split()[4] == "—"


def test_tables_fit_a_terminal(figures) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    show(console, with_gain(figures))
    printed = console.export_text()
    assert "…" not in printed
    assert "2.20" in printed
    assert "more than 3.80" in printed
    assert "less than 1.50" in printed


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_curves_can_be_drawn(figures, tmp_path: Path, suffix: str) -> None:
    draw(figures, tmp_path / f"it.{suffix}")
    drawn = (tmp_path / f"it.{suffix}").read_bytes()
    assert drawn.startswith({"svg": b"<?xml", "png": b"\x89PNG"}[suffix])


def test_few_documents_can_be_drawn_too(figures, tmp_path: Path) -> None:
    unsure = tuple(
        dataclasses.replace(point, kl_lo=float("nan"), kl_hi=float("nan")) for point in figures.points
    )
    draw(dataclasses.replace(figures, points=unsure, noise=Means(0, 0, 0, 0, 1)), tmp_path / "it.svg")
    assert (tmp_path / "it.svg").stat().st_size > 0


def test_the_table_says_what_is_left_and_what_is_in_doubt(figures) -> None:
    names = [spelled(point.codec, point.dial) for point in figures.points]
    beaten = (
        Surpassed(names[0], names[-1], 2.0, 0.5, 0.4, 0.6, 0.01),
        Surpassed(names[1], names[-1], 2.0, 0.9, 0.7, 0.99, 0.3),
    )
    text = io.StringIO()
    show(Console(file=text, width=250), dataclasses.replace(figures, documents=4, surpassed=beaten))
    left = next(line for line in text.getvalue().splitlines() if line.startswith("Not surpassed beyond"))
    assert left.startswith(f"Not surpassed beyond noise: {names[1]} ?, ")
    assert names[0] not in left.removeprefix("Not surpassed beyond noise: ").split(", ")
    assert "4 documents can show nothing: no p is below 0.062" in text.getvalue()
    assert ".50 " in text.getvalue()
    assert ".90 ? " in text.getvalue()


def test_a_picture_that_cannot_be_drawn_says_why(
    figures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"it\.xyz: cannot be drawn: its name ends in none of"):
        draw(figures, tmp_path / "it.xyz")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unavailable, match="a plot needs matplotlib"):
        draw(figures, tmp_path / "it.svg")


def test_without_scipy_the_extra_is_named(figures, measured, monkeypatch: pytest.MonkeyPatch) -> None:
    del figures
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(Unavailable, match=r"intervals need scipy.special; pip install 'kvtcd\[lab\]'"):
        Means.of(measured[2], [0, 1, 0, 0])


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1500)  # with the calibration
def test_the_command_measures_a_real_model(tmp_path: Path) -> None:
    real_model("smollm2")
    arguments = [
        "eval", "rd", "--model", "smollm2", "--codec", "kvtc:16", "--codec", "kvtc:32", "--codec", "lossless",
        "--text", str(ROOT / "tests" / "data" / "encyclopedia.txt"), "--windows", "2", "--context", "512",
        "--continue", "64", "--json", str(tmp_path / "rd.json"), "--plot", str(tmp_path / "rd.svg"),
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    written = json.loads((tmp_path / "rd.json").read_text())
    assert written["command"] == "eval rd"
    assert written["documents"] == 2
    assert [(point["codec"], point["dial"]) for point in written["points"]] == [
        ("kvtc", 16),
        ("kvtc", 32),
        ("lossless", None),
    ]
    fine, coarse, exact = written["points"]
    assert 15 < fine["ratio"] < 22 < coarse["ratio"] < 44
    assert written["noise"]["kl"] < fine["kl"] < coarse["kl"] < 0.2
    assert exact["kl"] == 0
    assert 1.2 < exact["ratio"] < 1.8
    keys = "bits_per_token ratio ratio_all kl kl_lo kl_hi dnll top1 err_k err_v"
    assert set(keys.split()) <= set(fine)
    assert (tmp_path / "rd.svg").stat().st_size > 0
