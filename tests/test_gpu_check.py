"""The script for machines with a GPU: what it says without one; what it measures, on a CPU twin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import fake_cuda, fake_cudart, fake_nvcomp, gpu_figures, gpu_nvcomp, gpu_ready

from kvtcd.codec.uniform import Arithmetic, InTorch

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


def rows(*faster: bool) -> list[dict[str, object]]:
    return [
        {"chunks": 2**n, "inflate_gpu_ms": 1.0 if fast else 3.0, "inflate_cpu_ms": 2.0}
        for n, fast in enumerate(faster)
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, and it would all run")
def test_without_a_device_it_says_so_and_is_content(tmp_path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    result = subprocess.run(
        [ROOT / "tests" / "gpu_check.sh"], capture_output=True, text=True, env=environment, check=False
    )

    assert result.returncode == 0, result.stderr
    assert "no CUDA device" in result.stdout
    assert not (tmp_path / "out").exists()


def test_missing_wheels_are_named(monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu_ready, "NEEDED_BY_TESTS", ("pytest", "no-such-distribution"))

    assert gpu_ready.main() == 69
    assert capsys.readouterr().out == "missing, bring these wheels: no-such-distribution\n"


@pytest.mark.parametrize(("cuda", "major"), [("12.8", 12), ("13.0", 13), (None, 13)])
def test_nvcomp_comes_for_the_cuda_of_torch(cuda, major) -> None:
    assert gpu_ready.nvcomp(cuda) == [f"nvidia-nvcomp-cu{major}", f"nvidia-libnvcomp-cu{major}"]


@pytest.mark.parametrize(
    ("faster", "want"),
    [
        ((False, True, True), 2),
        ((True, False, True), 4),
        ((True, True), 1),
        ((False, False), None),
        ((True, False), None),
        ((), None),
    ],
)
def test_the_crossover_is_where_the_device_stays_ahead(faster, want) -> None:
    assert gpu_figures.crossover(rows(*faster), "inflate") == want


def test_what_it_measures_is_written_and_shown(tmp_path, monkeypatch, capsys) -> None:
    fake_cuda.install(monkeypatch)
    fake_nvcomp.install(monkeypatch)
    fake_cudart.install(monkeypatch)
    copies, entropy, overlap = gpu_figures.copies, gpu_figures.entropy, gpu_figures.overlap
    manners, speeds = gpu_nvcomp.manners, gpu_nvcomp.speeds
    monkeypatch.setattr(gpu_nvcomp, "SIZES", (1, 33, 16_384))
    monkeypatch.setattr(gpu_nvcomp, "manners", lambda api, device: manners(api, device, 20))
    monkeypatch.setattr(gpu_nvcomp, "speeds", lambda *most: speeds(*most, chunks=(8192,), batches=(2, 5)))
    monkeypatch.setattr(gpu_figures, "copies", lambda device: copies(device, 1 << 20))
    monkeypatch.setattr(gpu_figures, "entropy", lambda device: entropy(device, (2, 5)))
    monkeypatch.setattr(gpu_figures, "overlap", lambda device: overlap(device, 2, 0.001))
    gpu_figures.measure(CPU, tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())

    assert [row["memory"] for row in figures["copies"]] == ["pageable", "pinned"]
    assert [row["chunks"] for row in figures["entropy"]] == [2, 5]
    assert [(row["codec_on"], row["way"]) for row in figures["overlap"]] == [
        (where, way) for where in ("threads", "cuda") for way in ("demote", "promote")
    ]
    assert [(row["algorithm"], row["type"], row["chunks"]) for row in figures["nvcomp_speeds"]] == [
        (*algorithm, count) for algorithm in gpu_nvcomp.ALGORITHMS for count in (2, 5)
    ]
    assert all(row["decode_gb_s"] > 0 and row["ratio"] > 1 for row in figures["nvcomp_speeds"])
    assert len(figures["exchanged"]) == 2 * 3 * 2
    assert all(row["zlib_reads"] and row["reads_zlib"] for row in figures["exchanged"])
    assert figures["manners"]["pinned"] == "encodes into it and decodes from it"
    assert figures["manners"]["list"].startswith("refused"), "the stand-in takes no lists"
    assert {"inflate_crossover", "deflate_crossover", "crossover_used", "machine"} <= set(figures)
    shown = capsys.readouterr().out
    assert all(title in shown for title in ("copies", "entropy", "overlap"))


def test_kernels_are_measured_beside_torch_once_they_say_the_same(monkeypatch) -> None:
    monkeypatch.setattr(gpu_figures.fused, "load", lambda _: InTorch())
    assert gpu_figures.kernels(CPU) == [], "there are none"

    class Kernels(Arithmetic):
        quantise, restore = InTorch.quantise, InTorch.restore

    monkeypatch.setattr(gpu_figures.fused, "load", lambda _: Kernels())
    (row,) = gpu_figures.kernels(CPU, [(20, 5)])
    assert row.pop("rank") == 20
    assert row.pop("tokens") == 5
    assert row.keys() == {f"{way}_{by}_ms" for way in ("quantise", "restore") for by in ("kernels", "torch")}
    assert all(took > 0 for took in row.values())

    class Wrong(Kernels):
        def restore(self, *given):
            return InTorch().restore(*given) + 1

    monkeypatch.setattr(gpu_figures.fused, "load", lambda _: Wrong())
    with pytest.raises(SystemExit, match="other codes"):
        gpu_figures.kernels(CPU, [(20, 5)])


def test_a_library_that_zlib_does_not_read_fails_the_check(tmp_path, monkeypatch, capsys) -> None:
    fake_cuda.install(monkeypatch)
    fake_cudart.install(monkeypatch)
    row = {"type": 0, "bytes": 33, "noise": False, "zlib_reads": False, "reads_zlib": True}
    monkeypatch.setattr(gpu_figures, "library", lambda _: {"exchanged": [row]})
    for name in ("copies", "entropy", "kernels", "overlap"):
        monkeypatch.setattr(gpu_figures, name, lambda _: [])
    with pytest.raises(SystemExit) as ended:
        gpu_figures.measure(CPU, tmp_path / "figures.json")

    assert ended.value.code == 1
    assert "do not read each other" in capsys.readouterr().out


def test_what_failed_is_written_and_the_rest_goes_on(monkeypatch) -> None:
    def speed(*_: object) -> dict[str, object]:
        raise RuntimeError("not supported")

    monkeypatch.setattr(gpu_nvcomp, "_speed", speed)
    rows = gpu_nvcomp.speeds(None, CPU, float("inf"), chunks=(8192,), batches=(2,))

    assert [row["failed"] for row in rows] == ["not supported"] * len(gpu_nvcomp.ALGORITHMS)
    assert gpu_nvcomp.speeds(None, CPU, 0.0, chunks=(8192,), batches=(2,)) == [], "there was no time left"
