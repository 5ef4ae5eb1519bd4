"""A small server that answers as a worker's local API would, for those who ask it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

STATUS = {"version": "1", "state": "ready", "why": "", "models": []}
KEY = "a-long-secret"


class Handler(BaseHTTPRequestHandler):
    """Answers /status with what its server has, to who has the key."""

    server: Any

    def do_GET(self) -> None:
        server = self.server
        is_known = server.key in (
            None,
            self.headers.get("Authorization", "").removeprefix("Bearer "),
        )
        code, answer = (server.code, server.answer) if is_known else (401, {"error": {}})
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None: ...


class Answering(ThreadingHTTPServer):
    def __init__(self, answer: Any = STATUS, code: int = 200, key: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.code, self.key = answer, code, key
        self.address = f"http://127.0.0.1:{self.server_port}/"


@contextmanager
def answering(**options: Any) -> Iterator[Answering]:
    server = Answering(**options)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
