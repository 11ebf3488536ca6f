"""This very llmtrain on a node that has none, or another one: its files in a folder of their own.

Nothing is installed into the node's interpreter; a wrapper around it finds the files. Their digest names the
folder, so that runs of different versions do not disturb each other.
"""

from __future__ import annotations

import hashlib
import io
import shlex
import tarfile
from functools import cache
from pathlib import Path

from llmtrain import resources
from llmtrain.transport.base import Transport, TransportError

FOLDER = ".code"
UNPACK_SECONDS = 60.0
_WRAPPER = """#!/bin/sh
# An interpreter that finds the llmtrain beside this file; what PYTHONPATH held comes after it.
PYTHONPATH={folder}${{PYTHONPATH:+:$PYTHONPATH}} exec {python} "$@"
"""


def wrapper_path(storage: Path, python: str) -> Path:
    """Where the wrapper of an interpreter lies on nodes that this llmtrain was sent to."""
    digest, _ = package()
    name = hashlib.sha256(python.encode()).hexdigest()[:8]
    return storage / FOLDER / digest / f"python-{name}"


def send_code(transport: Transport, storage: Path, python: str) -> None:
    """Bring this llmtrain to a node unless it is there already. Raises TransportError."""
    digest, archive = package()
    folder, wrapper = storage / FOLDER / digest, wrapper_path(storage, python)
    if transport.run(["test", "-x", str(wrapper)], timeout=UNPACK_SECONDS).exit_code == 0:
        return
    # Unpacked beside it and moved into place as a whole; of two that do it at once, one wins.
    script = (
        'set -e; umask 022; mkdir -p -- "$1"; new=$(mktemp -d "$1/new.XXXXXX"); chmod 755 "$new"; '
        'tar -xzf - -C "$new"; mv -T -- "$new" "$2" 2>/dev/null || { rm -rf -- "$new"; test -d "$2"; }'
    )
    arguments = ["sh", "-c", script, "send", str(folder.parent), str(folder)]
    done = transport.run(arguments, timeout=UNPACK_SECONDS, stdin=archive)
    if done.exit_code:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise TransportError(
            f"llmtrain cannot be put into {folder}: {said[-1] if said else 'no reason given'}"
        )
    text = _WRAPPER.format(folder=shlex.quote(str(folder)), python=shlex.quote(python))
    transport.put(wrapper, text.encode(), mode=0o755)


@cache
def package() -> tuple[str, bytes]:
    """Digest and gzipped tar of this llmtrain: its modules, and the data files that ship with it."""
    root = Path(resources.__file__).resolve().parent
    files = {f"llmtrain/{path.relative_to(root)}": path for path in root.rglob("*") if _ships(path)}
    for kind in ("recipes", "cluster_profiles", "templates"):
        folder = resources.shipped_folder(kind)
        if root not in folder.parents:
            files |= {
                f"llmtrain/_data/{kind}/{path.name}": path for path in folder.iterdir() if path.is_file()
            }
    digest, out = hashlib.sha256(), io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, path in sorted(files.items()):
            data = path.read_bytes()
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return digest.hexdigest()[:16], out.getvalue()


def _ships(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
