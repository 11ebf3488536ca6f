"""Checkpoints on disk, without torch: manifest, choice of the newest whole one, commit and deletion."""

from llmtrain.run.checkpoints.chain import Link, read_chain
from llmtrain.run.checkpoints.commit import begin_save, clean_leftovers, commit_save
from llmtrain.run.checkpoints.folder import (
    Checkpoint,
    ever_committed,
    last_committed,
    list_checkpoints,
    lost_pointer,
    read_pointer,
    resolve_step,
)
from llmtrain.run.checkpoints.manifest import (
    Base,
    CheckpointInfo,
    Manifest,
    PieceEntry,
    ShardEntry,
    TensorEntry,
)
from llmtrain.run.checkpoints.notes import notes_faults
from llmtrain.run.checkpoints.parse import read_manifest
from llmtrain.run.checkpoints.retention import Retention, delete, kept_for_ever, outdated, prune, retention
from llmtrain.run.checkpoints.verify import Selection, newest_valid, verify, verify_shards

__all__ = [
    "Base",
    "Checkpoint",
    "CheckpointInfo",
    "Link",
    "Manifest",
    "PieceEntry",
    "Retention",
    "Selection",
    "ShardEntry",
    "TensorEntry",
    "begin_save",
    "clean_leftovers",
    "commit_save",
    "delete",
    "ever_committed",
    "kept_for_ever",
    "last_committed",
    "list_checkpoints",
    "lost_pointer",
    "newest_valid",
    "notes_faults",
    "outdated",
    "prune",
    "read_chain",
    "read_manifest",
    "read_pointer",
    "resolve_step",
    "retention",
    "verify",
    "verify_shards",
]
