import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import support
import torch

from kvtcd.codec.basis import Moments
from kvtcd.lab.checkpoint import Checkpoint, sweep
from kvtcd.lab.gather import Gathered

CPU = torch.device("cpu")


def gathered(read: int = 5) -> Gathered:
    rows = {"k": torch.randn(20, 6), "v": torch.randn(20, 4)}
    return Gathered(
        read=read,
        moments={name: Moments.from_rows(x) for name, x in rows.items()},
        samples={name: x[:3] for name, x in rows.items()},
        seconds={"model": 1.25, "moments": 0.5},
    )


def assert_equal(got: Gathered, want: Gathered) -> None:
    assert (got.read, got.seconds) == (want.read, want.seconds)
    assert set(got.samples) == set(want.samples)
    assert all(torch.equal(got.samples[name], sample) for name, sample in want.samples.items())
    assert set(got.moments) == set(want.moments)
    for name, moments in want.moments.items():
        for part in ("count", "shift", "total", "outer"):
            assert torch.equal(getattr(got.moments[name], part), getattr(moments, part))
            assert getattr(got.moments[name], part).dtype == getattr(moments, part).dtype


def test_what_was_kept_comes_back(tmp_path: Path) -> None:
    kept = gathered()
    Checkpoint(tmp_path / "it.safetensors", every=0).keep(kept)
    assert_equal(Checkpoint(tmp_path / "it.safetensors").restore(CPU), kept)
    assert [path.name for path in tmp_path.iterdir()] == ["it.safetensors"]


def test_samples_are_kept_before_there_are_moments(tmp_path: Path) -> None:
    kept = gathered(read=1)
    kept.moments = {}
    Checkpoint(tmp_path / "it.safetensors", every=0).keep(kept)
    assert_equal(Checkpoint(tmp_path / "it.safetensors").restore(CPU), kept)


def test_nothing_is_written_before_it_is_time(tmp_path: Path) -> None:
    Checkpoint(tmp_path / "it.safetensors", every=3600).keep(gathered())
    assert not list(tmp_path.iterdir())


def test_writing_takes_at_most_a_tenth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("kvtcd.lab.checkpoint.time.monotonic", lambda: now[0])
    path = tmp_path / "it.safetensors"
    checkpoint = Checkpoint(path, every=30)

    def slow(*_arguments: object) -> None:
        now[0] += 20
        path.with_suffix(f".{os.getpid()}.part").touch()

    monkeypatch.setattr("kvtcd.lab.checkpoint.save_file", slow)
    now[0] = 130
    checkpoint.keep(gathered())  # until 150, so the next is due at 150 + 180
    assert now[0] == 150
    for at, then in ((329, 329), (330, 350)):
        now[0] = at
        checkpoint.keep(gathered())
        assert now[0] == then


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda _: b"", lambda _: b"\xff" * 900])
def test_a_damaged_file_is_a_new_beginning(tmp_path: Path, damage) -> None:
    path = tmp_path / "it.safetensors"
    Checkpoint(path, every=0).keep(gathered())
    path.write_bytes(damage(path.read_bytes()))
    assert Checkpoint(path).restore(CPU) == Gathered()


def test_no_file_is_a_new_beginning_and_discarding_none_is_fine(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "it.safetensors")
    checkpoint.discard()
    assert checkpoint.restore(CPU) == Gathered()


DIES_WRITING = """
import os, sys, threading, time
from pathlib import Path
from kvtcd.lab import checkpoint
from kvtcd.lab.gather import Gathered

def half(tensors, path, metadata):
    Path(path).with_name(".tmpAbCdEf").write_bytes(b"half")
    Path(path).write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(3600)

checkpoint.save_file = half
checkpoint.Checkpoint(Path(sys.argv[1], "it.safetensors"), every=0).keep(Gathered())
"""


def test_what_a_killed_writer_has_left_is_swept_and_that_of_a_live_one_is_not(tmp_path: Path) -> None:
    kept = tmp_path / "other.safetensors"
    kept.touch()
    with subprocess.Popen(
        [sys.executable, "-c", DIES_WRITING, tmp_path], stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as writer:  # fmt: skip
        assert writer.stdout
        try:
            assert writer.stdout.readline() == b"writing\n"
            sweep(tmp_path)
            assert len(list(tmp_path.iterdir())) == 3
        finally:
            writer.kill()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [kept]


def test_a_checkpoint_of_a_month_is_swept(tmp_path: Path) -> None:
    for name, days in (("old", 31), ("young", 29)):
        path = tmp_path / f"{name}.safetensors"
        path.touch()
        os.utime(path, (0, time.time() - days * 86_400))
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["young.safetensors"]


@pytest.mark.slow
def test_a_calibration_killed_twice_ends_with_the_bytes_of_one_that_was_not(tmp_path: Path) -> None:
    def child(folder: str, killed_in: str = "nothing", call: int = 0) -> tuple[int, int]:
        command = [sys.executable, "-m", "support.calibration", tmp_path / folder, tmp_path / f"{folder}.out"]
        paths = os.pathsep.join((str(Path(support.__path__[0]).parent), *sys.path))
        done = subprocess.run(
            [*command, killed_in, str(call)],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (0, -9), done.stderr
        return done.returncode, int(done.stdout)

    assert child("whole") == (0, 0)
    assert child("killed", "keep", 8) == (-9, 0)  # seven checkpoints were written
    assert child("killed", "replace", 6) == (-9, 7)  # the sixth is whole, but not in its place
    assert child("killed") == (0, 12)
    assert (tmp_path / "killed.out").read_bytes() == (tmp_path / "whole.out").read_bytes()
    assert list((tmp_path / "killed" / "checkpoints").iterdir()) == []
