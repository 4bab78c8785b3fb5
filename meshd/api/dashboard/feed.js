// Where everything comes from: the room's document every second, and the event log as it happens.
// The event stream is read with fetch and not with EventSource, which cannot send a key. While it is down the events
// travel with the document. A hidden tab asks for nothing: browsers allow few connections to one host.

const EVERY_MS = 1000;
const SLOW_MS = 3000;
const GIVE_UP_MS = 8000;
const SILENCE_MS = 40000; // the stream sends a comment each 15 s

let key = null;
let askForKey = null;
let asking = null;

export function useKey(asker) {
  askForKey = asker;
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given) {
    sessionStorage.setItem("meshd.key", given);
    history.replaceState(null, "", location.pathname); // a key in the address bar is a key on the next screenshot
  }
  key = sessionStorage.getItem("meshd.key");
}

// fetch with the key; when it is refused the person is asked, once for all who wait.
export async function call(path, options = {}) {
  for (;;) {
    const used = key;
    const headers = { ...(options.headers ?? {}), ...(used ? { Authorization: `Bearer ${used}` } : {}) };
    const response = await fetch(path, { cache: "no-store", ...options, headers, credentials: "omit" });
    if (response.status !== 401) return response;
    if (key !== used) continue;
    asking ??= askForKey(used !== null).then((entered) => {
      key = entered;
      sessionStorage.setItem("meshd.key", entered);
      asking = null;
    });
    await asking;
  }
}

// The JSON documents of a stream of server-sent events.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const frames = rest.split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        const data = frame.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
        if (data === "[DONE]") return;
        yield data ? JSON.parse(data) : null; // null: a comment, a sign of life
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export class Feed {
  constructor({ onRoom, onEvent, onState }) {
    this.onRoom = onRoom;
    this.onEvent = onEvent;
    this.onState = onState;
    this.streaming = false;
    this.seen = new Set();
    this.timer = null;
    this.failures = 0;
    this.busy = false;
    this.again = false;
    this.stop = null;
  }

  start() {
    document.addEventListener("visibilitychange", () => (document.hidden ? this.sleep() : this.wake()));
    this.first = true;
    this.wake();
  }

  wake() {
    this.look();
    this.listen();
  }

  sleep() {
    clearTimeout(this.timer);
    this.timer = null;
    this.stop?.abort();
  }

  async look() {
    if (this.busy) {
      this.again = true;
      return;
    }
    this.busy = true;
    clearTimeout(this.timer);
    const room = await this.fetched();
    this.failures = room ? 0 : this.failures + 1;
    this.onState(!room ? (this.failures > 1 ? "lost" : "late") : this.streaming ? "live" : "polling");
    if (room) {
      try {
        this.onRoom(room);
        for (const event of room.events ?? []) this.tell(event, this.first);
      } catch (error) {
        console.error(error); // a mistake in one part of the page must not end the others
      }
      this.first = false;
    }
    this.busy = false;
    if (document.hidden) return;
    const pause = this.again ? 150 : this.failures > 3 ? SLOW_MS : EVERY_MS;
    this.again = false;
    this.timer = setTimeout(() => this.look(), pause);
  }

  async fetched() {
    const wanted = this.first || !this.streaming ? "?events=1" : "";
    try {
      const response = await call(`/mesh/room${wanted}`, { signal: AbortSignal.timeout(GIVE_UP_MS) });
      return response.ok ? await response.json() : null;
    } catch {
      return null; // no answer, or half of one
    }
  }

  async listen() {
    this.stop?.abort();
    const stop = (this.stop = new AbortController());
    while (!stop.signal.aborted) {
      let watch = null;
      try {
        const response = await call("/events?last=20", { signal: stop.signal });
        if (!response.ok) throw new Error(`HTTP ${response.status}`);
        this.streaming = true;
        const heard = () => {
          clearTimeout(watch);
          watch = setTimeout(() => stop.abort(), SILENCE_MS);
        };
        heard();
        for await (const event of eventsOf(response)) {
          heard();
          if (event) this.tell(event, false);
        }
      } catch {
        // The documents go on, with the events in them; the stream is tried again.
      }
      clearTimeout(watch);
      this.streaming = false;
      const silent = stop.signal.aborted && stop === this.stop && !document.hidden;
      if (silent) return void setTimeout(() => this.listen(), SLOW_MS);
      if (stop.signal.aborted) return;
      await new Promise((resolve) => setTimeout(resolve, SLOW_MS));
    }
  }

  // Each event once, whichever way it came; the room's document follows soon after what changes it.
  tell(event, old) {
    const mark = `${event.t} ${event.ev} ${event.node} ${event.session ?? ""} ${event.text ?? ""}`;
    if (this.seen.has(mark)) return;
    this.seen.add(mark);
    if (this.seen.size > 2000) this.seen = new Set([...this.seen].slice(-1000));
    this.onEvent(event, old);
    if (!old && !["route", "answer"].includes(event.ev)) this.look();
  }
}
