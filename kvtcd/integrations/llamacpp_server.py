"""What is asked of a running llama.cpp server: its slots as files, its tokens, what it is."""

from __future__ import annotations

import json
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtcd.core.errors import BadRequest, ServerError, Unavailable
from kvtcd.core.fields import Fields, json_object

_SECONDS = 600.0
"""A slot that answers somebody is saved when it is done."""
_FOLDER_OPTION = b"--slot-save-path"


@dataclass(frozen=True, slots=True)
class Props:
    """What a server says of itself: its build, the file of the model, tokens of a slot, and slots."""

    build: str
    model: Path
    n_ctx: int
    slots: int


class LlamaServer:
    """A server that was started with ``--slot-save-path``.

    Args:
        url: ``http://host:port``.
        folder: what it was given as ``--slot-save-path``, as this process sees it.

    The key of a server with ``--api-key`` is taken from ``$LLAMA_API_KEY``, as the server itself does.
    """

    def __init__(self, url: str, folder: Path) -> None:
        if not url.startswith(("http://", "https://")):
            raise BadRequest("server", f"{url!r} is not http://host:port")
        if not folder.is_dir():
            raise BadRequest("slots", f"{folder} is no folder; give that of the server's --slot-save-path")
        self._url, self._folder = url.rstrip("/"), folder

    def props(self) -> Props:
        """Return what the server is."""
        given = Fields(self._ask("/props"), "props")
        settings = Fields(given.value("default_generation_settings"), "default_generation_settings")
        return Props(
            given.text("build_info"), Path(given.text("model_path")), settings.integer("n_ctx", 1, 1 << 31),
            given.integer("total_slots", 1, 1 << 31),
        )  # fmt: skip

    @contextmanager
    def saved(self, slot: int) -> Iterator[Path]:
        """Have a slot written to a file, which is gone at the end of the block.

        Raises:
            Unavailable: the file is not in the folder.
        """
        with self.file() as path:
            self._ask(f"/slots/{slot}?action=save", {"filename": path.name})
            if not path.is_file():
                gone = _removed_elsewhere(path.name)
                left = "" if gone else f", and remove {path.name} there"
                why = f"the server has saved slot {slot}, but not in {self._folder}"
                raise Unavailable(f"{why}; give its --slot-save-path{left}")
            yield path

    @contextmanager
    def file(self) -> Iterator[Path]:
        """Yield a path for a slot file, which is gone at the end of the block."""
        path = self._folder / f"kvtcd-{secrets.token_hex(8)}.bin"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def restore(self, slot: int, path: Path) -> int:
        """Have a slot read from a file; return how many tokens it then has."""
        answer = self._ask(f"/slots/{slot}?action=restore", {"filename": path.name})
        return Fields(answer, "answer").integer("n_restored", 0, 1 << 31)

    def evaluate_one(self, slot: int) -> None:
        """Have a slot read one token, in place of what it has."""
        self._ask("/completion", {"prompt": [0], "n_predict": 0, "id_slot": slot, "cache_prompt": False})

    def tokenize(self, text: str) -> list[int]:
        """Return a text's tokens as the server reads it as a prompt."""
        body = {"content": text, "add_special": True, "parse_special": True}
        return Fields(self._ask("/tokenize", body), "answer").integers("tokens", 0, (1 << 32) - 1)

    def prompt_of(self, messages: Sequence[object]) -> str:
        """Return the prompt that the server makes of a conversation."""
        return Fields(self._ask("/apply-template", {"messages": messages}), "answer").text("prompt")

    def _ask(self, path: str, body: object = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("LLAMA_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)  # noqa: S310 - http or https, see above
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as response:  # noqa: S310 - the same
                return json_object(response.read())
        except urllib.error.HTTPError as error:
            with error:
                raise ServerError(error.code, "llama.cpp", _said(error.read())) from None
        except OSError as error:
            raise Unavailable(f"no llama.cpp server answers on {self._url}: {error}") from None


def _removed_elsewhere(name: str) -> bool:
    """Remove a file from the slot folder of whichever server of this host has it; tell whether one had.

    No server says where its folder is, nor whether it is a certain one before it has saved something there;
    the command lines of this host's processes do, as far as this user may see them.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = process.joinpath("cmdline").read_bytes().split(b"\0")
            folder = (
                os.fsdecode(words[words.index(_FOLDER_OPTION) + 1]) if _FOLDER_OPTION in words[:-1] else ""
            )
            root = process / ("root" if folder.startswith("/") else "cwd")
            if folder:
                root.joinpath(folder.lstrip("/"), name).unlink()
                return True
    return False


def _said(body: bytes) -> str:
    """Return the message of an error."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
