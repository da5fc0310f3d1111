"""A set of the user's own."""

from __future__ import annotations

from pathlib import Path

from kvtcd.core.errors import ConfigError
from kvtcd.lab.tasks.files import Row, read_rows
from kvtcd.lab.tasks.item import Item, Measure, Task, Turn
from kvtcd.lab.tasks.score import code, exact, f1

METRICS: dict[str, Measure] = {"exact": exact, "f1": f1, "code": code}
_TOKENS = 64
_SHOWN = 40


def own_task(path: Path, metric: str) -> Task:
    """Return the task of a JSONL file, named after it.

    A row has ``context`` (stored and fetched), ``question`` (read behind it) and ``answers``, a list, or
    ``answer``; for ``code`` instead of those ``test``, a program that fails unless the answer is right. It
    may have ``tokens`` (to generate at most, 64) and ``stop`` (the text that ends an answer, a line feed;
    empty for none).

    Raises:
        ConfigError: no such metric, or the file is not like that.
    """
    if metric not in METRICS:
        raise ConfigError("--metric", "", f"{metric!r} is not one of {', '.join(METRICS)}")
    rows = read_rows(path, "context", "question")
    items = [_item(path, number, row, metric) for number, row in enumerate(rows, start=1)]
    return Task(path.stem, lambda order: [items[n] for n in order.spread(items)], {metric: METRICS[metric]})


def _item(path: Path, number: int, row: Row, metric: str) -> Item:
    where = f"row {number}"
    answers = row.get("answers", [row["answer"]] if "answer" in row else [])
    tokens, stop, test = row.get("tokens", _TOKENS), row.get("stop", "\n"), row.get("test", "")
    texts = {"context": row["context"], "question": row["question"], "stop": stop, "test": test}
    if "answers" not in row and answers:
        texts |= {"answer": answers[0]}
    elif not isinstance(answers, list) or not all(isinstance(text, str) for text in answers):
        raise ConfigError(path, where, f"answers is {_short(answers)}, not a list of strings")
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ConfigError(path, where, f"{name} is {_short(text)}, not a string")
        if not text and name in {"context", "question"}:
            raise ConfigError(path, where, f"{name} is empty")
    if not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(path, where, f"tokens is {tokens!r}, not a number of at least 1")
    if metric == "code" and not test:
        raise ConfigError(path, where, "has no test, which --metric code needs")
    if metric != "code" and not answers:
        raise ConfigError(path, where, "has neither answers nor answer")
    turns = Turn(row["context"]), Turn(row["question"])
    return Item(turns, answers=tuple(answers), tokens=tokens, stop=stop, test=test)


def _short(value: object) -> str:
    """Show a value in a line."""
    said = repr(value)
    return said if len(said) <= _SHOWN else f"{said[:_SHOWN]}…"
