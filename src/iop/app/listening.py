"""What every role that listens needs: clear words for an address that cannot be had, ids, the journal's place."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from iop.admin.core import AdminCore
from iop.admin.permissions import Permission, require
from iop.api.grpc.auth import Credentials, PrincipalDirectory
from iop.config.values import StoreUrl
from iop.core.ids import OperationId

__all__ = [
    "id_maker",
    "operation_ids",
    "process_owner",
    "running_core",
    "store_url",
    "viewer_check",
]

CORE_READY_TIMEOUT_S: Final = 30.0
"""Recovery reads the journal; longer means that the store does not answer."""


def id_maker(prefix: str) -> Callable[[], str]:
    """Ids that are unique over restarts: one random part per process, then a count; cheap enough per request."""
    base = f"{prefix}-{secrets.token_hex(5)}"
    count = itertools.count(1)
    return lambda: f"{base}-{next(count)}"


def process_owner(role: str) -> str:
    """Names this process in the store's lease, for people."""
    return f"{role}@{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def store_url(store: StoreUrl, *, is_given: bool, home: Callable[[], Path]) -> str:
    """The journal's URL; the default one lies in the state directory."""
    if is_given:
        return store.under(Path.cwd()).url
    return store.under(home()).url


def viewer_check(principals: PrincipalDirectory) -> Callable[[str | None], None]:
    """Guards the ops listener: a bearer token whose principal may read the profile (SF-30)."""

    def check(token: str | None) -> None:
        require(principals.authenticate(Credentials(bearer=token)), Permission.PROFILE)

    return check


@contextlib.asynccontextmanager
async def running_core(core: AdminCore) -> AsyncIterator[None]:
    """Run an operation core; inside, what it keeps closed is closed (AD-26).

    Raises:
        Unavailable: the store is held by another process, or cannot be used.
    """
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(core.run(), name="admin core")
        try:
            async with asyncio.timeout(CORE_READY_TIMEOUT_S):
                await core.wait_ready()
            yield
        finally:
            run.cancel()


def operation_ids() -> Callable[[], OperationId]:
    """Ids of admin operations, unique over restarts."""
    make = id_maker("op")
    return lambda: OperationId(make())
