"""`--what-if nodes=30 micro=2`: short names of what people vary, as the overrides that `--set` takes."""

from __future__ import annotations

from llmtrain.errors import UsageError

SHORT_NAMES: dict[str, str] = {
    "nodes": "cluster.nodes",
    "spares": "cluster.spares",
    "global": "batch.global",
    "micro": "batch.micro",
    "accumulation": "batch.accumulation",
    "sequence": "model.sequence",
    "layers": "model.layers",
    **{
        name: f"parallel.{name}"
        for name in (
            "dp",
            "tp",
            "pp",
            "vpp",
            "cp",
            "ep",
            "zero",
            "sequence_parallel",
            "schedule",
            "recompute",
        )
    },
}


def what_if_overrides(text: str) -> list[str]:
    """`nodes=30 batch.micro=2` -> texts for `--set`; raises UsageError for a word that is not key=value."""
    overrides = []
    for word in text.replace(",", " ").split():
        key, equals, value = word.partition("=")
        if not equals or not key or not value:
            raise UsageError(
                f"`{word}` is not of the form key=value",
                where="--what-if",
                hint=f"e.g. --what-if 'nodes=30 micro=2'; short names: {', '.join(SHORT_NAMES)}",
            )
        overrides.append(f"{SHORT_NAMES.get(key, key)}={value}")
    if not overrides:
        raise UsageError("nothing to change", where="--what-if", hint="e.g. --what-if 'nodes=30 micro=2'")
    return overrides
