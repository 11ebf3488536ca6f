"""What a node in good order says of itself."""

from __future__ import annotations

from llmtrain.backends.preflight import Report

GOOD = Report(
    host="a",
    boot="1",
    machine="m",
    executable="/venv/bin/python",
    python="3.11.7",
    llmtrain="1.0",
    torch="2.13.0",
    time=1000.0,
    addresses={"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"},
    entered_by="10.0.0.1",
    nonce="n",
    writable=True,
    user="me",
    seen_at=1000.0,
    uncertainty=0.1,
)
