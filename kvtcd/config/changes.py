"""What a configuration file says now that is not in effect until a restart."""

from __future__ import annotations

from pathlib import Path

from kvtcd.config.daemon import Config, load
from kvtcd.config.values import Table


def changed(config: Config, path: Path | None) -> tuple[str, ...]:
    """Return the settings, such as ``host.capacity``, that a file says otherwise now.

    Args:
        config: what is in effect.
        path: the file that it was read from; None: it was none.

    Raises:
        ConfigError: the file is wrong now.
    """
    if path is None:
        return ()
    now, found = load(path), []
    for section in Config.model_fields:
        held, said = getattr(config, section), getattr(now, section)
        if isinstance(held, Table):
            names = type(held).model_fields
            found += [f"{section}.{name}" for name in names if getattr(held, name) != getattr(said, name)]
        elif held != said:
            found.append(section)
    return tuple(found)
