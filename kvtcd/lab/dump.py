"""Caches of documents in a file, for tests of codecs without a model: what a model has made, or an engine.

A safetensors file. For the n-th document, from 0 without a gap, ``n.k`` and ``n.v`` are ``[T, L, H, D]`` of
any float type, keys as in the cache, after RoPE at positions from 0; ``n.q``, which `ablate` needs, are
queries of later tokens, after RoPE too, ``[Q, L, G H, D]`` with the G query heads of a KV head side by side.
T and Q may differ from document to document, all else may not. Metadata have one key, ``kvtcd``: JSON with

======================= ==============================================================================
``model``               a name for people
``rope``                as profiles have it; null where keys are not rotated
``weights``             digest of the weight files (`client.weights.weights_digest`), which `validate`
                        compares with the profile's; null or absent where it is not known
``adapter``             digest of the LoRA files; ``none``, or absent, without
``texts``               what the documents were cut from, ``{"name", "sha256", "runs"}`` each; may be
                        absent. ``runs`` are digests of some runs of its words (`lab.runs`), by which
                        `validate` notices parts of calibration texts; absent in dumps of older versions
======================= ==============================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvtcd import outputs
from kvtcd.codec.origin import Text
from kvtcd.codec.rope import Rotation
from kvtcd.core.errors import BadField, BadIdentity, BadRequest, ConfigError
from kvtcd.core.fields import Fields, json_object
from kvtcd.core.identity import Rope
from kvtcd.core.layout import canonical_json

_METADATA = "kvtcd"
_NAME = re.compile(r"(0|[1-9][0-9]*)\.([kvq])")
_NAMED = "tensors are named 0.k, 0.v, 0.q, 1.k and so on"
_FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
_AXES = ("layers", "heads", "head dimension")
SINKS = 4
"""First tokens of a document, which nothing is measured on: stored as they are, and unlike all others."""


@dataclass(frozen=True, slots=True)
class Source(Text):
    """What documents were cut from; of `runs` there are none where they are not known."""

    runs: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Document:
    """The cache of one document; shapes as in the module. Without queries `queries` is None."""

    keys: Tensor
    values: Tensor
    queries: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Dump:
    """Caches of documents of one model; what is known of that as in the module."""

    model: str
    rope: Rope | None
    documents: tuple[Document, ...]
    weights: str | None = None
    adapter: str = "none"
    texts: tuple[Source, ...] = ()

    def unrotated(self, document: Document) -> Tensor:
        """Return the keys of a document with RoPE undone, float32 ``[T, L, H, D]``."""
        keys = document.keys.to(torch.float32).transpose(0, 1).contiguous()
        if self.rope:
            keys = Rotation(self.rope, 0, keys.shape[1], inverse=True)(keys)
        return keys.transpose(0, 1)


def write(path: Path, dump: Dump) -> None:
    """Write a file.

    Raises:
        ConfigError: it cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for number, document in enumerate(dump.documents):
        parts = {"k": document.keys, "v": document.values, "q": document.queries}
        tensors |= {f"{number}.{name}": part.contiguous() for name, part in parts.items() if part is not None}
    about = {
        "adapter": dump.adapter,
        "model": dump.model,
        "rope": dump.rope.to_json() if dump.rope else None,
        "texts": [{"name": text.name, "sha256": text.sha256, "runs": list(text.runs)} for text in dump.texts],
        "weights": dump.weights,
    }
    try:
        with outputs.replacing(path) as part:
            save_file(tensors, part, {_METADATA: canonical_json(about).decode()})
    except SafetensorError as error:
        raise ConfigError(path, "", f"cannot be written: {error}") from None


def load(path: Path) -> Dump:
    """Read a file and check it.

    Raises:
        ConfigError: it cannot be read, or is no dump: a document or a tensor is missing, of another shape
            than the others, or holds NaN or infinity.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = json_object((file.metadata() or {})[_METADATA].encode())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        known = _known(about)
    except KeyError:
        raise ConfigError(path, "", "is no dump of caches: its metadata have no kvtcd") from None
    except (OSError, SafetensorError, ValueError, BadField, BadIdentity, BadRequest) as fault:
        raise ConfigError(path, "", f"is no dump of caches: {fault}") from None
    try:
        documents = tuple(_documents(tensors))
        for number, document in enumerate(documents):
            _check(number, document, documents[0], known.rope)
    except BadRequest as fault:
        raise ConfigError(path, fault.field, fault.why) from None
    return Dump(known.model, known.rope, documents, known.weights, known.adapter, known.texts)


def _known(about: Mapping[str, object]) -> Dump:
    """Return what metadata say, without documents."""
    fields = Fields(about, _METADATA)
    rope = fields.value("rope")
    texts = [Fields(text, "texts") for text in fields.items("texts")] if "texts" in fields else []
    return Dump(
        model=fields.optional_text("model") or "",
        rope=None if rope is None else Rope.from_json(rope),
        documents=(),
        weights=fields.optional_text("weights"),
        adapter=fields.optional_text("adapter") or "none",
        texts=tuple(Source(text.text("name"), text.text("sha256"), _runs(text)) for text in texts),
    )


def _runs(text: Fields) -> tuple[str, ...]:
    found = text.value("runs") if "runs" in text else []
    if not isinstance(found, list) or not all(isinstance(run, str) for run in found):
        raise BadRequest("texts", "runs are not a list of strings")
    return tuple(found)


def _documents(tensors: Mapping[str, Tensor]) -> Iterable[Document]:
    """Put tensors together.

    Raises:
        BadRequest: one is missing, or is none of a dump.
    """
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if not (named := _NAME.fullmatch(name)):
            raise BadRequest(name, f"is no tensor of a dump: {_NAMED}")
        found.setdefault(int(named[1]), {})[named[2]] = tensor
    if not found:
        raise BadRequest("0.k", f"is missing, there are no documents: {_NAMED}")
    for number in range(max(found) + 1):
        if number not in found:
            raise BadRequest(
                f"{number}.k",
                f"is missing, but there is a document {max(found)}: they are numbered from 0 without a gap",
            )
        for part in "kv":
            if part not in found[number]:
                raise BadRequest(f"{number}.{part}", f"is missing: {_NAMED}")
        own = found[number]
        yield Document(own["k"], own["v"], own.get("q"))


def _check(number: int, document: Document, first: Document, rope: Rope | None) -> None:
    """Compare a document with the first.

    Raises:
        BadRequest: a tensor is not as it should be.
    """
    keys = document.keys
    for part, tensor in (("k", keys), ("v", document.values), ("q", document.queries)):
        if tensor is None:
            continue
        where, shape = f"{number}.{part}", list(tensor.shape)
        if tensor.dim() != 4 or 0 in shape or tensor.dtype not in _FLOATS:
            raise BadRequest(where, f"is {tensor.dtype} of shape {shape}, not floats [T, L, H, D]")
        if part == "v" and shape != list(keys.shape):
            raise BadRequest(where, f"is of shape {shape}, its keys are of {list(keys.shape)}")
        _compare(where, tensor, first.keys, queries=part == "q")
        if not (finite := torch.isfinite(tensor)).all():
            token, layer, head, _ = torch.nonzero(~finite)[0].tolist()
            raise BadRequest(
                where,
                f"holds NaN or infinity ({int((~finite).sum())} values), first at token {token}, layer "
                f"{layer}, head {head}: caches that are so cannot be judged; leave the document out",
            )
    if rope and rope.rotary_dim > keys.shape[3]:
        raise BadRequest(
            f"{number}.k", f"has {keys.shape[3]} dimensions of a head, RoPE rotates {rope.rotary_dim}"
        )


def _compare(where: str, tensor: Tensor, keys: Tensor, *, queries: bool) -> None:
    """Compare layers, heads and dimension of a head with those of the first document's keys."""
    own, want = tensor.shape[1:], keys.shape[1:]
    for axis, (have, other) in zip(_AXES, zip(own, want, strict=True), strict=True):
        if queries and axis == "heads":
            if have % other:
                raise BadRequest(where, f"has {have} query heads, no multiple of the {other} heads of 0.k")
        elif have != other:
            raise BadRequest(where, f"has {have} {axis}, 0.k has {other}: a dump is of one model")
