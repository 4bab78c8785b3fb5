// Throughput and requests in flight over the last minutes. The samples are this page's own, kept over a reload.

import { $, say, svg } from "./dom.js";

const KEEP_MS = 5 * 60 * 1000;
const WIDE = 300;
const HIGH = 70;
let samples = [];
let of = null;

export function sample(room) {
  if (of !== room.status.node_id) restore(room.status.node_id);
  const all = [room.peers.self, ...room.peers.peers].filter((peer) => peer && ["alive", "suspect", "draining"].includes(peer.state));
  // Every stage counts each token; those that hold the model's end count what leaves the room.
  const tails = all.filter((peer) => peer.layers && peer.layers[1] >= room.hive.num_layers && peer.digest === room.hive.digest);
  const rate = tails.reduce((sum, peer) => sum + (peer.status?.tokens_per_s ?? 0), 0);
  const flight = all.reduce((sum, peer) => sum + (peer.node_id === room.status.node_id ? room.status.in_flight : (peer.status?.in_flight ?? 0)), 0);
  const now = Date.now();
  samples.push([now, rate, flight]);
  samples = samples.filter(([t]) => now - t < KEEP_MS);
  if (samples.length % 5 === 0) sessionStorage.setItem("meshd.samples", JSON.stringify({ of, samples }));
  say($("tps-now"), rate.toFixed(1));
  say($("flight-now"), String(flight));
  chart($("tps"), samples.map(([t, value]) => [t, value]), now, "tokens a second");
  chart($("flight"), samples.map(([t, , value]) => [t, value]), now, "requests in flight");
}

function restore(node) {
  of = node;
  samples = [];
  try {
    const kept = JSON.parse(sessionStorage.getItem("meshd.samples"));
    if (kept?.of === node && Array.isArray(kept.samples)) samples = kept.samples.filter((each) => each.length === 3 && each.every(Number.isFinite));
  } catch {
    // nothing kept, or nothing that can be read
  }
}

function chart(target, points, now, what) {
  const top = nice(Math.max(1, ...points.map(([, value]) => value)));
  const x = (t) => WIDE - ((now - t) / KEEP_MS) * WIDE;
  const y = (value) => HIGH - (value / top) * (HIGH - 6);
  let line = "";
  points.forEach(([t, value], i) => {
    const gap = i === 0 || t - points[i - 1][0] > 10000; // the tab was hidden: no line over what nobody saw
    line += `${gap ? "M" : "L"}${x(t).toFixed(1)} ${y(value).toFixed(1)}`;
  });
  target.setAttribute("viewBox", `0 0 ${WIDE} ${HIGH + 14}`);
  const last = points.at(-1)?.[1] ?? 0;
  target.setAttribute("aria-label", `${what}: ${last.toFixed(1)} now, at most ${Math.max(0, ...points.map(([, value]) => value)).toFixed(1)} in the last five minutes`);
  const text = (at, anchor, words) => svg("text", { x: at, y: HIGH + 12, "text-anchor": anchor }, words);
  target.replaceChildren(
    svg("line", { x1: 0, y1: HIGH, x2: WIDE, y2: HIGH, class: "base" }),
    svg("line", { x1: 0, y1: y(top), x2: WIDE, y2: y(top), class: "grid" }),
    svg("path", { d: line, class: "curve" }),
    svg("text", { x: 2, y: y(top) + 10, class: "top" }, String(top)),
    text(0, "start", "5 min ago"),
    text(WIDE, "end", "now"),
  );
}

function nice(value) {
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * size).find((step) => step >= value);
}
