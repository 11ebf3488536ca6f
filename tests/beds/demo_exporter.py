#!/usr/bin/env python3
"""A tiny Prometheus exporter on loopback, for the bed's own check: demo_exporter.py PORT."""

import http.server
import itertools
import sys
import time

STARTED = time.monotonic()
SCRAPES = itertools.count(1)
RANKS = 16


def exposition() -> str:
    """One scrape in Prometheus' text format."""
    steps = (
        f'bed_step_seconds{{rank="{rank}",host="node{rank // 8 + 1}"}} {0.5 + rank / 100:.3f}'
        for rank in range(RANKS)
    )
    lines = (
        "# HELP bed_scrapes_total Scrapes answered.",
        "# TYPE bed_scrapes_total counter",
        f"bed_scrapes_total {next(SCRAPES)}",
        "# HELP bed_step_seconds Made-up step time of a rank.",
        "# TYPE bed_step_seconds gauge",
        *steps,
        "# HELP bed_uptime_seconds Up time.",
        "# TYPE bed_uptime_seconds gauge",
        f"bed_uptime_seconds {time.monotonic() - STARTED:.3f}",
    )
    return "\n".join(lines) + "\n"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers every path with the exposition."""

    def do_GET(self):
        body = exposition().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        """Say nothing."""


http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
