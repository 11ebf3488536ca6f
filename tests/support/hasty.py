"""`python -m tests.support.hasty RUN_DIR`: the supervisor of a run, with less patience for nodes that come
back: what takes minutes takes seconds."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from llmtrain.run.layout import RunDir
from llmtrain.supervise import __main__ as supervisor

TIMES = {"quarantine": 2.0, "step_up_look": 1.0, "step_up_back_off": 1.0}


def take_over(run: RunDir) -> None:
    """Have a run's batch script start this supervisor."""
    repository = Path(__file__).parents[2]
    [script] = [path for path in run.scripts.iterdir() if "-m llmtrain.supervise" in path.read_text()]
    text = script.read_text()
    script.write_text(
        text.replace("-m llmtrain.supervise", "-m tests.support.hasty").replace(
            '"$python" -m tests', f'PYTHONPATH={repository} "$python" -m tests'
        )
    )


if __name__ == "__main__":
    sys.exit(supervisor.main(sys.argv[1:], adjust=lambda limits: replace(limits, **TIMES)))
