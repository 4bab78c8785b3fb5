"""How a finished answer is told: route, routing, recoveries, timings, and the headers made of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshd.api.message import Headers
from meshd.chain.request import Finished, HopReport, Recovery, RouteUse, Started, Timings
from meshd.directory import Directory


def route_json(hops: Sequence[HopReport], directory: Directory) -> list[dict[str, Any]]:
    """``route``: the stages, with means per token."""
    return [
        {
            "node": hop.node_id,
            "name": directory.label(hop.node_id),
            "layers": hop.layers.json(),
            "compute_ms": round(hop.compute_ms, 2),
            "wire_ms": round(hop.wire_ms, 2),
            "cached_tokens": hop.cached_tokens,
        }
        for hop in hops
    ]


def answer_fields(started: Started, finished: Finished, tokens: int, directory: Directory) -> dict[str, Any]:
    """The event ``answer``: how a request of this entry was computed, nothing of what it said."""
    rate = finished.timings.tokens_per_s
    stalls = f", {len(finished.recoveries)} recovered" if finished.recoveries else ""
    names = " -> ".join(directory.label(hop.node_id) for hop in finished.route)
    return {
        "text": f"{tokens} tokens at {rate:.1f}/s over {names}{stalls}",
        "session": started.session,
        "mode": finished.routing.mode,
        "tokens": tokens,
        "reason": finished.reason,
        "route": route_json(finished.route, directory),
        "recoveries": recoveries_json(finished.recoveries, directory),
        "timings": timings_json(finished.timings),
    }


def recoveries_json(recoveries: Sequence[Recovery], directory: Directory) -> list[dict[str, Any]]:
    """``recoveries``: stages that were replaced while the answer ran."""
    return [
        {
            "layers": each.layers.json(),
            "from": directory.label(each.from_node),
            "to": directory.label(each.to_node),
            "reason": each.reason,
            "stall_ms": round(each.stall_ms, 1),
            "replayed_tokens": each.replayed_tokens,
            "exact": each.exact,
        }
        for each in recoveries
    ]


def timings_json(timings: Timings) -> dict[str, Any]:
    """``timings``; drafts only where there were some."""
    document: dict[str, Any] = {
        "ttft_ms": round(timings.ttft_ms, 2),
        "total_ms": round(timings.total_ms, 2),
        "tokens_per_s": round(timings.tokens_per_s, 2),
    }
    if timings.drafted_tokens:
        document |= {"drafted_tokens": timings.drafted_tokens, "accepted_tokens": timings.accepted_tokens}
    return document


def usage_json(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """``usage`` as OpenAI spells it."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def route_headers(use: RouteUse) -> Headers:
    """``X-Mesh-Route: n1[0:15]->n2[15:30]`` and ``X-Mesh-Mode``."""
    hops = use.signature.rpartition("|")[2]
    text = "".join(char if " " <= char <= "~" else "?" for char in hops)
    return ("X-Mesh-Route", text), ("X-Mesh-Mode", use.mode)


def answer_headers(report: Finished, directory: Directory) -> Headers:
    """The route's headers, and Server-Timing with the mean per token of each hop."""
    timings = report.timings
    parts = [f"ttft;dur={timings.ttft_ms:.1f}", f"total;dur={timings.total_ms:.1f}"]
    parts += [f"{directory.label(hop.node_id)};dur={hop.compute_ms + hop.wire_ms:.1f}" for hop in report.route]
    return (*route_headers(report.routing), ("Server-Timing", ", ".join(parts)))


def started_headers(report: Finished, ttft_ms: float) -> Headers:
    """What can be said before a streamed answer's first token."""
    return (*route_headers(report.routing), ("Server-Timing", f"ttft;dur={ttft_ms:.1f}"))
