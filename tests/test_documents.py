"""Documents that point somewhere point at something."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for room in ("", "kvtcd", "systemd", "tests")
    for path in (TOP / room).glob("**/*.md" if room else "*.md")
)
LINK = re.compile(r'\]\(([^()\s]+)\)|src="([^"]+)"')


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a document."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL), flags=re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(TOP)))
def test_links_lead_to_files_and_headings_that_exist(document: Path) -> None:
    for groups in LINK.findall(document.read_text()):
        link = "".join(groups)
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.is_relative_to(TOP), link
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
