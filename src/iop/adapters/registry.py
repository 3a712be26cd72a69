"""Which adapter serves which type of the config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from iop.adapters.base import Adapter, AdapterServices
from iop.adapters.cli import CliAdapter
from iop.adapters.llamacpp.control import LlamaCppControl
from iop.adapters.native_adapter import NativeHttpAdapter
from iop.adapters.native_control import NativeControl
from iop.adapters.ollama import OllamaAdapter
from iop.adapters.openai_compat import OpenAICompatAdapter
from iop.adapters.openengine.adapter import OpenEngineAdapter
from iop.adapters.openengine.control import OpenEngineControl
from iop.adapters.sglang.control import SglangControl
from iop.adapters.trtllm.control import TrtllmControl
from iop.adapters.vllm.control import VllmControl
from iop.core.errors import Unsupported
from iop.wire.messages import AdapterConfig, OpenAICompatSettings, OpenEngineSettings

AdapterFactory = Callable[[AdapterConfig, AdapterServices], Adapter]
"""Makes one adapter; raises InvalidRequest when the config cannot work."""


def _control(config: AdapterConfig, services: AdapterServices) -> OpenEngineControl | None:
    """The engine's own OpenEngineAdmin, where the config names one, whatever the adapter's type."""
    settings = config.engine_control
    if settings is None and isinstance(config.settings, OpenEngineSettings):
        settings = config.settings
    if settings is None or not settings.admin_target:
        return None
    return OpenEngineControl(settings, services)


def _openai_compat(config: AdapterConfig, services: AdapterServices) -> Adapter:
    return OpenAICompatAdapter(config, services, control=_control(config, services))


def _native(kind: type[NativeControl]) -> AdapterFactory:
    """An HTTP engine with its own control routes, or with its OpenEngineAdmin where the config names one."""

    def make(config: AdapterConfig, services: AdapterServices) -> Adapter:
        if _control(config, services) is not None or not isinstance(config.settings, OpenAICompatSettings):
            return _openai_compat(config, services)
        return NativeHttpAdapter(
            config, services, kind(config.settings, services, targets=tuple(config.targets))
        )

    return make


NATIVE_CONTROLS: Final[Mapping[str, type[NativeControl]]] = MappingProxyType(
    {
        "llamacpp": LlamaCppControl,
        "sglang": SglangControl,
        "trtllm": TrtllmControl,
        "vllm": VllmControl,
    }
)
"""Kinds that take admin steps over their own routes."""


def _openengine(config: AdapterConfig, services: AdapterServices) -> Adapter:
    return OpenEngineAdapter(config, services, control=_control(config, services))


ADAPTERS: Final[Mapping[str, AdapterFactory]] = MappingProxyType(
    {
        "openai_compat": _openai_compat,
        "openengine": _openengine,
        "ollama": OllamaAdapter,
        "cli": CliAdapter,
        **{kind: _native(control) for kind, control in NATIVE_CONTROLS.items()},
    }
)
"""By type."""


def adapter_types() -> tuple[str, ...]:
    """What a Node of this build offers, for its registration."""
    return tuple(sorted(ADAPTERS))


def create_adapter(config: AdapterConfig, services: AdapterServices) -> Adapter:
    """Make the adapter that a config asks for; it is not started yet.

    Raises:
        Unsupported: a type that this build does not know.
        InvalidRequest: a config that cannot work.
    """
    factory = ADAPTERS.get(config.type)
    if factory is None:
        raise Unsupported(
            f"adapter {config.name!r}: this Node has no adapter of type {config.type!r}; it has "
            + ", ".join(adapter_types()),
            reason="UNKNOWN_ADAPTER_TYPE",
        )
    return factory(config, services)
