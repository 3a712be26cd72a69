"""``iop status`` and ``iop explain``: what the ops listener tells, for people and programs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from iop.cli.ops_options import OpsCall, asks_ops
from iop.cli.output import data, print_json, print_rows

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands to the tree."""
    app.command("status")(status)
    app.command("explain")(explain)
    app.command("models")(models)


@asks_ops(role="viewer")
def status(
    call: OpsCall,
    leases: Annotated[
        bool, typer.Option("--leases", help="List every occupied unit of capacity too.")
    ] = False,
) -> None:
    """The fleet: Nodes and their providers, models and their queues.

    Example: iop status --leases
    """
    shown = call.client.status(with_leases=leases)
    if call.as_json:
        print_json(shown)
        return
    data.print(f"config revision {shown['config_revision']}\n")
    print_rows(
        ("node", "step", "provider", "status", "health", "in flight", "queued", "weights", "gates", "why"),
        _provider_rows(shown["nodes"]),
        empty="no nodes are configured",
    )
    data.print()
    _print_models(shown["models"])
    if leases:
        data.print()
        print_rows(
            ("lease", "node", "provider", "kind", "request", "since"),
            (
                tuple(str(lease[key]) for key in ("id", "node", "provider", "kind", "request_id", "since"))
                for lease in shown["leases"]
            ),
            empty="no leases: nothing is running",
        )


def _provider_rows(nodes: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            str(node["id"]),
            str(node["step"]),
            str(provider.get("id", "")),
            str(provider.get("status", "")),
            str(provider.get("health", "")),
            f"{provider.get('in_flight', 0)}/{provider.get('capacity', 0)}",
            str(provider.get("queued", 0)),
            str(provider.get("weight_version") or ""),
            ", ".join(str(gate) for gate in provider.get("gates") or []),
            str(provider.get("reason") or node.get("reason") or ""),
        )
        for node in nodes
        for provider in node["providers"] or [{}]
    ]


@asks_ops(role="viewer")
def explain(
    call: OpsCall,
    request_id: Annotated[str, typer.Argument(help="The x-request-id of a recent answer.")],
) -> None:
    """Why a recent request went where it went: candidates, choice, waiting, outcome.

    Example: iop explain req-7
    """
    shown = call.client.explain(request_id)
    if call.as_json:
        print_json(shown)
        return
    for line in _explained(shown):
        data.print(line)


def _explained(shown: dict[str, Any]) -> list[str]:
    """What became of one request, in a line each."""
    outcome, reason = shown["outcome"] or "still running", shown["reason"]
    why = f" ({reason})" if reason and reason != outcome else ""
    took = "" if shown["duration_ms"] is None else f", took {shown['duration_ms']} ms"
    lines = [f"{shown['request_id']}: {shown['model']}, {outcome}{why}", f"  began {shown['began']}{took}"]
    provider = f"provider {shown['provider']}" if shown["provider"] else "reached no provider"
    lines.append(f"  {provider}, waited {shown['queue_ms']} ms, attempts {shown['attempts']}")
    if usage := shown["usage"]:
        told = {"prompt_tokens": "in", "cached_prompt_tokens": "of them cached", "completion_tokens": "out"}
        counts = [f"{usage[key]} {word}" for key, word in told.items() if usage.get(key) is not None]
        lines.append(f"  tokens: {', '.join(counts)}")
    lines += [f"  tried {one['provider']}: {one['error']}" for one in shown["tries"] if one["error"]]
    for candidate in shown["candidates"]:
        sign = "+" if candidate["eligible"] else "-"
        lines.append(f"  {sign} {candidate['provider']}: {candidate['why']}")
    return lines


@asks_ops(role="viewer")
def models(call: OpsCall) -> None:
    """What callers may ask for: each model, who serves it, how full its queue is, and what its pool can do.

    A question mark stands where no engine has said.

    Example: iop models
    """
    shown = call.client.status()["models"]
    if call.as_json:
        print_json({"models": shown})
        return
    _print_models(shown)
    data.print()
    print_rows(
        ("model", "live", "at once", "context", "images", "audio", "tools"),
        (_abilities(model) for model in shown if "context_window" in model),
        empty="nothing is known of any model",
    )
    data.print()
    print_rows(
        ("model", "route", "served by", "asked as"),
        (
            (
                str(model["id"]),
                path,
                ", ".join(ways),
                ", ".join(model["conversions"].get(path, ())),
            )
            for model in shown
            for path, ways in model.get("endpoints", {}).items()
        ),
        empty="no route of any model is served",
    )


def _abilities(model: dict[str, Any]) -> tuple[str, ...]:
    window, modalities = model["context_window"], model["modalities"]
    context = "?" if window["max"] is None else str(window["max"])
    if window["min"] != window["max"]:
        context = f"{'?' if window['min'] is None else window['min']} to {context}"
    return (
        str(model["id"]),
        f"{model['providers_live']}/{model['providers_configured']}",
        str(model["limits"]["concurrent"]),
        context,
        *(_known(value) for value in (modalities["image"], modalities["audio"], model["tools"])),
    )


def _known(value: bool | None) -> str:
    return "?" if value is None else "yes" if value else "no"


def _print_models(shown: list[dict[str, Any]]) -> None:
    print_rows(
        ("model", "providers", "waiting", "paused"),
        (
            (
                str(model["id"]),
                ", ".join(str(provider) for provider in model["providers"]),
                f"{model['queue_depth']}/{model['queue_max']}",
                "yes" if model["paused"] else "no",
            )
            for model in shown
        ),
        empty="no models are configured",
    )
