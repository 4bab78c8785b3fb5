// Requests of this node, running and finished, and which of them is drawn over the room.

import { $, el, keyed, ms, range, say } from "./dom.js";
import { flash, showRoute } from "./picture.js";

const KEPT = 12;
let self = "";
let nameOf = (node) => node.slice(0, 8);
let idOf = () => null;
const answers = new Map(); // session -> answer, oldest first
let picked = null; // null: the newest

export function know(room) {
  self = room.status.node_id;
  const all = [room.peers.self, ...room.peers.peers].filter(Boolean);
  nameOf = (node) => all.find((peer) => peer.node_id === node)?.name ?? node.slice(0, 8);
  idOf = (name) => all.find((peer) => peer.name === name)?.node_id ?? null;
}

// `mode|n1[0:15]->n2[15:30]` as hops.
function hopsOf(signature) {
  const steps = String(signature ?? "").split("|").slice(1).join("|").split("->");
  return steps.flatMap((step) => {
    const match = /^(.*)\[(\d+):(\d+)\]$/.exec(step);
    return match ? [{ node: idOf(match[1]) ?? match[1], name: match[1], layers: [Number(match[2]), Number(match[3])] }] : [];
  });
}

function of(session) {
  let answer = answers.get(session);
  if (!answer) {
    answer = { session, hops: [], running: true, mode: "", recoveries: [], tokens: null, at: Date.now() };
    answers.set(session, answer);
    while (answers.size > KEPT) answers.delete(answers.keys().next().value);
  }
  return answer;
}

// An event of the log. True if it was about an answer.
export function hear(event) {
  if (!event.session) return false;
  if (event.ev === "route") {
    const known = of(event.session);
    if (!known.finished) Object.assign(known, { mode: event.mode, hops: hopsOf(event.signature), at: event.t * 1000 });
  } else if (event.ev === "failover") {
    const answer = of(event.session);
    for (const swap of event.swaps ?? []) {
      flash(swap.from);
      answer.hops = swapped(answer.hops, swap);
    }
    answer.swapping = true;
  } else if (event.ev === "recovered") {
    const answer = of(event.session);
    answer.swapping = false;
    answer.recoveries.push({ ...event, from: nameOf(event.from), to: nameOf(event.to) });
  } else if (event.ev === "answer") {
    finish(event.session, event);
  } else return false;
  redraw();
  return true;
}

function swapped(hops, swap) {
  const [start, end] = swap.layers;
  const kept = hops.filter((hop) => hop.layers[1] <= start || hop.layers[0] >= end || hop.node !== swap.from);
  return [...kept, { node: swap.to, name: nameOf(swap.to), layers: swap.layers }].sort((a, b) => a.layers[0] - b.layers[0]);
}

function finish(session, report) {
  Object.assign(of(session), {
    hops: report.route,
    recoveries: report.recoveries,
    tokens: typeof report.tokens === "number" ? report.tokens : report.tokens.length,
    timings: report.timings,
    mode: report.mode ?? report.routing?.mode ?? "",
    running: false,
    finished: true,
  });
}

// What the chat knows first-hand.
export function began(session, route) {
  Object.assign(of(session), { hops: route, running: true, mine: true });
  picked = null;
  redraw();
}

export function ended(session, report) {
  if (report) finish(session, report);
  else Object.assign(of(session), { running: false, failed: true });
  redraw();
}

export function hopsOfAnswer(session) {
  return answers.get(session);
}

const newestFirst = () => [...answers.values()].reverse();

export function redraw() {
  // A failed request leaves no last event: what the log has been silent about for long is over.
  for (const answer of answers.values()) if (answer.running && !answer.mine && Date.now() - answer.at > 180000) answer.running = false;
  const list = newestFirst();
  keyed($("answer-list"), list, (answer) => answer.session, make, update);
  const shown = (picked && answers.get(picked)) || list[0];
  showRoute(shown?.hops.length ? { entry: self, hops: shown.hops, running: shown.running } : null);
  say($("route-words"), shown ? `Drawn: ${sentence(shown)}` : "");
  if (!list.length && !$("answer-list").children.length) $("answer-list").append(el("li", { class: "muted empty", "data-key": "empty" }, "none yet"));
}

function make(answer) {
  const pick = () => {
    picked = picked === answer.session ? null : answer.session;
    redraw();
  };
  return el("li", {}, el("button", { type: "button", class: "answer", on: { click: pick } }, el("span", { class: "way-words" }), el("span", { class: "numbers muted" }), el("span", { class: "recovery" })));
}

function update(item, answer) {
  const button = item.firstElementChild;
  const shown = picked ? picked === answer.session : newestFirst()[0] === answer;
  button.setAttribute("aria-pressed", String(shown));
  button.dataset.running = answer.running;
  say(button.querySelector(".way-words"), way(answer.hops));
  say(button.querySelector(".numbers"), numbers(answer));
  say(button.querySelector(".recovery"), answer.recoveries.map(recovery).join("; "));
}

export const way = (hops) => hops.map((hop) => `${hop.name} ${range(hop.layers)}`).join(" → ") || "looking for a route";

export function numbers(answer) {
  if (answer.failed) return "failed";
  if (answer.running) return answer.swapping ? "replacing a stage …" : "running …";
  if (!answer.timings) return answer.mode;
  const { tokens_per_s: rate, ttft_ms: first } = answer.timings;
  const speed = rate ? `, ${rate.toFixed(1)} tok/s` : "";
  return `${answer.tokens} tokens${speed}, first after ${ms(first)}, ${answer.mode}`;
}

export const recovery = (lost) =>
  `${lost.from} lost (${lost.reason}): ${lost.to} took ${range(lost.layers)} after ${ms(lost.stall_ms)}${lost.exact === false ? ", other arithmetic" : ""}`;

function sentence(answer) {
  const timed = answer.running ? [] : answer.hops.filter((hop) => hop.compute_ms !== undefined);
  const total = timed.reduce((sum, hop) => sum + hop.compute_ms + hop.wire_ms, 0);
  return `${way(answer.hops)}${timed.length ? `, ${ms(total)} a token` : ""}${answer.recoveries.length ? `; ${answer.recoveries.map(recovery).join("; ")}` : ""}`;
}
