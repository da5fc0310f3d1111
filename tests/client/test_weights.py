import hashlib
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtcd.client import weights
from kvtcd.client.weights import adapter_digest, weights_digest
from kvtcd.core.errors import BadField, Truncated, Unavailable

HEADER = b'{"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}'
PAGE = 4096
GOLDEN_QUICK = "4cddb6de8f3ce5d5b0a7bd4ff470c8354f1acc8d32b7cf54b01b8ed8c6f60037"
GOLDEN_FULL = "35fb19618a938da8db169dd0afa7c17c14d112f67cd78dac28f167b5f48bc829"


def safetensors(data: bytes, header: bytes = HEADER) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def field(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.joinpath("config.json").write_text("{}")
    tmp_path.joinpath("model-00001-of-00002.safetensors").write_bytes(safetensors(bytes(range(8))))
    tmp_path.joinpath("model-00002-of-00002.safetensors").write_bytes(safetensors(b"\xff" * 8))
    return tmp_path


def test_digest_of_fixed_files_is_the_golden_one(folder: Path) -> None:
    assert weights_digest(folder) == GOLDEN_QUICK
    assert weights_digest(folder, full=True) == GOLDEN_FULL


def test_digest_is_sha256_over_length_prefixed_fields_in_name_order(tmp_path: Path) -> None:
    fields = [b"kvtcd-weights-v1"]
    for name in ["a.gguf", *(f"m{i}.safetensors" for i in range(10)), "z.gguf"]:
        body = safetensors(name.encode())
        (tmp_path / name).write_bytes(body)
        header = body if name.endswith("gguf") else body[: 8 + len(HEADER)]
        fields += [
            name.encode(),
            struct.pack("<Q", len(body)),
            hashlib.sha256(field(header) + field(body)).digest(),
        ]
    assert weights_digest(tmp_path) == hashlib.sha256(b"".join(map(field, fields))).hexdigest()


def test_finetunes_with_one_config_but_other_weights_differ(folder: Path, tmp_path_factory) -> None:
    other = tmp_path_factory.mktemp("other")
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert weights_digest(other) == weights_digest(folder)
    shard = other / "model-00002-of-00002.safetensors"
    shard.write_bytes(safetensors(b"\xff" * 7 + b"\xfe"))
    assert weights_digest(other) != weights_digest(folder)


@pytest.mark.parametrize("offset", [20, 2 * PAGE, 3 * PAGE, 96 * PAGE + 5, -1])
def test_a_byte_changed_in_header_or_sampled_page_changes_the_digest(tmp_path: Path, offset: int) -> None:
    # 190 pages, of which every third is a sample; the header covers pages 0 to 2
    header = b"{" + b" " * (2 * PAGE + 50) + b"}"
    body = bytearray(safetensors(bytes(190 * PAGE - 8 - len(header)), header))
    file = tmp_path / "m.safetensors"
    file.write_bytes(body)
    before = weights_digest(file)
    body[offset] ^= 1
    file.write_bytes(body)
    os.utime(file, ns=(1, 1))
    assert weights_digest(file) != before


def test_only_the_full_digest_sees_a_byte_between_sampled_pages(tmp_path: Path) -> None:
    body = bytearray(safetensors(bytes(200 * PAGE)))
    file = tmp_path / "m.safetensors"
    file.write_bytes(body)
    quick, full = weights_digest(file), weights_digest(file, full=True)
    body[PAGE + 10] ^= 1
    file.write_bytes(body)
    os.utime(file, ns=(1, 1))
    assert weights_digest(file) == quick
    assert weights_digest(file, full=True) != full


@given(size=st.integers(1, 3_000_000), data=st.data())
def test_every_run_of_a_63rd_of_the_file_meets_a_sampled_page(size: int, data: st.DataObject) -> None:
    run = -(-size // 63)
    start = data.draw(st.integers(0, size - run))
    seen = []

    class Recorder:
        def seek(self, offset: int) -> None:
            seen.append(offset)

        def read(self, _nbytes: int) -> bytes:
            return b""

    list(weights._sample(Path("m.gguf"), Recorder(), size))
    assert len(seen) <= 64
    assert seen[0] == 0
    assert seen[-1] <= size - 1 < seen[-1] + PAGE
    assert any(page < start + run and start < page + PAGE for page in seen)


def test_name_and_number_of_shards_count(folder: Path) -> None:
    before = weights_digest(folder)
    shard = folder / "model-00002-of-00002.safetensors"
    renamed = shard.rename(folder / "model-2.safetensors")
    assert weights_digest(folder) != before
    renamed.rename(shard)
    assert weights_digest(folder) == before
    (folder / "extra.gguf").write_bytes(b"GGUF")
    assert weights_digest(folder) != before


def test_other_files_do_not_count(folder: Path) -> None:
    before = weights_digest(folder)
    (folder / "config.json").write_text('{"other": 1}')
    assert weights_digest(folder) == before


def test_gguf_header_counts_beyond_the_sampled_pages(tmp_path: Path) -> None:
    body = bytearray(b"GGUF" + bytes(500 * PAGE))
    file = tmp_path / "model.gguf"
    file.write_bytes(body)
    before = weights_digest(tmp_path)
    body[PAGE + 1] ^= 1  # page 1 is not sampled, but within the first 64 KiB
    file.write_bytes(body)
    os.utime(file, ns=(1, 1))
    assert weights_digest(tmp_path) != before


def test_an_unchanged_file_is_not_read_twice(folder: Path) -> None:
    before = weights_digest(folder, full=True)
    shard = folder / "model-00001-of-00002.safetensors"
    status = shard.stat()
    with shard.open("r+b") as file:  # same inode, size and, put back below, time
        file.seek(-1, os.SEEK_END)
        file.write(b"\x99")
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights_digest(folder, full=True) == before
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert weights_digest(folder, full=True) != before


@pytest.mark.parametrize("missing", ["", "no-such-folder"])
def test_no_weight_file_says_what_is_looked_for(tmp_path: Path, missing: str) -> None:
    with pytest.raises(Unavailable, match=r"no weight file \(\*\.safetensors or \*\.gguf\)"):
        weights_digest(tmp_path / missing)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", Truncated),
        (b"\x01\x02\x03", Truncated),
        (struct.pack("<Q", 9) + b"{}", Truncated),
        (struct.pack("<Q", 100_000_001) + b"{}", BadField),
        (b"\xff" * 64, BadField),
    ],
)
def test_a_file_without_a_credible_header_is_refused(tmp_path: Path, body: bytes, error: type) -> None:
    (tmp_path / "m.safetensors").write_bytes(body)
    with pytest.raises(error, match=r"m\.safetensors"):
        weights_digest(tmp_path)


def test_adapter_digest_reads_all_bytes_in_any_order(tmp_path: Path) -> None:
    config, matrices = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    config.write_text('{"r": 8}')
    matrices.write_bytes(safetensors(bytes(200 * PAGE)))
    before = adapter_digest([config, matrices])
    assert before == adapter_digest([matrices, config])
    assert before != weights_digest(tmp_path, full=True)
    body = bytearray(matrices.read_bytes())
    body[PAGE + 10] ^= 1
    matrices.write_bytes(body)
    os.utime(matrices, ns=(1, 1))
    assert adapter_digest([config, matrices]) != before


def test_an_adapter_of_no_or_missing_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="without files"):
        adapter_digest([])
    with pytest.raises(Unavailable, match=r"gone\.safetensors cannot be read: No such file"):
        adapter_digest([tmp_path / "gone.safetensors"])


def test_importing_the_module_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, kvtcd.client.weights; sys.exit(sorted({'torch', 'numpy'} & set(sys.modules)) or 0)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
