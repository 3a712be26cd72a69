"""The typed settings of every process, and their loader."""

from iop.config.explain import ConfigChange, EffectiveValue, changes_between, effective_values
from iop.config.loader import Loaded, Sources, load_edge, load_engine, load_node
from iop.config.problems import ConfigInvalid, Origin, OriginKind, Problem
from iop.config.reader import SecretSource
from iop.config.tree import Adapter, EdgeConfig, EngineConfig, Model, NodeConfig, NodeEntry
from iop.config.values import HIDDEN, Address, Secret, SecretHash, StoreUrl, parse_address

__all__ = [
    "HIDDEN",
    "Adapter",
    "Address",
    "ConfigChange",
    "ConfigInvalid",
    "EdgeConfig",
    "EffectiveValue",
    "EngineConfig",
    "Loaded",
    "Model",
    "NodeConfig",
    "NodeEntry",
    "Origin",
    "OriginKind",
    "Problem",
    "Secret",
    "SecretHash",
    "SecretSource",
    "Sources",
    "StoreUrl",
    "changes_between",
    "effective_values",
    "load_edge",
    "load_engine",
    "load_node",
    "parse_address",
]
