"""What the parts know anyway, read when somebody asks: the room, this node, its engine, gossip's and the chain's counters.

Nothing is kept: a scrape costs one walk over what the parts show, and a node that nobody scrapes spends nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from meshd.api import views
from meshd.inference.engine import Engine
from meshd.vocabulary import MB, NodeStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where to look. ``traffic``, ``rejected`` and ``send_errors`` are gossip's, ``chain`` the chain's counters."""

    view: Callable[[], views.View]
    engine: Callable[[], Engine | None]
    in_flight: Callable[[], int]
    tasks: Callable[[], int]
    traffic: Callable[[], Mapping[str, int]]
    rejected: Callable[[], Mapping[str, int]]
    send_errors: Callable[[], Mapping[str, int]]
    chain: Callable[[], Mapping[str, int]]


class RoomCollector(Collector):
    """Register it: ``registry.register(RoomCollector(sources))``."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: the registry would otherwise collect at registration, before the parts are there."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Everything, as of now."""
        yield from self._node()
        yield from self._engine()
        yield from self._room()
        yield from self._gossip()
        yield from self._chain()

    def _node(self) -> Iterable[Metric]:
        directory, facts, spec = self._sources.view()
        me = directory.me
        info = {
            "node_id": directory.self_id,
            "name": facts.name,
            "version": facts.version,
            "model": spec.name if spec else "",
            "layers": str(me.advert.layers) if me and me.advert.layers else "",
            "dtype": me.advert.dtype if me else "",
            "arith": me.advert.arith if me else "",
        }
        yield InfoMetricFamily("meshd_node", "Who this node is and what it serves.", value=info)
        state = GaugeMetricFamily("meshd_node_state", "1 for the state this node is in.", labels=["state"])
        for name in ("starting", "loading", "proving", "ready", "draining", "observer", "failed"):
            state.add_metric([name], float(name == facts.state))
        yield state
        health = facts.health
        yield _gauge("meshd_uptime_seconds", "Since this daemon started.", facts.uptime_s)
        yield _gauge("meshd_requests_in_flight", "Requests owned or passed on now.", self._sources.in_flight())
        yield _gauge("meshd_tasks", "Tasks of the daemon's event loop.", self._sources.tasks())
        yield _gauge("meshd_memory_available_bytes", "Memory this device has free.", health.ram_free_mb * MB)
        yield _gauge(
            "meshd_node_jammed", "1 while this device is too busy, hot, full or empty to be given work.", health.jammed
        )
        yield _gauge("meshd_warnings", "Warnings on /status.", len(facts.warnings))
        if health.battery_pct is not None:
            yield _gauge("meshd_battery_ratio", "Charge of the battery, 0 to 1.", health.battery_pct / 100)
        if health.on_ac is not None:
            yield _gauge("meshd_on_ac_power", "1 on mains, 0 on battery.", health.on_ac)
        if health.temp_c is not None:
            yield _gauge("meshd_temperature_celsius", "The hottest sensor of the processor.", health.temp_c)

    def _engine(self) -> Iterable[Metric]:
        engine = self._sources.engine()
        if engine is None:
            return
        health = engine.health()
        yield _gauge("meshd_layers_held", "Layers that this node serves.", len(engine.info.layers))
        yield _gauge("meshd_engine_queue_depth", "Steps that wait for the engine.", health.queue_depth)
        yield _gauge("meshd_engine_tokens_per_second", "Rows computed lately.", health.tokens_per_s)
        yield _gauge("meshd_kv_sessions", "Sessions with state in the engine.", health.sessions)
        yield _gauge("meshd_kv_used_bytes", "KV and boundary logs of running sessions.", health.kv_used_bytes)
        yield _gauge("meshd_kv_capacity_bytes", "What KV and boundary logs may take.", health.kv_total_bytes)

    def _room(self) -> Iterable[Metric]:
        directory, facts, spec = self._sources.view()
        hive = views.hive_of(directory, facts, views.room_digest(directory, spec), spec)
        gone = sum(len(gap) for gap in hive.missing)
        yield _gauge("meshd_layers", "Layers of the room's model.", hive.num_layers)
        yield _gauge("meshd_layers_missing", "Layers that nobody serves, as seen from here.", gone)
        yield _gauge("meshd_layer_replicas_min", "Replicas of the thinnest layer.", hive.min_replicas)
        counts = Counter(member.state for member in directory.members.values())
        members = GaugeMetricFamily("meshd_members", "Nodes known here, this one included.", labels=["state"])
        for status in NodeStatus:
            members.add_metric([str(status)], counts[status])
        yield members
        here = [m for m in directory.peers if m.state not in (NodeStatus.DEAD, NodeStatus.LEFT)]
        unadmitted = sum(m.admitted is not True for m in here if m.advert.layers is not None)
        yield _gauge("meshd_peers_not_admitted", "Peers with layers that are not proven to this node.", unadmitted)
        yield _gauge("meshd_peers_one_way", "Peers that are heard but do not hear.", sum(m.one_way for m in here))
        rtt = GaugeMetricFamily("meshd_peer_round_trip_seconds", "Round trip to a peer.", labels=["peer"])
        for member in here:
            if member.rtt_ms is not None:
                rtt.add_metric([directory.label(member.node_id)], member.rtt_ms / 1000)
        yield rtt

    def _gossip(self) -> Iterable[Metric]:
        told = {
            "sent_datagrams": ("meshd_gossip_packets_sent", "Datagrams sent."),
            "received_datagrams": ("meshd_gossip_packets_received", "Datagrams received, refused ones included."),
            "sent_bytes": ("meshd_gossip_sent_bytes", "Bytes of datagrams sent."),
            "received_bytes": ("meshd_gossip_received_bytes", "Bytes of datagrams received."),
        }
        traffic = self._sources.traffic()
        for key, (name, text) in told.items():
            yield CounterMetricFamily(name, text, value=traffic[key])
        yield _counters(
            "meshd_gossip_packets_rejected", "Datagrams that were not ours to read.", "reason", self._sources.rejected()
        )
        yield _counters(
            "meshd_gossip_send_errors", "Datagrams the system did not take.", "error", self._sources.send_errors()
        )

    def _chain(self) -> Iterable[Metric]:
        told = {
            "failovers": ("meshd_failovers", "Routes changed in mid-answer."),
            "hedges": ("meshd_hedges", "Of these, because a hop was slow and not gone."),
            "recoveries": ("meshd_recoveries", "Stages replaced in answers that went on."),
            "replayed_tokens": ("meshd_replayed_tokens", "Positions computed again by replacements."),
        }
        counters = self._sources.chain()
        for key, (name, text) in told.items():
            yield CounterMetricFamily(name, text, value=counters.get(key, 0))


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _counters(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family
