"""Tasks that are made up, the same ones every time: needles of several kinds in filler of any length."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator
from importlib.resources import files
from itertools import cycle, islice, pairwise

from kvtcd.lab.tasks.item import Item, Order, Task, Turn
from kvtcd.lab.tasks.score import greedy, likelihood, recall

_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_HOPS = 4
_COMMON = 10
_TIMES = 10
"""How much more often a common word stands in a list than another."""
_VARIABLES_TOKENS = 40
_WORDS_TOKENS = 60


def _passkey(order: Order) -> list[Item]:
    """A number somewhere in articles, from their beginning to their end (Mohtashami and Jaggi 2023)."""
    items = []
    for number in range(order.n):
        key = str(_draw(number).randrange(10_000, 100_000))
        needle = f"The pass key is {key}. Remember it. {key} is the pass key."
        sentences = _until(order, _sentences(), needle)
        sentences.insert(number * (len(sentences) + 1) // order.n, needle)
        asked = Turn(" What is the pass key? The pass key is", f" {key}")
        items.append(Item((Turn(" ".join(sentences)), asked)))
    return items


def _variables(order: Order) -> list[Item]:
    """All variables that a chain of assignments gives one value (RULER, Hsieh et al. 2024)."""
    items = []
    for number in range(order.n):
        draw = _draw(number)
        names = ["".join(draw.choices(string.ascii_uppercase, k=5)) for _ in range(_HOPS + 1)]
        value = str(draw.randrange(10_000, 100_000))
        chain = [f"VAR {name} = {of}." for name, of in _assignments(names, value)]
        lines = _until(order, cycle([_FILLER]), " ".join(chain))
        places = sorted(draw.sample(range(len(lines) + _HOPS + 1), _HOPS + 1))
        for place, assignment in zip(places, chain, strict=True):
            lines.insert(place, assignment)
        asked = (
            f"\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: "
            f"According to the chain of variable assignments in the text above, {_HOPS + 1} variables are "
            f"assigned the value {value}, they are:"
        )
        turns = Turn("\n".join(lines)), Turn(asked, f" {', '.join(names)}")
        items.append(Item(turns, answers=tuple(names), tokens=_VARIABLES_TOKENS))
    return items


def _common_words(order: Order) -> list[Item]:
    """The ten words that a list holds ten times as often as all others (RULER, as above)."""
    vocabulary = sorted(set(re.findall(r"\b[a-z]{4,8}\b", _articles())))
    items = []
    for number in range(order.n):
        draw = _draw(number)
        words = draw.sample(vocabulary, len(vocabulary))
        common, others = words[:_COMMON], iter(words[_COMMON:])
        listed = common * _TIMES
        room = order.context - order.length(_numbered(listed))
        listed += islice(others, max(0, room * len(listed) // order.length(_numbered(listed))))
        draw.shuffle(listed)
        asked = (
            f"\nQuestion: What are the {_COMMON} most common words in the above list? Answer: The top "
            f"{_COMMON} words that appear most often in the list are:"
        )
        turns = Turn(_numbered(listed)), Turn(asked, f" {', '.join(common)}")
        items.append(Item(turns, answers=tuple(common), tokens=_WORDS_TOKENS))
    return items


def _draw(number: int) -> random.Random:
    return random.Random(number)  # noqa: S311 - the same problems every time, no secrets


def _assignments(names: list[str], value: str) -> Iterator[tuple[str, str]]:
    yield names[0], value
    for before, name in pairwise(names):
        yield name, f"VAR {before}"


def _numbered(words: list[str]) -> str:
    return " ".join(f"{n}. {word}" for n, word in enumerate(words, start=1))


def _until(order: Order, parts: Iterator[str], needle: str) -> list[str]:
    """Take parts until there are as many tokens as ordered, those of the needle included."""
    taken, room = [], order.context - order.length(needle)
    for part in parts:
        room -= order.length(f" {part}")
        if room < 0:
            break
        taken.append(part)
    return taken


def _sentences() -> Iterator[str]:
    return cycle(re.split(r"(?<=[.!?])\s+", _articles()))


def _articles() -> str:
    """Paragraphs of encyclopedia articles that ship with kvtcd, no recipe text."""
    return files("kvtcd.lab.texts").joinpath("reader.txt").read_text("utf-8")


SYNTHETIC = (
    Task("passkey", _passkey, {"accuracy": greedy, "loglik": likelihood}),
    Task("variables", _variables, {"recall": recall, "loglik": likelihood}),
    Task("common-words", _common_words, {"recall": recall, "loglik": likelihood}),
)
