"""Preparations that are killed, or that several processes begin: nothing is done twice or left behind."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmtrain.corpus.preparation.prepare import _lock, prepare_folder
from llmtrain.corpus.prepared import open_prepared
from tests.corpus.conftest import paragraph

SCRIPT = """
import sys
from llmtrain.corpus.preparation import sources
from llmtrain.corpus.preparation.prepare import prepare_folder
sources.cut_into_parts.__defaults__ = (20_000,)
if __name__ == "__main__":
    from pathlib import Path
    corpus = prepare_folder([sys.argv[1]], Path(sys.argv[2]), workers=int(sys.argv[3]),
                            progress=lambda step: print(step.phase, step.done, flush=True))
    print("digest", corpus.digest)
"""


def start(tmp_path, source, out, workers=1):
    script = tmp_path / "script.py"
    if not script.exists():  # another process may be reading it
        script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(script), str(source), str(out), str(workers)], stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def large(tmp_path):
    """About 2 MB of jsonl."""
    path = tmp_path / "large.jsonl"
    path.write_text("".join(json.dumps({"text": paragraph(n)}) + "\n" for n in range(25_000)))
    return path


@pytest.mark.parametrize("seed", range(6))
def test_a_killed_preparation_goes_on(tmp_path, large, seed):
    out = tmp_path / "out"
    first = start(tmp_path, large, out)
    rng = random.Random(seed)
    for _ in range(rng.randint(2, 60)):
        first.stdout.readline()
    first.kill()
    first.wait()
    assert not out.exists()
    kept = len(list((tmp_path / ".out.tmp").glob("part-*.json")))
    second = start(tmp_path, large, out)
    lines = second.stdout.read().split("\n")
    assert second.wait() == 0
    assert int(lines[1].split()[1]) >= (kept - 1) * 20_000, "finished parts are not made again"
    assert open_prepared(out).digest == lines[-2].split()[1]
    reference = prepare_folder([str(large)], tmp_path / "reference")
    assert open_prepared(out).digest == reference.digest
    assert not list(tmp_path.glob(".out.*")), "neither parts nor the lock"


def test_a_lock_whose_file_was_removed_keeps_nobody_out(tmp_path):
    """One waits at a file that its holder removes; who comes later makes a new one. Both must not work."""
    inside = []

    def work(name, seconds):
        with _lock(tmp_path / "out", lambda _: waits.set()):
            inside.append(name)
            assert len(inside) == 1
            time.sleep(seconds)
            inside.remove(name)

    waits = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        with _lock(tmp_path / "out", lambda _: None):
            second = pool.submit(work, "second", 0.1)
            assert waits.wait(30)
        third = pool.submit(work, "third", 0.5)
    assert [second.result(), third.result()] == [None, None] and not list(tmp_path.iterdir())


def test_several_processes_prepare_the_same_corpus_once(tmp_path, large):
    processes = [start(tmp_path, large, tmp_path / "out") for _ in range(3)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({text.split("digest ")[-1] for text in outputs}) == 1
    assert sum("merge" in text for text in outputs) == 1, "one worked, the others waited"


def test_a_killed_parent_takes_its_workers_along(tmp_path, large):
    process = start(tmp_path, large, tmp_path / "out", workers=2)
    while "tokenise" not in process.stdout.readline():
        pass
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    deadline = time.monotonic() + 120
    while len(children) < 2 and process.poll() is None and time.monotonic() < deadline:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.05)
