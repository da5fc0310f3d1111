"""Text as it comes is the text of all tokens, in whole characters, up to what ends it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtcd.lab.chat_text import UntilStop, Words


def from_bytes(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


@given(st.text(st.sampled_from("aé→😀 ")))
def test_pieces_are_whole_characters_and_all_of_the_text(text):
    words = Words(from_bytes)
    pieces = [words.add(byte) for byte in text.encode()]

    assert "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert words.rest() == ""


def test_what_stays_broken_is_shown_in_the_end():
    words = Words(from_bytes)

    assert [words.add(byte) for byte in "a→".encode()[:-1]] == ["a", "", ""]
    assert words.rest() == "\N{REPLACEMENT CHARACTER}"


@given(st.lists(st.text("ab", max_size=4)), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_a_text_ends_before_the_first_stop_however_it_comes(pieces, stops):
    until, shown = UntilStop(stops), ""
    for piece in pieces:
        shown += until.add(piece)
        if until.stopped:
            break
    shown += until.rest()

    # The first piece with which the text holds a stop ends it: before that, no text does.
    so_far = ""
    for piece in pieces:
        so_far += piece
        ends = [so_far.find(stop) for stop in stops if stop in so_far]
        if ends:
            so_far = so_far[: min(ends)]
            break
    assert shown == so_far
    assert until.stopped == any(stop in "".join(pieces) for stop in stops)
