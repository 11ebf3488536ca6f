"""Variables that mark the processes of a run: the agent sets them, ranks read them, sweeps look for them."""

from __future__ import annotations

RUN_MARKER = "LLMTRAIN_RUN"
"""Holds the run directory's path."""
ATTEMPT_MARKER = "LLMTRAIN_ATTEMPT"
"""Holds the attempt's number."""
STANDBY_MARKER = "LLMTRAIN_STANDBY"
"""`1` for processes that were started to wait until their attempt begins."""
