"""What reading a sample costs: `python -m tests.bench.data_loading [MILLION TOKENS] [SEQUENCE]`.

Writes a corpus of random documents, then reads samples as ranks do: from one corpus or a blend of three, as a
stream or packed by documents, with documents in the order of the file or of the seed. Prints CPU
microseconds a sample, with those for its digest alone and for finding its place alone.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from llmtrain.corpus.document_index import DocumentTokens
from llmtrain.corpus.document_order import ShuffledDocuments, make_order
from llmtrain.corpus.samples import Samples, sample_digest
from llmtrain.corpus.token_file import CODES, HEAD, MAGIC, TokenFile

SAMPLES = 2000


def write(prefix: Path, tokens: int) -> TokenFile:
    """Documents of about 500 tokens each, of geometric length."""
    generator = np.random.default_rng(0)
    lengths = generator.geometric(1 / 500, size=tokens // 500).astype("<i4")
    pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * 2
    with prefix.with_suffix(".bin").open("wb") as stream:
        generator.integers(0, 50_000, size=int(lengths.sum()), dtype="<u2").tofile(stream)
    with prefix.with_suffix(".idx").open("wb") as stream:
        stream.write(HEAD.pack(MAGIC, 1, CODES["uint16"], len(lengths), len(lengths) + 1))
        for part in (lengths, pointers, np.arange(len(lengths) + 1, dtype="<i8")):
            part.tofile(stream)
    return TokenFile.open(prefix)


def cost(work: Callable[[int], object]) -> float:
    """CPU microseconds a call."""
    work(0)
    before = time.process_time()
    for sample in range(SAMPLES):
        work(sample)
    return 1e6 * (time.process_time() - before) / SAMPLES


def main() -> None:
    """Print a line for each way to read."""
    tokens = int(float(sys.argv[1]) * 1e6) if len(sys.argv) > 1 else 100_000_000
    sequence = int(sys.argv[2]) if len(sys.argv) > 2 else 4096
    with tempfile.TemporaryDirectory(prefix="llmtrain-bench-") as name:
        folder = Path(name)
        file = write(folder / "c", tokens)
        before = time.perf_counter()
        make_order(file, folder / "c.ends", 1)
        print(f"{file.documents:,} documents, {file.tokens:,} tokens; drawn order made in "
              f"{time.perf_counter() - before:.2f} s")  # fmt: skip
        documents, order = DocumentTokens(file), ShuffledDocuments(file, folder / "c.ends", 1)
        window = file.window(0, sequence)
        print(f"digest {cost(lambda sample: sample_digest(sample, window)):.1f} us")
        blend = (0.5, 0.3, 0.2)
        for label, samples in (
            ("one corpus, stream", Samples([file], sequence=sequence, seed=1)),
            ("blend of 3, stream", Samples([file] * 3, blend, sequence=sequence, seed=1)),
            ("documents packed", Samples([documents], sequence=sequence, seed=1, documents=[documents])),
            ("documents in drawn order", Samples([order], sequence=sequence, seed=1, documents=[order])),
        ):
            place, read = cost(samples.place), cost(samples.read)
            print(f"{label}: place {place:.1f} us, read {read:.1f} us a sample of {sequence} tokens, "
                  f"{sequence / read:.0f} M tokens/s")  # fmt: skip


if __name__ == "__main__":
    main()
