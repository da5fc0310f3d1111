"""State directories written by every release so far are read by this one."""

import importlib.util
import sys
import tarfile
from pathlib import Path

import pytest
from support.records import keys_in

from kvtcd.tiers.disk import Environment
from kvtcd.tiers.state import StateDirectory

GOLDEN = Path(__file__).with_name("golden")


def maker():
    spec = importlib.util.spec_from_file_location("make_state", GOLDEN / "make_state.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.byteorder != "little", reason="LMDB files have the byte order of their machine")
@pytest.mark.parametrize("archive", sorted(GOLDEN.glob("*.tar.gz")), ids=lambda path: path.name)
def test_a_golden_state_directory_is_read_and_written(tmp_path, archive):
    golden = maker()
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    # The filter leaves the modes of directories to the umask.
    (tmp_path / "state").chmod(0o700)
    state = StateDirectory(tmp_path / "state")
    assert state.master_key() == golden.MASTER_KEY
    assert list(state.tenants()) == [golden.TENANT]
    environment = Environment(state.tenant(golden.TENANT), quota=1 << 24)
    assert not environment.quarantined
    assert not environment.recovered
    assert environment.namespaces() == golden.NAMESPACES
    assert keys_in(environment) == [record.key for record in golden.RECORDS]
    for record in golden.RECORDS:
        envelope, blob = environment.read(record.key)
        assert envelope == record.envelope
        assert blob.tobytes() == record.blob
    assert environment.used == sum(record.footprint for record in golden.RECORDS)
    environment.write([golden.RECORDS[0]], [golden.RECORDS[1].key])
    assert environment.read(golden.RECORDS[1].key) is None
    environment.close()
    state.close()


def test_there_is_a_golden_state_directory():
    assert list(GOLDEN.glob("*.tar.gz"))
