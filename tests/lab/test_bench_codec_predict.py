"""What is counted follows from shapes, and times from what is counted."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, replace

import pytest
import torch

from kvtcd import cli
from kvtcd.codec import nvcomp
from kvtcd.core.blob import CHUNK_BYTES
from kvtcd.core.errors import ConfigError
from kvtcd.lab import bench_codec, bench_codec_predict
from kvtcd.lab.bench_codec_case import TOKENS, make
from kvtcd.lab.bench_codec_figures import Row
from kvtcd.lab.bench_codec_packers import CODECS, codec
from kvtcd.lab.bench_codec_predict import (
    AT_ONCE,
    BUS,
    CARDS,
    ENTROPY,
    LAUNCH,
    RUN,
    WAIT,
    Card,
    Predicted,
    card_named,
)
from kvtcd.lab.bench_codec_work import Work, counted
from kvtcd.lab.second_device import DEVICE, SecondDevice

P, RANK = 512, 64
FAR = {"kvtc": 0, "kvtc2": 2 + 32}
"""Rows besides the basis that features are multiplied with: what tells classes of two streams, the sketch."""


@pytest.fixture(scope="module")
def case():
    return make(P, RANK)


# ---- counting


def test_operations_are_told_with_their_bytes_and_sides():
    told = []
    with SecondDevice(told.append):
        here = torch.ones(3, 4)
        there = here.to(DEVICE)
        product = there @ there.t()
        int(product.sum())
        product.to("cpu")
        torch.empty(9).copy_(product.view(9), non_blocking=True)
        torch.empty_like(there).copy_(here)
        here.to(DEVICE, non_blocking=True)
    seen = [(one.name, one.nbytes, one.crosses, one.to_host, one.waits) for one in told if one.launches]

    assert seen == [
        ("_to_copy", 2 * 48, 48, False, True),
        ("mm", 48 + 48 + 36, 0, False, False),
        ("sum", 36 + 4, 0, False, False),
        ("_to_copy", 2 * 36, 36, True, True),
        ("copy_", 2 * 36, 36, True, False),
        ("copy_", 2 * 48, 48, False, True),
        ("_to_copy", 2 * 48, 48, False, False),
    ]
    assert [one.name for one in told if one.waits] == ["_to_copy", "_local_scalar_dense", "_to_copy", "copy_"]


@pytest.mark.parametrize("name", CODECS)
def test_products_and_bytes_follow_from_the_shapes(case, name):
    found = counted(name, case, graphs=False)
    flop = {way: sum(work.flop for work in stages.values()) for way, stages in found.items()}

    assert flop["encode"] == 2 * 2 * TOKENS * P * (RANK + FAR[name])
    assert flop["decode"] == 2 * 2 * TOKENS * P * RANK
    assert all(work.flop == 0 for way in found.values() for stage, work in way.items() if stage != "product")
    raw = 2 * 2 * TOKENS * P
    for way, launches in (("encode", 1), ("decode", len(case.layout.streams))):
        copy = found[way]["copy"]
        assert (copy.bus, copy.launches, copy.memory) == (raw, launches, 2 * raw)
    assert found["encode"]["rotate"].memory > 3 * raw
    codes = found["encode"]["deflate"].codes
    assert found["decode"]["inflate"] == found["encode"]["deflate"]
    assert codes >= found["decode"]["inflate"].chunks
    counts = 2 * 32  # what is to be known of each stream, four numbers
    assert 0.9 * codes < found["encode"]["pack"].bus <= codes + counts
    assert 0.9 * codes < found["decode"]["unpack"].bus <= 1.3 * codes, "escapes have room there"


def test_kernels_are_fewer_launches_of_the_same_codes(case):
    kernels, without = (counted("kvtc2", case, kernels=k, graphs=False) for k in (True, False))
    for way, stages in (("encode", ("quantise", "pack")), ("decode", ("dequantise", "unpack"))):
        assert kernels[way].keys() == without[way].keys()
        for stage in stages:
            few, many = kernels[way][stage], without[way][stage]
            assert few.bus == many.bus
            assert few.launches < many.launches
            assert few.memory < many.memory
    assert kernels["encode"]["pack"].waits == 2, "for numbers of escapes, and for the codes"
    assert kernels["encode"]["deflate"] == without["encode"]["deflate"]
    read = 2 * 4 * TOKENS * RANK  # float32 coefficients of both streams, once
    assert kernels["encode"]["quantise"].memory > 2 * read


def test_launches_do_not_depend_on_the_size_of_the_block():
    few, many = (counted("kvtc2", make(p, RANK), graphs=False)["decode"]["rotate"] for p in (512, 1024))
    assert few.launches == many.launches == 9
    assert 1.9 < many.memory / few.memory < 2.1


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", CODECS)
def test_a_recording_is_one_launch_and_its_inputs_of_the_same_work(case, name, kernels):
    replayed, one_by_one = (counted(name, case, kernels=kernels, graphs=graphs) for graphs in (True, False))
    inputs = {"kvtc": {"encode": 2, "decode": 1}, "kvtc2": {"encode": 3, "decode": 1}}[name]
    runs = {"kvtc": {"encode": 2, "decode": 2}, "kvtc2": {"encode": 1, "decode": 2}}[name]
    inputs["straight"], runs["straight"] = inputs["decode"], runs["decode"]
    for way, stages in replayed.items():
        graph, all_ = stages["graph"], sum(one_by_one[way].values(), Work())
        assert graph.launches == runs[way] * (1 + inputs[way])
        assert graph.waits == 0
        assert graph.flop == all_.flop
        whole = sum(stages.values(), Work())
        assert whole.launches < all_.launches / 4
        assert whole.bus == pytest.approx(all_.bus, abs=200)
        assert whole.waits == all_.waits
        # What is written into the block is no more than without, what is read is copied to where it is read.
        assert whole.memory < 1.1 * all_.memory + 2 * case.raw.nbytes * (way == "encode")


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", CODECS)
def test_straight_to_the_device_nothing_is_copied_and_all_else_is_the_same(case, name, graphs):
    found = counted(name, case, graphs=graphs)
    over, straight = found["decode"], found["straight"]
    assert over["copy"].bus == case.raw.numel()
    assert "copy" not in straight
    assert straight == {stage: work for stage, work in over.items() if stage != "copy"}
    symbols = sum(work.codes for work in straight.values())
    assert 0 < sum(work.bus for work in straight.values()) < symbols + (16 << 10)


# ---- predicting

SLOW = Card(flop=1e9, memory=1e6)


def predicted(monkeypatch, stage, **work):
    monkeypatch.setattr(bench_codec_predict, "counted", lambda *_, **__: {"encode": {stage: Work(**work)}})
    (one,) = bench_codec_predict.predict_stages("kvtc", make(P, RANK), SLOW)
    return one


@pytest.mark.parametrize(
    ("work", "want"),
    [
        ({"launches": 10}, (10 * LAUNCH, 0, 0)),
        ({"launches": 10, "waits": 3}, (10 * LAUNCH + 3 * WAIT, 0, 0)),
        ({"runs": 10}, (0, 10 * RUN, 0)),
        ({"flop": 2_000_000_000, "memory": 1_000_000, "products": 1_000_000}, (0, 2.0, 0)),
        ({"flop": 1_000_000_000, "memory": 3_000_000, "products": 3_000_000}, (0, 3.0, 0)),
        ({"flop": 2_000_000_000, "memory": 3_000_000, "products": 1_000_000}, (0, 4.0, 0)),
        ({"bus": 55_000_000}, (0, 0, 55_000_000 / BUS)),
    ],
)
def test_a_stage_takes_what_the_slower_side_takes_and_the_bus(monkeypatch, work, want):
    one = predicted(monkeypatch, "product", **work)
    assert (one.host, one.device, one.bus) == pytest.approx(want)
    assert math.isclose(one.seconds, max(want[:2]) + want[2])


@pytest.mark.parametrize("stage", ENTROPY)
def test_few_chunks_are_a_cores_and_many_take_as_long_as_those_that_fit(monkeypatch, stage):
    few = nvcomp.CROSSOVER - 1
    one = predicted(monkeypatch, stage, chunks=few, codes=few * CHUNK_BYTES)
    assert (one.host, one.device) == (few * CHUNK_BYTES / ENTROPY[stage].core, 0)
    alone = CHUNK_BYTES / ENTROPY[stage].chunk
    for chunks, rounds in ((nvcomp.CROSSOVER, 1), (AT_ONCE, 1), (AT_ONCE + 1, 2)):
        one = predicted(monkeypatch, stage, chunks=chunks, codes=chunks * CHUNK_BYTES)
        assert (one.host, one.device) == pytest.approx((0, rounds * alone))
    assert AT_ONCE * CHUNK_BYTES / alone == pytest.approx({"deflate": 4.7, "inflate": 9.3}[stage] * 2**30)


@pytest.mark.parametrize(
    ("name", "card"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "")],
)
def test_a_card_is_known_by_what_cuda_calls_it(name, card):
    assert card_named(name) == card


def test_a_pipeline_is_as_fast_as_its_slower_half():
    stages = [
        Predicted("kvtc", P, RANK, 6_000_000_000, "decode", stage, Work(chunks=chunks), host, device, bus)
        for stage, chunks, host, device, bus in (
            ("product", 0, 0.5, 1.0, 0.0), ("copy", 0, 0.25, 0.0, 1.75), ("inflate", 7, 3.0, 0.0, 0.0),
        )
    ]  # fmt: skip
    speeds = bench_codec_predict.tables("h200", stages)[-1]
    cells = [next(iter(column.cells)) for column in speeds.columns]
    assert cells == ["512", "64", "kvtc", "decode", "1.0", "2.0", "8.0", "6.0", "3.4", "2.0"]


def test_what_was_measured_stands_beside_it():
    stages = [
        Predicted("kvtc", P, RANK, 1, way, stage, Work(chunks=chunks), 0.001, 0.002, 0.003)
        for way, entropy in (("encode", "deflate"), ("decode", "inflate"))
        for stage, chunks in (("copy", 0), (entropy, 7))
    ]
    row = Row("kvtc", P, RANK, "cuda", 8.0, 1.0, 1.0, 1.0, 1.0, {"copy": 0.007}, {"copy": 0.009})
    encode, decode, _ = bench_codec_predict.tables("h200", stages, [row, replace(row, rank=7)])
    last = [[list(column.cells) for column in table.columns][-2:] for table in (encode, decode)]
    assert last == [[["5.000"] * 2, ["7.000", "0.000"]], [["5.000"] * 2, ["9.000", "0.000"]]]


# ---- the command


def run(*arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kvtcd", "bench", "codec", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0


def test_a_prediction_measures_nothing_and_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_codec, "Bench", None)
    out = tmp_path / "predicted.json"
    arguments = ("--predict", "h100", "--p", "512", "--rank", "64", "--codec", "kvtc2", "--json", str(out))
    assert run(*arguments, monkeypatch=monkeypatch) == 0
    figures = json.loads(out.read_text())

    assert (figures["card"], figures["rows"], figures["floors"]) == ("h100", [], [])
    assert {stage["codec"] for stage in figures["predicted"]} == {"kvtc2"}
    for stage in figures["predicted"]:
        assert math.isclose(stage["seconds"], max(stage["host"], stage["device"]) + stage["bus"])
    assert figures["predicted"][0]["work"].keys() == asdict(Work()).keys()
    shown = capsys.readouterr().out
    assert "kvtc2, decode, p = 512, rank 64, predicted for h100" in shown
    assert "measured" not in shown


def test_a_card_that_nothing_is_known_of_is_refused(monkeypatch, capsys):
    assert run("--predict", "a100", monkeypatch=monkeypatch) == 2
    assert "'a100' is not one of h100, h200" in capsys.readouterr().err


def test_cards_differ_in_memory_alone():
    assert CARDS["h200"].flop == CARDS["h100"].flop
    assert CARDS["h200"].memory > CARDS["h100"].memory


def test_what_needs_pinned_memory_asks_for_it_on_a_gpu_alone(case, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", None)
    assert codec("kvtc", case, None).device == "cpu"
    with pytest.raises(ConfigError):
        bench_codec.check(P, P)
