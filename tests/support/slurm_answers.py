"""A transport in the place of a cluster's login node, for what needs only its words."""

from __future__ import annotations

from llmtrain.transport.base import Completed, TransportError


class Answers:
    """A transport that answers every command with the same text, or with the end of a time limit."""

    def __init__(self, text: str | None) -> None:
        self.text = text

    def run(self, argv: tuple[str, ...], *, timeout: float, stdin: bytes = b"") -> Completed:
        if self.text is None:
            raise TransportError(f"`{argv[0]}` took longer than {timeout:g} s and was killed")
        return Completed(argv=argv, exit_code=0, stdout=self.text.encode(), stderr=b"")
