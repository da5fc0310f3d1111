"""Make a golden state directory: `python tests/tiers/golden/make_state.py state-v1.tar.gz`.

A release that changes what lies on disk adds one with the next number and keeps the old ones:
`test_disk_golden` opens them all. What is in them is `RECORDS`, which follow from nothing but this file.
"""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
import tempfile
from pathlib import Path

from kvtcd.tiers.disk import CHUNK_BYTES, Environment, Put
from kvtcd.tiers.state import StateDirectory

TENANT = "0123456789abcdef" * 2
MASTER_KEY = bytes(range(32))
NAMESPACES = {"first": b'{"model":"first"}', "second": b'{"model":"second"}'}


def content(index: int, nbytes: int) -> bytes:
    """Return bytes that differ between records and compress well."""
    line = b"".join(b"record %d line %d\n" % (index, number) for number in range(100))
    return (line * (nbytes // len(line) + 1))[:nbytes]


RECORDS = [
    Put(bytes([index] * 32), b"envelope %d " % index * repeats, content(index, nbytes))
    for index, (repeats, nbytes) in enumerate(
        [(1, 0), (40, 1), (40, 1900), (250, 5000), (40, CHUNK_BYTES), (40, 2 * CHUNK_BYTES + 777)]
    )
]


def make(path: Path) -> None:
    """Write the state directory `path`: some history, then the records, closed in order."""
    state = StateDirectory(path)
    (path / "master.key").write_bytes(MASTER_KEY)
    (path / "master.key").chmod(0o600)
    environment = Environment(state.tenant(TENANT), quota=1 << 24)
    environment.write([Put(bytes([99] * 32), b"dropped", b"dropped")], [])
    for name, identity in NAMESPACES.items():
        environment.put_namespace(name, identity)
    for record in RECORDS:
        environment.write([record], [bytes([99] * 32)])
    environment.close()
    state.close()


def pack(path: Path) -> bytes:
    """Return the directory as a compressed archive that names nobody and no time."""

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(path, arcname="state", filter=anonymous)
    return gzip.compress(archive.getvalue(), mtime=0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / "state")
        Path(__file__).with_name(sys.argv[1]).write_bytes(pack(Path(folder) / "state"))
