"""Code lines of each folder of the packages: no comments, docstrings or blank lines.

python .ci/code_lines.py
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("fcoll", "inductor_ext", "fcoll_backend", "fcoll_pytest")
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
NO_CODE |= {tokenize.ENDMARKER}
HAVE_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """How many lines of a Python source have code on them.

    >>> code_lines('x = 1  # one\\n\\n# two\\ndef f():\\n    "Three."\\n    return x\\n')
    3
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, HAVE_DOCSTRINGS) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def main() -> None:
    for package in PACKAGES:
        folders: Counter[str] = Counter()
        for path in sorted((ROOT / package).rglob("*.py")):
            inside = path.relative_to(ROOT / package).parts
            folders[inside[0] if len(inside) > 1 else "."] += code_lines(path.read_text())
        each = ", ".join(f"{name} {n:,}" for name, n in folders.most_common())
        print(f"{package}: {folders.total():,} code lines ({each})")


if __name__ == "__main__":
    main()
