"""A swarm server with a scripted engine as a process: `scripted_server.py FOLDER PORT`.

For each line on its standard input it forks a server and prints that one's process id, so that a successor of a
killed server is there at once. The servers end with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import uvloop

from a3r.config import TrainerConfig, TrialConfig
from a3r.swarm.wire import Configure
from gateway.app import build_app
from gateway.desk import Options
from gateway.engines.scripted import ScriptedEngine
from gateway.gateway import Gateway
from gateway.keys import KeyRing
from gateway.ledger import Ledger
from gateway.serving import serve
from gateway.template import ChatTemplate
from tests.fakes.chatml import chatml_tokenizer


class FixedTrial:
    async def configure(self, configure: Configure) -> None: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


async def main(folder: Path, port: int) -> None:
    template = ChatTemplate(chatml_tokenizer())
    ids = [*template.encode("hello world"), template.end_ids[0]]
    gateway = Gateway(
        ScriptedEngine(lambda _prompt, _sampling: ids),
        template=template,
        ledger=Ledger(folder / "ledger.db"),
        keys=KeyRing(b"a secret of enough bytes"),
        options=Options(policy="small", max_model_tokens=2048),
    )
    trainer = TrainerConfig(group_size=8, batch_tasks=8, max_reply_tokens=32)
    await gateway.open_trial(Configure(trial_id="trial", config=TrialConfig(trainer=trainer), folder=str(folder)))
    await serve(build_app(gateway, FixedTrial()), port=port)


if __name__ == "__main__":
    children: list[int] = []
    for _line in sys.stdin:
        if children:
            os.waitpid(children.pop(), 0)
        child = os.fork()
        if child == 0:
            uvloop.run(main(Path(sys.argv[1]), int(sys.argv[2])))
        children.append(child)
        print(child, flush=True)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
