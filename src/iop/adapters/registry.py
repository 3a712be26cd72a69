"""Which adapter serves which type of the config.

A kind is loaded when the first adapter of it is made: a Node in front of a plain HTTP engine carries neither gRPC nor
the control of engines that it does not have. The table names all kinds nevertheless, so what a Node offers does not
depend on what it has loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from iop.adapters.base import Adapter, AdapterServices
from iop.core.errors import Unsupported
from iop.wire.messages import AdapterConfig, OpenAICompatSettings, OpenEngineSettings

if TYPE_CHECKING:
    from iop.adapters.native_control import NativeControl
    from iop.adapters.openengine.control import OpenEngineControl

__all__ = ["ADAPTERS", "NATIVE_CONTROLS", "AdapterFactory", "adapter_types", "create_adapter"]

AdapterFactory = Callable[[AdapterConfig, AdapterServices], Adapter]
"""Makes one adapter; raises InvalidRequest when the config cannot work."""


# --- adapters ---------------------------------------------------------------------------------------------------------


def _openai_compat(config: AdapterConfig, services: AdapterServices) -> Adapter:
    from iop.adapters.openai_compat import OpenAICompatAdapter

    return OpenAICompatAdapter(config, services, control=_control(config, services))


def _openengine(config: AdapterConfig, services: AdapterServices) -> Adapter:
    from iop.adapters.openengine.adapter import OpenEngineAdapter

    return OpenEngineAdapter(config, services, control=_control(config, services))


def _ollama(config: AdapterConfig, services: AdapterServices) -> Adapter:
    from iop.adapters.ollama import OllamaAdapter

    return OllamaAdapter(config, services)


def _cli(config: AdapterConfig, services: AdapterServices) -> Adapter:
    from iop.adapters.cli import CliAdapter

    return CliAdapter(config, services)


def _native(load_control: Callable[[], type[NativeControl]]) -> AdapterFactory:
    """An HTTP engine with its own control routes, or with its OpenEngineAdmin where the config names one."""

    def make(config: AdapterConfig, services: AdapterServices) -> Adapter:
        if _control_settings(config) is not None or not isinstance(config.settings, OpenAICompatSettings):
            return _openai_compat(config, services)
        from iop.adapters.native_adapter import NativeHttpAdapter

        control = load_control()(config.settings, services, targets=tuple(config.targets))
        return NativeHttpAdapter(config, services, control)

    return make


# --- their control ----------------------------------------------------------------------------------------------------


def _control(config: AdapterConfig, services: AdapterServices) -> OpenEngineControl | None:
    """The engine's own OpenEngineAdmin, where the config names one, whatever the adapter's type."""
    settings = _control_settings(config)
    if settings is None:
        return None
    from iop.adapters.openengine.control import OpenEngineControl

    return OpenEngineControl(settings, services)


def _control_settings(config: AdapterConfig) -> OpenEngineSettings | None:
    settings = config.engine_control
    if settings is None and isinstance(config.settings, OpenEngineSettings):
        settings = config.settings
    return settings if settings is not None and settings.admin_target else None


def _llamacpp_control() -> type[NativeControl]:
    from iop.adapters.llamacpp.control import LlamaCppControl

    return LlamaCppControl


def _sglang_control() -> type[NativeControl]:
    from iop.adapters.sglang.control import SglangControl

    return SglangControl


def _trtllm_control() -> type[NativeControl]:
    from iop.adapters.trtllm.control import TrtllmControl

    return TrtllmControl


def _vllm_control() -> type[NativeControl]:
    from iop.adapters.vllm.control import VllmControl

    return VllmControl


# --- tables -----------------------------------------------------------------------------------------------------------

NATIVE_CONTROLS: Final[Mapping[str, Callable[[], type[NativeControl]]]] = MappingProxyType(
    {
        "llamacpp": _llamacpp_control,
        "sglang": _sglang_control,
        "trtllm": _trtllm_control,
        "vllm": _vllm_control,
    }
)
"""Kinds that take admin steps over their own routes; the call loads the control's class."""

ADAPTERS: Final[Mapping[str, AdapterFactory]] = MappingProxyType(
    {
        "openai_compat": _openai_compat,
        "openengine": _openengine,
        "ollama": _ollama,
        "cli": _cli,
        **{kind: _native(load_control) for kind, load_control in NATIVE_CONTROLS.items()},
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
