"""The code on the pages for users: README.md and docs/*.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r'^```python(?: title="(?P<title>\S+)")?\n(?P<code>.*?)^```$', re.S | re.M)
_LINK = re.compile(r"\]\((?!https?:)([\w./-]+\.\w+)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Block:
    """A block of Python on a page. With a title it is a whole file, whose ``ranks()`` runs on each
    rank."""

    page: Path
    line: int
    title: str | None
    code: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start("code")), found["title"], found["code"])
        for found in _BLOCK.finditer(text)
    ]


def files() -> list[Block]:
    """The blocks that are whole files."""
    return [block for page in PAGES for block in blocks(page) if block.title is not None]


def run(page: Path) -> int:
    """Run the blocks of a page that are no files, one after the other, as one program; how many.

    Lines in errors and traces are lines of the page.
    """
    names: dict[str, Any] = {"__name__": page.stem}
    snippets = [block for block in blocks(page) if block.title is None]
    for block in snippets:
        exec(compile("\n" * block.line + block.code, str(page), "exec"), names)
    return len(snippets)


def run_file(rank: int, block: Block) -> None:
    """What a block that is a whole file does on one of the ranks that it would start."""
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile("\n" * block.line + block.code, str(block.page), "exec"), names)
    names["ranks"]()


def links(page: Path) -> list[Path]:
    """The files of the repository that a page links to."""
    return [page.parent / target for target in _LINK.findall(page.read_text())]
