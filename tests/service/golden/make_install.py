"""Make a golden installation: `PYTHONPATH=tests python tests/service/golden/make_install.py install-0.1.0`.

It has everything that a release leaves on a host: configuration, policies, tokens, a profile, and state
directories, plain and encrypted, with blocks of two namespaces; and the bytes that were served then. A
release adds one before it is made and keeps the others: `test_upgrade` starts on all of them.
"""

from __future__ import annotations

import gzip
import io
import socket
import sys
import tarfile
import tempfile
from pathlib import Path

from support.codec_world import DEFAULT, WEIGHTS, World, kv
from support.supervised import supervised

from kvtcd import config
from kvtcd.client import BlockHead, Client
from kvtcd.core.access import digest
from kvtcd.core.identity import Identity
from kvtcd.core.keys import EngineKey
from kvtcd.core.layout import Dtype
from kvtcd.lab.daemon import Daemon

WORLD = World(kv(Dtype.BF16, layers=2))
TOKENS = 40
BLOCKS = 2
TOKEN = "kvtcd_of-a-golden-installation-and-of-nothing-else"  # noqa: S105 - it opens nothing else
POLICIES = {
    "exact": '[match]\nnamespace = "exact*"\n\n[codec]\nname = "lossless"\n',
    "packed": '[codec]\nname = "kvtc2"\nratio = 12\nsinks = 4\nwindow = 8\n',
}


def identity(name: str) -> Identity:
    """Return the identity of a namespace."""
    model = {"packed": "synthetic", "exact": "synthetic-exact"}[name]
    return Identity(
        engine="test", hash_scheme="kvtcd-chain-v1", model=model, weights=WEIGHTS, layout=WORLD.layout,
        rope=DEFAULT, block_tokens=TOKENS,
    )  # fmt: skip


def key(number: int) -> EngineKey:
    """Return the key of a block."""
    return EngineKey(bytes([number]) * 32)


def block(number: int) -> bytes:
    """Return the raw bytes of a block."""
    return bytes(WORLD.block(TOKENS, seed=60 + number, first_token=TOKENS * number).numpy())


def prepare(folder: Path) -> None:
    """Write what an operator writes."""
    profile, data = WORLD.profile(ratios=(4, 8))
    (folder / "profiles").mkdir()
    (folder / "profiles" / f"{profile.digest.hex()}.safetensors").write_bytes(data)
    for name, text in POLICIES.items():
        (folder / f"{name}.toml").write_text(text)
    (folder / "tokens.toml").write_text(
        f'[[token]]\nsha256 = "{digest(TOKEN.encode()).hex()}"\ntenant = "team"\nscopes = ["data"]\n'
    )
    for name in ("plain", "encrypted"):
        said = config.Config.model_validate({
            "daemon": {"state": name, "socket": "kvtcd.sock", "stop_seconds": 20.0},
            "tcp": {"tokens": "tokens.toml"},
            "host": {"capacity": "8 MiB"},
            "disk": {"capacity": "64 MiB", "encrypt": name == "encrypted"},
            "codec": {"profiles": "profiles"},
            "policies": [f"{each}.toml" for each in POLICIES],
        })  # fmt: skip
        (folder / f"{name}.toml").write_text(config.dump(said))


def fill(folder: Path, name: str) -> None:
    """Run a daemon that stores blocks, and once more, to keep what it serves from its disk."""
    daemon = Daemon(folder, host=8 << 20, disk=64 << 20, profiles=folder / "profiles")
    daemon.config.write_text((folder / f"{name}.toml").read_text())
    for run in ("store", "serve"):
        with (
            socket.create_server(("127.0.0.1", 0)) as tcp,
            supervised(daemon, sockets=[("tcp", tcp)]) as running,
            Client(f"http://127.0.0.1:{tcp.getsockname()[1]}", token=TOKEN) as client,
        ):
            running.until("READY=1")
            for namespace in ("exact", "packed"):
                if run == "store":
                    info = client.register(namespace, identity(namespace))
                    assert info.codec.startswith({"exact": "lossless", "packed": "kvtc2"}[namespace]), info
                for n in range(BLOCKS):
                    if run == "store":
                        parent = key(n - 1) if n else None
                        head = BlockHead(key(n), TOKENS, first_token=TOKENS * n, parent=parent)
                        client.put(namespace, head, block(n), durable=True)
                    else:
                        keep(folder / "served" / f"{namespace}-{n}.raw", bytes(client.get(namespace, key(n))))
            assert running.stop() == 0
    for left in ("config.toml", "daemon.log", "notify"):
        (folder / left).unlink()


def keep(path: Path, served: bytes) -> None:
    """Note what came from disk: raw copies do not outlive a stop. Encryption makes no difference to it."""
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        assert path.read_bytes() == served
    elif path.name.startswith("packed"):
        path.write_bytes(served)
    else:
        assert served == block(int(path.stem.rpartition("-")[2]))


def pack(folder: Path) -> bytes:
    """Return the folder as a compressed archive that names nobody and no time."""

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, arcname=path.name, filter=anonymous)
    return gzip.compress(archive.getvalue(), mtime=0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        prepare(Path(made))
        for each in ("plain", "encrypted"):
            fill(Path(made), each)
        Path(__file__).with_name(f"{sys.argv[1]}.tar.gz").write_bytes(pack(Path(made)))
