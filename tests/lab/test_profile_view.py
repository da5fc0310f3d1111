"""The view of a profile whose spectrum and plans are written here by hand."""

import dataclasses
import hashlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from support.codec_world import World, kv

from kvtcd.cli import app, main
from kvtcd.codec.plan import Group, Plan
from kvtcd.codec.profile import Profile, StreamProfile, build
from kvtcd.core.errors import ConfigError, Corrupt, Unavailable
from kvtcd.lab.profile_view import command, energy, figures, widths

P = 96
PLANS = {
    8: Plan((Group(0, 1, 8), Group(1, 16, 4), Group(17, 16, 4), Group(40, 16, 2))),
    64: Plan(()),
}
SPECTRUM = torch.tensor([0.95**n for n in range(56)])
TOTAL = 20.0


def by_hand() -> tuple[Profile, bytes]:
    """Falling variances, of which the first 56 of 96 are kept; a gap from 33 to 39; a plan without groups."""
    streams = {
        name: StreamProfile(
            mean=torch.zeros(P),
            basis=torch.linalg.qr(torch.randn(P, P)).Q[:56].half(),
            spectrum=SPECTRUM.clone(),
            total=TOTAL,
            plans=PLANS,
        )
        for name in ("k", "v")
    }
    return build(World(kv()).origin, streams, {})


def digest_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "it.safetensors"
    path.write_bytes(by_hand()[1])
    return path


def test_energy_is_the_sum_of_variances_over_the_total() -> None:
    stream = by_hand()[0].streams["k"]
    assert [rank for rank, _ in energy(stream)] == [3, 6, 12, 24, 56]
    for rank, share in energy(stream):
        assert share == pytest.approx((1 - 0.95**rank) / 0.05 / TOTAL, rel=1e-5)


def test_widths_name_the_bits_of_every_component() -> None:
    assert widths(PLANS[8]) == [8, *[4] * 32, *[0] * 7, *[2] * 16]
    assert widths(PLANS[64]) == []


def test_figures_of_a_plan_are_those_of_its_groups() -> None:
    plans = figures(by_hand()[0])["streams"]["k"]["plans"]
    assert plans[0]["bits_per_token"] == 8 + 16 * 4 + 16 * 4 + 16 * 2 + 4 * 32
    assert plans[0]["rank"] == 56
    assert plans[0]["components"] == {"8": 1, "4": 32, "2": 16}
    assert plans[0]["groups"] == [
        {"size": 1, "bits": 8, "count": 1},
        {"size": 16, "bits": 4, "count": 2},
        {"size": 16, "bits": 2, "count": 1},
    ]
    gap = float(SPECTRUM[33:40].sum())
    assert plans[0]["energy"] == pytest.approx((float(SPECTRUM.sum()) - gap) / TOTAL)
    assert plans[1] == {
        "ratio": 64, "bits_per_token": 0, "rank": 0, "energy": 0.0, "groups": [],
        "components": {"8": 0, "4": 0, "2": 0},
    }  # fmt: skip


def test_the_command_shows_tables_and_writes_json(
    file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command(file, plot=None, json=tmp_path / "it.json")
    written = json.loads((tmp_path / "it.json").read_text())
    assert written["digest"] == digest_of(file)
    assert written["profile_bytes"] == file.stat().st_size
    assert written["origin"]["texts"] == [{"name": "noise", "sha256": "0" * 64}]
    assert written["streams"]["v"]["rank"] == 56
    shown = capsys.readouterr().out
    for expected in (
        digest_of(file),
        "600 tokens; more were read",
        "noise",
        "3 x 2 x 16",
        "94.3%",
        "fp8 1x1",
        "int4 16x2",
    ):
        assert expected in shown
    # Each of 24 characters stands for two or three of 56 components, and shows the finest of them.
    assert "█" + 14 * "▄" + "  " + 7 * "▂" in shown


def test_the_picture_has_a_bar_for_every_band_and_is_as_wide_as_its_streams(
    file: Path, tmp_path: Path
) -> None:
    command(file, plot=tmp_path / "it.svg", json=None)
    fills = re.findall(r'style="fill: (#[0-9a-f]{6})', (tmp_path / "it.svg").read_text())
    # Per stream one bar of 8 bits, one of 2, and one band of 32 at 4; and a patch of each in the legend.
    assert [fills.count(colour) for colour in ("#08519c", "#4292c6", "#9ecae1")] == [3, 3, 3]
    command(file, plot=tmp_path / "it.png", json=None)
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


def test_a_measured_curve_is_shown_drawn_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "it.safetensors"
    file.write_bytes(World(kv()).profile()[1])
    command(file, plot=tmp_path / "it.svg", json=tmp_path / "it.json")
    written = json.loads((tmp_path / "it.json").read_text())
    assert [point["ratio"] for point in written["curve"]] == [8.0, 12.0, 20.0]
    assert written["floor"] == 0.0001
    assert written["weighted"]["k"]["bytes"] == 2 * 96 * written["weighted"]["k"]["rank"]
    shown = capsys.readouterr().out
    assert "kvtc2 on held-out text" in shown
    assert "dips" not in shown
    assert "0.02 to 0.04" in shown
    assert "ratio of coded tokens" in (tmp_path / "it.svg").read_text()
    assert "One window alone" not in shown


def test_a_file_that_is_not_named_by_its_digest_is_said_to_serve_no_daemon(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(file, plot=None, json=None)
    assert f"call it {digest_of(file)}.safetensors" in capsys.readouterr().out
    command(file.rename(file.with_stem(digest_of(file))), plot=None, json=None)
    assert "call it" not in capsys.readouterr().out


@pytest.mark.parametrize(("tokens", "said"), [(8191, 1), (8192, 0)])
def test_a_profile_of_few_tokens_is_said_to_be_worth_little(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokens: int, said: int
) -> None:
    profile, _ = World(kv()).profile()
    file = tmp_path / "it.safetensors"
    origin = dataclasses.replace(profile.origin, tokens=tokens)
    file.write_bytes(build(origin, profile.streams, profile.weighted)[1])
    command(file, plot=None, json=None)
    assert capsys.readouterr().out.count("fewer than 8,192") == said


def test_one_window_tells_no_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, _ = World(kv()).profile()
    alone = tuple({**row, "kl_lo": row["kl"], "kl_hi": row["kl"]} for row in profile.origin.curve)
    file = tmp_path / "it.safetensors"
    origin = dataclasses.replace(profile.origin, curve=alone)
    file.write_bytes(build(origin, profile.streams, profile.weighted)[1])
    command(file, plot=None, json=tmp_path / "it.json")
    written = json.loads((tmp_path / "it.json").read_text())["curve"]
    assert [(point["kl_lo"], point["kl_hi"]) for point in written] == [(None, None)] * 3
    shown = capsys.readouterr().out
    assert "One window alone tells no bounds" in shown
    assert shown.count("—") == 3


def test_a_picture_that_cannot_be_drawn_says_why(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"it\.xyz: cannot be drawn: its name ends in none of"):
        command(file, plot=tmp_path / "it.xyz", json=None)
    with pytest.raises(ConfigError, match=r"it\.png: cannot be written: No such file"):
        command(file, plot=tmp_path / "none" / "it.png", json=None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unavailable, match=r"a plot needs matplotlib; pip install 'kvtcd\[lab\]'"):
        command(file, plot=tmp_path / "it.png", json=None)


def test_what_is_no_profile_is_refused_in_one_line(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(Corrupt):
        command(file, plot=None, json=None)
    monkeypatch.setattr("sys.argv", ["kvtcd", "profile", "show", str(file)])
    monkeypatch.setattr("kvtcd.cli.app", lambda: app(standalone_mode=False))
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 1
    assert error.startswith("kvtcd: profile it.safetensors: ")
    assert error.count("\n") == 1
    with pytest.raises(ConfigError, match=r"missing: cannot be read: No such file"):
        command(tmp_path / "missing", plot=None, json=None)
