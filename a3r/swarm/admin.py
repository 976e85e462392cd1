"""The control plane of a swarm server for its owner: configure, start and stop trials."""

from __future__ import annotations

from a3r.swarm.http import Address, Connections
from a3r.swarm.wire import Configure, Status

_PATIENCE_S = 60.0


class SwarmAdmin:
    """Opened with the admin key. Raises Refused when the server declines, InfrastructureFault when it is gone."""

    def __init__(self, url: str, key: str) -> None:
        self._key = key
        self._connections = Connections(Address(url))

    def configure(self, wanted: Configure) -> Status:
        """Say what is to be trained next; the server must be OFFLINE."""
        return self._post("/swarm/configure", wanted.model_dump(mode="json"))

    def start(self) -> Status:
        """Load weights and open the configured trial."""
        return self._post("/swarm/start", {})

    def stop(self) -> Status:
        """End the trial. Harmless when none runs."""
        return self._post("/swarm/stop", {})

    def close(self) -> None:
        self._connections.close()

    def _post(self, path: str, body: object) -> Status:
        reply = self._connections.call("POST", path, key=self._key, body=body, patience_s=_PATIENCE_S)
        return Status.model_validate(reply)
