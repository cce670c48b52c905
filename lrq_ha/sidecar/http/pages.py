"""The page of a group, at GET /ui: it shows GET /cluster and GET /history, each second.

Rules:

- The page only reads. It needs nothing from another host, and its browser is told to take nothing from one.
- Text of nodes becomes text of the page, never markup.
"""

from __future__ import annotations

from importlib import resources

from aiohttp import web

from .listener import Handler

_FILES = {
    "/ui": ("page.html", "text/html"),
    "/ui/page.js": ("page.js", "text/javascript"),
    "/ui/page.css": ("page.css", "text/css"),
    "/ui/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_handlers() -> dict[str, Handler]:
    """The files of the page, by path."""
    folder = resources.files(__package__) / "page"
    return {path: _serve((folder / name).read_text("utf-8"), kind) for path, (name, kind) in _FILES.items()}


def _serve(text: str, kind: str) -> Handler:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(text=text, content_type=kind, charset="utf-8", headers=_HEADERS)

    return handle
