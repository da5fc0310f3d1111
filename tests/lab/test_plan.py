"""Plans: sums done by hand, break-even by trial of every length, hits as `policy simulate` has them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtcd import cli
from kvtcd.codec.dial import Curve, Point
from kvtcd.codec.origin import Origin
from kvtcd.core.errors import ConfigError
from kvtcd.core.layout import Stream
from kvtcd.core.policy import CodecChoice
from kvtcd.lab import plan
from kvtcd.lab import speeds as speeds_of
from kvtcd.lab.speeds import Cost, Speeds

TRACE = Path(__file__).parents[1] / "data" / "mooncake-600.jsonl"
CURVE = Curve(
    tuple(Point(step, ratio, 1e-3, kl, kl, kl, 0.9) for step, ratio, kl in
          [(0.01, 10.0, 0.001), (0.02, 20.0, 0.004), (0.04, 40.0, 0.016)]),
    0.0001,
)  # fmt: skip
ORIGIN = Origin(
    model="toy", weights="ab" * 32, adapter="none", rope=None,
    streams=(Stream("k", 2, 64, rope=False), Stream("v", 2, 64, rope=False)), layers=4, parallel="canonical",
    sinks=4, tokens=1000, texts=(), seed=0, version="0", curve=tuple(CURVE.to_json()),
)  # fmt: skip
NBYTES = 2 * 2 * 64 * 4 * 2
"""Two streams, two heads of 64, four layers, 16 bits."""


def test_bytes_of_a_prefix_are_those_of_its_parts() -> None:
    found = plan.of_profile(ORIGIN, CodecChoice("kvtc2", 20, sinks=4, window=100), 1000)
    assert (found.bytes_per_token, found.ratio_codec) == (NBYTES, pytest.approx(20))
    assert found.kl == pytest.approx(0.004)
    # 16 times finer than step .02 is three octaves beyond the curve, where the ratio halves with each.
    window = 10 / 8
    assert found.ratio == pytest.approx(1000 / (4 + 100 / window + 896 / 20))
    assert found.packed_per_token == pytest.approx(NBYTES / found.ratio)


def test_within_the_curve_the_finer_step_is_read_off_it() -> None:
    assert plan.finer(CURVE, 0.04, 2) == pytest.approx(20)
    assert plan.finer(CURVE, 0.04, 4) == pytest.approx(10)
    assert plan.finer(CURVE, 0.04, 100) == 1, "never more than raw"


@given(st.integers(1, 300), st.integers(0, 50), st.integers(0, 200))
def test_short_prefixes_are_all_ends_and_never_larger_than_raw(tokens, sinks, window) -> None:
    found = plan.of_profile(ORIGIN, CodecChoice("kvtc2", 20, sinks=sinks, window=window), tokens)
    assert 1 <= found.ratio <= found.ratio_codec + 1e-9
    if tokens <= sinks:
        assert found.ratio == 1


def test_a_bound_above_the_curve_is_planned_with_its_coarsest_point() -> None:
    found = plan.of_profile(ORIGIN, CodecChoice("kvtc2", None, max_kl=0.9), 1000)
    assert (found.ratio_codec, found.kl) == (CURVE.points[-1].ratio, CURVE.points[-1].kl)


def test_a_dial_beyond_the_curve_or_a_codec_without_one_is_refused_unless_the_ratio_is_said() -> None:
    with pytest.raises(ConfigError, match="outside of what was measured"):
        plan.of_profile(ORIGIN, CodecChoice("kvtc2", 400), 1000)
    with pytest.raises(ConfigError, match="no curve of toy says what kvtc gives"):
        plan.of_profile(ORIGIN, CodecChoice("kvtc", 16), 1000)
    with pytest.raises(ConfigError, match="no curve of toy"):
        plan.of_profile(replace(ORIGIN, curve=()), CodecChoice("kvtc2", 20), 1000)
    assert plan.of_profile(ORIGIN, CodecChoice("kvtc", 16), 1000, 18.0).ratio == 18


def costs(most: float) -> st.SearchStrategy[float]:
    """Nothing at all, or what a clock could measure."""
    return st.just(0.0) | st.floats(1e-12, most)


@given(costs(0.01), costs(1e-4), costs(1), costs(0.01))
def test_below_the_break_even_reading_is_faster_and_from_there_on_fetching(a, b, c, d) -> None:
    speeds = Speeds(Cost(linear=a, square=b), {"disk": Cost(c, d)})
    least = speeds.break_even("disk")
    won = [n for n in range(1, 300) if speeds.reuse["disk"].at(n) < speeds.prefill.at(n) * (1 - 1e-9)]
    if least is None:
        assert not won
    else:
        assert all(n >= least for n in won)
        assert speeds.reuse["disk"].at(least + 1) <= speeds.prefill.at(least + 1) * (1 + 1e-9)


def bench(path: Path, rows: list[dict], command: str = "bench ttft") -> Path:
    path.write_text(json.dumps({"command": command, "rows": rows}))
    return path


def row(tokens: int, source: str, seconds: float, model: str = "m") -> dict:
    read = source == "recompute"
    fetch = None if read else seconds
    return {
        "model": model, "tokens": tokens, "source": source, "fetch_decode_s": fetch, "prefill_s": seconds,
    }  # fmt: skip


def test_measured_speeds_are_what_made_them(tmp_path) -> None:
    read, disk = Cost(linear=1e-3, square=2e-7), Cost(constant=0.02, linear=3e-4)
    sizes = (512, 1024, 4096)
    rows = [row(n, "recompute", read.at(n)) for n in sizes] + [row(n, "disk", disk.at(n)) for n in sizes]
    found = speeds_of.measured(bench(tmp_path / "ttft.json", rows))
    assert (found.prefill.linear, found.prefill.square) == pytest.approx((1e-3, 2e-7))
    assert (found.reuse["disk"].constant, found.reuse["disk"].linear) == pytest.approx((0.02, 3e-4))


def test_no_cost_is_fitted_below_zero(tmp_path) -> None:
    rows = [row(n, "recompute", 1e-3 * n) for n in (100, 200)] + [
        row(100, "disk", 0.1),
        row(200, "disk", 0.3),
    ]
    found = speeds_of.measured(bench(tmp_path / "ttft.json", rows))
    assert found.reuse["disk"].constant == 0
    assert 0.1 / 100 < found.reuse["disk"].linear < 0.3 / 200


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("none", "is not what `kvtcd bench ttft --json` writes"),
        ('{"command": "bench codec", "rows": []}', "is not what"),
        ('{"command": "bench ttft", "rows": [{"model": "m"}]}', "is not what .*KeyError"),
        ("[]", "is not what"),
    ],
)
def test_other_files_are_refused(tmp_path, text, why) -> None:
    (tmp_path / "ttft.json").write_text(text)
    with pytest.raises(ConfigError, match=why):
        speeds_of.measured(tmp_path / "ttft.json")


def test_speeds_of_two_models_are_not_mixed(tmp_path) -> None:
    rows = [row(100, "recompute", 1.0), row(100, "recompute", 2.0, "other")]
    with pytest.raises(ConfigError, match="several models: m, other"):
        speeds_of.measured(bench(tmp_path / "ttft.json", rows))


def run(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", ["kvtcd", "plan", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0


def test_hits_are_those_of_policy_simulate(tmp_path, monkeypatch, capsys) -> None:
    out, same = tmp_path / "plan.json", tmp_path / "simulate.json"
    run(
        monkeypatch, "--bytes-per-token", 1000, "--ratio", 16, "--budget", "256MiB", "--trace", TRACE,
        "--prefill", 1000, "--reuse", 10, "--json", out, "--plot", tmp_path / "plan.png",
    )  # fmt: skip
    assert "pays from" in capsys.readouterr().out
    policy = tmp_path / "balanced.toml"
    policy.write_text("")
    monkeypatch.setattr(
        "sys.argv",
        ["kvtcd", "policy", "simulate", "--trace", str(TRACE), "--policy", str(policy), "--budget", "256MiB",
         "--ratio", "16", "--bytes-per-token", "1000", "--json", str(same)],
    )  # fmt: skip
    with pytest.raises(SystemExit):
        cli.main()
    planned, simulated = json.loads(out.read_text()), json.loads(same.read_text())
    assert planned["rows"] == simulated["rows"]
    assert planned["budgets"] == [
        {"bytes": 2**28, "tokens_raw": 2**28 // 1000, "tokens_packed": 2**28 * 16 // 1000}
    ]
    (gain,) = planned["gains"]
    assert gain["break_even"] == 6, "5 ms, then .1 ms a token against 1 ms"
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_what_is_missing_is_said(tmp_path) -> None:
    nothing = dict.fromkeys((
        "profile", "bytes_per_token", "ratio", "policy", "tokens", "trace", "bench", "prefill", "reuse",
        "json", "plot",
    )) | {"budgets": [], "overhead_ms": 5.0}  # fmt: skip
    for said, why in (
        ({}, "say --profile, or --bytes-per-token and --ratio"),
        ({"bytes_per_token": 1000}, "say --profile"),
        ({"profile": tmp_path / "none.safetensors"}, "cannot be read"),
        ({"bytes_per_token": 1000, "ratio": 9.0, "prefill": 3.0}, "say both speeds"),
        ({"bytes_per_token": 1000, "ratio": 9.0, "budgets": ["many"]}, "is not a size"),
    ):
        with pytest.raises(ConfigError, match=why):
            plan.command(**nothing | said)
