"""`python -m llmtrain.supervise.rehearsal RUN_DIR`: the supervisor of a run over nodes that can be lost on
purpose; it looks for them again after a second instead of a minute."""

from __future__ import annotations

import sys
from dataclasses import replace

from llmtrain.backends.rehearsed import rehearsed
from llmtrain.supervise.__main__ import main
from llmtrain.supervise.detection.limits import Limits


def hasty(limits: Limits) -> Limits:
    """Limits for a rehearsal: all that guards against nodes that come and go is short."""
    return replace(limits, quarantine=1.0, step_up_look=1.0, step_up_back_off=1.0, step_up_wait=30.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], rehearsed, hasty))
