"""A profile: what calibration made for one model. A safetensors file, free of code, named by its digest.

Tensors, for each stream ``s``; the weighted basis (`codec.weighted`) came with format 2:

======================= ================= ===========================================================
``plain.s.mean``        f32 [p]           mean of the rows
``plain.s.basis``       f16 [r, p]        principal components, one a row, trimmed to the plans
``plain.s.spectrum``    f32 [r]           variance per component
``plain.s.total``       f32 [1]           variance over all p features
``plain.s.plan.N``      i32 [g, 3]        groups (start, size, bits) of the plan for ratio N
``weighted.s.mean``     f32 [p]           mean of the rows, sensitive tokens counted more often
``weighted.s.basis``    f16 [r, p]        principal components of the rows weighted by ``root``
``weighted.s.root``     f32 [L, H, D, D]  square root of the second moment of gradients
``weighted.s.spread``   f32 [r]           mean magnitude of each coefficient on held-out rows
``weighted.s.tokens``   f32 [S, p]        what features add to the step classes of all S streams
``weighted.s.level``    f32 [1]           what is added to the step classes of this stream
======================= ================= ===========================================================

Metadata has one key, ``kvtcd``: canonical JSON (`Origin`); in format 3 it has choices for `auto` as well
(`codec.choices`).
Equal content gives equal bytes. A profile knows
model weights, adapter, RoPE and streams, but no element type: it serves float32, bfloat16 and float16 caches
alike. Tensors of a loaded profile are views of its file: of the two bases, the one in use takes memory.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvtcd.codec.choices import Choice
from kvtcd.codec.dial import Curve
from kvtcd.codec.origin import Origin
from kvtcd.codec.plan import Plan
from kvtcd.codec.residency import Residency
from kvtcd.codec.transform import Transform, orthonormal
from kvtcd.codec.weighted import Weighted, check, take
from kvtcd.core.errors import BadChecksum, BadField, Corrupt, Truncated
from kvtcd.core.fields import json_object
from kvtcd.core.identity import Identity
from kvtcd.core.layout import Stream, canonical_json

SUFFIX = ".safetensors"
_METADATA = "kvtcd"
_DIGITS = 64
_PLAIN = "plain"
_MAX_HEADER = 1 << 20
_LENGTH_BYTES = 8


@dataclass(frozen=True, eq=False)
class StreamProfile:
    """Mean, basis and plans of one stream; shapes and dtypes as in the module's table."""

    mean: Tensor
    basis: Tensor
    spectrum: Tensor
    total: float
    plans: Mapping[int, Plan]

    def transform(self, layers: int, device: torch.device) -> Transform:
        """Put the map between features and coefficients on a device."""
        return Transform(self.mean, self.basis, self.basis, layers, device)

    def nbytes(self, device: torch.device) -> int:
        """Return the bytes that it takes there."""
        return Transform.nbytes(*self.basis.shape, orthonormal=True, device=device)


@dataclass(frozen=True, eq=False)
class Profile:
    """A checked profile.

    Attributes:
        origin: model and calibration data it was made from.
        streams: by name, in the order of the layout.
        weighted: by name, the weighted bases; empty where there are none.
        digest: SHA-256 of the file's bytes.
        residency: keeps its bases on devices, for all who use this profile.
    """

    origin: Origin
    streams: Mapping[str, StreamProfile]
    weighted: Mapping[str, Weighted]
    digest: bytes
    residency: Residency = field(default_factory=Residency, repr=False)

    @property
    def ratios(self) -> tuple[int, ...]:
        """Ratios there is a plan for, ascending; the same for every stream."""
        return tuple(sorted(next(iter(self.streams.values())).plans))

    @cached_property
    def curve(self) -> Curve | None:
        """Rate and quality of `kvtc2`; None where they were not measured."""
        return Curve.from_json(self.origin.curve)

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """What `auto` stands for, by ratio; empty where nothing was chosen.

        Raises:
            BadField: they are none.
        """
        return tuple(map(Choice.from_json, self.origin.choices))

    def check(self, identity: Identity) -> None:
        """Make sure that this profile was made for a namespace's model.

        Raises:
            ProfileMismatch: it was not; the error names what differs.
        """
        self.origin.check(identity)


def build(
    origin: Origin, streams: Mapping[str, StreamProfile], weighted: Mapping[str, Weighted]
) -> tuple[Profile, bytes]:
    """Return the profile of the given content, the plain basis trimmed to its plans, and its file's bytes.

    Raises:
        BadField: the content contradicts itself.
    """
    trimmed = {name: _trim(stream) for name, stream in streams.items()}
    _check(origin, trimmed)
    check(origin.layers, origin.streams, weighted)
    tensors = _tensors(trimmed)
    for name, stream in weighted.items():
        tensors |= stream.tensors(name)
    data = save(tensors, {_METADATA: canonical_json(origin.to_json()).decode()})
    return Profile(origin, trimmed, weighted, hashlib.sha256(data).digest()), data


def file_name(digest: bytes) -> str:
    """Return what the file of a profile is called in a folder, by the SHA-256 of its bytes."""
    return digest.hex() + SUFFIX


def is_named(path: Path) -> bool:
    """Tell whether a file has the name of a digest, which `load` then compares."""
    return len(path.stem) == _DIGITS


def store(data: bytes, folder: Path) -> Path:
    """Write the bytes of a profile into a folder under their digest, whole or not at all; return the path."""
    path = folder / file_name(hashlib.sha256(data).digest())
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)
    return path


def load(path: Path, residency: Residency | None = None) -> Profile:
    """Read and check a profile.

    Args:
        path: of its file.
        residency: keeps its bases on devices; None: one of its own, without limits.

    Raises:
        Corrupt: the file is damaged, is not what its name says, or is no profile this release reads.
        OSError: the file cannot be read.
    """
    with _named(path):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        if is_named(path) and path.name != file_name(digest):
            raise BadChecksum(
                "profile", f"does not hold what its name says, but {digest.hex()}; copy it again"
            )
        origin = _origin(path)
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        streams = {stream.name: _stream(stream, tensors) for stream in origin.streams}
        weighted = take([stream.name for stream in origin.streams], tensors)
        if tensors:
            raise BadField("profile", f"tensor {min(tensors)} belongs to nothing")
        _check(origin, streams)
        check(origin.layers, origin.streams, weighted)
        return Profile(origin, streams, weighted, digest, residency or Residency())


def read_origin(path: Path) -> Origin:
    """Read only where a profile comes from; its tensors are not looked at.

    Raises:
        Corrupt: the file is no profile that this release reads.
        OSError: the file cannot be read.
    """
    with _named(path):
        return _origin(path)


def _origin(path: Path) -> Origin:
    with path.open("rb") as file:
        header = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if not 0 < header <= _MAX_HEADER:
        raise BadField("profile", f"its header claims {header} bytes; it is no profile")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    if _METADATA not in metadata:
        raise BadField("profile", "has no metadata of a profile")
    return Origin.from_json(json_object(metadata[_METADATA].encode()))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let faults of a profile say which file it is."""
    what = f"profile {path.name}"
    try:
        yield
    except SafetensorError as fault:
        raise Truncated(what, str(fault)) from None
    except Corrupt as fault:
        raise type(fault)(what, fault.why) from None


def _stream(stream: Stream, tensors: dict[str, Tensor]) -> StreamProfile:
    """Take the tensors of a stream out of `tensors`."""
    prefix = f"{_PLAIN}.{stream.name}."
    try:
        mean, basis, spectrum, total = (
            tensors.pop(prefix + n) for n in ("mean", "basis", "spectrum", "total")
        )
        plans = {
            int(name.removeprefix(prefix + "plan.")): Plan.from_tensor(tensors.pop(name))
            for name in sorted(tensors)
            if name.startswith(prefix + "plan.")
        }
        return StreamProfile(mean, basis, spectrum, float(total), plans)
    except KeyError as missing:
        raise BadField("profile", f"has no tensor {missing}") from None
    except (ValueError, RuntimeError) as fault:
        raise BadField("profile", f"stream {stream.name}: {fault}") from None


def _tensors(streams: Mapping[str, StreamProfile]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, stream in streams.items():
        prefix = f"{_PLAIN}.{name}."
        tensors[prefix + "mean"] = stream.mean
        tensors[prefix + "basis"] = stream.basis
        tensors[prefix + "spectrum"] = stream.spectrum
        tensors[prefix + "total"] = torch.tensor([stream.total])
        for ratio, plan in stream.plans.items():
            tensors[f"{prefix}plan.{ratio}"] = plan.to_tensor()
    return tensors


def _trim(stream: StreamProfile) -> StreamProfile:
    rank = max((plan.rank for plan in stream.plans.values()), default=0)
    return StreamProfile(
        mean=stream.mean.to("cpu", torch.float32).contiguous(),
        basis=stream.basis[:rank].to("cpu", torch.float16).contiguous(),
        spectrum=stream.spectrum[:rank].to("cpu", torch.float32).contiguous(),
        total=stream.total,
        plans=dict(sorted(stream.plans.items())),
    )


def _check(origin: Origin, streams: Mapping[str, StreamProfile]) -> None:
    """Raise `BadField` unless the content fits its origin and itself."""
    Curve.from_json(origin.curve)
    ratios = {tuple(sorted(stream.plans)) for stream in streams.values()}
    if len(ratios) != 1 or not all(next(iter(ratios))) or {s.name for s in origin.streams} != set(streams):
        raise BadField("profile", "its streams do not all have the same plans")
    for described in origin.streams:
        stream, p = streams[described.name], origin.layers * described.width
        rank = len(stream.spectrum)
        found = {
            "mean": (stream.mean, torch.float32, (p,)),
            "basis": (stream.basis, torch.float16, (rank, p)),
            "spectrum": (stream.spectrum, torch.float32, (rank,)),
        }
        for name, (tensor, dtype, shape) in found.items():
            where = f"{described.name}.{name}"
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise BadField("profile", f"{where} is {tensor.dtype} of shape {list(tensor.shape)}")
            if not torch.isfinite(tensor).all():
                raise BadField("profile", f"{where} holds NaN or infinity")
        if max(plan.rank for plan in stream.plans.values()) > rank:
            raise BadField("profile", f"a plan of {described.name} needs more than {rank} components")
        if not orthonormal(stream.basis):
            raise BadField("profile", f"the basis of {described.name} is not orthonormal")
