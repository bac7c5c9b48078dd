"""A server of HTTP on this machine that keeps files in memory, for tests of URLs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class HttpFiles:
    """``files`` by path; a path of ``statuses`` is answered with that status instead. PUT is taken if ``writable``."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    writable: bool = False


@contextmanager
def http_files() -> Iterator[HttpFiles]:
    """A server, for as long as the context lasts."""
    kept = HttpFiles()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            status = kept.statuses.get(path, 200 if path in kept.files else 404)
            self._answer(status, kept.files.get(path, b"") if status == 200 else b"")

        do_HEAD = do_GET

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if kept.writable:
                kept.files[self.path] = body
            self._answer(201 if kept.writable else kept.statuses.get(self.path, 405))

        def log_message(self, *_: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    kept.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield kept
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
