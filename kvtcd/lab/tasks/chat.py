"""Conversations of several turns: each turn is packed once it is over, and the next one is read behind it."""

from __future__ import annotations

import re

from kvtcd.lab.tasks.files import read_rows
from kvtcd.lab.tasks.item import Item, Order, Task, Turn
from kvtcd.lab.tasks.score import likelihood

FILE = "oasst1_multiturn_en.jsonl"
_HUMAN, _ASSISTANT = "### Human:", "### Assistant:"


def _chats(order: Order) -> list[Item]:
    """Replies behind all turns before, of the third of the file that no recipe text is from.

    What a person said in a reply's place is part of the cache from the next turn on. A conversation ends when
    it is twice as long as ordered.
    """
    assert order.data, "only asked where there is a folder"
    rows = read_rows(order.data / FILE, "input", "output")
    rows = rows[2 * len(rows) // 3 :]
    chats = [turns for row in rows if len(turns := _cut(order, _turns(row["input"], row["output"]))) > 1]
    return [Item(chats[n]) for n in order.spread(chats)]


def _turns(given: str, reply: str) -> list[Turn]:
    """Read ``### Human: … ### Assistant: …``, the last reply apart."""
    whole = f"{given.rstrip()} {reply.strip()}"
    found = re.findall(f"{_HUMAN} (.*?)\\s*{_ASSISTANT} (.*?)\\s*(?={_HUMAN}|$)", whole, re.DOTALL)
    return [
        Turn(f"{' ' if number else ''}{_HUMAN} {asked} {_ASSISTANT}", f" {said}")
        for number, (asked, said) in enumerate(found)
    ]


def _cut(order: Order, turns: list[Turn]) -> tuple[Turn, ...]:
    kept, room = [], 2 * order.context
    for turn in turns:
        room -= order.length(turn.read) + order.length(turn.said)
        if room < 0 or not turn.said.strip():
            break
        kept.append(turn)
    return tuple(kept)


CHAT = Task("chat", _chats, {"loglik": likelihood}, FILE)
