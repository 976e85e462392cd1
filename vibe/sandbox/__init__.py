"""Where code that an LLM wrote runs: no network but the gateway, no files but its workspace, bounded everything.

| protection | bubblewrap | plain |
|---|---|---|
| files | its workspace (read-only when judged), `/usr`, the interpreter, allowed packages, client SDK | all of ours |
| network | none; the gateway's Unix socket where it is given one | all of ours |
| environment, other processes | invisible | visible to the same user |
| system calls | filtered (`system_calls`) | all |
| CPU, address space, file size, open files of a process | rlimits | rlimits |
| number of processes | cgroup, or RLIMIT_NPROC in its own user namespace | RLIMIT_NPROC; nothing for root |
| memory in total | cgroup where we may make one | nothing |
| wall time | the whole process tree is killed | its process group is killed |

RLIMIT_NPROC does not bind a process whose user is root outside, whatever it is inside. Started by root, the
sandbox therefore uses a cgroup (v1, or v2 where it is delegated), or else becomes an unprivileged user before it
starts, provided that the interpreter and the workspace can be reached by others. `sandbox_report` says what holds
on this machine. Not covered: bugs of the kernel, and covert use of the gateway itself.
"""

from vibe.sandbox.bubblewrap import BubblewrapSandbox
from vibe.sandbox.choice import Protection, choose_sandbox, sandbox_report
from vibe.sandbox.plain import PlainSandbox
from vibe.sandbox.process import Ended, Exposure, Limits, Sandbox, SandboxedProcess

__all__ = [
    "BubblewrapSandbox",
    "Ended",
    "Exposure",
    "Limits",
    "PlainSandbox",
    "Protection",
    "Sandbox",
    "SandboxedProcess",
    "choose_sandbox",
    "sandbox_report",
]
