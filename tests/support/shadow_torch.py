"""A `torch.distributed.run` for PYTHONPATH that starts the stand-in's ranks.

What `launch` and `resume` render then runs as it is, without torch.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.support import stand_in

TORCHRUN = """\
import json, os, shutil, sys
from pathlib import Path
options = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:] if word.startswith("--"))
run = Path(sys.argv[-1]).parent
shutil.copy(Path(__file__).parent / "behaviour.json", run)
told = Path(__file__).parent / "tell"
if told.exists():
    found = {{name: os.environ.get(name) for name in told.read_text().split()}}
    own = Path(os.environ.get("LLMTRAIN_SCRATCH", "-")).name
    found["/tmp"] = sorted(set(os.listdir("/tmp")) - {{own}})
    (told.parent / ("told-" + options["node-rank"])).write_text(json.dumps(found))
words = [run, options["rdzv-id"].rpartition(".")[2], options["node-rank"], options["nproc-per-node"]]
os.execv(sys.executable, [sys.executable, {stand_in!r}, "launcher", *map(str, words), options["nnodes"]])
"""


def install(folder: Path, *, tell: str = "", **behaviour: object) -> Path:
    """A folder for PYTHONPATH; `tell`: names of variables whose values each node writes down (`told`)."""
    run = folder / "torch" / "distributed" / "run.py"
    run.parent.mkdir(parents=True)
    for package in (run.parent.parent, run.parent):
        (package / "__init__.py").touch()
    run.write_text(TORCHRUN.format(stand_in=stand_in.__file__))
    run.with_name("behaviour.json").write_text(json.dumps(behaviour))
    if tell:
        run.with_name("tell").write_text(tell)
    return folder


def told(folder: Path) -> dict[str, dict[str, object]]:
    """Node rank -> variables, and what lies in its /tmp."""
    files = sorted((folder / "torch" / "distributed").glob("told-*"))
    return {file.name.rpartition("-")[2]: json.loads(file.read_text()) for file in files}


def overrides(folder: Path, corpus: Path) -> list[str]:
    """Settings of a run of eight ranks on such a torchrun."""
    return [
        "parallel.dp=4",
        "parallel.tp=1",
        "parallel.pp=2",
        "batch.micro=1",
        f"data.corpus={corpus}",
        "data.validation_every=0",
        f"cluster.environment.variables.PYTHONPATH={folder}",
    ]
