"""Golden files: expected text beside the test, rewritten when LLMTRAIN_UPDATE_GOLDEN=1."""

from __future__ import annotations

import os
from pathlib import Path

UPDATE = "LLMTRAIN_UPDATE_GOLDEN"


def check_golden(path: Path, text: str) -> None:
    """Compare text with a golden file; fails with the whole text when there is none."""
    if os.environ.get(UPDATE) == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    assert path.is_file(), f"no golden file {path}; look at the text and set {UPDATE}=1 to keep it:\n{text}"
    assert text == path.read_text(encoding="utf-8"), f"differs from {path}; {UPDATE}=1 keeps the new text"
