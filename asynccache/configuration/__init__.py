"""Settings from a TOML file, the environment and Python: one tree of typed values, each with its origin.

Python wins over the environment, the environment over the file, and the file over the defaults. Unknown settings and
unusable values are refused; the error has the setting's name, its value, where it came from, and the nearest name that
exists. This package does not import torch.
"""

from asynccache.configuration.building import Effective, Loaded, Problem, load_config, read_config
from asynccache.configuration.schema import schema
from asynccache.configuration.settings import nearest
from asynccache.configuration.writing import as_toml

__all__ = [
    "Effective",
    "Loaded",
    "Problem",
    "as_toml",
    "load_config",
    "nearest",
    "read_config",
    "schema",
]
