"""What config.toml says that a restart would bring into effect."""

from __future__ import annotations

import pytest

from kvtcd import config
from kvtcd.core.errors import ConfigError


def test_what_a_file_says_otherwise_is_named_and_nothing_else(tmp_path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[host]\ncapacity = "1 GiB"\n[tcp]\ntokens = "t.toml"\n')
    held = config.load(path)
    assert config.changed(held, path) == ()
    path.write_text(
        'policies = ["p.toml"]\n[host]\ncapacity = "2 GiB"\n[tcp]\ntokens = "./t.toml"\n'
        "[limits]\nregions = 1\n"
    )
    assert set(config.changed(held, path)) == {"policies", "host.capacity", "limits.regions"}
    path.write_text("nonsense")
    with pytest.raises(ConfigError):
        config.changed(held, path)
    assert config.changed(held, None) == ()
