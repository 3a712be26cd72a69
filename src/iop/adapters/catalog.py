"""What each kind of adapter can do, from the code that does it: for the command line and the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from iop.adapters.gate_control import GATE_OFFERS, Offer
from iop.adapters.ollama_control import OllamaControl
from iop.adapters.registry import NATIVE_CONTROLS, adapter_types
from iop.admin.enums import AdminOperationKind

_RUNS: Final = frozenset({"cli", "ollama", "openengine"})
_ADMIN_BY_CONFIG: Final = frozenset({"openengine", "openai_compat"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One adapter type.

    Attributes:
        work: `tunnels` or `runs`.
        offers: admin operations over the engine's own routes or the Node's gate, each subject to what is found.
        note: what else there is where the config says so.
    """

    type: str
    work: str
    offers: tuple[Offer, ...] = ()
    note: str = ""


def kinds() -> tuple[Kind, ...]:
    """All kinds of this build, by name."""
    return tuple(_kind(each) for each in adapter_types())


def _kind(name: str) -> Kind:
    note = "what its OpenEngineAdmin advertises, where `admin` names one" if name in _ADMIN_BY_CONFIG else ""
    return Kind(type=name, work="runs" if name in _RUNS else "tunnels", offers=_offers_of(name), note=note)


def _offers_of(name: str) -> tuple[Offer, ...]:
    if name == "ollama":
        return OllamaControl.OFFERS
    control = NATIVE_CONTROLS.get(name)
    return GATE_OFFERS if control is None else control().OFFERS


def operation_name(operation: AdminOperationKind) -> str:
    """As people read it."""
    return operation.name.lower().replace("_", " ")


def rows() -> tuple[tuple[str, str, str, str, str], ...]:
    """Type, work, operation, what of it, and how the engine must be started for it."""
    lines = []
    for kind in kinds():
        if kind.note:
            lines.append((kind.type, kind.work, kind.note, "", ""))
        lines += [
            (kind.type, kind.work, operation_name(offer.operation), offer.detail, offer.needs)
            for offer in kind.offers
        ]
    return tuple(lines)


def markdown() -> str:
    """The table of the reference."""
    lines = ["| type | work | admin operation | what | needs |", "| --- | --- | --- | --- | --- |"]
    lines += ["| `" + first + "` | " + " | ".join(rest) + " |" for first, *rest in rows()]
    return "\n".join(line.replace("|  |", "| |").replace("|  |", "| |") for line in lines) + "\n"
