"""Calibration of a tiny random model: what comes out, what does not change it, and the command around it."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from support.calibration import TEXTS, WINDOW, run, text, tiny_model
from support.codec_world import rotated
from typer.testing import CliRunner

from kvtcd import terminal
from kvtcd.cli import app
from kvtcd.codec.profile import Profile, load
from kvtcd.codec.rope import inverse_frequencies
from kvtcd.core.errors import ConfigError, Unavailable
from kvtcd.core.layout import Dtype
from kvtcd.lab import calibrate as module
from kvtcd.lab import calibration, gather, models
from kvtcd.lab.calibrate import command, profile_for
from kvtcd.lab.capture import kv_rows
from kvtcd.lab.checkpoint import Checkpoint
from kvtcd.lab.models import LoadedModel
from kvtcd.lab.phases import Phases

IDENTITY = models.identity
"""Before any test replaces it."""
MINIMAL_TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
    "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {chr(64 + n): n for n in range(62)}, "unk_token": "@"},
}  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVTCD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedModel:
    return tiny_model(tmp_path / "model")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


def test_a_profile_says_what_it_was_made_of(loaded: LoadedModel, checkpoints: Path) -> None:
    made = run(loaded, checkpoints, seed=3)
    origin = made.profile.origin
    assert made.tokens == 24 * WINDOW
    assert origin.tokens == 21 * (WINDOW - 4)
    assert [text.name for text in origin.texts] == ["long", "short", "tiny"]
    assert (origin.seed, origin.sinks, origin.model) == (3, 4, "model")
    made.profile.check(models.identity(loaded, Dtype.F32))
    fitting = [f"{what} of {stream}" for stream in "kv" for what in ("basis", "bits")]
    phases = ["model", "gradients", "moments", *fitting, "weighted bases", "curve"]
    assert list(made.seconds) == phases
    assert list(checkpoints.iterdir()) == []


def test_the_basis_holds_the_energy_of_rows_it_was_not_fitted_to(
    loaded: LoadedModel, checkpoints: Path
) -> None:
    """Held-out windows are the first of each text; their energy is counted here by hand, in float64."""
    made = run(loaded, checkpoints)
    named = models.identity(loaded, Dtype.F32)
    frequencies, _ = inverse_frequencies(named.rope)
    energy, left = {"k": 0.0, "v": 0.0}, {"k": 0.0, "v": 0.0}
    for source in TEXTS[:2]:
        for name, x in kv_rows(loaded, models.tokenize(loaded, source.text)[:WINDOW]).items():
            by_layer = x.movedim(1, 0)
            undone = rotated(by_layer, named.rope, -frequencies, 1.0, 0) if name == "k" else by_layer.double()
            stream = made.profile.streams[name]
            centred = undone.movedim(0, 1).flatten(1)[4:] - stream.mean.double()
            basis = torch.linalg.qr(stream.basis.double().t()).Q  # float16 entries: nearly orthonormal
            energy[name] += float(centred.square().sum())
            left[name] += float((centred - centred @ basis @ basis.t()).square().sum())
    for name, held_out in made.held_out.items():
        assert held_out.captured == pytest.approx(1 - left[name] / energy[name], abs=2e-3)
        errors = [held_out.error[ratio] for ratio in (8, 16, 32, 64)]
        assert errors == sorted(errors)
        assert 1 - held_out.captured <= errors[0] < errors[-1] <= 1.0 + 1e-6


def test_equal_input_gives_equal_bytes_and_another_seed_or_text_does_not(
    loaded: LoadedModel, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(loaded, checkpoints).data
    assert run(loaded, checkpoints).data == first
    assert run(loaded, checkpoints, seed=1).data != first
    assert run(loaded, checkpoints, tokens=23 * WINDOW).data != first
    monkeypatch.setattr("support.calibration.TEXTS", (text("long", 2000, 9), *TEXTS[1:]))
    assert run(loaded, checkpoints).data != first


def test_an_interrupted_calibration_goes_on_where_it_was(
    loaded: LoadedModel,
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = run(loaded, checkpoints).data
    monkeypatch.setattr("kvtcd.lab.checkpoint._SHARE", 1)
    read, prefill = [], gather.prefill

    def mortal(loaded: LoadedModel, tokens: list[int]) -> object:
        if len(read) == 9:
            raise KeyboardInterrupt
        read.append(tokens)
        return prefill(loaded, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(gather, "prefill", mortal)
        with pytest.raises(KeyboardInterrupt):
            run(loaded, checkpoints)
    assert len(list(checkpoints.iterdir())) == 1
    run(loaded, checkpoints, seed=1)  # another calibration leaves it alone
    rest = []
    monkeypatch.setattr(gather, "prefill", lambda *a: rest.append(a) or prefill(*a))
    capsys.readouterr()
    with terminal.progress(terminal.console()) as progress:
        made = run(loaded, checkpoints, phases=Phases(progress))
    assert f"going on from the checkpoint in {checkpoints}: 9 of 24 windows done\n" in capsys.readouterr().err
    assert len(rest) == 24 - 9
    assert made.data == whole
    assert list(checkpoints.iterdir()) == []


def test_a_rank_caps_the_components_and_what_it_cuts_off_is_lost(
    loaded: LoadedModel, checkpoints: Path
) -> None:
    made = run(loaded, checkpoints, rank=20)
    for name, stream in made.profile.streams.items():
        assert len(stream.basis) <= 20
        assert made.held_out[name].captured < 0.9
        assert not stream.plans[64].groups  # 32 bits do not pay for one group
        assert made.held_out[name].error[64] == pytest.approx(1.0, abs=1e-4)


def test_what_was_kept_of_other_windows_is_not_used(
    loaded: LoadedModel, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of the same texts, as many and as long, but with a BOS in front."""
    monkeypatch.setattr("support.calibration.TEXTS", TEXTS[:2])
    with_start = tiny_model(tmp_path / "other" / "model", start=(7,))
    whole = run(with_start, checkpoints).data
    monkeypatch.setattr(Checkpoint, "discard", lambda _: None)
    run(loaded, checkpoints)
    assert run(with_start, checkpoints).data == whole


def test_profile_for_calibrates_once(
    loaded: LoadedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.texts, "recipe", lambda: list(TEXTS[:1]))
    monkeypatch.setattr(models, "identity", lambda loaded: IDENTITY(loaded, Dtype.F32))
    path = profile_for(loaded, tokens=4 * 64)
    assert path.parent.parent == cache / "profiles"
    profile = load(path)
    assert path.stem == profile.digest.hex()
    assert profile.origin.tokens == 3 * (64 - gather.SINKS)  # of four windows, however few the tokens
    assert [other.name for other in path.parent.iterdir()] == [path.name]
    other = profile_for(loaded, tokens=8 * 64)
    assert other.parent != path.parent
    monkeypatch.setattr(module, "calibrate", None)
    assert profile_for(loaded, tokens=4 * 64) == path
    assert profile_for(loaded, tokens=8 * 64) == other


@pytest.fixture
def folder(loaded: LoadedModel) -> Path:
    (loaded.folder / "tokenizer.json").write_text(json.dumps(MINIMAL_TOKENIZER))
    return loaded.folder


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(TEXTS[0].text * 3)
    return path


def calibrated(folder: Path, book: Path, **changes: object) -> None:
    options = {
        "model": str(folder), "files": [book], "tokens": 4 * 1024, "seed": 0, "rank": 10_000,
        "sensitivity": "fisher", "low_memory": False, "split": None, "stage_layers": (),
        "threads": None, "device": "cpu", "out": None, "json": None,
    }  # fmt: skip
    command(**options | changes)


def test_the_command_writes_a_profile_and_says_what_it_took(
    folder: Path, book: Path, cache: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    calibrated(folder, book, json=tmp_path / "it.json")
    written = json.loads((tmp_path / "it.json").read_text())
    path = Path(written["profile"])
    profile = load(path)
    assert path.parent == cache / "profiles"
    assert path.stem == profile.digest.hex()
    assert {"command", "version", "machine", "date"} <= set(written)
    assert (written["model"], written["tokens"], written["texts"]) == ("model", 4096, ["book.txt"])
    assert written["profile_bytes"] == path.stat().st_size
    model = models.load(folder).model
    assert written["model_bytes"] == 2 * sum(p.numel() for p in model.parameters())
    numbers = sum(len(stream.basis) * 128 for stream in profile.streams.values())
    assert written["share_of_parameters"] == numbers / (written["model_bytes"] / 2)
    assert sum(written["phases"].values()) <= written["seconds"]
    assert [row["ratio"] for row in written["ratios"]] == [8, 16, 32, 64]
    assert written["ratios"][0]["streams"]["k"]["bits_per_token"] <= 16 * 128 / 8
    shown, noted = capsys.readouterr()
    assert "The basis will be fitted to 3,060 tokens, fewer than 8,192" in noted
    assert "Profile of model: 4,096 tokens read, fitted to 3,060" in shown
    assert "Its basis was fitted to 3,060 tokens, fewer than 8,192" in shown
    assert str(path) in shown


def test_a_file_name_is_taken_as_it_is(
    folder: Path, book: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "mine.safetensors"
    calibrated(folder, book, out=out)
    assert f"call it {hashlib.sha256(out.read_bytes()).hexdigest()}.safetensors" in capsys.readouterr().out
    assert isinstance(load(out), Profile)
    assert [path.name for path in out.parent.iterdir()] == ["mine.safetensors"]
    assert not (cache / "profiles").exists()


@pytest.mark.usefixtures("cache")
def test_what_cannot_be_done_is_said_before_the_work(folder: Path, book: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written: .*file is no folder"):
        calibrated(folder, book, out=tmp_path / "file")
    with pytest.raises(ConfigError, match=r"the texts have 5; add texts, or ask for 5120"):
        calibrated(folder, book, tokens=6 * 1024, out=tmp_path / "new" / "folder")
    assert not (tmp_path / "new").exists(), "nothing came of it"
    with pytest.raises(Unavailable, match=r"device nonsense cannot be used"):
        calibrated(folder, book, device="nonsense")


def test_the_command_line_hands_over_every_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        Path(name).touch()
    given = {}
    monkeypatch.setattr(module, "command", lambda **options: given.update(options))
    runner = CliRunner()
    options = "--model m --text a.txt --text b.txt --tokens 4096 --seed 7 --rank 99 --threads 3 --device cuda"
    options += " --sensitivity attention --low-memory --split pp2-tp2 --stage-layers 3 --stage-layers 2"
    result = runner.invoke(app, ["calibrate", *options.split(), "--out", "o", "--json", "j"])
    assert result.exit_code == 0, result.output
    assert given == {
        "model": "m", "files": [Path("a.txt"), Path("b.txt")], "tokens": 4096, "seed": 7, "rank": 99,
        "sensitivity": "attention", "low_memory": True, "split": "pp2-tp2", "stage_layers": [3, 2],
        "threads": 3, "device": "cuda", "out": Path("o"), "json": Path("j"),
    }  # fmt: skip
    runner.invoke(app, ["calibrate", "--model", "m"])
    assert given == {
        "model": "m", "files": [], "tokens": 65_536, "seed": 0, "rank": 10_000,
        "sensitivity": "fisher", "low_memory": False, "split": None, "stage_layers": [],
        "threads": None, "device": "cpu", "out": None, "json": None,
    }  # fmt: skip


def test_with_little_memory_windows_are_shorter_and_components_fewer(
    folder: Path, book: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del cache
    given = {}

    def noted(*a: object, **options: object) -> calibration.Calibration:
        given.update(options)
        return calibration.calibrate(*a, **options)

    monkeypatch.setattr(module, "calibrate", noted)
    calibrated(folder, book, low_memory=True)
    assert (given["window"], given["rank"]) == (512, 2048)


def test_without_sensitivities_all_errors_weigh_alike(loaded: LoadedModel, checkpoints: Path) -> None:
    made = run(loaded, checkpoints, sensitivity="none")
    assert made.profile.origin.sensitivity == "none"
    assert "gradients" not in made.seconds
    for own in made.profile.weighted.values():
        assert torch.allclose(own.root / own.root[0, 0, 0, 0], torch.eye(16).expand_as(own.root), atol=1e-5)
        assert not own.tokens.any()


def test_the_curve_is_measured_on_windows_held_out(loaded: LoadedModel, checkpoints: Path) -> None:
    made = run(loaded, checkpoints)
    curve = made.profile.curve
    assert curve is not None
    assert len(curve.points) >= 3
    ratios, errors = ([getattr(point, name) for point in curve.points] for name in ("ratio", "error"))
    assert ratios[0] < ratios[-1]
    assert errors == sorted(errors)
    assert all(point.kl_lo <= point.kl <= point.kl_hi for point in curve.points)
