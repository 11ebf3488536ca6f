"""Stand-ins for container runtimes, which Debian has no packages of: `apptainer`, and an `srun` with pyxis.

They take options of the real ones and no others, write down what they were called with, and run the
command in a mount namespace whose /tmp is empty but for what was mounted, as the real ones do.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
IN_IMAGE = [path for path in (Path(sys.prefix), REPOSITORY) if path.is_relative_to("/tmp")]
"""What a real image would hold itself, where it lies in the folder that is hidden."""

ENTER = """#!/bin/bash
# enter IMAGE MOUNTS COMMAND..: mounts are lines of SOURCE:TARGET[:FLAGS]
image=$1 mounts=$2; shift 2
[ -f "$image" ] || {{ echo "could not open image $image" >&2; exit 255; }}
export INSIDE="$image"
for path in {in_image}; do mounts+=${{mounts:+$'\n'}}$path:$path; done
exec unshare --mount bash -c '
  set -e
  mount --make-rprivate /
  stage=$(mktemp -d /var/tmp/stage-XXXXXX)
  mount -t tmpfs none "$stage"
  while IFS=: read -r source target flags; do
    mkdir -p "$stage/$((++count))"
    mount --bind "$source" "$stage/$count"
    targets[count]=$target
    [ "$flags" != ro ] || mount -o remount,bind,ro "$stage/$count"
  done <<<"$1"
  mount -t tmpfs none /tmp
  for number in "${{!targets[@]}}"; do
    mkdir -p "${{targets[number]}}"
    mount --move "$stage/$number" "${{targets[number]}}"
  done
  cd "$PWD" 2>/dev/null || cd /
  shift
  exec "$@"' enter "$mounts" "$@"
"""
APPTAINER = """#!{python}
import json, os, sys
words = sys.argv[1:]
with open({record!r}, "a") as file:
    file.write(json.dumps(sys.argv) + "\\n")
if words[:1] != ["exec"]:
    sys.exit("unknown command")
words, mounts = words[1:], []
while words[0].startswith("-"):
    option = words.pop(0)
    if option == "--bind":
        mounts.append(words.pop(0))
    elif option not in ("--nv", "--no-home", "--cleanenv"):
        sys.exit("unknown flag: " + option)
os.execv({enter!r}, [{enter!r}, words[0], "\\n".join(mounts), *words[1:]])
"""
PYXIS = """#!{python}
import json, os, sys
words, image, mounts = sys.argv[1:], None, ""
with open({record!r}, "a") as file:
    file.write(json.dumps(sys.argv) + "\\n")
options = []
while words[0].startswith("-"):
    name, _, value = words.pop(0).partition("=")
    if name == "--container-image":
        image = value
    elif name == "--container-mounts":
        mounts = value.replace(",", "\\n")
    elif name not in ("--container-mount-home", "--no-container-mount-home", "--container-remap-root"):
        options.append(name + ("=" + value if value else ""))
inner = words if image is None else [{enter!r}, image, mounts, *words]
os.execv({srun!r}, [{srun!r}, *options, *inner])
"""


def install(folder: Path, python: str) -> Path:
    """Executables in `folder`; the file of JSON lines in which each writes down how it was called."""
    record, enter = folder / "calls", folder / "enter"
    srun = shutil.which("srun")
    in_image = " ".join(shlex.quote(str(path)) for path in IN_IMAGE)
    values = {
        "in_image": in_image,
        "python": python,
        "record": str(record),
        "enter": str(enter),
        "srun": srun,
    }
    folder.mkdir()
    for name, text in (("enter", ENTER), ("apptainer", APPTAINER), ("srun", PYXIS)):
        (folder / name).write_text(text.format(**values))
        (folder / name).chmod(0o755)
    return record


def calls(record: Path, program: str) -> list[list[str]]:
    """Arguments of all calls of a program so far."""
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    return [words[1:] for words in lines if Path(words[0]).name == program]
