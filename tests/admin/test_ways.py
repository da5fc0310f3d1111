"""Whether the doctor tries TCP as its clients would: with a token or without, encrypted or not."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.authority import Authority
from support.ports import free_port

from kvtcd import cli
from kvtcd.admin.findings import Finding
from kvtcd.admin.ways import by_tcp
from kvtcd.config.daemon import Tcp
from kvtcd.core.access import digest, new_token
from kvtcd.lab.daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = new_token()


@contextmanager
def listening(host: str, **settings: object) -> Iterator[tuple[Daemon, Tcp]]:
    """A daemon that listens by TCP too, for who has `SECRET`, and how it was told to."""
    with tempfile.TemporaryDirectory(prefix="kvtcd-") as name:
        folder = Path(name)
        tokens = folder / "tokens.toml"
        entry = f'sha256 = "{digest(SECRET.encode()).hex()}"\ntenant = "one"\nscopes = ["data"]\n'
        tokens.write_text(f"[[token]]\n{entry}")
        tokens.chmod(0o600)
        tcp = Tcp(listen=f"{host}:{free_port()}", tokens=tokens, **settings)
        with Daemon(folder, host=64 << 20, disk=0, profiles=folder, tcp=tcp) as daemon:
            yield daemon, tcp


def test_tcp_is_tried_with_the_token_that_is_given(monkeypatch, tmp_path) -> None:
    with listening("127.0.0.1") as (daemon, tcp):
        for given, said in (("", "none is given"), (new_token(), "the one in KVTCD_TOKEN is none of its")):
            monkeypatch.setenv("KVTCD_TOKEN", given)
            found = by_tcp(tcp)
            assert (found.what, found.state) == ("by TCP", "note")
            assert f"http://{tcp.listen} answers, and asks for a token: {said}" in found.said

        monkeypatch.setenv("KVTCD_TOKEN", SECRET)
        monkeypatch.setattr(
            sys, "argv", ["kvtcd", "doctor", "-c", str(daemon.config), "--json", str(tmp_path / "found.json")]
        )
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        rows = {row["what"]: row for row in json.loads((tmp_path / "found.json").read_text())["findings"]}
        assert rows["by http"]["state"] == rows["by TCP"]["state"] == "ok"
        assert "GB/s" in rows["by TCP"]["said"]
        with daemon.client() as client:
            assert client.namespaces() == ()
    assert by_tcp(tcp).state == "wrong", "nobody listens any more"
    assert by_tcp(Tcp()) == Finding("by TCP", "ok", "not configured: [tcp] listen is empty")


def test_tls_is_tried_by_a_client_that_checks_the_certificate(monkeypatch, tmp_path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("127.0.0.1", "cache.example")
    monkeypatch.setenv("KVTCD_TOKEN", SECRET)
    with listening("0.0.0.0", certificate=str(certificate), key=str(key)) as (_, tcp):  # noqa: S104 - with TLS
        stranger = by_tcp(tcp)
        assert stranger.state == "wrong"
        assert "KVTCD_CA" in stranger.said
        monkeypatch.setenv("KVTCD_CA", str(authority.root))
        known = by_tcp(tcp)
        assert (known.state, "GB/s" in known.said) == ("ok", True), known.said
