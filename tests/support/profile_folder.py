"""Profiles in a dict: what a folder of them does, for tests in which no model is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from kvtcd.core.errors import BadChecksum, UnknownProfile


class Draft:
    def __init__(self, folder: DictFolder, digest: bytes) -> None:
        self.folder, self.digest, self.content = folder, digest, bytearray()
        folder.drafts.append(self)

    def write(self, start, data) -> None:
        self.content[len(self.content) : start] = bytes(max(0, start - len(self.content)))
        self.content[start : start + len(data)] = data

    def finish(self) -> None:
        self.discard()
        if hashlib.sha256(self.content).digest() != self.digest:
            raise BadChecksum("profile", "is another")
        self.folder.contents[self.digest] = bytes(self.content)

    def discard(self) -> None:
        self.folder.drafts.remove(self)


@dataclass
class DictFolder:
    """Contents by digest, and what is being written."""

    contents: dict[bytes, bytes] = field(default_factory=dict)
    drafts: list[Draft] = field(default_factory=list)

    def _content(self, digest) -> bytes:
        if digest not in self.contents:
            raise UnknownProfile(digest)
        return self.contents[digest]

    def size(self, digest) -> int:
        return len(self._content(digest))

    def piece(self, digest, start, nbytes) -> bytes:
        found = self._content(digest)[start : start + nbytes]
        if len(found) != nbytes:
            raise UnknownProfile(digest)
        return found

    def draft(self, digest) -> Draft:
        return Draft(self, digest)
