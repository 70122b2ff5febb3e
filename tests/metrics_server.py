"""A server process whose /metrics goes on as it is told: for tests that kill, stop and hang it.

Every scrape finds another second of work done: counters grow by scrape, not by the clock, so that a
slow machine changes nothing. What it is told stands in a file: well, dead_draft, stuck or hang.
"""

from __future__ import annotations

import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

told, is_speculative, port = Path(sys.argv[1]), sys.argv[2] == "speculative", int(sys.argv[3])
counts = {"tokens": 0, "drafts": 0, "drafted": 0, "accepted": 0, "finished": 0}


def page(mode: str) -> str:
    if mode != "stuck":
        counts["tokens"] += 240
        counts["drafts"] += 40
        counts["drafted"] += 160
        counts["finished"] += 4
        counts["accepted"] += 0 if mode == "dead_draft" else 112 + counts["finished"] % 7
    engine = '{engine="0"}'
    lines = [
        f"vllm:num_requests_running{engine} 2",
        f"vllm:num_requests_waiting{engine} 0",
        f"vllm:generation_tokens_total{engine} {counts['tokens']}",
        f'vllm:request_success_total{{engine="0",finished_reason="stop"}} {counts["finished"]}',
    ]
    if is_speculative:
        lines += [
            f"vllm:spec_decode_num_drafts_total{engine} {counts['drafts']}",
            f"vllm:spec_decode_num_draft_tokens_total{engine} {counts['drafted']}",
            f"vllm:spec_decode_num_accepted_tokens_total{engine} {counts['accepted']}",
        ]
    return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        mode = told.read_text()
        if mode == "hang":
            time.sleep(600)
        body = page(mode).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


ThreadingHTTPServer.allow_reuse_address = True
server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
server.daemon_threads = True
print(server.server_port, flush=True)
server.serve_forever()
