"""The page of a run in its two forms: Markdown with a picture beside it, and HTML that is one file. Pure."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from html import escape

ALT = "loss, throughput and goodput over the steps"
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""A browser runs no script of the page and loads nothing for it, whatever a name or a message in it says
(https://developer.mozilla.org/en-US/docs/Web/HTTP/Reference/Headers/Content-Security-Policy)."""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; background: white }
body { max-width: 1500px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1.5em 0 }
th, td { padding: 0.25em 1em 0.25em 0; border-bottom: 1px solid #d9e0e7; text-align: left }
th + th, td + td { text-align: right; font-variant-numeric: tabular-nums }
img { max-width: 100% }
"""


@dataclass(frozen=True)
class Page:
    """What the page says, in the words of both forms."""

    title: str
    facts: tuple[str, ...]
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """Where the time went; empty where `without_rows` says why."""
    without_rows: str
    picture: bytes | None
    """PNG; None where `without_picture` says why."""
    without_picture: str


def text(page: Page) -> list[str]:
    """Return the lines of the page without its picture, in Markdown."""
    table = [page.heads, ("---",) * len(page.heads), *page.rows]
    return [
        f"# {page.title}",
        "",
        *(f"- {fact}" for fact in page.facts),
        "",
        *([f"| {' | '.join(row)} |" for row in table] if page.rows else [page.without_rows]),
        *([] if page.picture is not None else ["", page.without_picture]),
    ]


def markdown(page: Page, picture: str) -> list[str]:
    """Return the lines of the page; `picture` is the name of the file beside it."""
    return [*text(page), *([] if page.picture is None else ["", f"![{ALT}]({picture})"])]


def html(page: Page) -> str:
    """Return the page as one file that needs no other."""
    title = escape(page.title)
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        "</head>",
        "<body>",
        f"<h1>{title}</h1>",
        "<ul>",
        *(f"<li>{escape(fact)}</li>" for fact in page.facts),
        "</ul>",
        *(_table(page) if page.rows else [f"<p>{escape(page.without_rows)}</p>"]),
        f"<p>{escape(page.without_picture)}</p>" if page.picture is None else _picture(page.picture),
        "</body>",
        "</html>",
    ]
    return "\n".join(lines) + "\n"


def _table(page: Page) -> list[str]:
    rows = [_row("th", page.heads), *(_row("td", row) for row in page.rows)]
    return ["<table>", *rows, "</table>"]


def _row(cell: str, texts: tuple[str, ...]) -> str:
    return f"<tr>{''.join(f'<{cell}>{escape(text)}</{cell}>' for text in texts)}</tr>"


def _picture(png: bytes) -> str:
    return f'<p><img alt="{ALT}" src="data:image/png;base64,{b64encode(png).decode("ascii")}"></p>'
