"""``GET /``: a page to talk with the model and to look at the engine, and the report of its graphs."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse

from octavo.runtime.server.errors import ApiError

REPORT = "report.html"
"""In the directory of a dump."""

# The page holds all that it needs, and asks this server alone; the report, which it opens, needs nothing.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes(dump_dir: Path | None) -> APIRouter:
    """The two routes; ``dump_dir`` is the engine's. They are for people, so the OpenAPI document does not have them."""
    router = APIRouter(include_in_schema=False)
    text = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    page = text.replace("{{report}}", "hidden" if dump_dir is None else "")

    @router.get("/")
    async def show_page() -> Response:
        return HTMLResponse(page, headers=_HEADERS)

    @router.get("/graphs")
    async def show_report() -> Response:
        """The report of a dump, which is written while the engine starts."""
        file = None if dump_dir is None else dump_dir / REPORT
        if file is None or not file.is_file():
            raise ApiError(404, "There is no report: start the server with --dump-dir, and wait until it is ready.")
        return HTMLResponse(file.read_bytes(), headers=_HEADERS)

    return router
