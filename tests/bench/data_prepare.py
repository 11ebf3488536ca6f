"""CPU time of preparing a corpus against the `tokenizers` library's own batch encoding of the same texts.

`python -m tests.bench.data_prepare [MB] [ROUNDS]`: a byte-level BPE of 8,192 tokens is trained on the
standard library's sources; then all tokenise the same jsonl in turn, each in a fresh process on one core.
The library has its documents in memory and throws its encodings away; preparing reads, parses, splits,
digests, writes and syncs. Prints the CPU times of each round and the median ratios to `encode_batch` and to
`encode_batch_fast`, which leaves character offsets out.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

LIBRARY = """
import json, os, resource, sys
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
texts = [json.loads(line)["text"] for line in open(sys.argv[2], encoding="utf-8")]
def spent():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
before, tokens = spent(), 0
encode = getattr(tokenizer, sys.argv[3])
for first in range(0, len(texts), 1000):
    for encoding in encode(texts[first : first + 1000], add_special_tokens=False):
        tokens += len(encoding.ids)
print(json.dumps([spent() - before, tokens]))
"""
OURS = """
import json, resource, sys
from pathlib import Path
from llmtrain.corpus.preparation.prepare import prepare_folder
def spent():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
import os
os.environ["TOKENIZERS_PARALLELISM"] = "false"
before = spent()
corpus = prepare_folder([sys.argv[2]], Path(sys.argv[3]), tokenizer=sys.argv[1], workers=1)
print(json.dumps([spent() - before, corpus.train.tokens + corpus.validation.tokens]))
"""


def texts(megabytes: float) -> list[str]:
    """Documents of the standard library's sources, cut and repeated to a size."""
    from llmtrain.corpus.preparation.sources import STANDARD_LIBRARY, find_files

    found, size, wanted = [], 0, megabytes * 1e6
    files = [file.path.read_text(encoding="utf-8", errors="replace") for file in find_files(STANDARD_LIBRARY)]
    while size < wanted:
        for text in files:
            for first in range(0, len(text), 4000):
                found.append(text[first : first + 4000])
                size += len(found[-1])
                if size >= wanted:
                    return found
    return found


def measure(code: str, *arguments: str) -> tuple[float, int]:
    """CPU-seconds and tokens of one run."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    seconds, tokens = json.loads(done.stdout.splitlines()[-1])
    return float(seconds), int(tokens)


def main() -> None:
    """Print one line a round."""
    from llmtrain.corpus.preparation.train_tokenizer import train_tokenizer

    megabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    with tempfile.TemporaryDirectory(prefix="llmtrain-bench-") as name:
        folder = Path(name)
        train_tokenizer(["python-stdlib"], folder / "bpe", vocab=8192, most_bytes=4_000_000)
        tokenizer, lines = str(folder / "bpe" / "tokenizer.json"), folder / "text.jsonl"
        with lines.open("w", encoding="utf-8") as stream:
            for text in texts(megabytes):
                stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        ratios: list[tuple[float, float]] = []
        for number in range(rounds):
            whole, tokens = measure(LIBRARY, tokenizer, str(lines), "encode_batch")
            ours, written = measure(OURS, tokenizer, str(lines), str(folder / f"out-{number}"))
            fast, _ = measure(LIBRARY, tokenizer, str(lines), "encode_batch_fast")
            ratios.append((ours / whole, ours / fast))
            print(
                f"round {number}: encode_batch {whole:.2f} s, encode_batch_fast {fast:.2f} s, "
                f"prepare {ours:.2f} s of CPU; {megabytes / ours:.2f} MB/s a core; "
                f"{tokens:,} and {written:,} tokens",
                flush=True,
            )
        to_whole, to_fast = (statistics.median(column) for column in zip(*ratios, strict=True))
        print(f"median ratio {to_whole:.3f} to encode_batch, {to_fast:.3f} to encode_batch_fast")


if __name__ == "__main__":
    main()
