"""What `kvtcd inspect` says of a blob, against golden ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtcd.admin.blob_view import command
from kvtcd.core.errors import ConfigError, Corrupt

GOLDEN = Path(__file__).parents[1] / "codec" / "golden"


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.blob")), ids=lambda path: path.name)
def test_every_golden_blob_is_shown_whole(file: Path, tmp_path: Path) -> None:
    command(file, json=tmp_path / "it.json")
    written = json.loads((tmp_path / "it.json").read_text())

    assert file.name.startswith(written["header"]["codec"])
    assert written["header"]["raw_bytes"] == file.with_suffix(".raw").stat().st_size
    assert 0 < sum(row["nbytes"] for row in written["sections"]) < written["header"]["blob_bytes"]
    covered = {token for row in written["sections"] for token in range(*row["tokens"])}
    assert covered == set(range(written["header"]["tokens"]))


def test_what_is_no_blob_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    data = bytearray((GOLDEN / "kvtc-1-kv-bfloat16.blob").read_bytes())
    data[-1] ^= 1
    (tmp_path / "it").write_bytes(data)
    with pytest.raises(Corrupt, match="checksum"):
        command(tmp_path / "it", json=None)
    (tmp_path / "it").write_bytes(b"hello")
    with pytest.raises(Corrupt):
        command(tmp_path / "it", json=None)
    with pytest.raises(ConfigError, match="cannot be read"):
        command(tmp_path / "none", json=None)
