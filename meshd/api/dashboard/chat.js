// The chat: one conversation, streamed, with the nodes that computed each answer. It is kept in this page only.

import * as answers from "./answers.js";
import { $, el, say } from "./dom.js";
import { call, eventsOf } from "./feed.js";

const history = [];
let running = null;

export function startChat() {
  $("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return running.abort();
    const text = $("chat-text").value.trim();
    if (!text) return $("chat-text").focus();
    $("chat-text").value = "";
    ask(text);
  });
  $("chat-text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!running) $("chat-form").requestSubmit();
    }
  });
  $("chat-clear").addEventListener("click", () => {
    running?.abort();
    history.length = 0;
    $("chat-log").replaceChildren();
    $("chat-text").focus();
  });
  new ResizeObserver(follow).observe($("chat-log"));
}

function message(kind, text) {
  const words = el("p", { class: "words" }, text);
  const how = el("p", { class: "how" });
  $("chat-log").querySelector(".empty")?.remove();
  $("chat-log").append(el("div", { class: `message ${kind}` }, words, how));
  follow();
  return { words, how };
}

function follow() {
  const log = $("chat-log");
  log.scrollTop = log.scrollHeight;
}

async function ask(text) {
  const stop = (running = new AbortController());
  message("mine", text);
  const { words, how } = message("theirs", "");
  words.classList.add("waiting");
  busy(true);
  let session = null;
  let report = null;
  let answer = "";
  try {
    const wanted = Math.min(4096, Math.max(1, Number($("chat-max").value) || 128));
    const body = { messages: [...history, { role: "user", content: text }], max_tokens: wanted, stream: true };
    const response = await call("/chain", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: stop.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error?.message ?? `HTTP ${response.status}`);
    for await (const event of eventsOf(response)) {
      if (!event) continue;
      if (event.error) throw new Error(event.error.message);
      if ("finish_reason" in event) report = event;
      else if (event.tokens) {
        answer += event.text;
        words.textContent = answer;
        follow();
      } else {
        session = event.id;
        answers.began(session, event.route ?? []);
        say(how, `computing on ${answers.way(event.route ?? [])}`);
      }
    }
    if (!report) throw new Error("the stream ended in the middle: this node went away");
    history.push({ role: "user", content: text }, { role: "assistant", content: report.text });
    words.textContent = report.text || "(an empty answer)";
  } catch (error) {
    const stopped = stop.signal.aborted;
    how.classList.toggle("failed", !stopped);
    say(how, stopped ? "stopped" : String(error.message ?? error));
  }
  words.classList.remove("waiting");
  if (session) answers.ended(session, report);
  if (report) {
    const told = answers.hopsOfAnswer(session);
    say(how, `${answers.way(report.route)} · ${answers.numbers(told)}`);
    for (const lost of report.recoveries) how.after(el("p", { class: "how recovery" }, answers.recovery(lost)));
  }
  follow();
  if (running === stop) running = null;
  busy(running !== null);
}

function busy(now) {
  say($("chat-send"), now ? "Stop" : "Send");
  $("chat-send").classList.toggle("stop", now);
}
