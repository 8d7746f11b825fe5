"""SVG as the drawings of the pages share it: a card that is readable on light and dark pages, words, arrows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

# The card is opaque: it is as readable on a page whose theme was chosen by hand.
STYLE = """text{font:12px system-ui,sans-serif;fill:#57606a;text-anchor:middle}.left{text-anchor:start}
.stage{font-weight:600;font-size:14px;fill:#24292f}.id{font-weight:600;fill:#fff}.id.still{fill:#57606a}
.card{fill:#fff;stroke:#d0d7de}.lane{fill:#f3f5f7}.box{fill:none;stroke:#8b949e;stroke-width:1.5}
.r0{fill:#2c6fbb}.r1{fill:#b75d07}.mixed{fill:#768390}rect.still{fill-opacity:.3}
.flow,.a0,.a1{fill:none;stroke:#8b949e;stroke-width:1.5}.a0{stroke:#2c6fbb}.a1{stroke:#b75d07}
.h{fill:#8b949e}.h0{fill:#2c6fbb}.h1{fill:#b75d07}
@media(prefers-color-scheme:dark){text{fill:#b1bac4}.stage{fill:#f0f3f6}.id.still{fill:#8b949e}
.card{fill:#161b22;stroke:#373e47}.lane{fill:#21262d}.a0{stroke:#539bf5}.a1{stroke:#e0883a}.h0{fill:#539bf5}.h1{fill:#e0883a}}"""


def picture(title: str, width: int, height: int, parts: Iterable[str]) -> str:
    """The file: a card of that size, heads of arrows, and what is drawn on it."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    card = f'<rect class="card" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}"><title>{title}</title>'
    )
    return f"{head}<style>{STYLE}</style>\n{chr(10).join([card, *_heads(), *parts])}\n</svg>\n"


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Words; `kind` is a class of STYLE."""
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x}" y="{y}">{escape(words)}</text>'


def _heads() -> Iterator[str]:
    """Heads of arrows."""
    for name in ("h", "h0", "h1"):
        yield (
            f'<marker id="{name}" viewBox="0 0 6 6" refX="1" refY="3" markerWidth="7" markerHeight="7" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path class="{name}" d="M0 0L6 3L0 6z"/></marker>'
        )
