"""Whoever asks without an end fills no log, and what was left out is counted."""

from __future__ import annotations

import logging

from kvtcd.api.refusals import SHOWN, WINDOW_S, Refusals


def test_of_many_refusals_a_few_are_logged_and_the_others_counted(caplog) -> None:
    caplog.set_level(logging.INFO)
    due: list[tuple[float, object]] = []
    refusals = Refusals(lambda seconds, call: due.append((seconds, call)))
    for port in range(1_207):
        refusals.say(("127.0.0.1", port), 401, "a valid token is needed")
    refusals.say("", 403, "requests from web pages are refused", "uid:7")
    assert len(caplog.messages) == SHOWN + 1
    assert caplog.messages[0] == "refused 127.0.0.1:0, 401: a valid token is needed"
    assert caplog.messages[-1].startswith("refused the Unix socket (tenant uid:7), 403: "), "not crowded out"

    ((seconds, end),) = due
    assert seconds == WINDOW_S
    end()
    assert caplog.messages[SHOWN + 1 :] == [f"{1_207 - SHOWN} more requests were refused within 60 s, 401"]
    assert caplog.records[-1].left_out == 1_207 - SHOWN

    refusals.say(("127.0.0.1", 1), 401, "a valid token is needed")
    assert len(due) == 2, "and it begins anew"
    assert caplog.messages[-1] == caplog.messages[1]
    due[1][1]()
    assert len(caplog.messages) == SHOWN + 3, "nothing was left out"
