"""What a store lacks of the blocks that are to be written there, by as few questions as will do."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvtcd.core.remote.presence import Presence
from kvtcd.engine.remote.caller import Caller


class Questions:
    """Asks a store for names, where the answer is not known.

    What continues a block that was missing is of no use there without it, so nobody looks for it, and as a
    rule nobody has stored it: it is taken to be missing, too. Else it is written twice, which does no harm.

    Args:
        caller: of the store.
        presence: what is known.
        lacked: told of what was missing a moment ago. It may be there by now: it was to be written.
    """

    def __init__(self, caller: Caller, presence: Presence, lacked: Presence) -> None:
        self._caller, self._presence, self._lacked = caller, presence, lacked

    async def answered(
        self, names: Collection[str], follows: Mapping[str, str]
    ) -> dict[str, bool | Exception]:
        """Tell of each name whether the store has a value under it, or why nobody can say.

        Args:
            names: of records; what comes first is asked for first.
            follows: the name of the block that a block continues, which need not be among them.

        Raises:
            RemoteFailed: the store cannot be asked.
        """
        known: dict[str, bool | Exception] = {}

        def learn(name: str, *, there: bool | Exception | None) -> None:
            if there is not None:
                known[name] = there
            if there is False:
                self._lacked.note(name, there=False)

        for name in names:
            learn(name, there=self._presence.ask(name))
        for further in (False, True):
            for name in names:
                if name not in known and name in follows:
                    learn(name, there=self._lacked.ask(follows[name]))
            asked = [
                name for name in names if name not in known and (further or follows.get(name) not in names)
            ]
            if asked:
                for name, there in zip(asked, await self._caller.exists(asked), strict=True):
                    learn(name, there=there)
        return known
