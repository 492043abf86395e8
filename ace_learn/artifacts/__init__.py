"""Artifacts on disk: atomic and resumable writes, one writer, hashes, provenance."""

from ace_learn.artifacts.atomic import (
    atomic_file,
    atomic_folder,
    clean_stale,
    is_temporary,
    publish,
    sync_tree,
    write_bytes,
    write_json,
    write_text,
)
from ace_learn.artifacts.dump import config_json, dump_config, same_config
from ace_learn.artifacts.hashing import sha256_file, sha256_folder, sha256_json
from ace_learn.artifacts.json_fields import JsonFields, read_fields, read_json
from ace_learn.artifacts.lock import LOCK_NAMES, writer_lock
from ace_learn.artifacts.provenance import GitState, ProvenanceRecorder, git_state
from ace_learn.json_type import JSON

__all__ = [
    "JSON",
    "LOCK_NAMES",
    "GitState",
    "JsonFields",
    "ProvenanceRecorder",
    "atomic_file",
    "atomic_folder",
    "clean_stale",
    "config_json",
    "dump_config",
    "git_state",
    "is_temporary",
    "publish",
    "read_fields",
    "read_json",
    "same_config",
    "sha256_file",
    "sha256_folder",
    "sha256_json",
    "sync_tree",
    "write_bytes",
    "write_json",
    "write_text",
    "writer_lock",
]
