"""A process that has imported what crash children need and forks one for each request.

Forking takes milliseconds where a new interpreter takes a third of a second, and a child that is ended by a
signal harms nobody else.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

TESTS = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """How a child ended: by a signal, with an error (its traceback), or with a result."""

    signal: int
    error: str
    result: Any

    def checked(self) -> Any:
        """Return the result of a child that was meant to succeed."""
        assert not self.signal, f"child ended by {signal.Signals(self.signal).name}"
        assert not self.error, self.error
        return self.result


class Zygote:
    """The parent's side; a context manager."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        variables = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"} | dict(environment or {})
        self._server = subprocess.Popen(
            [sys.executable, "-m", "support.crash.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()

    def start(self, task: str, **arguments: object) -> int:
        """Fork a child for one of `tasks.TASKS`; return its process id."""
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write(json.dumps({"task": task, "arguments": arguments}) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def finish(self) -> Outcome:
        """Wait for the child that was started last."""
        assert self._server.stdout
        return Outcome(**json.loads(self._server.stdout.readline()))

    def call(self, task: str, **arguments: object) -> Outcome:
        """Run one task to its end."""
        self.start(task, **arguments)
        return self.finish()


def _serve() -> None:
    from support.crash.tasks import TASKS  # noqa: PLC0415 - the parent's side needs none of it

    logging.disable()  # damage is the point of these children
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        request = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            answer = {"error": "", "result": None}
            try:
                answer["result"] = TASKS[request["task"]](**request["arguments"])
            except BaseException:  # noqa: BLE001 - the parent shall see it
                answer["error"] = traceback.format_exc()
            with os.fdopen(writing, "w") as pipe:
                json.dump(answer, pipe)
            os._exit(0)
        os.close(writing)
        print(child, flush=True)  # noqa: T201 - the protocol
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        answer = json.loads(text) if text and not ended else {"error": "", "result": None}
        print(json.dumps({"signal": ended, **answer}), flush=True)  # noqa: T201 - the protocol


if __name__ == "__main__":
    _serve()
