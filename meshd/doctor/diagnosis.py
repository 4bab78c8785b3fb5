"""All findings of one view, most urgent first, and what would be gone without each node."""

from __future__ import annotations

from meshd.doctor import layers, network, nodes
from meshd.doctor.finding import Documents, Finding


def diagnose(documents: Documents) -> list[Finding]:
    """Errors before warnings; within each, layers before nodes before the network."""
    found = [*layers.findings(documents), *nodes.findings(documents), *network.findings(documents)]
    return sorted(found, key=lambda finding: finding.severity != "error")
