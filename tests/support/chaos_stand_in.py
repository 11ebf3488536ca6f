"""Chaos without torch: the same faults and nodes, but ranks that are stand-ins; ten times as many seeds.

Such a run has no weights, and says of each step only that it was done: what is checked is that the run gets
there, from where it had saved, and leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

from llmtrain.corpus.ledger import read_ledgers
from llmtrain.run.layout import RunDir
from tests.support import chaos, stand_in

IS_WANTED = os.environ.get("LLMTRAIN_CHAOS_RANKS") == "stand-in"
BEHAVIOUR = {"steps": chaos.STEPS, "step_seconds": 0.4, "checkpoint_every": 3, "silent_saves": True}

INTERPRETER = """#!/bin/bash
# An interpreter whose torchrun starts stand-ins.
if [ "$1 $2" != "-m torch.distributed.run" ]; then exec {python} "$@"; fi
for word; do
  case $word in
    --nnodes=*) nodes=${{word#*=}} ;;
    --node-rank=*) node=${{word#*=}} ;;
    --nproc-per-node=*) ranks=${{word#*=}} ;;
    --rdzv-id=*) attempt=${{word##*.}} ;;
  esac
  last=$word
done
run=${{last%/*}}
if [ ! -e "$run/behaviour.json" ]; then
  echo {behaviour} >"$run/behaviour.$node.new" && mv "$run/behaviour.$node.new" "$run/behaviour.json"
fi
exec {python} {stand_in} launcher "$run" "$attempt" "$node" "$ranks" "$nodes"
"""


def interpreter(folder: Path) -> str:
    """The interpreter that nodes use: this one, or one that starts stand-ins."""
    if not IS_WANTED:
        return sys.executable
    path = folder / "python"
    words = {"python": sys.executable, "stand_in": stand_in.__file__, "behaviour": json.dumps(BEHAVIOUR)}
    path.write_text(INTERPRETER.format(**{name: shlex.quote(word) for name, word in words.items()}))
    path.chmod(0o755)
    return str(path)


def check_steps(run: RunDir) -> None:
    """Every attempt went on from a step that was done before, without a gap, up to the last one."""
    done = 0
    for ledger in read_ledgers(run):
        if ledger.restored_step is None:
            continue
        assert ledger.restored_step <= done, f"attempt {ledger.number} went on from {ledger.restored_step}"
        steps = [record.step for record in ledger.steps]
        assert steps == list(range(ledger.restored_step + 1, ledger.restored_step + 1 + len(steps))), steps
        done = max([done, *steps])
    assert done == chaos.STEPS
