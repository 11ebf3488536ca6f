"""One HTML page that needs nothing else, not even a network: its frame, its style and its tables."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape

from llmtrain.observe.wording import UNKNOWN

PALETTE = ("#2f6fb3", "#c2571a", "#2f8f5b", "#8a5cb8", "#b3902f", "#a8475f", "#7a7a7a", "#3f9aa6")
"""Of the classes `cN` (filled), `sN` (drawn) and `bN` (behind), for N from 0."""

STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(360px, 1fr)); gap: 1rem 2rem }
figure { margin: 0 }
figure + figure { margin-top: 1rem } .plots figure { margin-top: 0 }
figcaption { font-weight: 600 } svg { width: 100%; height: auto }
svg text { font: 11px system-ui, sans-serif; fill: currentColor }
.label { text-anchor: end } .tick { text-anchor: middle }
.grid { stroke: currentColor; opacity: .15 } .line { fill: none; stroke-width: 1.6 }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
.soft { opacity: .55 } .frame { fill: none; stroke: currentColor; opacity: .35 }
.limit { stroke: currentColor; stroke-dasharray: 4 3 } .on { fill: #fff !important; text-anchor: middle }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0 1.2rem; padding: 0; margin: .2rem 0 }
table { border-collapse: collapse } .scroll td:not(:last-child) { white-space: nowrap }
th, td { text-align: left; padding: .15rem .9rem .15rem 0; vertical-align: top }
th { opacity: .65; font-weight: 500 } .scroll { overflow-x: auto } .empty { opacity: .6 }
""" + "".join(
    f".c{n} {{ fill: {colour} }} .s{n} {{ stroke: {colour} }} .b{n} {{ background: {colour} }}\n"
    for n, colour in enumerate(PALETTE)
)


def page(title: str, parts: Iterable[str]) -> str:
    """The whole page around its parts."""
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, header: bool = True) -> str:
    """An HTML table of texts."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head) if header else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{f"<tr>{top}</tr>" if header else ""}{body}</table></div>'


def when(moment: float | None) -> str:
    """Local date and time."""
    if moment is None:
        return UNKNOWN
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(moment))
