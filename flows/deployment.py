"""The campaign deployment, as those who hand campaigns to it see it."""

from __future__ import annotations

DEPLOYMENT = "campaign/campaign"


def hand_over(campaign_id: str) -> None:
    """Hand a campaign to the runner, whose services are up. Returns at once."""
    from prefect.deployments import run_deployment

    run_deployment(
        DEPLOYMENT, parameters={"campaign_id": campaign_id}, timeout=0, flow_run_name=f"campaign {campaign_id}"
    )
