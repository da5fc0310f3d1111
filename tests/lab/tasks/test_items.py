"""Items: what is stored, read and right in each task, from files of a row or two and from nothing."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from kvtcd.core.errors import ConfigError
from kvtcd.lab.tasks.battery import TASKS, able, chosen
from kvtcd.lab.tasks.item import Item, Order
from kvtcd.lab.tasks.own import own_task

LARGE = 10**10


def words(text: str) -> int:
    return len(text.split())


def jsonl(*rows: object) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    problems = [
        {"question": f"What is {n} + 1?", "answer": f"It is {n}+1=<<{n}+1={n + 1}>>{n + 1}.\n#### {n + 1}"}
        for n in range(20)
    ]
    functions = [
        {
            "prompt": f'def f{n}():\n    """Return {n}.\n    """\n',
            "canonical_solution": f"    return {n}\n",
        }
        for n in range(8)
    ]
    pairs = [[f"key-{n}", f"value-{n}"] for n in range(75)]
    article = {
        "paragraphs": [
            {
                "context": f"Fact {n} is {n * n}.",
                "qas": [
                    {"question": f"What is fact {n}?", "answers": [{"text": str(n * n)}, {"text": "it"}]}
                ],
            }
            for n in range(3)
        ]
    }
    chats = [
        {
            "input": f"### Human: Hi {n} ### Assistant: Hello\n\n### there ### Human: More? ### Assistant:",
            "output": "No.",
        }
        for n in range(9)
    ]
    files = {
        "gsm8k_test.jsonl": jsonl(*problems),
        "humaneval.jsonl.gz": gzip.compress(jsonl(*functions)),
        "lambada_test.jsonl": jsonl(
            *[{"text": f"Passage {n} ends"} for n in range(5)],
            {"text": 'He said "no" and went to bed'},
            {"text": "One two three\nfour five"},
        ),
        "mmlu_val_zeroshot.jsonl": jsonl(
            *[
                {"subject": "x", "input": f"{n}+1?\nA. 1\nB. {n + 1}\nAnswer:", "output": "B"}
                for n in range(6)
            ]
        ),
        "litm_kv75_first100.jsonl.gz": gzip.compress(
            jsonl(*[{"ordered_kv_records": pairs, "key": "key-9", "value": "value-9"}] * 5)
        ),
        "xquad_en.json": json.dumps({"data": [article, article]}).encode(),
        "oasst1_multiturn_en.jsonl": jsonl(*chats),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def items(name: str, data: Path | None, n: int = 4, context: int = 300) -> list[Item]:
    return TASKS[name].items(Order(n, context, words, data))


def test_worked_problems_come_without_a_calculator_and_from_the_second_half(data: Path) -> None:
    *_, last = items("gsm8k", data)
    stored, asked = last.turns
    assert stored.read.startswith("Question: What is 10 + 1?\nAnswer: It is 10+1=11.\n#### 11\n\nQuestion")
    assert stored.read.endswith("#### 15\n\nQuestion: What is 18 + 1?")
    assert (asked.read, asked.said) == ("\nAnswer:", " It is 18+1=19.\n#### 19")


def test_functions_are_stored_up_to_the_end_of_their_docstring(data: Path) -> None:
    first = items("humaneval", data)[0]
    whole = "".join(turn.read + turn.said for turn in first.turns)
    assert whole.count("def f") == 6
    assert whole.endswith('def f5():\n    """Return 5.\n    """\n    return 5\n')
    asked = first.turns[1]  # cut where tokens of code are, before the last space of an indentation
    assert (asked.read, asked.said) == ('\n    """\n   ', " return 5\n")


def test_the_last_word_of_a_passage_is_asked_for(data: Path) -> None:
    first, second = items("lambada", data)
    before = "".join(f"Passage {n} ends\n\n" for n in range(5))
    assert [(turn.read, turn.said) for turn in first.turns] == [
        (before + 'He said "no" and went', ""),
        (" to", " bed"),
    ]
    assert [(turn.read, turn.said) for turn in second.turns] == [
        (before + "One two", ""),
        (" three\nfour", " five"),
    ]


def test_one_letter_of_four_is_chosen(data: Path) -> None:
    (only,) = items("mmlu", data)
    assert only.turns[0].read.startswith("0+1?\nA. 1\nB. 1\nAnswer: B\n\n1+1?")
    assert only.turns[0].read.endswith("Answer: B\n\n5+1?\nA. 1\nB. 6")
    assert (only.turns[1].read, only.turns[1].said) == ("\nAnswer:", " B")
    assert (only.answers, only.choices) == ((" B",), (" A", " B", " C", " D"))


def test_values_are_asked_for_from_the_first_pair_to_the_last_that_fit(data: Path) -> None:
    found = items("key-value", data, n=5, context=60)
    records = [json.loads(item.turns[0].read.partition("JSON data:\n")[2]) for item in found]
    assert all(10 < len(record) < 40 for record in records)
    for item, record in zip(found, records, strict=True):
        key = re.search('Key: "(.*)"', item.turns[1].read)[1]
        assert item.turns[1].said == f' "{record[key]}"'
    places = [
        list(r).index(re.search('Key: "(.*)"', i.turns[1].read)[1])
        for i, r in zip(found, records, strict=True)
    ]
    assert places == sorted(set(places))
    assert places[0] == 0
    assert places[-1] > len(records[0]) / 2


def test_questions_are_about_whole_articles_and_take_them_in_turn(data: Path) -> None:
    found = items("xquad", data, n=5)
    assert {item.turns[0].read for item in found} == {"Fact 0 is 0.\n\nFact 1 is 1.\n\nFact 2 is 4."}
    assert [item.turns[1].read for item in found] == [
        f"\n\nQuestion: What is fact {n}?\nAnswer:" for n in (0, 0, 1, 1, 2)
    ]
    assert found[4].answers == ("4", "it")
    assert found[4].turns[1].said == " 4"
    assert found[4].tokens > 0


def test_chats_are_those_of_the_last_third_turn_by_turn(data: Path) -> None:
    first, *_ = found = items("chat", data)
    assert len(found) == 3
    assert [(turn.read, turn.said) for turn in first.turns] == [
        ("### Human: Hi 6 ### Assistant:", " Hello\n\n### there"),
        (" ### Human: More? ### Assistant:", " No."),
    ]


def test_a_chat_ends_when_it_gets_too_long(data: Path) -> None:
    assert items("chat", data, context=7) == []  # 14 words hold the first turn alone
    assert len(items("chat", data, context=8)) == 3


def test_a_pass_key_is_everywhere_in_the_context(data: Path) -> None:
    del data
    found = items("passkey", None, n=8)
    places = []
    for item in found:
        stored, asked = item.turns
        key = asked.said.strip()
        assert re.fullmatch(r"\d{5}", key)
        before, needle, _ = stored.read.partition(
            f"The pass key is {key}. Remember it. {key} is the pass key."
        )
        assert needle
        places.append(words(before))
        assert 240 < words(stored.read) <= 300
    assert places == sorted(places)
    assert places[0] == 0
    assert places[-1] > 200
    assert found == items("passkey", None, n=8)


def test_variables_form_one_chain() -> None:
    for item in items("variables", None):
        stored, asked = item.turns
        found = re.findall(r"^VAR (\w+) = (.*)\.$", stored.read, re.MULTILINE)
        assert [name for name, _ in found] == list(item.answers)
        value = found[0][1]
        assert value in asked.read
        assert [of for _, of in found[1:]] == [f"VAR {name}" for name in item.answers[:-1]]
        assert asked.said == " " + ", ".join(item.answers)
        assert 240 < words(stored.read) <= 300


def test_ten_words_are_common() -> None:
    for item in items("common-words", None, context=600):
        listed = re.findall(r"\d+\. (\w+)", item.turns[0].read)
        counts = Counter(listed)
        assert {word for word, count in counts.items() if count == 10} == set(item.answers)
        assert sorted(counts.values())[-11] == 1
        assert len(counts) > 100
        assert 540 < words(item.turns[0].read) <= 660


def test_items_are_spread_evenly_over_a_file() -> None:
    order = Order(4, 0, words)
    assert order.spread(range(10)) == [0, 2, 5, 7]
    assert order.spread(range(3)) == [0, 1, 2]
    assert order.spread([]) == []


def test_without_data_only_what_is_made_up_is_asked(data: Path) -> None:
    tasks, left_out = chosen([], None)
    assert [task.name for task in tasks] == ["passkey", "variables", "common-words"]
    assert set(left_out) == set(TASKS) - {"passkey", "variables", "common-words"}
    tasks, left_out = chosen([], data)
    assert [task.name for task in tasks] == list(TASKS)
    assert left_out == {}
    (data / "xquad_en.json").unlink()
    assert set(chosen([], data)[1]) == {"xquad"}


def test_a_model_that_guesses_is_not_asked_unless_told(data: Path) -> None:
    tasks, _ = chosen([], data)
    assert able(tasks, LARGE) == (tasks, {})
    fewer, left_out = able(tasks, 10**8)
    assert "only guesses" in left_out["mmlu"]
    assert [task.name for task in fewer] == [name for name in TASKS if name != "mmlu"]
    assert [task.name for task in chosen(["mmlu"], data)[0]] == ["mmlu"]


@pytest.mark.parametrize(
    ("name", "why"), [("mathematics", "not one of gsm8k"), ("gsm8k", "name its folder with --data")]
)
def test_a_task_that_cannot_be_had_is_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        chosen([name], None)


def test_damaged_files_are_named(data: Path) -> None:
    (data / "xquad_en.json").write_text('{"data": [{}]}')
    with pytest.raises(ConfigError, match=r"xquad_en\.json: is not in the format of SQuAD"):
        items("xquad", data)
    (data / "lambada_test.jsonl").write_text('{"text": "fine here"}\n{"passage": 3}\n')
    with pytest.raises(ConfigError, match="line 2: has no text"):
        items("lambada", data)
    (data / "humaneval.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="cannot be read"):
        items("humaneval", data)


def test_ones_own_rows_are_taken_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_bytes(
        jsonl(
            {"context": "c", "question": "q", "answers": ["a", "b"], "tokens": 7, "stop": ""},
            {"context": "d", "question": "r", "answer": "x"},
        )
    )
    task = own_task(file, "f1")
    assert (task.name, list(task.measures)) == ("mine", ["f1"])
    first, second = task.items(Order(9, 0, words))
    assert [turn.read for turn in first.turns] == ["c", "q"]
    assert (first.answers, first.tokens, first.stop) == (("a", "b"), 7, "")
    assert (second.answers, second.tokens, second.stop) == (("x",), 64, "\n")


@pytest.mark.parametrize(
    ("row", "metric", "why"),
    [
        ({"question": "q", "answer": "a"}, "exact", "line 1: has no context"),
        ({"context": "", "question": "q", "answer": "a"}, "exact", "row 1: context is empty"),
        ({"context": "c", "question": "", "answer": "a"}, "exact", "row 1: question is empty"),
        ({"context": 7, "question": "q", "answer": "a"}, "f1", "row 1: context is 7, not a string"),
        ({"context": "c", "question": None, "answer": "a"}, "f1", "question is None, not a string"),
        ({"context": "c", "question": "q", "answer": "a", "stop": ["x"]}, "f1", "stop is .'x'., not"),
        ({"context": "c", "question": "q", "answers": ["a", 3]}, "f1", "answers is .'a', 3., not a list"),
        ({"context": "c", "question": "q"}, "exact", "row 1: has neither answers nor answer"),
        ({"context": "c", "question": "q", "answer": 3}, "f1", "row 1: answer is 3, not a string"),
        ({"context": "c", "question": "q", "answers": "a"}, "f1", "answers is 'a', not a list of strings"),
        ({"context": "c", "question": "q", "answer": "a", "tokens": 0}, "f1", "tokens is 0"),
        ({"context": "c", "question": "q", "answer": "a"}, "code", "has no test"),
        ({"context": "c", "question": "q", "answer": "a"}, "bleu", "not one of exact, f1, code"),
        ([1], "exact", "line 1: has no context, question"),
    ],
)
def test_ones_own_rows_are_checked(tmp_path: Path, row: object, metric: str, why: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_bytes(jsonl(row))
    with pytest.raises(ConfigError, match=why):
        own_task(file, metric)
