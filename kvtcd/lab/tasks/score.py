"""Scores of replies: all are better when higher."""

from __future__ import annotations

import re
import string
from collections import Counter
from statistics import fmean

from kvtcd.lab.tasks.execute import passes
from kvtcd.lab.tasks.item import Item, Reply

_BOXED = r"\boxed{"
_FENCED = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


def likelihood(_: Item, reply: Reply) -> float:
    """Mean log probability of a token that was said, in nats: 0 is certainty."""
    return fmean(reply.logprobs)


def greedy(_: Item, reply: Reply) -> float:
    """1 when the model would have said the very same, token by token."""
    return float(reply.greedy)


def choice(item: Item, reply: Reply) -> float:
    """1 when the likeliest choice is right."""
    return float(reply.choice in item.answers)


def exact(item: Item, reply: Reply) -> float:
    r"""1 when the answer that was generated is one of the right ones.

    It is what stands in the last ``\boxed{}``, else behind the last ``####``, else in the first line; letter
    case, white space, a full stop or dollar sign around it and commas within numbers do not matter.
    """
    said = _plain(_final(reply.text))
    return float(any(said == _plain(answer) for answer in item.answers))


def f1(item: Item, reply: Reply) -> float:
    """F1 of words, over the best of the right answers, as SQuAD has it (Rajpurkar et al. 2016).

    Without punctuation, articles and letter case.
    """
    return max(_f1(_words(reply.text), _words(answer)) for answer in item.answers)


def recall(item: Item, reply: Reply) -> float:
    """Share of the answers that occur in what was generated, as RULER has it (Hsieh et al. 2024)."""
    text = reply.text.casefold()
    return fmean(answer.casefold() in text for answer in item.answers)


def code(item: Item, reply: Reply) -> float:
    """1 when the generated program passes the test; see `execute` for what running it means.

    The program is the first fenced block of the reply; a reply without one continues what was read last.
    """
    fenced = _FENCED.search(reply.text)
    program = fenced[1] if fenced else item.turns[-1].read + reply.text
    return float(passes(f"{program}\n{item.test}\n"))


def _final(text: str) -> str:
    if _BOXED in text:
        depth, inside = 1, text.rpartition(_BOXED)[2]
        for place, character in enumerate(inside):
            depth += (character == "{") - (character == "}")
            if not depth:
                return inside[:place]
        return inside
    if "####" in text:
        text = text.rpartition("####")[2]
    return text.strip().partition("\n")[0]


def _plain(text: str) -> str:
    without_commas = re.sub(r"(?<=\d),(?=\d{3}\b)", "", " ".join(text.casefold().split()))
    return without_commas.strip(" .$")


def _words(text: str) -> list[str]:
    without = text.casefold().translate(str.maketrans("", "", string.punctuation))
    return [word for word in without.split() if word not in {"a", "an", "the"}]


def _f1(said: list[str], right: list[str]) -> float:
    if not said or not right:
        return float(said == right)
    shared = (Counter(said) & Counter(right)).total()
    return 2 * shared / (len(said) + len(right))
