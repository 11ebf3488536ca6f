"""Problems that show after a profile was read, with the file and line of the field that is to blame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from llmtrain.errors import ConfigError, Problem


@contextmanager
def profile_lines(cluster: str, overrides: Sequence[str]) -> Iterator[None]:
    """Give problems of a ConfigError that name a field of the profile (`backend.slurm.partition`) the place
    where it stands."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(_located(error.problems, cluster, overrides)) from error


def _located(problems: Sequence[Problem], cluster: str, overrides: Sequence[str]) -> list[Problem]:
    from llmtrain.config.load import read_profile
    from llmtrain.config.reading.override import parse_overrides, split_overrides

    read = read_profile(cluster, split_overrides(parse_overrides(overrides)[0])[1])
    sections = {"nodes", "backend", "storage", "environment", "inter_node"}
    return [
        # The field stays named: what is wrong may be that it is not written.
        replace(problem, where=read.where(problem.where), message=f"{problem.where}: {problem.message}")
        if problem.where.partition(".")[0] in sections
        else problem
        for problem in problems
    ]
