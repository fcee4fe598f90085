"""A prefill server of SGLang's, as far as a decode server asks it over HTTP, that says what a test wants."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from typing import Any

SIZES = {"attn_tp_size": 2, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1}
SERVER = SIZES | {"page_size": 16, "kv_cache_dtype": "torch.bfloat16", "follow_bootstrap_room": True}
RANK = {"pp_rank": 0, "tp_rank": 0, "agent": "tcp://127.0.0.1:7700", "rank_ip": "127.0.0.1", "rank_port": 4000}
RANKS = [[*(RANK | {"tp_rank": rank}).values()] for rank in range(SIZES["attn_tp_size"])]


class Prefill:
    """Answers everything with `body`, which may be bytes or JSON; or questions for ranks with `ranks`, if it is set.

    Those whose path contains `held`, if it is set, it answers only after `go`.
    """

    def __init__(self) -> None:
        self.body: Any = SERVER
        self.ranks: Any = None
        self.status = 200
        self.held, self.go = "", threading.Event()
        told = self

        class Told(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if told.held and told.held in self.path:
                    told.go.wait(60)
                said = told.ranks if told.ranks is not None and "/kvbridge/ranks" in self.path else told.body
                body = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(told.status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Location", f"http://{told.address}/elsewhere")
                with contextlib.suppress(OSError):  # whoever asked has left
                    self.end_headers()
                    self.wfile.write(body)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def log_message(self, *_: Any) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Told)
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.go.set()
        self.server.shutdown()
        self.server.server_close()
