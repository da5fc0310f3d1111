"""The script for machines with a GPU: what it says without one; what it measures, on a CPU twin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import fake_cuda, fake_cudart, fake_nvcomp, gpu_figures, gpu_ready

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
    assert {"inflate_crossover", "deflate_crossover", "crossover_used", "machine"} <= set(figures)
    shown = capsys.readouterr().out
    assert all(title in shown for title in ("copies", "entropy", "overlap"))
