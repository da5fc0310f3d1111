import hashlib
import itertools
import json
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
TIMES = itertools.count(1)
GOLDEN_QUICK = "bbc2124b5ac5a9279d1923f3e6ed411d2b52d3566d6bba40aee900e77581248e"
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
    fields = [b"kvtcd-weights-v2"]
    for name in ["a.gguf", *(f"m{i}.safetensors" for i in range(10)), "z.gguf"]:
        body = safetensors(name.encode())
        (tmp_path / name).write_bytes(body)
        parts = (
            (body, body) if name.endswith("gguf") else (body[: 8 + len(HEADER)], body[8 + len(HEADER) :][:8])
        )
        fields += [
            name.encode(),
            struct.pack("<Q", len(body)),
            hashlib.sha256(b"".join(map(field, parts))).digest(),
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


def of_tensors(*sizes: int) -> bytearray:
    """A file of so many tensors, in no order of their names."""
    places, end = {}, 0
    for number, size in enumerate(sizes):
        places[f"t{-number}"] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    header = json.dumps({"__metadata__": {"format": "pt"}} | dict(sorted(places.items()))).encode()
    return bytearray(safetensors(bytes(end), header))


def changed(file: Path, body: bytearray, place: int, count: int = 1) -> str:
    """The digest of a file in which so many bytes are others."""
    other = body.copy()
    for n in range(place, place + count):
        other[n] ^= 1
    file.write_bytes(other)
    os.utime(file, ns=(1, next(TIMES)))
    return weights_digest(file)


def test_a_change_of_any_tensor_all_over_changes_the_digest_however_small_it_is(tmp_path: Path) -> None:
    sizes = (1, 3000 * PAGE, 5, 4 * PAGE, 4 * PAGE + 1, 40 * PAGE + 7, 0, 2)
    body, file = of_tensors(*sizes), tmp_path / "m.safetensors"
    begin = len(body) - sum(sizes)
    seen = {changed(file, body, 0, 0)}
    for size in filter(None, sizes):
        seen.add(changed(file, body, begin, size))
        begin += size
    assert len(seen) == len(sizes), "all but the empty one, and the file as it was"


@pytest.mark.parametrize(
    ("place", "sees"),
    [
        (0, True),
        (PAGE, False),
        (4096 * 33, True),
        (PAGE * 33 + PAGE // 2, True),
        (-1, True),
        (-PAGE - 1, False),
    ],
)
def test_first_and_last_page_of_a_tensor_are_sampled_and_two_between(
    tmp_path: Path, place: int, sees: bool
) -> None:
    body, file = of_tensors(100 * PAGE), tmp_path / "m.safetensors"
    before = changed(file, body, 0, 0)
    at = len(body) - 100 * PAGE + place if place >= 0 else len(body) + place
    assert (changed(file, body, at) != before) is sees


def test_only_the_full_digest_sees_a_byte_between_sampled_pages(tmp_path: Path) -> None:
    body, file = of_tensors(200 * PAGE), tmp_path / "m.safetensors"
    file.write_bytes(body)
    quick, full = weights_digest(file), weights_digest(file, full=True)
    assert changed(file, body, len(body) - 199 * PAGE + 10) == quick
    assert weights_digest(file, full=True) != full


@pytest.mark.parametrize(
    "header",
    [
        b"[]", b"{", b'{"a":1}', b'{"a":{}}', b'{"a":{"data_offsets":[0]}}', b'{"a":{"data_offsets":"ab"}}',
        b'{"a":{"data_offsets":[0,9]}}', b'{"a":{"data_offsets":[-1,8]}}', b'{"a":{"data_offsets":[8,0]}}',
    ],
)  # fmt: skip
def test_a_header_that_says_no_places_is_refused(tmp_path: Path, header: bytes) -> None:
    tmp_path.joinpath("m.safetensors").write_bytes(safetensors(bytes(8), header))
    with pytest.raises(BadField, match=r"m\.safetensors"):
        weights_digest(tmp_path)


@given(size=st.integers(1, 60_000_000), data=st.data())
def test_every_run_of_a_4095th_of_a_gguf_file_meets_a_sampled_page(size: int, data: st.DataObject) -> None:
    run = -(-size // 4095)
    start = data.draw(st.integers(0, size - run))
    runs = weights._pages(0, size, weights._OF_GGUF)
    assert sum(end - begin for begin, end in runs) <= 4096 * PAGE
    assert (runs[0][0], runs[-1][1]) == (0, size)
    assert any(begin < start + run and start < end for begin, end in runs)


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
