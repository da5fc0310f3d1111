"""Full devices and failing calls: an error with a name, no loss, and work goes on when there is room."""

import errno
import os
import shutil
import subprocess
import sys

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
    assert str(path) in result["refused"], "which disk"
    assert len(result["readable"]) > 5
    assert result["readable"] == list(range(len(result["readable"])))
    assert not result["lost"], "a full device must not look like a crash or damage"
    assert result["rewritten"] == result["again"]


def test_a_file_at_its_limit_reads_drops_and_then_writes_again(tmp_path):
    fill(tmp_path / "environment", file_limit=12 << 20)


@pytest.fixture
def small(tmp_path):
    """A file system of 16 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    folder = tmp_path / "small"
    folder.mkdir(mode=0o700)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_file_system_reads_drops_and_then_writes_again(small):
    fill(small / "environment", file_limit=0)


_ON_A_FULL_DEVICE = """
import os, sys
from pathlib import Path
from kvtcd.core.errors import StoreFull
from kvtcd.tiers.disk import Environment

folder = Path(sys.argv[1])
environment = Environment(folder / "old", quota=1 << 20)
with (folder / "rest").open("wb", buffering=0) as rest:
    try:
        while rest.write(bytes(4096)):
            pass
    except OSError:
        pass
def refused(call):
    try:
        call()
    except StoreFull as error:
        print(error)

refused(lambda: Environment(folder / "new", quota=1 << 20))
print(sorted(path.name for path in (folder / "new").iterdir()))
os.unlink(folder / "rest")
Environment(folder / "new", quota=1 << 20).close()
environment.close()
print("room again")
"""


def test_on_a_full_file_system_a_new_file_is_refused_and_does_not_end_the_process(small):
    script = [sys.executable, "-c", _ON_A_FULL_DEVICE, str(small)]
    said = subprocess.run(script, capture_output=True, text=True, check=False)
    assert said.returncode == 0, (said.returncode, said.stderr)
    new, left, after = said.stdout.splitlines()
    assert new.startswith("disk ")
    assert "ENOSPC" in new or "no space left" in new
    assert ".part" not in left, "nothing half made stays"
    assert after == "room again"


_REWRITTEN_ON_A_FULL_DEVICE = """
import sys
from pathlib import Path
from kvtcd.tiers.disk import Environment, Put

folder, room = Path(sys.argv[1]), int(sys.argv[2])
environment = Environment(folder / "old", quota=12 << 20)
def key(number):
    return number.to_bytes(32, "big")
for number in range(8):
    word = (b"KEPT", b"GONE")[number % 2]
    environment.write([Put(key(number), word, word + b"-MARKER" * (1 << 16))], [])
environment.put_namespace("gone", b"GONE-MARKER")
with (folder / "rest").open("wb", buffering=0) as rest:
    try:
        while rest.write(bytes(4096)):
            pass
    except OSError:
        pass
    rest.truncate(rest.tell() - room)
print(environment.rewrite(lambda envelope: envelope == b"KEPT", {"kept": b"identity"}))
left = [key for page in environment.scan() for key in page.keys]
print(len(left), all(environment.read(key)[1][:4].tobytes() == b"KEPT" for key in left))
print(environment.namespaces())
print(any(b"GONE-MARKER" in path.read_bytes() for path in (folder / "old").rglob("*") if path.is_file()))
environment.write([Put(key(9), b"KEPT", b"KEPT-MARKER" * 1000)], [])
environment.close()
again = Environment(folder / "old", quota=12 << 20)
print(again.quarantined, again.recovered, again.read(key(9))[1][:11].tobytes())
"""


@pytest.mark.parametrize(
    ("room", "whole", "left"),
    [(0, "False", "0 True"), (1 << 20, "False", "0 True"), (6 << 20, "True", "4 True")],
)
def test_a_rewrite_on_a_full_device_leaves_no_byte_of_what_goes(small, room, whole, left):
    script = [sys.executable, "-c", _REWRITTEN_ON_A_FULL_DEVICE, str(small), str(room)]
    said = subprocess.run(script, capture_output=True, text=True, check=False)
    assert said.returncode == 0, (said.returncode, said.stdout, said.stderr)
    assert said.stdout.splitlines() == [
        whole,
        left,
        "{'kept': b'identity'}",
        "False",
        "False False b'KEPT-MARKER'",
    ]


def test_the_table_of_readers_has_its_blocks_before_it_is_mapped(tmp_path):
    environment = Environment(tmp_path / "environment", quota=workload.QUOTA)
    (table,) = (tmp_path / "environment").rglob("lock.mdb")
    assert table.stat().st_blocks * 512 >= table.stat().st_size >= 256 * 64
    environment.close()


CALLS = pytest.mark.parametrize(
    ("kind", "code"),
    # Room for the meta pages is taken when the file is made.
    [(WRITE, errno.EIO), (WRITE, errno.ENOSPC), (SYNC, errno.EIO), (SYNC, errno.ENOSPC), (META, errno.EIO)],
)


def each_fails(failing, tmp_path, kind, code, step):
    """Let the n-th call of a kind fail, for every `step`-th n until there are no more; return how many."""
    calls = 0
    for after in range(0, 1000, step):
        path = tmp_path / str(after)
        result = failing.call(
            "fail_call", path=str(path), seed=1, kind=kind, after=after, code=code
        ).checked()
        shutil.rmtree(path)
        if not result["reached"]:
            break
        calls += 1
        assert len(result["refused"]) == 1, after
        expected = "StoreFull" if code == errno.ENOSPC else "StoreFailed"
        assert result["refused"][0][1] == expected, (after, result)
        assert result["right"], (after, result)
    return calls


@CALLS
def test_one_failing_call_refuses_one_step_and_loses_none(failing, tmp_path, kind, code):
    assert each_fails(failing, tmp_path, kind, code, 7 if kind == WRITE else 2) > 4


@pytest.mark.slow
@CALLS
def test_whichever_call_fails_one_step_is_refused_and_none_lost(failing, tmp_path, kind, code):
    assert each_fails(failing, tmp_path, kind, code, 1) > {WRITE: 20, SYNC: 10, META: 10}[kind]


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
