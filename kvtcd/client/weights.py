"""Digests of weight files: what tells two fine-tunes with one config.json apart.

The quick digest reads names, sizes and headers, and samples: of every tensor in a safetensors file four
pages, its first and last among them, or all of it where that is no more; of a GGUF file 4,096 pages, evenly
spaced. Training or merging changes a tensor all over, and so is seen in any; of a GGUF file each change of at
least a 4,095th in one run is. What touches a few numbers alone is seen with the chance that it meets a page;
`full` reads all bytes. The two never have the same value for the same files.

Every field is hashed after its length, so no two lists of fields give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kvtcd.core.errors import BadField, Truncated, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_QUICK, _FULL, _ADAPTER = b"kvtcd-weights-v2", b"kvtcd-weights-full-v1", b"kvtcd-adapter-v1"
_SUFFIXES = (".safetensors", ".gguf")
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 100_000_000
"""Bytes of JSON before safetensors itself refuses a file."""
_GGUF, _GGUF_HEADER = b"GGUF", 1 << 16
_PAGE = 4096
_OF_TENSOR = 4
"""Pages of a tensor."""
_OF_GGUF = 4096
"""Pages of a GGUF file, whose tensors are found only by reading all of its vocabulary."""
_CHUNK = 1 << 20

_known: dict[tuple[bytes, int, int, int, int], bytes] = {}
"""Digest of a file by (domain, device, inode, size, mtime_ns), for the life of this process."""


def weights_digest(path: Path | str, *, full: bool = False) -> str:
    """Return the digest of a model's weights as 64 hex digits.

    Args:
        path: a model folder, of which all `*.safetensors` and `*.gguf` files count, or one such file.
        full: read every byte instead of headers and sampled pages.

    Raises:
        Unavailable: no weight file there, or one cannot be read.
        Corrupt: a safetensors file without a credible header.
    """
    path = Path(path)
    shards = [path] if path.is_file() else sorted(p for p in path.glob("*") if p.suffix in _SUFFIXES)
    if not shards:
        raise Unavailable(
            f"{path} has no weight file ({' or '.join('*' + s for s in _SUFFIXES)}); "
            "give the folder that the model was loaded from"
        )
    return _digest_of_files(_FULL if full else _QUICK, shards)


def adapter_digest(files: Iterable[Path | str]) -> str:
    """Return the digest of all bytes of an adapter's (LoRA) files, in any order, as 64 hex digits.

    Raises:
        Unavailable: no file given, or one cannot be read.
    """
    paths = sorted((Path(file) for file in files), key=lambda path: path.name)
    if not paths:
        raise Unavailable("an adapter without files has no digest; name its safetensors and its config")
    return _digest_of_files(_ADAPTER, paths)


def _digest_of_files(domain: bytes, paths: list[Path]) -> str:
    fields = [domain]
    for path in paths:
        try:
            fields += [path.name.encode(), *_size_and_digest(domain, path)]
        except OSError as error:
            raise Unavailable(f"{path} cannot be read: {error.strerror}") from error
    return _hash(fields).hex()


def _size_and_digest(domain: bytes, path: Path) -> tuple[bytes, bytes]:
    """Return size (LE u64) and digest of one file, from memory while the file has not changed."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        size = status.st_size
        key = (domain, status.st_dev, status.st_ino, size, status.st_mtime_ns)
        if key not in _known:
            sampled = domain == _QUICK
            parts = _sample(path, file, size) if sampled else iter(lambda: file.read(_CHUNK), b"")
            _known[key] = _hash(parts)
        return _LENGTH.pack(size), _known[key]


def _sample(path: Path, file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the header and the sampled bytes of a file."""
    if path.suffix == ".gguf" or _begins_as_gguf(file):
        yield file.read(_GGUF_HEADER)
        runs = _pages(0, size, _OF_GGUF)
    else:
        header = _safetensors_header(path, file, size)
        yield header
        tensors = _tensors(path, header, size)
        runs = [run for begin, end in tensors for run in _pages(begin, end, _OF_TENSOR)]
    for begin, end in runs:
        file.seek(begin)
        yield file.read(end - begin)


def _pages(begin: int, end: int, count: int) -> list[tuple[int, int]]:
    """Return so many evenly spaced pages of a range, the first and the last among them, or all of it."""
    rest = end - begin - _PAGE
    if rest <= (count - 1) * _PAGE:
        return [(begin, end)]
    starts = (begin + i * rest // (count - 1) for i in range(count))
    return [(start, start + _PAGE) for start in starts]


def _begins_as_gguf(file: BinaryIO) -> bool:
    begin = file.read(len(_GGUF))
    file.seek(0)
    return begin == _GGUF


def _safetensors_header(path: Path, file: BinaryIO, size: int) -> bytes:
    """Read the length (LE u64) and as many bytes of JSON."""
    length = file.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        raise Truncated(str(path), "is too short for a safetensors file; fetch it again")
    (nbytes,) = _LENGTH.unpack(length)
    if nbytes > _MAX_HEADER:
        raise BadField(str(path), f"says that its header has {nbytes} bytes: not a safetensors file")
    if _LENGTH.size + nbytes > size:
        raise Truncated(str(path), f"ends after {size} bytes, within its header; fetch it again")
    return length + file.read(nbytes)


def _tensors(path: Path, header: bytes, size: int) -> list[tuple[int, int]]:
    """Return where the tensors of a safetensors file begin and end, in their order there."""
    try:
        named = json.loads(header[_LENGTH.size :])
        places = sorted(
            (int(begin), int(end))
            for begin, end in (told["data_offsets"] for name, told in named.items() if name != "__metadata__")
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadField(str(path), "has a header that names no tensors: not a safetensors file") from error
    if any(not 0 <= begin <= end <= size - len(header) for begin, end in places):
        raise BadField(str(path), "has tensors beyond its end; fetch it again")
    return [(len(header) + begin, len(header) + end) for begin, end in places]


def _hash(fields: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for field in fields:
        digest.update(_LENGTH.pack(len(field)))
        digest.update(field)
    return digest.digest()
