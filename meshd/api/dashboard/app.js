// The page's parts and what feeds them.

import * as answers from "./answers.js";
import { sample } from "./charts.js";
import { startChat } from "./chat.js";
import { $, el, keyed, percent, pick, say, shape } from "./dom.js";
import { Feed, useKey } from "./feed.js";
import { flash, showRoom } from "./picture.js";

const EVENTS = 60;
const FEEDS = {
  live: ["live", "good"],
  polling: ["live (polling)", "good"],
  late: ["late", "poor"],
  lost: ["this node does not answer", "bad"],
};
let routingAt = 0;

function onRoom(room) {
  answers.know(room);
  header(room);
  findings(room.findings);
  showRoom(room);
  answers.redraw();
  routing(room.routing);
  sample(room);
}

function header(room) {
  const { status, hive } = room;
  $("model").hidden = !hive.model;
  say($("model"), hive.model ?? "");
  say($("hive"), hive.status);
  $("hive").dataset.kind = hive.status === "healthy" ? "good" : hive.status.startsWith("healthy") ? "poor" : "bad";
  say($("seen-from"), `seen from ${status.name}${status.state === "ready" ? "" : ` (${status.state})`}`);
  document.title = `${hive.status === "healthy" ? "" : "⚠ "}${hive.model ?? "meshd"} – ${status.name}`;
}

function findings(list) {
  $("findings").hidden = list.length === 0;
  keyed(
    $("finding-list"),
    list,
    (finding) => `${finding.code} ${finding.nodes} ${finding.command}`,
    (finding) => {
      const copy = el("button", { type: "button", class: "quiet" }, "Copy");
      copy.addEventListener("click", async () => {
        const done = await navigator.clipboard?.writeText(finding.command).then(() => true, () => false);
        say(copy, done ? "Copied" : "Select it by hand");
        setTimeout(() => say(copy, "Copy"), 2000);
      });
      const command = el("span", { class: "command" }, el("code", {}, finding.command), copy);
      return el("li", { "data-severity": finding.severity }, shape(finding.severity), el("div", {}, el("p", { class: "what" }), el("p", { class: "remedy muted" }), command));
    },
    (item, finding) => {
      say(item.querySelector(".what"), finding.text);
      say(item.querySelector(".remedy"), finding.remedy);
    },
  );
}

// --- routing ---

function routing(document_) {
  routingAt = Date.now();
  const rows = Object.entries(document_.models).flatMap(([model, table]) => (table.candidates ?? []).map((arm) => ({ model, arm })));
  keyed($("routing-rows"), rows, ({ arm }) => arm.signature, routeRow, (row, { arm }) => fillRow(row.cells, arm));
  if (!rows.length) $("routing-rows").replaceChildren(el("tr", { "data-key": "none" }, el("td", { colspan: "7", class: "muted" }, "no route covers all layers")));
  const config = document_.config ?? {};
  const words = { explore_share: "explore share", weight_alpha: "weight alpha", half_life_s: "half-life (s)", min_sample_tokens: "least sample (tokens)" };
  const epochs = Object.entries(document_.models).map(([model, table]) => `epoch of ${model}: ${table.epoch}`);
  say($("routing-settings"), [...Object.entries(config).map(([name, value]) => `${pick(words, name, name)}: ${value}`), ...epochs].join(" · "));
  age();
}

function routeRow() {
  const cells = ["", "", "num", "num", "num", "", "num"].map((kind) => el("td", { class: kind || null }));
  cells[5].append(el("span", { class: "share" }, el("i")), el("span", { class: "share-words" }));
  return el("tr", {}, cells);
}

function fillRow(cells, arm) {
  say(cells[0], arm.hops.map((hop) => `${hop.name} ${hop.layers[0]}..${hop.layers[1]}`).join(" → "));
  say(cells[1], arm.status);
  cells[1].dataset.status = arm.status;
  say(cells[2], arm.tps === null ? "–" : arm.tps.toFixed(1));
  say(cells[3], arm.prior_tps.toFixed(1));
  say(cells[4], arm.coefficient === null ? "–" : arm.coefficient.toFixed(2));
  cells[5].firstElementChild.firstElementChild.style.setProperty("--share", arm.expected_share.toFixed(3));
  say(cells[5].lastElementChild, percent(arm.expected_share));
  say(cells[6], String(arm.samples));
}

function age() {
  if (!routingAt) return;
  const seconds = Math.round((Date.now() - routingAt) / 1000);
  say($("routing-age"), seconds < 2 ? "now" : `${seconds} s old`);
}

// --- what happened ---

const TOLD = {
  join: ["alive", () => "joined"],
  refute: ["alive", () => "is alive after all"],
  suspect: ["suspect", () => "does not answer: suspect"],
  failed: ["dead", (event) => (event.reason ? `failed: ${event.reason}` : "is dead")],
  left: ["left", () => "left"],
  failover: ["suspect", (event) => (event.swaps ?? []).map((swap) => `layers ${swap.layers?.[0]}..${swap.layers?.[1]}: ${who(swap.from)} ${swap.reason}, ${who(swap.to)} takes over`).join("; ")],
  recovered: ["alive", (event) => `layers ${event.layers?.[0]}..${event.layers?.[1]} go on at ${who(event.to)} after ${Math.round(event.stall_ms)} ms (${event.replayed_tokens} tokens replayed)`],
  conflict: ["error", () => "another device runs with this identity"],
  quarantine: ["refused", (event) => event.text ?? "refused"],
  admit: ["alive", (event) => `proved ${event.text ?? ""}`],
  stage: ["loading", (event) => event.text ?? ""],
  claim: ["loading", (event) => event.text ?? ""],
};
const QUIET = new Set(["route", "answer", "listening", "next", "lost"]);
const happened = [];
let names = new Map();
const who = (node) => names.get(node) ?? String(node ?? "?").slice(0, 8);

function onEvent(event, old) {
  answers.hear(event);
  if (["suspect", "failed"].includes(event.ev) && !old && !event.reason) flash(event.node);
  if (QUIET.has(event.ev)) return;
  happened.unshift(event);
  happened.length = Math.min(happened.length, EVENTS);
  happened.sort((a, b) => b.t - a.t);
  keyed($("event-list"), happened, (each) => `${each.t}${each.ev}${each.node}${each.session ?? ""}`, eventRow, () => {});
}

function eventRow(event) {
  const [state, words] = pick(TOLD, event.ev, ["left", (each) => `${each.ev} ${each.text ?? ""}`]);
  const time = new Date(event.t * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
  const about = ["failover", "recovered"].includes(event.ev) ? "" : `${event.name ?? ""} `;
  return el("li", {}, el("time", { class: "muted" }, time), shape(state), el("span", {}, el("b", {}, about), words(event)));
}

// --- the key ---

function askForKey(wasWrong) {
  if (wasWrong) say($("key-why"), "This key is not known here. On any device of the room, meshd key show --api prints the right one.");
  $("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
  $("key-dialog").showModal();
  return new Promise((resolve) => {
    $("key-form").addEventListener(
      "submit",
      (event) => {
        event.preventDefault();
        $("key-dialog").close();
        resolve($("key-text").value.trim());
        $("key-text").value = "";
      },
      { once: true },
    );
  });
}

useKey(askForKey);
startChat();
answers.redraw();
setInterval(age, 1000);
new Feed({
  onRoom(room) {
    names = new Map([room.peers.self, ...room.peers.peers].filter(Boolean).map((peer) => [peer.node_id, peer.name]));
    onRoom(room);
  },
  onEvent,
  onState(state) {
    const [words, kind] = FEEDS[state];
    say($("feed"), words);
    $("feed").dataset.kind = kind;
    document.body.dataset.feed = state;
  },
}).start();
