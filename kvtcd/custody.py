"""Which master key the tenants of a state directory are under, looked at without changing anything."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvtcd.core.errors import ConfigError, StoreFailed
from kvtcd.core.keys import TenantKeys, key_id
from kvtcd.engine.namespaces import TENANT_NAME
from kvtcd.tiers.disk import at_rest
from kvtcd.tiers.rekeying import Phase
from kvtcd.tiers.state import StateDirectory
from kvtcd.tiers.state_files import StateFiles


@dataclass(slots=True)
class Custody:
    """What was found, by the directories' names; one without a tenant's name holds nothing, and is left out.

    Attributes:
        fitting: tenants that are under the key.
        foreign: tenants that are under another.
        unreadable: why an environment cannot be read.
        damaged: why an environment would be mended, or set aside, at a start.
        set_aside: what of an environment was damaged earlier, and lies beside it.
    """

    fitting: dict[str, str] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    set_aside: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def notes(self, state: StateFiles) -> Iterator[str]:
        """Yield what a start would do about it."""
        for tag, why in self.unreadable.items():
            yield f"{state.tenant(tag)} cannot be read, and its tenant would be refused: {why}"
        for tag, why in self.damaged.items():
            yield f"{state.tenant(tag)} is damaged, and would be mended or set aside: {why}"
        for tag in self.set_aside:
            yield set_aside(state.tenant(tag), self.fitting.get(tag, "its tenant"))
        yield from map(left_alone, self.where(state, self.foreign))

    def where(self, state: StateFiles, tags: Mapping[str, str]) -> Iterator[str]:
        """Yield where tenants lie, how much that is, and whose it is."""
        return (described(state, tag, name) for tag, name in tags.items())


def survey(state: StateFiles, master: bytes) -> Custody:
    """Look at all environments; the caller sees to it that no process has them open."""
    found = Custody()
    for tag in in_use(state, master):
        try:
            with at_rest(state.tenant(tag)) as resting:
                name = resting.namespaces().get(TENANT_NAME, b"").decode(errors="replace")
                if resting.generation is None and resting.fault:
                    found.damaged[tag] = resting.fault
                if resting.set_aside:
                    found.set_aside[tag] = resting.set_aside
        except StoreFailed as error:
            found.unreadable[tag] = _cause(error)
            continue
        if name:
            fits = TenantKeys.derive(master, name).tag.hex() == tag
            (found.fitting if fits else found.foreign)[tag] = name
    return found


def in_use(state: StateFiles, master: bytes) -> list[str]:
    """Return the directories of tenants, but for those that a rekey has begun, or was to remove.

    Raises:
        ConfigError: they cannot be read.
    """
    begun = state.rekeying()
    others = begun.others(key_id(master).hex()) if begun else frozenset()
    return [tag for tag in state.tenants() if tag not in others]


def examine(state: StateFiles, master: bytes) -> tuple[str, ...]:
    """Return what is worth knowing of what is stored; refuse a key that nothing of it is under.

    Raises:
        ConfigError: it is another store's, or that of a rekey under which not all is whole; or not one tenant
            can be read, so that nobody can tell.
    """
    begun = unended(state, master)
    found = survey(state, master)
    require_fitting(state, found.fitting, found.foreign, found.unreadable)
    return (*begun, *found.notes(state))


def unended(state: StateFiles, master: bytes) -> tuple[str, ...]:
    """Return what is to be said of a rekey that was ended before its time, if there is one.

    Raises:
        ConfigError: under this key not all is whole.
    """
    begun = state.rekeying()
    if begun is None:
        return ()
    again = f"run `kvtcd rekey {state.path}` again, with the same options"
    if begun.whole_under(key_id(master).hex()):
        return (f"{begun.said}. This is the key that holds; {again}, to have it ended",)
    which = begun.which(key_id(master).hex())
    raise ConfigError(
        state.path, "", f"{begun.said}. The key that is there is {which}: put the other back, or {again}"
    )


def settle(state: StateDirectory, master: bytes) -> tuple[str, ...]:
    """Return what `unended` does; where all is whole under both keys of a rekey, from now on this one holds.

    What is stored from now on is under this one alone.

    Raises:
        ConfigError: as there.
    """
    said, begun = unended(state, master), state.rekeying()
    if begun and begun.phase is Phase.COPIED:
        holds = Phase.REMOVING if key_id(master).hex() == begun.new else Phase.COPYING
        state.note_rekeying(replace(begun, phase=holds))
    return said


def require_fitting(
    state: StateFiles, fitting: Collection[str], foreign: Collection[str], unreadable: Mapping[str, str]
) -> None:
    """Refuse a key that not one tenant which can be read is under: most likely a wrong one was put there.

    Args:
        state: where the tenants lie.
        fitting: those under the key.
        foreign: those under another.
        unreadable: why the others cannot be read.

    Raises:
        ConfigError: something is stored, and nothing of it fits.
    """
    if fitting or not (foreign or unreadable):
        return
    anew = f"remove {state.path / 'tenants'} to begin with an empty store. Nothing was removed"
    if foreign:
        also = f", and {len(unreadable)} cannot be read" if unreadable else ""
        why = f"all that is stored here ({len(foreign)} tenants) is under another master key than this one"
        raise ConfigError(state.path, "", f"{why}{also}; put that key back, or {anew}")
    why = (
        f"nothing that is stored here ({len(unreadable)} tenants) can be read, so nobody can tell whether it "
        f"is under this master key: "
        + ", ".join(f"{state.tenant(tag)} ({cause})" for tag, cause in unreadable.items())
    )
    mend = f"mend that (all there must belong to uid {os.geteuid()}: directories of mode 0700, files of 0600)"
    raise ConfigError(
        state.path, "", f"{why}. {mend}, or move it away; only if nothing of it is needed, {anew}"
    )


def unread(state: StateFiles, tags: Collection[str]) -> dict[str, str]:
    """Return why environments that a start has left out cannot be read; none of them is open."""
    found = dict.fromkeys(tags, "it could not be opened; the log says why")
    for tag in tags:
        try:
            with at_rest(state.tenant(tag)) as resting:
                resting.namespaces()
        except StoreFailed as error:
            found[tag] = _cause(error)
    return found


def _cause(error: StoreFailed) -> str:
    """Return what an operator is told: the error of the system, and the file."""
    return ": ".join(filter(None, (error.code, error.where)))


def described(state: StateFiles, tag: str, name: str = "") -> str:
    """Return where the environment of a tenant lies, how much that is, and whose it is, if that is known."""
    path = state.tenant(tag)
    return f"{path} ({_bytes(path) / 1e6:,.1f} MB)" + (f" of {name}" if name else "")


def set_aside(environment: Path, tenant: str = "its tenant") -> str:
    """Return what is said of what lies beside an environment, until somebody has seen to it."""
    return (
        f"{environment} has files (*.bad-*) that were set aside as damaged; purge {tenant}, or move them away"
    )


def left_alone(where: str) -> str:
    """Return what is said of a tenant under another key, who is otherwise taken for none."""
    return f"{where} is under another master key: it is left as it is, and may be removed"


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
