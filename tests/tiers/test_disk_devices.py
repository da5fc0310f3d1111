"""Full devices and failing calls: an error with a name, no loss, and work goes on when there is room."""

import errno
import os
import subprocess

import pytest
from support.crash import workload
from support.crash.replay import build_shim
from support.crash.zygote import Zygote

from kvtcd.tiers.disk import Environment

WRITE, META, SYNC = "w", "m", "s"


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    """A zygote whose children can let calls fail."""
    with Zygote({"LD_PRELOAD": str(build_shim(tmp_path_factory.mktemp("shim")))}) as started:
        yield started


def fill(path, file_limit):
    Environment(path, quota=workload.QUOTA).close()
    with Zygote() as zygote:
        result = zygote.call("fill_device", path=str(path), file_limit=file_limit).checked()
    assert "no space left" in result["refused"]
    assert len(result["readable"]) > 5
    assert result["readable"] == list(range(len(result["readable"])))
    assert not result["lost"], "a full device must not look like a crash or damage"
    assert result["rewritten"] == result["again"]


def test_a_file_at_its_limit_reads_drops_and_then_writes_again(tmp_path):
    fill(tmp_path / "environment", file_limit=12 << 20)


def test_a_full_file_system_reads_drops_and_then_writes_again(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    small = tmp_path / "small"
    small.mkdir(mode=0o700)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", small], check=False)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        fill(small / "environment", file_limit=0)
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize(
    ("kind", "code"),
    # Room for the meta pages is taken when the file is made.
    [(WRITE, errno.EIO), (WRITE, errno.ENOSPC), (SYNC, errno.EIO), (SYNC, errno.ENOSPC), (META, errno.EIO)],
)
def test_one_failing_call_refuses_one_step_and_loses_none(failing, tmp_path, kind, code):
    calls = 0
    for after in range(0, 1000, 7 if kind == WRITE else 2):
        path = tmp_path / str(after)
        result = failing.call(
            "fail_call", path=str(path), seed=1, kind=kind, after=after, code=code
        ).checked()
        if not result["reached"]:
            break
        calls += 1
        assert len(result["refused"]) == 1, after
        expected = "StoreFull" if code == errno.ENOSPC else "StoreFailed"
        assert result["refused"][0][1] == expected, (after, result)
        assert result["right"], (after, result)
    assert calls > 4


def test_a_second_failure_within_ten_minutes_puts_the_environment_out_of_use(failing, tmp_path):
    said = failing.call("break_twice", path=str(tmp_path / "environment"), window=600.0).checked()
    assert said == [
        "write: StoreFailed",
        "read: ok",
        "write: StoreFailed",
        "read: StoreFailed",
        "write: StoreFailed",
        "scan: StoreFailed",
        "failed",
    ]
    environment = Environment(tmp_path / "environment", quota=workload.QUOTA)
    assert environment.recovered, "what failed is verified at the next start"
    assert not environment.quarantined
    environment.close()


def test_a_second_failure_much_later_is_a_first_one(failing, tmp_path):
    said = failing.call("break_twice", path=str(tmp_path / "environment"), window=0.0).checked()
    assert said == [
        "write: StoreFailed",
        "read: ok",
        "write: StoreFailed",
        "read: ok",
        "write: ok",
        "scan: ok",
        "works",
    ]
