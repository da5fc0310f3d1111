"""Which master key the tenants of a state directory are under, looked at without changing anything."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvtcd.core.errors import ConfigError, StoreFailed
from kvtcd.core.keys import TenantKeys
from kvtcd.engine.namespaces import TENANT_NAME
from kvtcd.tiers.disk import at_rest
from kvtcd.tiers.state_files import StateFiles


@dataclass(slots=True)
class Custody:
    """What was found, by the directories' names; one without a tenant's name holds nothing, and is left out.

    Attributes:
        fitting: tenants that are under the key.
        foreign: tenants that are under another.
        unreadable: why an environment cannot be read.
        damaged: why an environment would be mended, or set aside, at a start.
    """

    fitting: dict[str, str] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)

    def notes(self, state: StateFiles) -> Iterator[str]:
        """Yield what a start would do about it."""
        for tag, why in self.unreadable.items():
            yield f"{state.tenant(tag)} cannot be read, and its tenant would be refused: {why}"
        for tag, why in self.damaged.items():
            yield f"{state.tenant(tag)} is damaged, and would be mended or set aside: {why}"
        for tag, name in self.foreign.items():
            where = f"{described(state, tag)} of {name}"
            yield f"{where} is under another master key: it is left as it is, and may be removed"


def survey(state: StateFiles, master: bytes) -> Custody:
    """Look at all environments; the caller sees to it that no process has them open."""
    found = Custody()
    for tag in state.tenants():
        try:
            with at_rest(state.tenant(tag)) as resting:
                name = resting.namespaces().get(TENANT_NAME, b"").decode(errors="replace")
                if resting.generation is None and resting.fault:
                    found.damaged[tag] = resting.fault
        except StoreFailed as error:
            found.unreadable[tag] = error.code
            continue
        if name:
            fits = TenantKeys.derive(master, name).tag.hex() == tag
            (found.fitting if fits else found.foreign)[tag] = name
    return found


def examine(state: StateFiles, master: bytes) -> tuple[str, ...]:
    """Return what is worth knowing of what is stored; refuse a key that nothing of it is under.

    Raises:
        ConfigError: it is another store's.
    """
    found = survey(state, master)
    if found.foreign and not found.fitting:
        raise refusal(state, found.foreign)
    return tuple(found.notes(state))


def refusal(state: StateFiles, foreign: Collection[str]) -> ConfigError:
    """Return what is said where not one tenant is under the key: most likely a wrong one was put there."""
    why = (
        f"all that is stored here ({len(foreign)} tenants) is under another master key than this one; put "
        f"that key back, or remove {state.path / 'tenants'} to begin with an empty store. Nothing was removed"
    )
    return ConfigError(state.path, "", why)


def described(state: StateFiles, tag: str) -> str:
    """Return where the environment of a tenant lies, and how much that is."""
    path = state.tenant(tag)
    return f"{path} ({_bytes(path) / 1e6:,.1f} MB)"


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
