"""Texts that a profile was made from are no held-out ones: whole, cut, or edited."""

from pathlib import Path

import pytest

from kvtcd.codec.origin import Text as Source
from kvtcd.core.errors import ConfigError
from kvtcd.lab import held_out
from kvtcd.lab.calibration import digest_of
from kvtcd.lab.texts import RECIPE, Text, read, recipe

MADE_FROM = [Source(text.name, digest_of(text)) for text in recipe()]


def check(texts, made_from):
    held_out.check([held_out.source(text) for text in texts], made_from)


def own(text: str) -> Text:
    return Text("mine.txt", "own", text)


def test_the_very_text_is_refused_under_any_name():
    text = own("a text of one's own, which a profile was made from")
    check([text], [])
    with pytest.raises(ConfigError, match=r"mine\.txt: is a text that the profile was made from"):
        check([text], [Source("other.txt", digest_of(text))])


@pytest.mark.parametrize("kind", RECIPE)
def test_a_part_of_a_text_of_the_recipe_is_refused_unless_the_profile_was_made_from_others(kind):
    text = next(one.text for one in recipe() if one.kind == kind)
    words = text.split()
    for number in range(0, len(words), 40):  # one word in forty is another
        words[number] = "otherwise"
    part = own(" ".join(words[len(words) // 3 : len(words) // 2]))
    with pytest.raises(ConfigError, match=rf"mine\.txt: has [0-9]+% of its runs of 8 words in {kind}\.txt"):
        check([part], MADE_FROM)
    check([part], [Source("x", "0" * 64), *(one for one in MADE_FROM if one.name != f"{kind}.txt")])


def test_other_texts_are_held_out():
    data = Path(__file__).parents[1] / "data"
    check([*read([data / "encyclopedia.txt", data / "russian.txt"]), own("few words")], MADE_FROM)
    prose, chat, *_ = recipe()
    quoting = own(f"{prose.text[:3000]} {' '.join(f'{n}' for n in range(20_000))}")  # quotes some pages
    check([quoting], MADE_FROM)
    check([chat], MADE_FROM[:1])
