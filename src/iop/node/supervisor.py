"""When the Node dials its Edge, and when its process ends: one pure state machine (EN-20 to EN-25, EN-107).

::

    IDLE --start--> DIALLING --connected--> HANDSHAKING --ready--> READY
                    ^   |failed                  |closed             |closed
                    |   v                        v                   v
                    +-- WAITING <----------------+-------------------+
                            (budget used up: EXITED 1;  fatal: EXITED 1;  stop, from anywhere: STOPPING, then
                            EXITED 0)

One attempt is dial to ready, whatever failed in between. Only a local shutdown, a fatal local error and a
used-up finite budget end the process; every refusal by the Edge is remote and is retried. The shell in
:mod:`iop.node.node` gives each event its time and one random number, and does what the effects say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, unique
from typing import Final, TypeAlias

FIRST_RETRY_S: Final = 1.0
"""The first retry after a ready session comes within this time (EN-23); spread over it, so that the Nodes of
a restarted Edge do not come in one instant (EN-107)."""

JITTER_LOW: Final = 0.5
JITTER_SPAN: Final = 1.0
"""Later retries wait the interval times 0.5 to 1.5 (EN-23), without growth: a fleet is back soon after its
Edge."""

EXIT_STOPPED: Final = 0
EXIT_FAILED: Final = 1


@unique
class LinkState(Enum):
    """Where the Node's one link to its Edge stands."""

    IDLE = "idle"
    DIALLING = "dialling"
    HANDSHAKING = "handshaking"
    READY = "ready"
    WAITING = "waiting"
    STOPPING = "stopping"
    EXITED = "exited"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconnectPolicy:
    """The one policy of the first connect and of every later one (EN-23).

    Attributes:
        interval_s: mean wait between attempts.
        attempts_max: attempts from dial to ready; `None`: without limit, which needs a positive interval.
    """

    interval_s: float = 10.0
    attempts_max: int | None = 10

    @staticmethod
    def from_config(interval_sec: float, max_attempts: int) -> ReconnectPolicy:
        """From the config's spelling, where 0 written out means without limit.

        Raises:
            ValueError: negative, or without limit and without a wait.
        """
        if interval_sec < 0 or max_attempts < 0:
            raise ValueError("reconnect: interval_sec and max_attempts cannot be negative")
        if max_attempts == 0 and interval_sec == 0:
            raise ValueError("reconnect: attempts without limit need a positive interval_sec")
        return ReconnectPolicy(interval_s=interval_sec, attempts_max=max_attempts or None)


# ---- events ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The daemon runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """The socket is open; registration follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The Edge acked ready=true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The attempt failed or the session ended, for whatever remote reason.

    Attributes:
        reason: for the log.
        retry_after_s: the Edge's own wish (EN-115); the wait is at least this.
    """

    reason: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """The wait of the last :class:`Wait` is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FatalLocalError:
    """Something here that no retry can mend, found before anything was sent (EN-22)."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A local shutdown was asked for."""


LinkEvent: TypeAlias = Start | Connected | Ready | Lost | TimerFired | FatalLocalError | Stop

# ---- effects ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """Open one connection. Attempt numbers count from 1 since the last ready."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Fire the timer at this monotonic time."""

    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseLink:
    """Close the connection, or call the dial off; then report :class:`Lost`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """End the process."""

    code: int
    reason: str


LinkEffect: TypeAlias = Dial | Wait | CloseLink | Exit


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """The supervisor's whole state."""

    policy: ReconnectPolicy
    state: LinkState = LinkState.IDLE
    attempts: int = 0


_HAS_LINK: Final = frozenset({LinkState.DIALLING, LinkState.HANDSHAKING, LinkState.READY})


def step(
    now_is: Supervision, event: LinkEvent, *, now: float, random: float
) -> tuple[Supervision, LinkEffect | None]:
    """Apply one event. Pure. An event that does not fit the state changes nothing: it came too late.

    Args:
        now_is: the state before.
        event: what happened.
        now: monotonic seconds.
        random: uniform in [0, 1), new for every call.
    """
    state = now_is.state
    match event:
        case Start() if state is LinkState.IDLE:
            return _dial(now_is)
        case TimerFired() if state is LinkState.WAITING:
            return _dial(now_is)
        case Connected() if state is LinkState.DIALLING:
            return replace(now_is, state=LinkState.HANDSHAKING), None
        case Ready() if state is LinkState.HANDSHAKING:
            return replace(now_is, state=LinkState.READY, attempts=0), None
        case Lost(reason=reason, retry_after_s=retry_after_s) if state in _HAS_LINK:
            return _after_loss(now_is, reason, retry_after_s, now=now, random=random)
        case Lost() if state is LinkState.STOPPING:
            return _exit(now_is, EXIT_STOPPED, "stopped")
        case FatalLocalError(reason=reason) if state is not LinkState.EXITED:
            return _exit(now_is, EXIT_FAILED, reason)
        case Stop() if state in _HAS_LINK:
            return replace(now_is, state=LinkState.STOPPING), CloseLink()
        case Stop() if state in {LinkState.IDLE, LinkState.WAITING}:
            return _exit(now_is, EXIT_STOPPED, "stopped")
        case _:
            return now_is, None


def _dial(now_is: Supervision) -> tuple[Supervision, LinkEffect]:
    attempts = now_is.attempts + 1
    return replace(now_is, state=LinkState.DIALLING, attempts=attempts), Dial(attempt=attempts)


def _after_loss(
    now_is: Supervision, reason: str, retry_after_s: float, *, now: float, random: float
) -> tuple[Supervision, LinkEffect]:
    policy = now_is.policy
    if now_is.state is LinkState.READY:
        wait_s = FIRST_RETRY_S * random
    else:
        if policy.attempts_max is not None and now_is.attempts >= policy.attempts_max:
            return _exit(now_is, EXIT_FAILED, f"gave up after {now_is.attempts} attempts: {reason}")
        wait_s = policy.interval_s * (JITTER_LOW + JITTER_SPAN * random)
    until = now + max(wait_s, retry_after_s)
    return replace(now_is, state=LinkState.WAITING), Wait(until=until)


def _exit(now_is: Supervision, code: int, reason: str) -> tuple[Supervision, LinkEffect]:
    return replace(now_is, state=LinkState.EXITED), Exit(code=code, reason=reason)
