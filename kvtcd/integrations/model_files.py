"""The model behind an engine's pages: what an operator says of it, and digests of its files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtcd.client.weights import adapter_digest, weights_digest
from kvtcd.core.errors import BadRequest
from kvtcd.core.layout import canonical_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator says of the model.

    Attributes:
        folder: of the model: weight files and config.json.
        adapters: folders of all adapters (LoRA) that are served.
        variant: names every argument that changes what the cache holds and is in no file: overrides of the
            configuration, quantisation at start, an encoding of the cache.
        full_digest: read every byte of the weights instead of headers and sampled pages.
    """

    folder: Path
    adapters: tuple[Path, ...] = ()
    variant: str = ""
    full_digest: bool = False

    @classmethod
    def of(
        cls, served: str, *, weights: str | None, adapters: Sequence[str], variant: str, full_digest: bool
    ) -> Settings:
        """Read an engine's JSON; `served` is the model as the engine was told.

        Raises:
            BadRequest: no folder to take the weights from, or adapters that are no list of folders.
        """
        folder = Path(weights or served)
        if not folder.is_dir():
            raise BadRequest(
                "weights", f"{folder} is no folder; name the one that holds the model's weight files"
            )
        if isinstance(adapters, str) or not all(Path(adapter).is_dir() for adapter in adapters):
            raise BadRequest(
                "adapters", f"{adapters!r} is not a list of folders with an adapter's files each"
            )
        return cls(
            folder=folder,
            adapters=tuple(Path(adapter) for adapter in adapters),
            variant=variant,
            full_digest=full_digest,
        )

    @property
    def name(self) -> str:
        """A name of the model for people."""
        name = "".join(c if c.isascii() and c.isprintable() else "-" for c in self.folder.resolve().name)
        return name.strip()[:64] or "model"

    def weights_digest(self) -> str:
        """Return the digest of the weight files.

        Raises:
            Unavailable: one is missing or cannot be read.
            Corrupt: one is no credible weight file.
        """
        return weights_digest(self.folder, full=self.full_digest)


def settings_digest(folder: Path, variant: str) -> str:
    """Return 32 hex digits for what is set beside the weights: the model's config.json, and `variant`.

    A RoPE that is scaled otherwise, in config.json or by an argument named in `variant`, is another cache.
    """
    file = folder / "config.json"
    config = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "none"
    return hashlib.sha256(canonical_json({"config": config, "variant": variant})).hexdigest()[:32]


def adapters_digest(folders: Sequence[Path]) -> str:
    """Return the digest of adapters (LoRA): their paths, which vLLM hashes into its keys, and their bytes.

    Raises:
        Unavailable: a folder without files, or one that cannot be read.
    """
    if not folders:
        return "none"
    pairs = sorted((str(folder), adapter_digest(_files(folder))) for folder in folders)
    return hashlib.sha256(canonical_json(pairs)).hexdigest()


class FileWatch:
    """Notes when files change under a running engine: nobody can tell then what its cache was computed with.

    Args:
        what: whose files these are, for people.
        folders: that hold them.
    """

    def __init__(self, what: str, folders: Sequence[Path]) -> None:
        self._what, self._folders = what, folders
        self._stamp = self._look()

    def __call__(self) -> str:
        """Return what is wrong, if anything: cheap enough to be asked before every transfer."""
        return "" if self._look() == self._stamp else f"files of {self._what} have changed under the engine"

    def _look(self) -> tuple[object, ...]:
        try:
            status = [(str(file), file.stat()) for folder in self._folders for file in _files(folder)]
        except OSError:
            return ("gone",)
        return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in status)


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*") if file.is_file())
