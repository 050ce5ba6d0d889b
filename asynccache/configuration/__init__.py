"""Settings from a TOML file, the environment and Python: one typed tree, each value with its origin.

Python wins over the environment, the environment over the file, the file over the defaults. What is unknown or cannot
be used is refused with its name, its value, where it came from, and the nearest name there is. Imports no torch.
"""

from asynccache.configuration.building import Effective, Loaded, Problem, load_config, read_config
from asynccache.configuration.reference import reference
from asynccache.configuration.schema import schema
from asynccache.configuration.settings import nearest
from asynccache.configuration.sources import File, describes_cache, read_file
from asynccache.configuration.writing import as_toml

__all__ = [
    "Effective",
    "File",
    "Loaded",
    "Problem",
    "as_toml",
    "describes_cache",
    "load_config",
    "nearest",
    "read_config",
    "read_file",
    "reference",
    "schema",
]
