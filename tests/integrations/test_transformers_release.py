"""A transformers that would leave out the cache it is given is refused before it can."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from kvtcd.client import Client
from kvtcd.core.errors import Unavailable
from kvtcd.integrations import transformers_release
from kvtcd.integrations.transformers_cache import PrefixCache
from kvtcd.integrations.transformers_prefill import prefill
from kvtcd.integrations.transformers_release import MINIMUM, require_release

ROOT = Path(transformers_release.__file__).parents[2]


def installed(monkeypatch, release: str | None) -> None:
    def version(name: str) -> str:
        assert name == "transformers"
        if release is None:
            raise PackageNotFoundError(name)
        return release

    monkeypatch.setattr(transformers_release, "version", version)


@pytest.mark.parametrize(
    "release", ["5.19.0", "5.9.1", "4.57.3", "5.24.0", "5.24.0.dev0", "5.30.2", "6.0", None]
)
def test_releases_that_know_no_cache_are_refused(monkeypatch, release, tmp_path):
    installed(monkeypatch, release)
    if release in {"5.24.0", "5.24.0.dev0", "5.30.2", "6.0"}:
        require_release()
        return
    said = rf"transformers 5\.24 or later is needed, {release or 'none'} is installed: pip install"
    with Client(tmp_path / "no.sock") as client, pytest.raises(Unavailable, match=said):
        PrefixCache(client, object())
    with pytest.raises(Unavailable, match=said):
        prefill(None, object(), [1, 2])


def test_the_release_that_is_needed_is_the_same_wherever_it_is_said():
    needed = ".".join(map(str, MINIMUM))
    told = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    (ours,) = [
        one for one in told["project"]["optional-dependencies"]["demo"] if one.startswith("transformers")
    ]
    assert ours == f"transformers>={needed},<6"
    for readme in ("README.md", "kvtcd/integrations/README.md"):
        assert f"transformers {needed} or later" in (ROOT / readme).read_text("utf-8"), readme
