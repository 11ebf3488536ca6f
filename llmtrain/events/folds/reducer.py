"""What a reducer is: the state after one event, of the kind that its table names it for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmtrain.events.event import Event
from llmtrain.events.run_state import RunState

Reducer = Callable[[RunState, Event, Any], RunState]
"""(state, event, its payload) -> state; pure, and never raises on a decoded event."""
