"""`python -m llmtrain.agent --run-dir RUN --attempt N --node K`: serve one node of one attempt.

`python -m llmtrain.agent sweep --run-dir RUN [--older-than N] [--grace S]`: end leftovers of a run here.
`python -m llmtrain.agent snapshots --run-dir RUN --node-name NAME [--action list|rescue|drop]`: the run's
snapshots in the memory of this node.

All are started by the supervisor over the node's transport.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from llmtrain.agent.agent import agent_main
from llmtrain.agent.snapshots import answer_json
from llmtrain.agent.sweep import sweep


def main(argv: list[str]) -> int:
    """Run the agent, or a sweep, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m llmtrain.agent")
    parser.add_argument("action", nargs="?", choices=("serve", "sweep", "snapshots"), default="serve")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--node", type=int, default=0)
    parser.add_argument("--older-than", type=int, default=None)
    parser.add_argument("--grace", type=float, default=0.0)
    parser.add_argument("--action", dest="what", choices=("list", "rescue", "drop"), default="list")
    parser.add_argument("--node-name", default="")
    parser.add_argument("--name", default="")
    parser.add_argument("--shards", default="")
    options = parser.parse_args(argv)
    if options.action == "serve":
        return agent_main(options.run_dir, options.attempt, options.node)
    if options.action == "snapshots":
        named = {"name": options.name, "shards": options.shards}
        sys.stdout.write(answer_json(options.what, options.run_dir, options.node_name, **named) + "\n")
        return 0
    swept = sweep(options.run_dir, older_than=options.older_than, grace=options.grace)
    sys.stdout.write(json.dumps(dataclasses.asdict(swept)) + "\n")
    return 1 if swept.remaining else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
