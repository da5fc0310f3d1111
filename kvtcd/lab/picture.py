"""What all plots have in common: a style, a file, and what is said when there is no matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtcd import outputs
from kvtcd.core.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "kvtcd",  # the same figures give the same file
}


_SUFFIXES = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Refuse a picture that could not be drawn, before there is anything to draw.

    Raises:
        Unavailable: matplotlib is not installed.
        ConfigError: it is of another type.
    """
    if path.suffix not in _SUFFIXES:
        raise ConfigError(path, "", f"cannot be drawn: its name ends in none of {', '.join(_SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise Unavailable("a plot needs matplotlib; pip install 'kvtcd[lab]'")


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Yield a figure to draw in, and write it at the end.

    Args:
        path: PNG, SVG or PDF, by its suffix.
        width: inches.
        height: inches.

    Raises:
        Unavailable: matplotlib is not installed.
        ConfigError: the file cannot be written, or is of another type.
    """
    check(path)
    from matplotlib import rc_context  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        with outputs.replacing(path) as part:
            try:
                figure.savefig(part, dpi=150)
            except ValueError as error:  # of figures that no axis has room for
                raise ConfigError(path, "", f"cannot be drawn: {error}") from error


def headline(figure: Figure, text: str) -> None:
    """Write a line over the whole figure."""
    figure.suptitle(text, fontsize=10, x=0.01, ha="left")
