"""What a head reads, on disk: the format, its writer and its memory-mapped reader."""

from ace_learn.exit import SCALARS
from ace_learn.features.shard import FILE_NAME, SPLITS, broken_shard, write_features
from ace_learn.features.spec import SOURCES, FeatureSpec, Source
from ace_learn.features.store import FeatureStore, shard_folders, verify_shards

__all__ = [
    "FILE_NAME",
    "SCALARS",
    "SOURCES",
    "SPLITS",
    "FeatureSpec",
    "FeatureStore",
    "Source",
    "broken_shard",
    "shard_folders",
    "verify_shards",
    "write_features",
]
