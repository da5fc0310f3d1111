"""The command line: how it ends."""

from __future__ import annotations

import pytest

from kvtcd import cli
from kvtcd.core.errors import (
    AlreadyRunning,
    Busy,
    ConfigError,
    DeviceLost,
    Unavailable,
    UnsupportedCache,
    UnsupportedModel,
    UnsupportedRope,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Busy("the disk"), 1),
        (ConfigError("config.toml", "host.capacity", "is no size"), 2),
        (UnsupportedCache("sliding windows"), 2),
        (UnsupportedModel("gradients"), 2),
        (UnsupportedRope("longrope", ("default",)), 2),
        (Unavailable("no wheel"), 69),
        (DeviceLost("cuda:0", "an illegal memory access"), 70),
        (AlreadyRunning("/var/lib/kvtcd"), 75),
    ],
)
def test_an_error_of_ours_is_a_line_and_a_code(error, code, monkeypatch, capsys) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as end:
        cli.main()

    assert end.value.code == code
    assert capsys.readouterr().err == f"kvtcd: {error}\n"


@pytest.mark.parametrize("arguments", [["serve", "--nonsense"], ["nonsense"]])
def test_wrong_usage_is_2(arguments, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["kvtcd", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()

    assert end.value.code == 2
