"""What a head reads, on disk: the format, its writer and its memory-mapped reader."""

from ace_learn.exit import CANDIDATES, SCALARS
from ace_learn.features.minimal import MinimalChoice
from ace_learn.features.shard import FILE_NAME, INDEX_COLUMNS, SPLITS, FeatureWriter, broken_shard, write_features
from ace_learn.features.spec import DEFAULT_SOURCES, SOURCES, FeatureSpec, Source, needs_drafter
from ace_learn.features.store import FeatureStore, shard_folders, verify_shards

__all__ = [
    "CANDIDATES",
    "DEFAULT_SOURCES",
    "FILE_NAME",
    "INDEX_COLUMNS",
    "SCALARS",
    "SOURCES",
    "SPLITS",
    "FeatureSpec",
    "FeatureStore",
    "FeatureWriter",
    "MinimalChoice",
    "Source",
    "broken_shard",
    "needs_drafter",
    "shard_folders",
    "verify_shards",
    "write_features",
]
