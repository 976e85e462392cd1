"""`a3r up`, `down` and `doctor`: the laboratory's services and what they need."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from ui.cli.screen import Screen


def up(*, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Start Prefect, MLflow and the campaign runner; campaigns that were interrupted go on."""
    from flows.lab import Lab
    from flows.services import bring_up

    services = bring_up(Lab.locate())
    Screen(json_lines=json).services(
        {"prefect": services.prefect.url, "mlflow": services.mlflow.url, "runner": "running"}
    )
    return 0


def down(*, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Stop the services. Records stay; a campaign that runs is interrupted and goes on at the next `a3r up`."""
    from flows.lab import Lab
    from flows.services import bring_down

    ended = bring_down(Lab.locate())
    Screen(json_lines=json).services({service.name: "stopped" for service in ended})
    return 0


def doctor(*, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Say what works here, what is missing and how to get it. Exit code 5 when something needed is missing."""
    from flows.doctor import examine

    findings = examine()
    Screen(json_lines=json, stream=sys.stdout).findings(findings)
    return 0 if all(finding.ok or not finding.needed for finding in findings) else 5
