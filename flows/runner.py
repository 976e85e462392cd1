"""The campaign runner: serves the campaign deployment and keeps record and processes in agreement.

`python -m flows.runner` is started by `a3r up`. Each campaign runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import logging

from prefect.runner import Runner

from flows.campaign import campaign
from flows.lab import Lab
from flows.reconcile import reconcile

RECONCILE_EVERY_S = 15.0
_log = logging.getLogger(__name__)


async def serve_campaigns() -> None:
    """Serve until killed. Interrupted campaigns are taken up at the start and whenever one is found."""
    lab = Lab.locate()
    runner = Runner(name="a3r", query_seconds=1, limit=None)
    await runner.aadd_flow(campaign, name="campaign")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(runner.start())
        tasks.create_task(_reconcile_forever(lab))


async def _reconcile_forever(lab: Lab) -> None:
    (lab.services_folder / "runner.ready").touch()
    while True:
        for campaign_id in await asyncio.to_thread(reconcile, lab):
            _log.warning("campaign %s was interrupted and goes on", campaign_id)
        await asyncio.sleep(RECONCILE_EVERY_S)


if __name__ == "__main__":
    asyncio.run(serve_campaigns())
