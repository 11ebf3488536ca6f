"""What a node says about itself before ranks start: `python - NONCE_FILE [write]`, this file on its stdin.

Runs on a node that may have nothing but some Python 3, so it imports the standard library only, and of that
only what is old; annotations are texts. Where the node has llmtrain, that looks at the machine too. With
`write`, a file is written to the folder as a test. The answer is one JSON object on standard output.
"""

import json
import os
import socket
import struct
import sys
import time

PACKAGES = {
    "numpy": "numpy",
    "psutil": "psutil",
    "tokenizers": "tokenizers",
    "xxhash": "xxhash",
    "yaml": "pyyaml",
    "zstandard": "zstandard",
}
"""What agents and ranks import beside torch -> the name that pip knows it by."""


def report(nonce_file: str, write: bool) -> "dict[str, object]":
    """Everything; what cannot be found out is empty."""
    folder = os.path.dirname(nonce_file)  # noqa: PTH120 - old Pythons
    return {
        "host": socket.gethostname(),
        "boot": text_of("/proc/sys/kernel/random/boot_id"),
        "machine": text_of("/etc/machine-id"),
        "executable": sys.executable,
        "python": "{}.{}.{}".format(*sys.version_info[:3]),
        "llmtrain": llmtrain(),
        "torch": version("torch"),
        "missing": missing(),
        "time": time.time(),
        "addresses": addresses(),
        # "client port server port": the address that this node was entered by
        "entered_by": (os.environ.get("SSH_CONNECTION", "").split() + [""] * 4)[2],
        "nonce": text_of(nonce_file),
        "writable": is_writable(folder),
        "user": user(),
        "health": health(folder, write),
    }


def text_of(path: str) -> str:
    """A small file's text, or nothing."""
    try:
        with open(path) as file:  # noqa: PTH123 - old Pythons
            return file.read(4096).strip()
    except (OSError, ValueError):
        return ""


def llmtrain() -> str:
    """The version of llmtrain here, or why it cannot be imported."""
    sys.path = [entry for entry in sys.path if entry]
    try:
        import llmtrain

        return str(llmtrain.__version__)
    except Exception as error:
        return "{}: {}".format(type(error).__name__, error)  # noqa: UP032


def version(name: str) -> str:
    """Version of an installed distribution, or nothing; importing torch would take seconds."""
    try:
        from importlib.metadata import version as installed

        return installed(name)
    except Exception:
        return ""


def missing() -> "list[str]":
    """Packages that are not there, by pip's names."""
    import importlib.util

    return [PACKAGES[name] for name in sorted(PACKAGES) if importlib.util.find_spec(name) is None]


def addresses() -> "dict[str, str]":
    """Interface -> its IPv4 address."""
    import fcntl

    found = {}
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _, name in socket.if_nameindex():
        try:
            # SIOCGIFADDR (netdevice(7)); the address stands behind family and port.
            answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))
            found[name] = socket.inet_ntoa(answer[20:24])
        except OSError:
            continue
    probe.close()
    return found


def health(folder: str, write: bool) -> "dict[str, object]":
    """Machine, disk and write test as the node's own llmtrain sees them; nothing when it cannot."""
    try:
        from dataclasses import asdict
        from pathlib import Path

        from llmtrain.probe.machine import probe_disk, probe_machine, probe_write

        path = Path(folder)
        found = {
            "machine": probe_machine(),
            "disk": probe_disk(path),
            "write": probe_write(path) if write else None,
        }
        return {name: asdict(value) for name, value in found.items() if value is not None}
    except Exception:
        return {}


def is_writable(folder: str) -> bool:
    """Whether this user may create files below the run directory."""
    return os.access(folder, os.W_OK | os.X_OK)


def user() -> str:
    """Who we are here."""
    try:
        import pwd

        return pwd.getpwuid(os.getuid()).pw_name
    except Exception:
        return str(os.getuid())


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1], "write" in sys.argv[2:])))  # noqa: T201
