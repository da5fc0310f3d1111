"""Scores, on examples worked out by hand."""

import math

import pytest

from kvtcd.lab.tasks.item import Item, Reply, Turn
from kvtcd.lab.tasks.score import choice, code, exact, f1, greedy, likelihood, recall

TURNS = (Turn("read"), Turn("asked"))


def item(*answers: str, **fields: object) -> Item:
    return Item(**({"turns": TURNS, "answers": answers} | fields))


def test_likelihood_is_the_mean_of_the_tokens() -> None:
    assert likelihood(item(), Reply(logprobs=(math.log(0.5), math.log(0.125)))) == pytest.approx(
        -2 * math.log(2)
    )


def test_greedy_is_all_or_nothing() -> None:
    assert (greedy(item(), Reply(greedy=True)), greedy(item(), Reply(greedy=False))) == (1.0, 0.0)


def test_a_choice_is_right_or_wrong() -> None:
    assert [choice(item(" B"), Reply(choice=one)) for one in (" A", " B", "")] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "answers", "score"),
    [
        (" Paris\nIt is the capital", ("paris",), 1),
        (" Paris.", ("Lyon", "Paris"), 1),
        ("in Paris", ("Paris",), 0),
        (r"So we get \boxed{1} or rather \boxed{\frac{1}{2}}.", (r"\frac{1}{2}",), 1),
        (r"\boxed{7", ("7",), 1),
        ("He pays 2 * 600 = 1,200.\n#### 1,200", ("1200",), 1),
        ("$1,200", ("1200",), 1),
        ("1,2", ("12",), 0),
        ("3.5", ("35",), 0),
        ("", ("x",), 0),
    ],
)
def test_an_exact_answer_is_the_final_one(text: str, answers: tuple[str, ...], score: int) -> None:
    assert exact(item(*answers), Reply(text=text)) == score


@pytest.mark.parametrize(
    ("text", "answers", "score"),
    [
        ("the Saxon Garden", ("Saxon Garden",), 1),
        ("Saxon", ("Saxon Garden",), 2 / 3),  # precision 1, recall 1/2
        ("a big red house", ("red house", "blue"), 0.8),  # precision 2/3, recall 1
        ("cat cat", ("cat",), 2 / 3),  # a word counts as often as it is there
        ("go go", ("go go now",), 0.8),
        ("none", ("other",), 0),
        ("", ("other",), 0),
        ("The", ("a",), 1),  # nothing but articles
    ],
)
def test_f1_is_that_of_squad(text: str, answers: tuple[str, ...], score: float) -> None:
    assert f1(item(*answers), Reply(text=text)) == pytest.approx(score)


def test_recall_counts_the_answers_that_occur() -> None:
    reply = Reply(text="ABCDE, fghij and nothing else")
    assert recall(item("ABCDE", "FGHIJ", "KLMNO", "PQRST"), reply) == 0.5


def test_a_program_is_what_was_read_and_what_continues_it() -> None:
    asked = (Turn("context"), Turn("def double(x):\n"))
    test = "assert double(4) == 8"
    right, wrong = Reply(text="    return 2 * x\n"), Reply(text="    return x\n")
    assert code(item(turns=asked, test=test), right) == 1
    assert code(item(turns=asked, test=test), wrong) == 0


def test_a_fenced_program_stands_alone() -> None:
    text = "Here it is:\n```python\ndef double(x):\n    return x + x\n```\nIt adds."
    assert (
        code(item(turns=(Turn("c"), Turn("Write double.")), test="assert double(4) == 8"), Reply(text=text))
        == 1
    )
