import os
import stat

import pytest

from kvtcd import outputs
from kvtcd.core.errors import ConfigError


def test_what_can_be_written_passes_and_nothing_is_left_behind(tmp_path):
    outputs.check(tmp_path / "new.json")
    (tmp_path / "old.json").write_text("old")
    outputs.check(tmp_path / "old.json")
    outputs.check_folder(tmp_path / "to" / "be" / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert (tmp_path / "old.json").read_text() == "old"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("folder", "is a folder"),
        ("none/it.json", "no folder .*none"),
        ("file/it.json", "no folder .*file"),
        ("n" * 300 + "/it.json", "File name too long"),
    ],
)
def test_what_cannot_be_written_is_refused_with_the_reason(tmp_path, name, why):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"cannot be written: .*{why}"):
        outputs.check(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_folder_that_takes_no_file_is_refused(tmp_path, monkeypatch):
    def read_only(**_):
        raise OSError(30, os.strerror(30))

    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is no folder"):
        outputs.check_folder(tmp_path / "file" / "deeper")
    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    with pytest.raises(ConfigError, match="Read-only file system"):
        outputs.check(tmp_path / "it.json")
    with pytest.raises(ConfigError, match="Read-only file system"):
        outputs.check_folder(tmp_path / "new")


def test_a_file_is_replaced_whole_or_stays(tmp_path):
    path = tmp_path / "it.png"
    path.write_text("old")

    def broken():
        with outputs.replacing(path) as part:
            assert part.suffix == ".png"
            part.write_text("ha")
            raise OSError(28, os.strerror(28))

    with pytest.raises(ConfigError, match="No space left"):
        broken()
    assert path.read_text() == "old"
    outputs.write(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
    umask = os.umask(0)
    os.umask(umask)
    outputs.write(tmp_path / "other", "")
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o666 & ~umask


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    outputs.write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_what_is_no_regular_file_is_written_to():
    reader, writer = os.pipe()
    path = outputs.Path(f"/dev/fd/{writer}")
    outputs.check(path)
    outputs.write(path, "through a pipe")
    os.close(writer)
    with os.fdopen(reader) as said:
        assert said.read() == "through a pipe"
