"""Tasks from published sets, in files of the user's own; README.md of the lab says where they are from."""

from __future__ import annotations

import re
from itertools import chain, zip_longest
from pathlib import Path

from kvtcd.core.errors import ConfigError
from kvtcd.lab.tasks.files import Row, read_json, read_rows
from kvtcd.lab.tasks.item import Item, Order, Task, Turn
from kvtcd.lab.tasks.score import choice, f1, greedy, likelihood

_SHOTS = 5
_LETTERS = (" A", " B", " C", " D")
_ASKED = "\nAnswer:"
_ANSWER_TOKENS = 16


def _gsm8k(order: Order) -> list[Item]:
    """Worked answers behind five worked problems, of the half of the file that no recipe text is from."""
    rows = read_rows(_file(order, GSM8K), "question", "answer")
    rows = rows[len(rows) // 2 :]
    shots, rows = rows[:_SHOTS], rows[_SHOTS:]

    def worked(answer: str) -> str:
        return " " + re.sub("<<.*?>>", "", answer)  # what a calculator would say

    before = "".join(f"Question: {row['question']}\nAnswer:{worked(row['answer'])}\n\n" for row in shots)
    return [
        Item((
            Turn(f"{before}Question: {rows[n]['question']}"),
            Turn("\nAnswer:", worked(rows[n]["answer"])),
        ))
        for n in order.spread(rows)
    ]  # fmt: skip


def _humaneval(order: Order) -> list[Item]:
    """Bodies of functions, by docstring, behind a file of five other functions."""
    rows = read_rows(_file(order, HUMANEVAL), "prompt", "canonical_solution")
    shots, rows = rows[:_SHOTS], rows[_SHOTS:]
    before = "\n\n".join(row["prompt"] + row["canonical_solution"] for row in shots)
    items = []
    for n in order.spread(rows):
        stored, _, last = rows[n]["prompt"].rstrip("\n").rpartition("\n")
        body = rows[n]["canonical_solution"]
        # Tokens of code hold the space before a word, not the rest of an indentation: cut there.
        indent = max(0, len(body) - len(body.lstrip(" ")) - 1)
        turns = Turn(f"{before}\n\n{stored}"), Turn(f"\n{last}\n{body[:indent]}", body[indent:])
        items.append(Item(turns))
    return items


def _lambada(order: Order) -> list[Item]:
    """The last word of a passage, behind five others."""
    rows = read_rows(_file(order, LAMBADA), "text")
    shots, rows = rows[:_SHOTS], rows[_SHOTS:]
    before = "".join(f"{row['text']}\n\n" for row in shots)
    items = []
    for n in order.spread(rows):
        *stored, read, last = rows[n]["text"].rsplit(" ", 2)
        items.append(Item((Turn(before + " ".join(stored)), Turn(f" {read}", f" {last}"))))
    return items


def _mmlu(order: Order) -> list[Item]:
    """The letter of the right answer, behind five questions that are answered."""
    rows = read_rows(_file(order, MMLU), "input", "output")
    shots, rows = rows[:_SHOTS], rows[_SHOTS:]
    before = "".join(f"{row['input'].removesuffix(_ASKED)}{_ASKED} {row['output']}\n\n" for row in shots)
    items = []
    for n in order.spread(rows):
        stored, letter = before + rows[n]["input"].removesuffix(_ASKED), f" {rows[n]['output']}"
        items.append(Item((Turn(stored), Turn(_ASKED, letter)), answers=(letter,), choices=_LETTERS))
    return items


def _key_value(order: Order) -> list[Item]:
    """The value of a key among as many pairs as the context holds, from the first to the last of them."""
    rows = read_rows(_file(order, KEY_VALUE), "ordered_kv_records")
    head = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{"
    items = []
    chosen = order.spread(rows)
    for number, n in enumerate(chosen):
        pairs = rows[n]["ordered_kv_records"]
        of_pair = order.length(f'"{pairs[0][0]}": "{pairs[0][1]}",\n ')
        pairs = pairs[: max(2, (order.context - order.length(head)) // of_pair)]
        key, value = pairs[number * len(pairs) // len(chosen)]
        stored = head + ",\n ".join(f'"{key}": "{value}"' for key, value in pairs) + "}"
        asked = f'\n\nKey: "{key}"\nCorresponding value:'
        items.append(Item((Turn(stored), Turn(asked, f' "{value}"'))))
    return items


def _xquad(order: Order) -> list[Item]:
    """Questions about whole articles, in turn."""
    articles = read_json(_file(order, XQUAD))
    by_article = []
    try:
        for article in articles["data"]:
            stored = "\n\n".join(paragraph["context"] for paragraph in article["paragraphs"])
            asked = [question for paragraph in article["paragraphs"] for question in paragraph["qas"]]
            by_article.append([_question(stored, one) for one in asked])
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(_file(order, XQUAD), "", f"is not in the format of SQuAD: {error!r}") from error
    rounds = chain.from_iterable(zip_longest(*by_article))
    return [item for item in rounds if item][: order.n]


def _question(stored: str, asked: Row) -> Item:
    answers = tuple(answer["text"] for answer in asked["answers"])
    turns = Turn(stored), Turn(f"\n\nQuestion: {asked['question']}\nAnswer:", f" {answers[0]}")
    return Item(turns, answers=answers, tokens=_ANSWER_TOKENS)


def _file(order: Order, name: str) -> Path:
    assert order.data, "tasks with a file are only asked where there is a folder"
    return order.data / name


GSM8K = "gsm8k_test.jsonl"
HUMANEVAL = "humaneval.jsonl.gz"
LAMBADA = "lambada_test.jsonl"
MMLU = "mmlu_val_zeroshot.jsonl"
KEY_VALUE = "litm_kv75_first100.jsonl.gz"
XQUAD = "xquad_en.json"

PUBLISHED = (
    Task("gsm8k", _gsm8k, {"loglik": likelihood}, GSM8K),
    Task("humaneval", _humaneval, {"loglik": likelihood}, HUMANEVAL),
    Task("lambada", _lambada, {"accuracy": greedy, "loglik": likelihood}, LAMBADA),
    Task(
        "mmlu",
        _mmlu,
        {"accuracy": choice, "loglik": likelihood},
        MMLU,
        parameters=1_000_000_000,
    ),
    Task("key-value", _key_value, {"accuracy": greedy, "loglik": likelihood}, KEY_VALUE),
    Task("xquad", _xquad, {"f1": f1, "loglik": likelihood}, XQUAD),
)
