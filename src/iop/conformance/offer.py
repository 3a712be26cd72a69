"""What the server's profile offers, and well-formed requests that stay within it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from iop.conformance.messages import pb
from iop.conformance.model import CheckSkipped

__all__ = ["KINDS", "Offer"]

KINDS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "FlushCaches": pb.ADMIN_OPERATION_KIND_FLUSH_CACHES,
        "Pause": pb.ADMIN_OPERATION_KIND_PAUSE,
        "Resume": pb.ADMIN_OPERATION_KIND_RESUME,
        "ReleaseResources": pb.ADMIN_OPERATION_KIND_RELEASE_RESOURCES,
        "RestoreResources": pb.ADMIN_OPERATION_KIND_RESTORE_RESOURCES,
        "UpdateWeights": pb.ADMIN_OPERATION_KIND_UPDATE_WEIGHTS,
        "StartProfile": pb.ADMIN_OPERATION_KIND_START_PROFILE,
        "StopProfile": pb.ADMIN_OPERATION_KIND_STOP_PROFILE,
        "ReconfigureServing": pb.ADMIN_OPERATION_KIND_RECONFIGURE_SERVING,
    }
)
"""The operation kind of each mutating RPC."""

MISSING_PATH: Final = "/nonexistent/openengine-conformance"
"""Weights that are nowhere: an absolute path that no participant sees."""


class Offer:
    """One profile, read for what can be asked.

    Requests select participants that all offer the kind: everybody where everybody does, else those by name.
    """

    def __init__(self, profile: Any) -> None:
        self.profile = profile
        self.participants: Sequence[Any] = tuple(p for p in profile.participants if p.connected)

    def has(self, rpc: str) -> bool:
        """Whether some participants can be asked for this kind of operation."""
        return bool(self.who(rpc))

    def need(self, *rpcs: str) -> None:
        """Skip the check unless all these kinds are offered.

        Raises:
            CheckSkipped: naming what is not.
        """
        lacking = [rpc for rpc in rpcs if not self.has(rpc)]
        if lacking:
            raise CheckSkipped(f"the profile does not offer {', '.join(lacking)}")

    @property
    def mutations(self) -> tuple[str, ...]:
        """Mutating RPCs that are offered."""
        return tuple(rpc for rpc in KINDS if self.has(rpc))

    def who(self, rpc: str) -> tuple[Any, ...]:
        """Connected participants of groups that wholly offer the kind."""
        offering = [p for p in self.participants if KINDS[rpc] in p.operations]
        short = {p.group_id for p in self.profile.participants if p not in offering and p.group_id}
        return tuple(p for p in offering if p.group_id not in short)

    def ids(self, rpc: str) -> tuple[str, ...]:
        """Their ids."""
        return tuple(p.participant_id for p in self.who(rpc))

    def common(self, rpc: str, field: str) -> tuple[int, ...]:
        """Numbers that everybody who offers the kind has in a capability list."""
        members = self.who(rpc)
        if not members:
            return ()
        first, *others = ([int(number) for number in getattr(p, field)] for p in members)
        return tuple(number for number in first if all(number in other for other in others))

    def one(self, rpc: str, field: str, *, prefer: int = 0) -> int:
        """One such number, the preferred one if it is there.

        Raises:
            CheckSkipped: there is none.
        """
        common = self.common(rpc, field)
        if not common:
            raise CheckSkipped(f"no {field} that all participants of {rpc} share")
        return prefer if prefer in common else common[0]

    def target(self, rpc: str) -> Any:
        """Everybody who offers the kind."""
        ids = self.ids(rpc)
        if len(ids) == len(self.profile.participants):
            return pb.TargetSelector(all=pb.AllTargets())
        return pb.TargetSelector(participants=pb.ParticipantSelector(participant_ids=ids))

    @property
    def model(self) -> str:
        """A model whose participants can all be updated.

        Raises:
            CheckSkipped: there is none.
        """
        able = set(self.ids("UpdateWeights"))
        for model in sorted({m for p in self.participants for m in p.models}):
            if all(p.participant_id in able for p in self.participants if model in p.models):
                return str(model)
        raise CheckSkipped("no model of which all participants take weight updates")

    # ------------------------------------------------------------------------------------------------- requests

    def flush(self, key: str, *, kinds: Iterable[int] = (), busy: int = 0, **options: Any) -> Any:
        """A flush that waits for engines that are busy."""
        return pb.FlushCachesRequest(
            options=pb.MutationOptions(idempotency_key=key, **options),
            target=self.target("FlushCaches"),
            kinds=list(kinds) or [self.one("FlushCaches", "cache_kinds", prefer=pb.CACHE_KIND_PREFIX)],
            busy_policy=busy or self.one("FlushCaches", "busy_policies", prefer=pb.BUSY_POLICY_WAIT),
        )

    def pause_spec(
        self, *, mode: int = 0, admission: int = 0, field: str = "pause_modes", rpc: str = "Pause"
    ) -> Any:
        """A drain, with new requests waiting, where it is offered."""
        return pb.PauseSpec(
            mode=mode or self.one(rpc, field, prefer=pb.PAUSE_MODE_DRAIN),
            admission=admission or pb.ADMISSION_POLICY_QUEUE,
        )

    def pause(self, key: str, *, mode: int = 0, admission: int = 0, **options: Any) -> Any:
        """A pause of everybody."""
        return pb.PauseRequest(
            options=pb.MutationOptions(idempotency_key=key, **options),
            target=self.target("Pause"),
            pause=self.pause_spec(mode=mode, admission=admission),
        )

    def resume(self, key: str, epoch: int, **options: Any) -> Any:
        """The end of a pause."""
        return pb.ResumeRequest(options=pb.MutationOptions(idempotency_key=key, **options), pause_epoch=epoch)

    @property
    def release_kind(self) -> int:
        """The resource that costs least to give back."""
        return self.one("ReleaseResources", "resource_kinds", prefer=pb.RESOURCE_KIND_KV_CACHE)

    def release(self, key: str, *, with_pause: bool = False, **options: Any) -> Any:
        """A release of one kind of resource."""
        kind = self.release_kind
        request = pb.ReleaseResourcesRequest(
            options=pb.MutationOptions(idempotency_key=key, **options),
            target=self.target("ReleaseResources"),
            kinds=[kind],
        )
        if kind == pb.RESOURCE_KIND_WEIGHTS:
            request.weight_retention = self.one(
                "ReleaseResources", "weight_retentions", prefer=pb.WEIGHT_RETENTION_OFFLOAD_TO_HOST
            )
        if with_pause:
            request.pause.CopyFrom(self.pause_spec(rpc="ReleaseResources"))
        return request

    def restore(self, key: str, epoch: int, *, kinds: Iterable[int] = (), **options: Any) -> Any:
        """The end of a release."""
        return pb.RestoreResourcesRequest(
            options=pb.MutationOptions(idempotency_key=key, **options),
            resource_epoch=epoch,
            kinds=list(kinds) or [self.release_kind],
        )

    def update(self, key: str, *, version: str, path: str = MISSING_PATH, **options: Any) -> Any:
        """An update from disk that pauses what it must.

        It says `allow_irreversible`: nobody may know where the weights of the start can be read again.
        """
        return pb.UpdateWeightsRequest(
            options=pb.MutationOptions(idempotency_key=key, **options),
            model=self.model,
            disk=pb.DiskSource(
                path=path,
                format=self.one("UpdateWeights", "weight_formats", prefer=pb.WEIGHT_FORMAT_SAFETENSORS),
            ),
            weight_version=version,
            quiesce=self.pause_spec(field="quiesce_modes", rpc="UpdateWeights"),
            cache_policy=self.one("UpdateWeights", "cache_policies", prefer=pb.CACHE_POLICY_FLUSH),
            allow_irreversible=True,
        )

    def start_profile(self, key: str, **options: Any) -> Any:
        """A profile of one kind."""
        return pb.StartProfileRequest(
            options=pb.MutationOptions(idempotency_key=key, **options),
            target=self.target("StartProfile"),
            kinds=[self.one("StartProfile", "profiler_kinds", prefer=pb.PROFILER_KIND_CPU)],
        )

    def stop_profile(self, key: str, profile_id: str, **options: Any) -> Any:
        """The end of a profile."""
        return pb.StopProfileRequest(
            options=pb.MutationOptions(idempotency_key=key, **options), profile_id=profile_id
        )

    def reconfigure(self, key: str, *changes: Any, **options: Any) -> Any:
        """A change of serving; without changes given, one that is only good for being refused or planned."""
        field = self.one("ReconfigureServing", "reconfigurable_fields")
        change = {
            pb.RECONFIGURABLE_FIELD_CAPACITY: pb.ServingChange(capacity=1),
            pb.RECONFIGURABLE_FIELD_LONG_CONTEXT_CAPACITY: pb.ServingChange(long_context_capacity=1),
            pb.RECONFIGURABLE_FIELD_DATA_PARALLEL_SIZE: pb.ServingChange(data_parallel_size=1),
            pb.RECONFIGURABLE_FIELD_ENABLED: pb.ServingChange(enabled=True),
            pb.RECONFIGURABLE_FIELD_SERVED_ALIASES: pb.ServingChange(served_aliases=pb.ServedAliases()),
            pb.RECONFIGURABLE_FIELD_ROLE: pb.ServingChange(role=1),
        }[field]
        return pb.ReconfigureServingRequest(
            options=pb.MutationOptions(idempotency_key=key, **options),
            target=self.target("ReconfigureServing"),
            changes=list(changes) or [change],
        )

    def sample(self, rpc: str, key: str, **options: Any) -> Any:
        """A request of any kind whose shape is right; epochs and ids in it are made up."""
        match rpc:
            case "FlushCaches":
                return self.flush(key, **options)
            case "Pause":
                return self.pause(key, **options)
            case "Resume":
                return self.resume(key, 1, **options)
            case "ReleaseResources":
                return self.release(key, **options)
            case "RestoreResources":
                return self.restore(key, 1, kinds=[pb.RESOURCE_KIND_KV_CACHE], **options)
            case "UpdateWeights":
                return self.update(key, version=f"v-{key}", **options)
            case "StartProfile":
                return self.start_profile(key, **options)
            case "StopProfile":
                return self.stop_profile(key, "no-such-profile", **options)
            case "ReconfigureServing":
                return self.reconfigure(key, **options)
            case _:
                raise AssertionError(rpc)

    @property
    def samples(self) -> tuple[str, ...]:
        """Mutating RPCs of which a sample can be made."""
        able = []
        for rpc in self.mutations:
            try:
                self.sample(rpc, "k")
            except CheckSkipped:
                continue
            able.append(rpc)
        return tuple(able)
