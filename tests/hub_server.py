"""A Hugging Face hub of one dataset on 127.0.0.1, for huggingface_hub's own client, that can misbehave as told."""
from __future__ import annotations

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves files: dict of name to bytes. Use as a context manager.

    faults[(method, name)] is a list of what to do on the next requests, taken from its front: a status code, answered
    with `headers`; ("cut", n), a connection closed after n bytes of the body; ("body", data), other bytes this once;
    ("hang", n), n bytes and then silence until the hub closes. `requests` logs (method, name) of those for files.
    """
    def __init__(self, repo: str, files: dict[str, bytes], faults: dict | None = None, headers: dict | None = None):
        self.prefix = f"/datasets/{repo}/resolve/main/"
        self.files, self.faults, self.headers = files, faults or {}, headers or {}
        self.requests: list[tuple[str, str]] = []
        self.closing, self.hanging = threading.Event(), threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()

    def _handler(hub):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self):
                self.answer("HEAD")

            def do_GET(self):
                self.answer("GET")

            def answer(self, method: str):
                if not self.path.startswith(hub.prefix):    # the client's own questions, such as /api/agent-harnesses
                    return self.send_empty(404, {})
                name = self.path.removeprefix(hub.prefix)
                hub.requests.append((method, name))
                planned = hub.faults.get((method, name))
                fault = planned.pop(0) if planned else None
                if isinstance(fault, int):
                    return self.send_empty(fault, hub.headers)
                if name not in hub.files:
                    return self.send_empty(404, {"X-Error-Code": "EntryNotFound"})
                self.send_file(method, hub.files[name], fault)

            def send_empty(self, status: int, headers: dict):
                self.send_response(status)
                for key, value in {**headers, "Content-Length": "0"}.items():
                    self.send_header(key, value)
                self.end_headers()

            def send_file(self, method: str, data: bytes, fault):
                body, what = data, fault[0] if fault else None
                if what == "body":
                    body = fault[1]
                start = 0
                if span := self.headers.get("Range"):
                    start = int(span.removeprefix("bytes=").split("-")[0])
                self.send_response(206 if span else 200)
                self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("Content-Length", str(len(body) - start))
                if span:
                    self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
                self.end_headers()
                if method == "HEAD":
                    return
                self.wfile.write(body[start:start + fault[1]] if what in ("cut", "hang") else body[start:])
                if what == "hang":
                    self.wfile.flush()
                    hub.hanging.set()
                    hub.closing.wait()
                self.close_connection = what in ("cut", "hang")

            def log_message(self, *_):
                pass

        return Handler
