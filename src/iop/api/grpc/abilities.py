"""What the providers of a pool can do with a generation, as one answer for all of them (SF-22). Pure.

A capability is advertised only where every provider that may get the request has it, so that what is advertised is
accepted whoever serves. What a kind of provider understands is written down here; what an OpenEngine server can do it
says itself, and its Node tells.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from google.protobuf.message import DecodeError

from iop.adapters.base import MODEL_CAPABILITY
from iop.admin.codec import RecordCodec
from iop.api.grpc import ports
from iop.core.errors import RemoteProtocolError
from iop.edge.calls import Route
from iop.edge.snapshot import AdapterSpec
from iop.pb.openengine.v1 import model_pb2
from iop.wire.messages import ProviderSnapshot

__all__ = [
    "CHAT_FORMATS",
    "MESSAGES_FORMAT",
    "OPENAI_FORMAT",
    "OPTION_NAMES",
    "TEXT_FORMAT",
    "Abilities",
    "abilities_of",
    "common_abilities",
]

TEXT_FORMAT: Final = "text"
MESSAGES_FORMAT: Final = "chat_messages"
"""The prompt is a JSON list of messages with a role and a text each."""
OPENAI_FORMAT: Final = "openai_chat"
"""The prompt is the body of an OpenAI chat: messages with parts and tool calls, tools, response format."""
CHAT_FORMATS: Final = frozenset({MESSAGES_FORMAT, OPENAI_FORMAT})

SEQUENCES_MAX: Final = 128
"""Most outputs of one request at a provider that takes any number: each costs an entry until the end."""

_CODEC: Final = RecordCodec(error=RemoteProtocolError)

OPTION_NAMES: Final = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
    }
)
"""Every option of sampling and stopping; the schema has no capability for any of them."""

_STANDARD: Final = frozenset(
    {"temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "max_tokens", "stop"}
)
"""OpenAI's own; whoever speaks its dialect knows them."""


_NO_LOGPROBS: Final = ports.LogprobCapabilities(supported=False)
_NO_GUIDES: Final = ports.GuidedCapabilities(supported=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What one provider, or each of several, can do.

    Attributes:
        options: the names of `OPTION_NAMES` that it understands; others it would silently ignore.
        formats: ways to read a prompt besides plain text.

    The rest are the schema's capabilities, by their names there.
    """

    options: frozenset[str] = _STANDARD
    formats: frozenset[str] = frozenset()
    takes_text: bool = True
    takes_token_ids: bool = False
    sequences_max: int = 1
    output_logprobs: ports.LogprobCapabilities = _NO_LOGPROBS
    prompt_logprobs: ports.LogprobCapabilities = _NO_LOGPROBS
    guided: ports.GuidedCapabilities = _NO_GUIDES
    stop_in_output: bool = False
    cache_salt: bool = False
    prefix_cache_bypass: bool = False
    lora: bool = False
    multimodal: bool = False
    context_max: int | None = None
    output_max: int | None = None


_BY_TYPE: Final[Mapping[str, Abilities]] = MappingProxyType(
    {
        "vllm": Abilities(
            options=OPTION_NAMES, takes_token_ids=True, sequences_max=SEQUENCES_MAX, stop_in_output=True
        ),
        "sglang": Abilities(options=OPTION_NAMES, takes_token_ids=True, sequences_max=SEQUENCES_MAX),
        "llamacpp": Abilities(
            options=_STANDARD | {"top_k", "min_p", "repetition_penalty", "ignore_eos"},
            takes_token_ids=True,
            output_logprobs=ports.LogprobCapabilities(
                supported=True, candidate_selection_modes=(ports.CandidateMode.TOP_N,), max_top_n=20
            ),
        ),
        "ollama": Abilities(
            options=_STANDARD | {"top_k", "min_p", "repetition_penalty"},
            guided=ports.GuidedCapabilities(
                supported=True, modes=(ports.GuidedMode.JSON_SCHEMA, ports.GuidedMode.JSON_OBJECT)
            ),
        ),
        "cli": Abilities(options=frozenset()),
    }
)

_UNKNOWN_ENGINE: Final = Abilities(options=OPTION_NAMES)
"""An OpenEngine server that has not told yet: it generates from text; more is not promised."""


def abilities_of(spec: AdapterSpec, *, target: str, report: ProviderSnapshot | None) -> Abilities:
    """What one provider can do with a generation for `target`.

    Args:
        spec: as configured.
        report: what its Node last told; only an OpenEngine server's counts.
    """
    if spec.type == "openengine":
        return _told(report, target) or _UNKNOWN_ENGINE
    able = _BY_TYPE.get(spec.type, Abilities())
    offers_chat = spec.operations is None or "chat_completions" in spec.operations
    offers_text = spec.operations is None or "completions" in spec.operations
    if spec.route is Route.TUNNEL and not offers_text:
        able = replace(able, takes_text=False, takes_token_ids=False)
    return replace(able, formats=CHAT_FORMATS if offers_chat else frozenset())


def common_abilities(each: Iterable[Abilities]) -> Abilities:
    """What all of them can do; of nobody, nothing but text."""
    able: Abilities | None = None
    for other in each:
        able = other if able is None else _both(able, other)
    return Abilities(options=frozenset()) if able is None else able


def _both(one: Abilities, two: Abilities) -> Abilities:
    return Abilities(
        options=one.options & two.options,
        formats=one.formats & two.formats,
        takes_text=one.takes_text and two.takes_text,
        takes_token_ids=one.takes_token_ids and two.takes_token_ids,
        sequences_max=min(one.sequences_max, two.sequences_max),
        output_logprobs=_both_logprobs(one.output_logprobs, two.output_logprobs),
        prompt_logprobs=_both_logprobs(one.prompt_logprobs, two.prompt_logprobs),
        guided=_both_guided(one.guided, two.guided),
        stop_in_output=one.stop_in_output and two.stop_in_output,
        cache_salt=one.cache_salt and two.cache_salt,
        prefix_cache_bypass=one.prefix_cache_bypass and two.prefix_cache_bypass,
        lora=one.lora and two.lora,
        multimodal=one.multimodal and two.multimodal,
        context_max=_surely(one.context_max, two.context_max),
        output_max=_surely(one.output_max, two.output_max),
    )


def _both_logprobs(
    one: ports.LogprobCapabilities, two: ports.LogprobCapabilities
) -> ports.LogprobCapabilities:
    if not (one.supported and two.supported):
        return _NO_LOGPROBS
    modes = tuple(mode for mode in one.candidate_selection_modes if mode in two.candidate_selection_modes)
    return ports.LogprobCapabilities(
        supported=True, candidate_selection_modes=modes, max_top_n=_least(one.max_top_n, two.max_top_n)
    )


def _both_guided(one: ports.GuidedCapabilities, two: ports.GuidedCapabilities) -> ports.GuidedCapabilities:
    modes = tuple(mode for mode in one.modes if mode in two.modes)
    return ports.GuidedCapabilities(supported=bool(one.supported and two.supported and modes), modes=modes)


def _surely(one: int | None, two: int | None) -> int | None:
    """The smaller length; unknown if either is."""
    return None if one is None or two is None else min(one, two)


def _least(one: int | None, two: int | None) -> int | None:
    """The smaller bound; an unknown one says nothing."""
    known = [value for value in (one, two) if value is not None]
    return min(known) if known else None


def _told(report: ProviderSnapshot | None, target: str) -> Abilities | None:
    """What an OpenEngine server says of this model; None if it says nothing that can be read."""
    if report is None or not (text := report.capabilities.get(MODEL_CAPABILITY + target)):
        return None
    try:
        message = model_pb2.ModelInfo.FromString(base64.b64decode(text, validate=True))
        # A newer server may name modes that we have no word for: those cannot be asked for here.
        capabilities = message.generation
        _keep_known(capabilities.prompt_logprobs.candidate_selection_modes, ports.CandidateMode)
        _keep_known(capabilities.output_logprobs.candidate_selection_modes, ports.CandidateMode)
        _keep_known(capabilities.guided_decoding.modes, ports.GuidedMode)
        info = _CODEC.decode(message, ports.ModelInfo, path="")
    except (binascii.Error, ValueError, DecodeError, RemoteProtocolError):
        return None
    can = info.generation
    return Abilities(
        options=OPTION_NAMES,
        formats=frozenset(info.tokenizer_modes) - {TEXT_FORMAT},
        takes_text=bool(info.supports_text_input),
        takes_token_ids=bool(info.supports_token_ids_input),
        sequences_max=1 if can.max_num_sequences is None else can.max_num_sequences,
        output_logprobs=can.output_logprobs,
        prompt_logprobs=can.prompt_logprobs,
        guided=can.guided_decoding,
        stop_in_output=bool(can.supports_stop_in_output),
        cache_salt=bool(can.supports_cache_salt),
        prefix_cache_bypass=bool(can.supports_prefix_cache_bypass),
        lora=bool(info.supports_lora),
        multimodal=bool(info.supports_multimodal),
        context_max=info.max_context_length,
        output_max=info.max_output_tokens,
    )


def _keep_known(modes: object, known: type[ports.CandidateMode | ports.GuidedMode]) -> None:
    numbers = {int(each) for each in known}
    kept = [mode for mode in modes if mode in numbers]  # type: ignore[attr-defined]  # a protobuf container
    del modes[:]  # type: ignore[attr-defined]  # as above
    modes.extend(kept)  # type: ignore[attr-defined]  # as above
