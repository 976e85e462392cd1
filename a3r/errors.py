"""Every error that A3R raises on purpose, as one tree.

A3RError                  says what happened, why, and what to do next; carries an exit code
  UsageError              the command or its input makes no sense                       exit 2
  ApprovalNeeded          a person must agree first, or did not                         exit 3
  PlanRejected            the plan or program cannot work as asked                      exit 4
  EnvironmentNotReady     a server, key, folder or program is missing                   exit 5
  BudgetExhausted         a limit ended it; what was done is kept                       exit 6
  NotFound                no such campaign, trial, episode or file                      exit 9
  Fault                   something misbehaved at a named boundary                      exit 1
    ClientFault           the program (agent, reward, environment) misbehaved
    EngineFault           inference or training failed
    CoderFault            the LLM coder gave nothing usable
    InfrastructureFault   a process, port, disk or database failed
  Refused                 the swarm server declined a request; carries an HTTP status   exit 1
  IllegalTransition       a record or engine was asked to move where it may not go      exit 1
"""

from __future__ import annotations

from typing import ClassVar


class A3RError(Exception):
    """Base of the tree. `str(error)` is one line: what, why, next."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, why: str = "", next_step: str = "") -> None:
        self.what = what
        self.why = why
        self.next_step = next_step
        parts = [what] + ([f"Why: {why}"] if why else []) + ([f"Next: {next_step}"] if next_step else [])
        super().__init__(" ".join(_sentence(part) for part in parts))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.why, self.next_step, dict(self.__dict__)))


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text if text.endswith((".", "!", "?", ":")) else text + "."


def _rebuild(kind: type[A3RError], what: str, why: str, next_step: str, state: dict[str, object]) -> A3RError:
    error = kind.__new__(kind)
    A3RError.__init__(error, what, why=why, next_step=next_step)
    error.__dict__.update(state)
    return error


class UsageError(A3RError, ValueError):
    """The command or its input makes no sense."""

    exit_code = 2


class ApprovalNeeded(A3RError):
    """A person must agree before anything is spent, or declined."""

    exit_code = 3


class PlanRejected(A3RError, ValueError):
    """The plan or program cannot work as asked."""

    exit_code = 4


class EnvironmentNotReady(A3RError):
    """A server, key, folder or program that the work needs is missing."""

    exit_code = 5


class BudgetExhausted(A3RError):
    """A limit ended the work. What was done is kept."""

    exit_code = 6


class NotFound(A3RError, LookupError):
    """There is no such campaign, trial, episode or file."""

    exit_code = 9


class Fault(A3RError):
    """Something misbehaved at a named boundary. It is recorded as data and never becomes a reward."""

    boundary: ClassVar[str] = "unknown"


class ClientFault(Fault):
    """The program (agent, reward or environment) misbehaved."""

    boundary = "client"


class EngineFault(Fault):
    """Inference or training failed."""

    boundary = "engine"


class CoderFault(Fault):
    """The LLM coder gave nothing usable."""

    boundary = "coder"


class InfrastructureFault(Fault):
    """A process, port, disk or database failed."""

    boundary = "infrastructure"


class Refused(A3RError):
    """The swarm server declined a request. `status` is the HTTP status, `code` a short stable word."""

    def __init__(
        self, what: str, *, why: str = "", next_step: str = "", status: int = 400, code: str = "refused"
    ) -> None:
        super().__init__(what, why=why, next_step=next_step)
        self.status = status
        self.code = code


class IllegalTransition(A3RError):
    """A record or the engine was asked to move where it may not go."""
