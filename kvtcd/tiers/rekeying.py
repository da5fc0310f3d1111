"""A change of the master key that has not ended: which step it was in, and so which key all is whole under.

``state/rekey`` is written before a step begins and gone when the last one has ended, each time by one rename,
so that whoever finds it after a kill or a power loss knows what holds.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from kvtcd.core.errors import ConfigError
from kvtcd.tiers import durable

FILE = "rekey"


class Phase(StrEnum):
    """A step; until the next one begins, everything that is stored can be read under the keys that are named.

    Attributes:
        COPYING: under the old key alone. Records are written anew beside the old ones.
        COPIED: under either. The new key takes the place of the old one.
        REMOVING: under the new key alone. The old records go.
    """

    COPYING = "copying"
    COPIED = "copied"
    REMOVING = "removing"


@dataclass(frozen=True, slots=True)
class Rekeying:
    """What the file says.

    Attributes:
        phase: the step.
        old, new: names of the two keys (`core.keys.key_id`), hex.
        tenants: directories of the tenants, old name to new name.
        moved, damaged: records that were written anew, and that could not be, once all are copied.
    """

    phase: Phase
    old: str
    new: str
    tenants: dict[str, str]
    moved: int = 0
    damaged: int = 0

    def whole_under(self, key: str) -> bool:
        """Tell whether everything can be read under the key of this name."""
        return (
            key
            in {
                Phase.COPYING: {self.old},
                Phase.COPIED: {self.old, self.new},
                Phase.REMOVING: {self.new},
            }[self.phase]
        )

    def others(self, key: str) -> frozenset[str]:
        """Return the directories that are of no use to who has the key of this name."""
        return frozenset(self.tenants if key == self.new else self.tenants.values())

    def which(self, key: str) -> str:
        """Return which of the two keys one of this name is."""
        return {self.old: "the old one", self.new: "the new one"}.get(key, "neither of them")

    @property
    def said(self) -> str:
        """What has happened, and what holds."""
        ended, whole = {
            Phase.COPYING: ("while it copied", f"the old one ({self.old}), and not under the new"),
            Phase.COPIED: ("when all was copied", f"the old one ({self.old}), and under the new"),
            Phase.REMOVING: (
                "while it removed what was under the old master key",
                f"the new one ({self.new}), and no more under the old",
            ),
        }[self.phase]
        other = self.old if self.phase is Phase.REMOVING else self.new
        return f"a rekey was ended {ended}: of its two keys all is whole under {whole} ({other})"


def read(state: Path) -> Rekeying | None:
    """Return what a state directory says, None if no change of its key is under way.

    Raises:
        ConfigError: the file cannot be read, or is not what was written.
    """
    file = state / FILE
    try:
        said = json.loads(file.read_bytes())
        tenants = {str(old): str(new) for old, new in said["tenants"].items()}
        moved, damaged = int(said["moved"]), int(said["damaged"])
        return Rekeying(Phase(said["phase"]), str(said["old"]), str(said["new"]), tenants, moved, damaged)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(file, "", f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = "is not what `kvtcd rekey` writes; restore it, or move it away once you know which key holds"
        raise ConfigError(file, "", f"{why} (`kvtcd inspect --key FILE`)") from error


def write(state: Path, said: Rekeying | None) -> None:
    """Have a state directory say this from now on, durably; None: that nothing is under way."""
    file = state / FILE
    if said is None:
        durable.remove_file(file)
    else:
        durable.write_file(file, json.dumps(asdict(said)).encode())
