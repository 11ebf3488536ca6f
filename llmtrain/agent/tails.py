"""What is new in an attempt's files on this node: `python -m llmtrain.agent.tails ATTEMPT_FOLDER`.

For clusters whose disks the supervisor does not see. Standard input is a JSON object, file -> bytes that are
known; standard output one of file -> what follows, in base64. Names are relative to the attempt's folder.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping
from pathlib import Path

MOST_BYTES = 4 << 20
"""Of each file at once; the rest comes the next time."""
LEFT_OUT = ("events", "attempt.json")
"""Events are relayed as they are written; the other comes from the supervisor."""


def tails(folder: Path, known: Mapping[str, int]) -> dict[str, bytes]:
    """Name -> bytes that follow those that are known; nothing for files without any."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not path.is_file() or name.split("/", 1)[0] in LEFT_OUT:
            continue
        try:
            with path.open("rb") as file:
                file.seek(known.get(name, 0))
                if data := file.read(MOST_BYTES):
                    found[name] = data
        except OSError:
            continue
    return found


def main(argv: list[str]) -> int:
    """Read what is known, print what is new."""
    known = json.load(sys.stdin)
    new = {name: base64.b64encode(data).decode("ascii") for name, data in tails(Path(argv[0]), known).items()}
    sys.stdout.write(json.dumps(new) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
