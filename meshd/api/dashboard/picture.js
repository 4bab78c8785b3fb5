// The room as a picture: nodes by the layers they hold, replicas stacked, links below and the chosen route above them.

import { $, el, keyed, mb, ms, pick, range, say, shape, svg } from "./dom.js";

const GAP = 8;
let room = null;
let drawn = null; // the route that is shown
let chosen = null; // the node whose details are shown
const flashes = new Map(); // node id -> until

export function showRoom(document_) {
  room = document_;
  draw();
}

// route: {entry, hops: [{node, name, layers, compute_ms?, wire_ms?}], running, words} or null
export function showRoute(route) {
  drawn = route;
  draw();
}

export function flash(node) {
  flashes.set(node, performance.now() + 4000);
  draw();
}

const everybody = () => [room.peers.self, ...room.peers.peers].filter(Boolean);

function looks(peer) {
  if (peer.state !== "alive") return peer.state;
  if (peer.admitted === false || peer.incompatible) return "refused";
  return peer.loading ? "loading" : "alive";
}

function draw() {
  if (!room) return;
  const layers = room.hive.num_layers || Math.max(1, ...everybody().map((peer) => peer.num_layers || 0));
  const held = (peer) => peer.layers ?? peer.loading?.layers ?? null;
  const digest = room.hive.digest;
  const placed = everybody().filter((peer) => held(peer) && (!digest || !peer.digest || peer.digest === digest));
  const rest = everybody().filter((peer) => !placed.includes(peer));
  const rows = stacked(placed, held);
  const height = Math.max(1, rows.count);
  $("stage").style.setProperty("--rows", height);
  keyed($("nodes"), placed, (peer) => peer.node_id, card, (item, peer) => {
    const [start, end] = held(peer);
    place(item, start / layers, (end - start) / layers, rows.at.get(peer.node_id));
    update(item, peer);
  });
  keyed($("others"), rest, (peer) => peer.node_id, card, update);
  $("others-block").hidden = rest.length === 0;
  coverage(layers);
  axis(layers);
  const here = everybody().filter((peer) => ["alive", "suspect", "draining"].includes(peer.state)).length;
  say($("room-count"), `${here} ${here === 1 ? "node" : "nodes"}, ${layers} layers`);
  legend();
  requestAnimationFrame(lines);
  detail();
}

// Rows so that no two ranges overlap: the fewest, widest first where equal.
function stacked(placed, held) {
  const order = [...placed].sort((a, b) => held(a)[0] - held(b)[0] || held(b)[1] - held(a)[1] || (a.name < b.name ? -1 : 1));
  const ends = [];
  const at = new Map();
  for (const peer of order) {
    const [start, end] = held(peer);
    let row = ends.findIndex((taken) => taken <= start);
    if (row < 0) row = ends.push(0) - 1;
    ends[row] = end;
    at.set(peer.node_id, row);
  }
  return { at, count: ends.length };
}

function place(item, left, width, row) {
  item.style.setProperty("--left", String(left));
  item.style.setProperty("--width", String(width));
  item.style.setProperty("--row", String(row));
}

// --- one node ---

function card(peer) {
  const button = el("button", { type: "button", class: "node", on: { click: () => choose(peer.node_id) } });
  button.append(
    el("span", { class: "name" }, el("span", { class: "mark" }), el("b"), el("span", { class: "tag" })),
    el("span", { class: "facts" }),
    el("span", { class: "bars" }, bar("memory"), bar("kv")),
    el("span", { class: "link" }),
    el("span", { class: "hop" }, el("span", { class: "long" }), el("span", { class: "short" })),
  );
  return el("li", {}, button);
}

function bar(kind) {
  return el("span", { class: `gauge ${kind}` }, kind === "kv" ? "KV" : "RAM", el("span", { class: "bar" }, el("i")));
}

function update(item, peer) {
  const button = item.firstElementChild;
  const look = looks(peer);
  const self = peer.node_id === room.status.node_id;
  const health = peer.status ?? {};
  const flashing = (flashes.get(peer.node_id) ?? 0) > performance.now();
  button.dataset.state = look;
  button.dataset.self = self;
  button.dataset.jammed = Boolean(health.jammed);
  button.dataset.flash = flashing;
  const hop = drawn?.hops.find((each) => each.node === peer.node_id);
  button.dataset.hop = Boolean(hop);
  button.setAttribute("aria-pressed", String(chosen === peer.node_id));
  const mark = button.querySelector(".mark");
  if (mark.dataset.state !== look) {
    mark.dataset.state = look;
    mark.replaceChildren(shape(look));
  }
  say(button.querySelector("b"), peer.name);
  say(button.querySelector(".tag"), self ? "you are here" : "");
  say(button.querySelector(".facts"), facts(peer, look, health));
  fill(button.querySelector(".memory"), health.ram_total_mb ? 1 - health.ram_free_mb / health.ram_total_mb : 0);
  fill(button.querySelector(".kv"), health.kv_total_mb ? health.kv_used_mb / health.kv_total_mb : 0);
  say(button.querySelector(".link"), link(peer, self));
  button.querySelector(".link").dataset.oneWay = Boolean(peer.one_way);
  say(button.querySelector(".hop .long"), hop ? times(hop) : "");
  say(button.querySelector(".hop .short"), hop ? shortTimes(hop) : "");
  button.setAttribute("aria-label", `${peer.name}: ${look}, ${words(peer, self)}`);
}

function facts(peer, look, health) {
  if (look === "loading") return `${peer.loading.stage} ${range(peer.loading.layers)}, ${Math.round(peer.loading.progress * 100)} %`;
  const parts = [peer.layers ? range(peer.layers) : look === "alive" ? (peer.entry ? "entry" : "observer") : ""];
  if (look !== "alive") parts.push(look === "refused" ? "not admitted" : look);
  else {
    if (peer.admitted === null && peer.layers) parts.push("being proven");
    if (health.jammed) parts.push("jammed");
    if (health.tokens_per_s > 0.05) parts.push(`${health.tokens_per_s.toFixed(1)} tok/s`);
    if (health.queue_depth) parts.push(`${health.queue_depth} queued`);
    if (health.on_ac === false) parts.push(`battery ${health.battery_pct ?? "?"} %`);
    if (health.temp_c >= 85) parts.push(`${Math.round(health.temp_c)} °C`);
  }
  return parts.filter(Boolean).join(" · ");
}

function link(peer, self) {
  if (self) return "";
  if (peer.one_way) return "⇢ one-way";
  if (peer.state === "dead" || peer.state === "left") return peer.last_heard_s === null ? "" : `heard ${Math.round(peer.last_heard_s)} s ago`;
  return peer.rtt_ms === null ? "" : `⇄ ${ms(peer.rtt_ms)}`;
}

function times(hop) {
  if (drawn.running || hop.compute_ms === undefined) return "computing …";
  return `${ms(hop.compute_ms)} + ${ms(hop.wire_ms)} wire`;
}

function shortTimes(hop) {
  return drawn.running || hop.compute_ms === undefined ? "…" : ms(hop.compute_ms + hop.wire_ms);
}

function words(peer, self) {
  const health = peer.status ?? {};
  return [
    self ? "this node" : null,
    peer.layers ? `layers ${range(peer.layers)}` : "no layers",
    health.ram_total_mb ? `${mb(health.ram_free_mb)} of ${mb(health.ram_total_mb)} free` : null,
    `${health.in_flight ?? 0} in flight`,
    link(peer, self) || null,
  ].filter(Boolean).join(", ");
}

function fill(element, share) {
  element.querySelector("i").style.setProperty("--share", Math.min(1, Math.max(0, share)).toFixed(3));
}

// --- details of the chosen node ---

function choose(node) {
  chosen = chosen === node ? null : node;
  draw();
}

function detail() {
  const box = $("detail");
  const peer = chosen && everybody().find((each) => each.node_id === chosen);
  box.hidden = !peer;
  if (!peer) return;
  const health = peer.status ?? {};
  const rows = [
    ["State", peer.state + (peer.incompatible ? `, ${peer.incompatible}` : "")],
    ["Layers", peer.layers ? `${range(peer.layers)} of ${peer.num_layers} (${peer.role})` : peer.role],
    ["Admitted", peer.layers ? (peer.admitted === true ? "yes" : peer.admitted === false ? "no" : "not yet") + (peer.admission ? `: ${peer.admission}` : "") : null],
    ["Model", peer.model ? `${peer.model}, ${peer.dtype ?? "?"}, arithmetic ${peer.arith ?? "?"}` : null],
    ["Speed", peer.layer_ms ? `${peer.layer_ms.toFixed(2)} ms a layer${peer.claim_ratio === null ? "" : `, delivers ${Math.round(peer.claim_ratio * 100)} % of it`}` : null],
    ["Memory", health.ram_total_mb ? `${mb(health.ram_free_mb)} of ${mb(health.ram_total_mb)} free, capacity ${mb(peer.capacity_mb)}` : null],
    ["KV", health.kv_total_mb ? `${mb(health.kv_used_mb)} of ${mb(health.kv_total_mb)}` : null],
    ["Load", `${health.load1 ?? 0}, ${health.queue_depth ?? 0} queued, ${health.in_flight ?? 0} in flight${health.jammed ? ", jammed" : ""}`],
    ["Power", health.on_ac === null || health.on_ac === undefined ? null : `${health.on_ac ? "mains" : "battery"}${health.battery_pct === null ? "" : `, ${health.battery_pct} %`}${health.temp_c === null ? "" : `, ${health.temp_c} °C`}`],
    ["Link", [link(peer, peer.node_id === room.status.node_id), peer.via && `found by ${peer.via}`].filter(Boolean).join(", ")],
    ["Addresses", [peer.mesh && `mesh ${peer.mesh}`, peer.http].filter(Boolean).join(", ")],
    ["Run", `epoch ${peer.epoch}, incarnation ${peer.incarnation}, engine ${peer.generation}, meshd ${peer.version}`],
    ["Id", peer.node_id],
  ].filter(([, value]) => value);
  const list = el("dl", {}, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  const close = el("button", { type: "button", class: "quiet", on: { click: () => choose(peer.node_id) } }, "Close");
  box.replaceChildren(el("div", { class: "head" }, el("h3", {}, peer.name), el("span", { class: "grow" }), close), list);
}

// --- coverage, axis, legend ---

function coverage(layers) {
  const segments = [];
  for (const [start, end, replicas] of room.hive.stages) segments.push({ start, end, replicas });
  for (const [start, end] of room.hive.missing) segments.push({ start, end, replicas: 0 });
  segments.sort((a, b) => a.start - b.start);
  keyed($("coverage"), segments, (each) => `${each.start}-${each.end}`, () => el("span"), (item, each) => {
    item.style.setProperty("--left", String(each.start / layers));
    item.style.setProperty("--width", String((each.end - each.start) / layers));
    item.dataset.replicas = Math.min(2, each.replicas);
    say(item, each.replicas === 0 ? "missing" : `× ${each.replicas}`);
    item.title = `layers ${each.start}..${each.end}: ${each.replicas === 0 ? "nobody" : `${each.replicas} replicas`}`;
  });
  const said = segments.map((each) => `layers ${each.start}..${each.end}: ${each.replicas || "no"} replicas`).join("; ");
  $("coverage").setAttribute("aria-label", `Layer coverage. ${said || "no model"}`);
}

function axis(layers) {
  const ends = new Set([0, layers]);
  for (const peer of everybody()) for (const end of peer.layers ?? []) if (end <= layers) ends.add(end);
  const sorted = [...ends].sort((a, b) => a - b);
  const shown = sorted.filter((end, i) => i === 0 || end === layers || (end - sorted[i - 1] >= layers / 16 && layers - end >= layers / 16));
  keyed($("axis"), shown, (end) => end, (end) => el("span", {}, String(end)), (item, end) => {
    item.style.setProperty("--left", String(end / layers));
    item.dataset.edge = end === 0 ? "first" : end === layers ? "last" : "";
  });
}

function legend() {
  const present = new Set(everybody().map(looks));
  const order = ["alive", "loading", "suspect", "draining", "refused", "dead", "left"].filter((state) => present.has(state));
  const called = { refused: "not admitted" };
  keyed($("legend"), order, (state) => state, (state) => el("li", {}, shape(state), pick(called, state, state)), () => {});
}

// --- lines: links of this node, and the route ---

function box(node, frame) {
  const card_ = document.querySelector(`li[data-key="${CSS.escape(node)}"] .node`);
  if (!card_) return null;
  const r = card_.getBoundingClientRect();
  return { left: r.left - frame.left, right: r.right - frame.left, top: r.top - frame.top, bottom: r.bottom - frame.top, x: (r.left + r.right) / 2 - frame.left, y: (r.top + r.bottom) / 2 - frame.top };
}

function lines() {
  if (!room) return;
  const frame = $("stage").getBoundingClientRect();
  drawLinks(frame);
  drawRoute(frame);
}

function drawLinks(frame) {
  const here = box(room.status.node_id, frame);
  const found = [];
  for (const peer of here ? room.peers.peers : []) {
    const there = box(peer.node_id, frame);
    if (!there || peer.state === "dead" || peer.state === "left") continue;
    found.push(svg("line", { x1: here.x, y1: here.y, x2: there.x, y2: there.y, class: peer.one_way ? "one-way" : "both-ways" }));
  }
  $("links").replaceChildren(...found);
}

// The route runs along the lower edge of each card, over the layers that the hop computes, and comes from the entry through the
// gaps between the cards, so that it hides nothing.
function drawRoute(frame) {
  const overlay = $("route");
  const layers = room.hive.num_layers;
  const stops = (drawn?.hops ?? []).map((hop) => stopOf(hop, layers, frame)).filter(Boolean);
  if (!stops.length) return overlay.replaceChildren();
  const steps = [approach(box(drawn.entry, frame), stops[0])];
  stops.forEach((stop, i) => {
    steps.push(`L${stop.from} ${stop.y}H${stop.to}`);
    const next = stops[i + 1];
    if (!next) return;
    const bend = Math.max(GAP, Math.abs(next.from - stop.to) / 2);
    steps.push(`C${stop.to + bend} ${stop.y} ${next.from - bend} ${next.y} ${next.from} ${next.y}`);
  });
  const path = steps.join("");
  const last = stops.at(-1);
  overlay.replaceChildren(
    svg("path", { d: path, class: "halo" }),
    svg("path", { d: path, class: drawn.running ? "way running" : "way" }),
    ...stops.map((stop) => svg("circle", { cx: stop.from, cy: stop.y, r: 4, class: "stop" })),
    svg("path", { d: `M${last.to - 5} ${last.y - 5}l6 5l-6 5z`, class: "stop" }),
  );
}

function stopOf(hop, layers, frame) {
  const card_ = box(hop.node, frame);
  if (!card_) return null;
  const [start, end] = hop.layers;
  const at = (layer) => (layer / layers) * frame.width;
  const from = Math.max(card_.left + GAP, at(start) + GAP + 3);
  return { card: card_, from, to: Math.max(from + GAP, Math.min(card_.right - GAP, at(end) - GAP - 3)), y: card_.bottom - 5 };
}

function approach(entry, first) {
  if (!entry || (entry.left === first.card.left && entry.top === first.card.top)) return `M${first.from} ${first.y}`;
  const gutter = -5;
  const beside = entry.left - 5;
  const start = `M${entry.left} ${entry.y}H${beside}`;
  const around = beside > 5 ? `V${entry.top - 7}H${gutter}` : `H${gutter}`;
  return `${start}${around}V${first.y}`;
}

new ResizeObserver(() => lines()).observe($("stage"));
