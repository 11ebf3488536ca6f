"""NVML without GPUs: `nvml_stub.c`, compiled into the library that pynvml loads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.support.beds import unavailable

COMPILERS = ("cc", "gcc", "clang", "tcc")


class Stub:
    """A folder with libnvidia-ml.so.1; what its GPUs answer are lines of a file (nvml_stub.c)."""

    def __init__(self, folder: Path) -> None:
        compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
        if compiler is None:
            unavailable(f"no C compiler: {', '.join(COMPILERS)}")
        self.folder = folder
        source, library = Path(__file__).with_name("nvml_stub.c"), folder / "libnvidia-ml.so.1"
        options = ["-shared", "-fPIC", "-Wl,-soname=libnvidia-ml.so.1"]
        subprocess.run([compiler, *options, "-o", str(library), str(source)], check=True, timeout=60)

    def environment(self, *lines: str, name: str = "gpus") -> dict[str, str]:
        """Variables for processes that are to see GPUs which answer so."""
        file = self.folder / name
        file.write_text("".join(f"{line}\n" for line in lines))
        return {"LD_LIBRARY_PATH": str(self.folder), "NVML_STUB": str(file)}
