"""The sharded tensors of a traced program, on its page: which rank holds which block."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape

MOST = 24  # pictures on a page

STYLE = """
#layouts summary { padding: 12px 16px; cursor: pointer; }
#layouts summary h2 { display: inline; }
#layouts .pictures { display: flex; flex-wrap: wrap; gap: 14px; padding: 0 16px 16px; }
#layouts figure { margin: 0; max-width: 100%; overflow-x: auto; }
#layouts figcaption { font-size: 12.5px; color: var(--soft); margin-bottom: 4px; }
#layouts img { display: block; }
"""


def section(cards: Sequence[Mapping[str, str]]) -> str:
    """A section that opens and closes; nothing where there is no sharded tensor."""
    if not cards:
        return ""
    more = f", the first {MOST} are shown" if len(cards) > MOST else ""
    count = f"{len(cards)} layout{'s' * (len(cards) > 1)}{more}"
    figures = "\n".join(map(_figure, cards[:MOST]))
    return (
        f'<details class="card" id="layouts" open><style>{STYLE}</style>'
        f'<summary><h2>Sharded tensors</h2> <span class="soft">{count}</span></summary>'
        f'<div class="pictures">{figures}</div></details>\n'
    )


def _figure(card: Mapping[str, str]) -> str:
    # as an image: its style is its own
    data = b64encode(card["svg"].encode()).decode()
    where = " ".join(escape(card[key]) for key in ("name", "source") if card.get(key))
    return (
        f"<figure><figcaption><code>{where}</code></figcaption>"
        f'<img alt="{escape(card["text"])}" src="data:image/svg+xml;base64,{data}"></figure>'
    )
