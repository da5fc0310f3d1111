"""What is timed is the codec itself, on blocks it codes whole; figures say what was timed."""

from __future__ import annotations

import io
import json
import math
import sys
import time
import zlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from support import fake_cuda

from kvtcd import cli
from kvtcd.codec.recording import CudaTapes
from kvtcd.codec.staged import Accelerator
from kvtcd.codec.stages import stage
from kvtcd.codec.widths import Widths
from kvtcd.core.blob import CodecId, Kind, parse
from kvtcd.core.errors import ConfigError, KvtcdError, Unavailable
from kvtcd.lab import bench_codec, bench_codec_packers, bench_codec_timing
from kvtcd.lab.accelerator import accelerator_for
from kvtcd.lab.bench_codec_case import GROUP, PLAN, TOKENS, check, cosines, make, plan, shape
from kvtcd.lab.bench_codec_figures import STAGES, Figures, Floor, Row, speeds, stages
from kvtcd.lab.bench_codec_floor import DTYPES, Form, fastest, forms
from kvtcd.lab.bench_codec_packers import CODECS, PEERS, codec, dequantize, peer, quantize
from kvtcd.lab.bench_codec_plot import draw
from kvtcd.lab.bench_codec_timing import LEAST_ROUNDS, OTHER, DeviceClock, HostClock, in_turn, run

P, RANK = 512, 64
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def case():
    return make(P, RANK)


# ---- the case


@pytest.mark.parametrize(
    ("p", "want"), [(5760, (30, 3, 64)), (14_336, (28, 4, 128)), (32_768, (32, 8, 128)), (512, (4, 1, 128))]
)
def test_shapes_are_those_of_real_models(p, want):
    layout = shape(p)
    keys = layout.streams[0]
    assert (layout.layers, keys.heads, keys.head_dim) == want
    assert [layout.features(stream) for stream in layout.streams] == [p, p]


@pytest.mark.parametrize(
    ("p", "rank", "option"), [(100, 16, "--p"), (512, 20, "--rank"), (512, 272, "--rank")]
)
def test_what_cannot_be_made_up_is_refused(p, rank, option):
    with pytest.raises(ConfigError, match=option):
        check(p, rank)
    check(512, 256)


def test_the_basis_is_orthonormal():
    basis = cosines(1000, 96, torch.Generator().manual_seed(1)).double()
    assert (basis @ basis.t() - torch.eye(96)).abs().max() < 1e-5


@pytest.mark.parametrize("rank", [16, 32, 64, 512, 1040, 2048])
def test_a_plan_covers_all_components(rank):
    groups = plan(rank).groups
    assert sum(group.size for group in groups) == plan(rank).rank == rank
    assert groups[0].size == GROUP
    assert groups[0].bits == 8


def test_both_codecs_code_every_component_of_the_whole_block(case):
    for stream in case.profile.weighted.values():
        widths = Widths.of(stream.spread, case.step)
        assert (widths.rank, len(widths.uncoded)) == (RANK, 0)
    assert case.profile.streams["k"].plans[PLAN].rank == RANK
    for name in CODECS:
        made = codec(name, case, None)
        blob = parse(memoryview(made.encode().blob))
        assert blob.header.codec is {"kvtc": CodecId.KVTC, "kvtc2": CodecId.KVTC2}[name]
        assert {(section.token_start, section.token_count) for section in blob.sections} == {(0, TOKENS)}
        assert Kind.PLANE not in {section.kind for section in blob.sections}
        assert made.nbytes == len(made.encode().blob)


@pytest.mark.parametrize("name", CODECS)
def test_what_is_decoded_is_what_was_encoded(case, name, monkeypatch):
    made = {}
    empty_like = torch.empty_like
    monkeypatch.setattr(
        bench_codec_packers.torch, "empty_like", lambda raw: made.setdefault("out", empty_like(raw))
    )
    packer = codec(name, case, None)
    monkeypatch.undo()
    packer.decode()
    got, want = (raw.view(torch.bfloat16).float() for raw in (made["out"], case.raw))
    assert (got - want).square().mean() < 0.01 * (want - want.mean()).square().mean()


# ---- peers


@pytest.mark.parametrize("name", ["zlib", "zstd"])
def test_compressors_restore_every_byte(case, name):
    packer = peer(name, case.raw, CPU)
    assert bytes(packer.decode()) == case.raw.numpy().tobytes()
    if name == "zlib":
        assert packer.encode() == zlib.compress(case.raw.numpy().tobytes(), 6)
    assert packer.nbytes == len(packer.encode())


def test_four_bits_are_off_by_half_a_step_at_most(case):
    values = case.raw.view(torch.bfloat16)
    codes, step, least = quantize(values)
    got = dequantize((codes, step, least))
    groups = values.float().view(-1, 64)
    step = (groups.amax(dim=1) - groups.amin(dim=1)) / 15
    off = (got.float().view(-1, 64) - groups).abs().amax(dim=1)
    assert (off <= 0.51 * step + 0.01 * groups.abs().amax(dim=1)).all()
    assert peer("int4", case.raw, CPU).nbytes == values.numel() // 2 + 4 * len(groups)


def test_without_zstandard_there_is_no_zstd(case, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(Unavailable, match="zstandard"):
        peer("zstd", case.raw, CPU)


# ---- time


def test_every_form_is_the_product():
    draw_again = torch.Generator().manual_seed(0)
    found = list(forms(5, 7, 3, CPU))
    assert len({form for form, _ in found}) == len(found) == 8 * len(DTYPES)
    for name in ("bfloat16", "float32"):
        left, right = (torch.randn(size, generator=draw_again) for size in ((5, 7), (7, 3)))
        for form, call in found:
            if form.dtype == name:
                got = call() if form.product == "rows" else call().t()
                assert torch.allclose(got.float(), left @ right, atol=0.1)


def test_the_fastest_form_is_the_one_that_took_the_least(monkeypatch):
    clock = HostClock(1)
    slow = {form: 2.0 for form, _ in forms(4, 4, 4, CPU)}
    best = Form("float32", "columns", "rows", "columns")
    slow[best] = 1.0
    monkeypatch.setattr(
        "kvtcd.lab.bench_codec_floor.forms", lambda *_: ((f, lambda f=f: slow[f]) for f in slow)
    )
    monkeypatch.setattr(
        "kvtcd.lab.bench_codec_floor.run", lambda call, _: type("R", (), {"seconds": call()})()
    )
    assert fastest(4, 4, 4, device=CPU, clock=clock)[0] == best


class Ticks(HostClock):
    """A clock that a call moves on."""

    def __init__(self):
        super().__init__(1)
        self.time = 0.0

    def now(self):
        return self.time


def test_the_run_of_median_time_is_told_with_its_own_stages():
    clock, took = Ticks(), iter([100.0, 5.0, 1.0, 3.0])

    def call():
        with stage("work"):
            clock.time += next(took) - 0.5
        clock.time += 0.5

    rounds = []
    median = in_turn({"call": call}, clock, time.monotonic(), lambda: rounds.append(1))["call"]

    assert len(rounds) == LEAST_ROUNDS
    assert median.seconds == 3.0, "the first call, of 100, is forgotten"
    assert median.stages == {"work": 2.5, OTHER: 0.5}


def test_calls_are_timed_in_turn_until_time_is_up(monkeypatch):
    order, clock, seconds = [], HostClock(2), iter(range(100))
    monkeypatch.setattr(bench_codec_timing, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    in_turn({name: partial(order.append, name) for name in "ab"}, clock, 10, lambda: None)

    assert order == ["a", "b"] * (1 + LEAST_ROUNDS + 10)


def test_on_one_thread_waiting_is_not_counted():
    assert run(lambda: time.sleep(0.02), HostClock(1)).seconds < 0.01
    assert run(lambda: time.sleep(0.02), HostClock(2)).seconds >= 0.02


def test_on_a_device_time_passes_between_events_and_none_is_waited_for_within(monkeypatch):
    waited = []

    class Event:
        reached = 0.0  # milliseconds of the device

        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            self.at = Event.reached

        def synchronize(self):
            waited.append(self.at)

        def elapsed_time(self, other):
            return other.at - self.at

    def call():
        with stage("product"):
            Event.reached += 30.0
        with stage("deflate"):
            Event.reached += 10.0
        assert not waited

    monkeypatch.setattr(torch.cuda, "Event", Event)
    timed = run(call, DeviceClock())

    assert math.isclose(timed.seconds, 0.04)
    assert timed.stages == pytest.approx({"product": 0.03, "deflate": 0.01, OTHER: 0.0}, abs=1e-9)
    assert waited[0] == 40.0


# ---- the command


def command(*arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kvtcd", "bench", "codec", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0


def test_figures_say_what_was_timed(tmp_path, monkeypatch, capsys):
    threads = torch.get_num_threads()
    out, plot = tmp_path / "figures.json", tmp_path / "stages.png"
    ended = command(
        "--p", "512", "--rank", "64", "--rank", "32", "--seconds", "0",
        "--json", str(out), "--plot", str(plot), monkeypatch=monkeypatch,
    )  # fmt: skip
    figures = json.loads(out.read_text())

    assert ended == 0
    assert torch.get_num_threads() == threads
    assert figures["command"] == "bench codec"
    assert figures["machine"]["threads"] == 1
    rows = figures["rows"]
    assert [(row["codec"], row["rank"]) for row in rows] == [
        *((name, 64) for name in CODECS), *((name, None) for name in PEERS), *((name, 32) for name in CODECS),
    ]  # fmt: skip
    floors = {floor["rank"]: floor for floor in figures["floors"]}
    megabytes = shape(512).nbytes(TOKENS) / 1e6
    for row in rows:
        assert row["p"] == 512
        assert row["device"] == "cpu"
        assert row["ratio"] > 1
        assert row["encode_mb_s"] > 0 < row["decode_mb_s"]
        for way in ("encode", "decode"):
            spent = row[f"{way}_stages"]
            if row["rank"] is None:
                assert row[f"{way}_over_floor"] is None
                assert spent == {}
                continue
            whole = megabytes / row[f"{way}_mb_s"]
            assert math.isclose(sum(spent.values()), whole, rel_tol=1e-6)
            assert all(seconds >= 0 for seconds in spent.values())
            assert set(spent) <= set(STAGES)
            floor = megabytes / floors[row["rank"]][f"{way}_mb_s"]
            assert math.isclose(row[f"{way}_over_floor"], whole / floor, rel_tol=1e-6)
            assert spent["product"] < whole
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "by stage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--codec", "rar"), 2, "'rar' is not one of kvtc, kvtc2, zlib, zstd, int4"),
        (("--p", "100", "--rank", "16"), 2, "100 features do not make up heads of 64"),
        (("--p", "512", "--rank", "1024"), 2, "1024 of 512 features"),
        (("--p", "64"), 2, "no rank of 512, 1024, 2048 fits 64 features"),
        (("--device", "tpu"), 2, "'tpu' is neither cpu nor cuda"),
    ],
)
def test_bad_options_are_refused_before_anything_is_timed(arguments, code, said, monkeypatch, capsys):
    monkeypatch.setattr(bench_codec, "make", None)
    assert command(*arguments, monkeypatch=monkeypatch) == code
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_device_that_is_not_there_is_not_available(device, monkeypatch, capsys):
    assert command("--device", device, monkeypatch=monkeypatch) == 69
    assert "no CUDA device" in capsys.readouterr().err
    with pytest.raises(KvtcdError):
        accelerator_for(device)
    assert accelerator_for("cpu") is None


def test_all_is_told_to_the_device_that_was_asked_for_where_it_can_be_replayed(monkeypatch, tmp_path):
    second, current = torch.device("cuda", 1), []
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", fake_cuda.device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device=None: str(device or fake_cuda.current_device())
    )
    monkeypatch.setattr(bench_codec, "accelerator_for", lambda _: Accelerator(second))
    monkeypatch.setattr(
        bench_codec.Bench, "measure",
        lambda *_: current.extend((fake_cuda.current_device(), CudaTapes(second).lane())) or Figures((), ()),
    )  # fmt: skip
    out = tmp_path / "figures.json"
    assert command("--device", "cuda:1", "--json", str(out), monkeypatch=monkeypatch) == 0
    assert json.loads(out.read_text())["machine"]["gpu"] == "cuda:1"
    device, lane = current
    assert (device, fake_cuda.current_device()) == (second, fake_cuda.FIRST)
    assert lane is not None


@pytest.mark.gpu
def test_a_device_is_timed_by_its_own_clock(tmp_path, monkeypatch):
    out = tmp_path / "figures.json"
    arguments = ("--p", "5760", "--rank", "512", "--device", "cuda", "--seconds", "5", "--json", str(out))
    assert command(*arguments, monkeypatch=monkeypatch) == 0
    figures = json.loads(out.read_text())
    coded = [row for row in figures["rows"] if row["rank"]]
    assert {row["device"] for row in coded} == {floor["device"] for floor in figures["floors"]} == {"cuda"}
    assert all("copy" in row["encode_stages"] and "copy" in row["decode_stages"] for row in coded)


def test_tables_show_every_case_and_its_peers():
    row = Row("kvtc2", 5760, 1024, "cpu", 64.0, 150.0, 160.0, 1.4, 1.3, {"product": 0.03}, {"product": 0.03})
    other = Row("zlib", 5760, None, "cpu", 1.3, 12.0, 230.0, None, None, {}, {})
    form = Form("bfloat16", "rows", "columns", "rows")
    figures = Figures((row, other), (Floor(5760, 1024, "cpu", 205.0, 197.0, form, form),))
    console = Console(file=io.StringIO(), width=100)
    for table in (speeds(figures), *stages(figures)):
        console.print(table)
    shown = console.file.getvalue()

    assert all(part in shown for part in ("products, bfloat16", "1.40", "1.30", "zlib", "230", "30.0"))


def test_a_plot_of_another_type_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be drawn"):
        draw(Figures((), ()), tmp_path / "stages.nonsense")
