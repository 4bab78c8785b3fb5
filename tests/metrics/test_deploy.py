"""The examples in `deploy/` name metrics that exist, and Prometheus reads them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.metrics.test_metrics import collected, scraped

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)


def existing() -> set[str]:
    """Every series a node can have."""
    found = set()
    for family in text_string_to_metric_families(scraped(collected()).decode()):
        kinds = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        found |= {f"{family.name}{kind}" for kind in kinds}
    return found


@pytest.mark.parametrize("file", ["grafana-meshd.json", "meshd-alerts.yml"])
def test_every_metric_that_is_drawn_or_alerted_on_exists(file: str) -> None:
    named = set(re.findall(r"\bmeshd_[a-z_]+", (DEPLOY / file).read_text()))
    assert len(named) >= 4
    assert named <= existing()


def test_grafanas_panels_do_not_overlap_and_have_their_own_ids() -> None:
    board = json.loads((DEPLOY / "grafana-meshd.json").read_text())
    cells = [
        (x, y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(x < 24 for x, _ in cells)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@needs_promtool
def test_promtool_takes_the_scrape_example_and_the_alerts(tmp_path: Path) -> None:
    config = (DEPLOY / "prometheus.yml").read_text().replace("/etc/prometheus/meshd.key", str(tmp_path / "meshd.key"))
    (tmp_path / "meshd.key").write_text("key")
    (tmp_path / "prometheus.yml").write_text(config)
    shutil.copy(DEPLOY / "meshd-alerts.yml", tmp_path)
    checked = subprocess.run(
        ["promtool", "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "5 rules found" in checked.stdout
