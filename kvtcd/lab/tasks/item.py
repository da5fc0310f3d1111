"""What a task is made of, and what a model makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Turn:
    """What a model is given to `read`, and the text that is then `said`: its likelihood is measured."""

    read: str
    said: str = ""


@dataclass(frozen=True, slots=True)
class Item:
    """One problem. After each turn but the last, the whole cache is stored and comes back.

    Attributes:
        turns: at least two; what is said in the first is part of what is stored, and not measured.
        answers: what is right, for measures that compare.
        choices: of which the model takes the likeliest; each another first token.
        tokens: to generate at most behind what is read last; none when 0.
        stop: ends what is generated; nothing does when empty.
        test: program behind a generated one, that ends with an error unless it is right.
    """

    turns: tuple[Turn, ...]
    answers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    tokens: int = 0
    stop: str = "\n"
    test: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model makes of an item.

    Attributes:
        logprobs: natural log of the probability of each token that was said, first turn aside.
        greedy: whether each of them was the likeliest.
        choice: the likeliest of the choices; empty without any.
        text: generated greedily, without what stopped it.
    """

    logprobs: tuple[float, ...] = ()
    greedy: bool = False
    choice: str = ""
    text: str = ""


Measure = Callable[[Item, Reply], float]
"""A score, the higher the better."""


@dataclass(frozen=True, slots=True)
class Order:
    """How much of a task is wanted.

    Attributes:
        n: items.
        context: tokens of what is stored, where a task can choose.
        length: tokens of a text.
        data: folder of the data files; None where there is none.
    """

    n: int
    context: int
    length: Callable[[str], int]
    data: Path | None = None

    def spread(self, rows: Sequence[object]) -> list[int]:
        """Return indices of up to `n` rows, spread evenly over all."""
        count = min(self.n, len(rows))
        return [number * len(rows) // count for number in range(count)]


@dataclass(frozen=True, slots=True)
class Task:
    """A task: how its items are made, and how replies are measured.

    Attributes:
        name: on the command line.
        items: makes them.
        measures: by name.
        file: name of the data file it needs; None where it needs none.
        parameters: of the smallest model known to do better than a guess.
    """

    name: str
    items: Callable[[Order], list[Item]]
    measures: Mapping[str, Measure]
    file: str | None = None
    parameters: int = 0
