"""`kvtcd validate` from its options to its files and exit code; which caches it takes, and how many."""

import json
from dataclasses import replace

import pytest
import torch
from support.calibration import TEXTS, run, text, tiny_model
from typer.testing import CliRunner

from kvtcd.cli import app
from kvtcd.codec.origin import Text
from kvtcd.codec.profile import build, store
from kvtcd.codec.profile import load as load_profile
from kvtcd.core.errors import ConfigError, ProfileMismatch
from kvtcd.lab import models
from kvtcd.lab.calibration import digest_of
from kvtcd.lab.dump import Document, Dump, write
from kvtcd.lab.dump_model import gather, read
from kvtcd.lab.phases import Phases
from kvtcd.lab.texts import recipe
from kvtcd.lab.validation.check import Check
from kvtcd.lab.validation.rows import ROWS, check, looked_at, missing
from kvtcd.lab.validation.verdict import judge

CHECKS = {
    "rows of a head", "spectral gap", "dimensions of a head", "energy of a head", "gain of a head",
    "energy of all layers", "spectra", "drift", "gain of all layers", "split-half basis",
    "split-half variances", "codec", "kurtosis", "Hill index", "largest row",
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny model, its profile, and caches of documents that it was not made from."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "checkpoints").mkdir()
    loaded = tiny_model(folder / "model")
    data = run(loaded, folder / "checkpoints").data
    (folder / "held.txt").write_text(text("held", 5000, 7).text)
    dump = gather(loaded, [folder / "held.txt"], 256, 4, 12, phases=Phases())
    return loaded, store(data, folder), dump


def validate(path, *words):
    return CliRunner().invoke(app, ["validate", str(path), *map(str, words)])


def test_a_dump_names_its_model_and_its_texts(made):
    loaded, path, dump = made
    origin = load_profile(path).origin
    assert (dump.model, dump.weights, dump.adapter) == (origin.model, origin.weights, origin.adapter)
    assert dump.rope == models.identity(loaded).rope
    assert [one.name for one in dump.texts] == ["held.txt"]
    assert {one.sha256 for one in dump.texts}.isdisjoint(one.sha256 for one in origin.texts)


def test_queries_are_those_that_the_model_attends_with(made):
    """Attention by hand, of the queries and keys of a dump, against the weights that the model tells."""
    loaded, _, _ = made
    tokens = [(7 * n) % 60 for n in range(140)]
    loaded.model.set_attn_implementation("eager")
    with torch.no_grad():
        told = loaded.model(torch.tensor([tokens]), output_attentions=True).attentions
    loaded.model.set_attn_implementation("sdpa")
    document = read(loaded, tokens, 136)
    for layer, weights in enumerate(told):
        groups = document.queries.shape[2] // document.keys.shape[2]
        keys = document.keys[:, layer].repeat_interleave(groups, dim=1)
        logits = (
            torch.einsum("qhd,thd->hqt", document.queries[:, layer], keys) / document.keys.shape[3] ** 0.5
        )
        want = weights[0, :, 136:, :136]
        assert torch.allclose(logits.softmax(-1), want / want.sum(-1, keepdim=True), atol=1e-4)


def test_the_command_says_it_and_ends_accordingly(made, tmp_path):
    _, path, dump = made
    write(tmp_path / "d", dump)
    result = validate(path, "--dump", tmp_path / "d", "--json", tmp_path / "j", "--plot", tmp_path / "p.png")
    found = json.loads((tmp_path / "j").read_text())
    assert [stream["name"] for stream in found["streams"]] == ["k", "v"]
    words = {stream["verdict"] for stream in found["streams"]}
    assert words <= {"safe", "tq", "collect"}
    assert result.exit_code == (0 if words == {"safe"} else 1), result.exception
    for stream in found["streams"]:
        assert {one["name"] for one in stream["checks"]} == CHECKS
        assert all(one["meaning"] in result.stdout.replace("\n", "") for one in stream["checks"])
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_a_profile_alone_is_not_judged(made, tmp_path):
    _, path, _ = made
    result = validate(path, "--json", tmp_path / "j")
    found = json.loads((tmp_path / "j").read_text())
    assert result.exit_code == 3
    assert {stream["verdict"] for stream in found["streams"]} == {"not judged"}
    assert [one["name"] for one in found["streams"][0]["checks"]] == ["rows of a head", "spectral gap"]
    assert "not judged: give --dump, or --model with --text" in result.stdout
    assert "safe" not in result.stdout


def test_of_a_profile_alone_it_is_said_that_its_tokens_were_too_few():
    few = Check("rows of a head", "heads", "budget", 2.0, 4.0, holds=False, meaning="few")
    verdict = judge([few], 1000, missing="nothing held out")
    assert (verdict.word, verdict.text) == ("not judged", "not judged: nothing held out")
    assert verdict.heads.startswith("collect about 1,000 more")


@pytest.mark.parametrize("documents", [1, 7, 8, 9])
def test_too_little_is_not_judged(made, tmp_path, documents):
    """Eight documents of 252 rows behind the sinks are 2,016, nine are enough."""
    _, path, dump = made
    write(tmp_path / "d", replace(dump, documents=dump.documents[:documents]))
    result = validate(path, "--dump", tmp_path / "d", "--plot", tmp_path / "p.png")
    assert (result.exit_code == 3) is (documents < 9), result.exception
    assert (f"{252 * documents:,} held-out tokens of {documents} documents" in result.stdout) is (
        documents < 9
    )
    assert (tmp_path / "p.png").exists() is (documents == 9)


def test_documents_that_are_nothing_but_sinks_do_not_count(made):
    _, _, dump = made
    long = Document(*(torch.zeros((3000, 4, 2, 16)) for _ in "kv"))
    short = Document(long.keys[:4], long.values[:4])
    assert "2,996 held-out tokens of 1 documents" in missing(replace(dump, documents=(long, short)))
    assert not missing(replace(dump, documents=(long, short, Document(long.keys[:5], long.values[:5]))))


def test_rows_are_spread_evenly_over_documents_of_any_length_without_their_sinks():
    """Every row tells by its value where it was; keys are not rotated."""
    lengths = (500, 3, 1000, 4, 3000)
    documents = []
    for number, length in enumerate(lengths):
        keys = (torch.arange(length) + 10_000.0 * number).view(-1, 1, 1, 1)
        documents.append(Document(keys, keys + 0.5))
    found = looked_at(Dump("m", None, tuple(documents)))
    at = found["k"].flatten()
    assert torch.equal(found["v"].flatten(), at + 0.5)
    assert len(at) == ROWS == len(at.unique())
    assert (at % 10_000 >= 4).all()
    counts = [int(((at >= 10_000 * n) & (at < 10_000 * (n + 1))).sum()) for n in range(len(lengths))]
    usable = [max(length - 4, 0) for length in lengths]
    assert counts == pytest.approx([ROWS * own / sum(usable) for own in usable], abs=1)


def read_text(monkeypatch, loaded):
    monkeypatch.setattr("kvtcd.lab.models.load", lambda _: loaded)
    monkeypatch.setattr("kvtcd.lab.models.resolve", lambda *_: loaded.folder)


def test_a_model_reads_texts_of_ones_own(made, tmp_path, monkeypatch):
    loaded, path, _ = made
    (tmp_path / "t.txt").write_text(text("held", 3000, 8).text)
    read_text(monkeypatch, loaded)
    options = ["--model", "tiny", "--text", tmp_path / "t.txt", "--context", "256", "--windows", "9"]
    result = validate(path, *options, "--json", tmp_path / "j")
    assert result.exit_code in {0, 1}, result.exception
    assert json.loads((tmp_path / "j").read_text())["documents"] == 9


@pytest.mark.parametrize("way", ["text", "dump"])
def test_a_text_that_the_profile_was_made_from_is_not_held_out(made, tmp_path, monkeypatch, way):
    loaded, path, _ = made
    own = tmp_path / "renamed.txt"
    own.write_text(TEXTS[0].text)
    read_text(monkeypatch, loaded)
    options = ["--model", "tiny", "--text", own, "--context", "256", "--windows", "2"]
    if way == "dump":
        write(tmp_path / "d", gather(loaded, [own], 256, 1, 2, phases=Phases()))
        options = ["--dump", tmp_path / "d"]
    result = validate(path, *options)
    assert isinstance(result.exception, ConfigError)
    assert "renamed.txt: is a text that the profile was made from" in str(result.exception)


def test_a_part_of_a_calibration_text_is_noticed_in_a_dump_unless_that_is_of_an_older_version(made, tmp_path):
    loaded, path, _ = made
    code = recipe()[-1]
    profile = load_profile(path)
    origin = replace(profile.origin, texts=(Text(code.name, digest_of(code)),))
    path = store(build(origin, profile.streams, profile.weighted)[1], tmp_path)
    (tmp_path / "cut.txt").write_text(code.text[20_000:40_000])
    dump = gather(loaded, [tmp_path / "cut.txt"], 256, 1, 10, phases=Phases())
    write(tmp_path / "d", dump)
    result = validate(path, "--dump", tmp_path / "d")
    assert isinstance(result.exception, ConfigError)
    assert "cut.txt: has 100% of its runs of 8 words in code.txt" in str(result.exception)
    assert len(dump.texts[0].runs) <= 512
    write(tmp_path / "d", replace(dump, texts=(replace(dump.texts[0], runs=()),)))
    assert validate(path, "--dump", tmp_path / "d").exit_code in {0, 1}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--text {d}", "--text: is not read without --model"),
        ("--dump {d} --model tiny --text {d}", "--dump: are caches already"),
        ("--dump {d} --text {d}", "--text: is not read without --model"),
        ("--model tiny", "--text: a model needs a text"),
        ("--plot {d}.png", "--plot: draws held-out caches"),
        ("--context 1024", "--context: has no effect without --model"),
        ("--dump {d} --windows 4", "--windows: has no effect without --model"),
    ],
)
def test_options_without_effect_are_refused(made, tmp_path, words, told):
    _, path, _ = made
    (tmp_path / "d").write_text("x")
    result = validate(path, *words.format(d=tmp_path / "d").split())
    assert isinstance(result.exception, ConfigError), result.output
    assert told in str(result.exception)


def cut(*at):
    """Cut the caches of all documents."""

    def change(dump: Dump) -> Dump:
        documents = tuple(Document(own.keys[at], own.values[at]) for own in dump.documents)
        return replace(dump, documents=documents)

    return change


def named(**changes):
    return lambda dump: replace(dump, **changes)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (named(rope=None), ProfileMismatch, "its rope is"),
        (named(weights="0" * 64, model="x"), ProfileMismatch, r"model is model .*, not x \(weights 0000"),
        (named(adapter="1" * 64), ProfileMismatch, "adapter 1111"),
        (named(weights=None), ConfigError, "weights: is not said"),
        (cut(slice(None), slice(2)), ProfileMismatch, "streams"),
        (cut(..., slice(1), slice(None)), ProfileMismatch, "streams"),
        (cut(..., slice(8)), ProfileMismatch, "streams"),
    ],
)
def test_caches_of_another_model_are_refused(made, change, error, words):
    _, path, dump = made
    with pytest.raises(error, match=words):
        check(load_profile(path), change(dump))


def test_a_dump_of_another_model_is_refused_by_the_command_and_nothing_is_written(made, tmp_path):
    _, path, dump = made
    (tmp_path / "j").write_text("as it was")
    write(tmp_path / "d", replace(dump, weights="0" * 64, model="other"))
    result = validate(path, "--dump", tmp_path / "d", "--json", tmp_path / "j")
    assert isinstance(result.exception, ProfileMismatch)
    assert (tmp_path / "j").read_text() == "as it was"
