"""Reads a gateway's metrics."""

from tests.support.gateway_process import Gateway


async def metric(gateway: Gateway, name: str) -> float:
    """Returns a sample by its name with its labels, such as `gateway_errors_total{code="X"}`; 0 if there is none."""
    lines = (await gateway.http.get("/metrics")).text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)
