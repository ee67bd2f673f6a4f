// The events of a job, newest first: when, what, who, and the data behind it on demand.

import { byId, h, say } from "./dom.js";
import { clock } from "./format.js";

const MOST_SHOWN = 500;
const seen = new Set();

/** Bad, good, or a change, by kind: it only picks the colour of the dot. */
function tone(kind) {
  if (/lost|failed|corrupt|unreachable|unreadable|incomplete|spike|rolled_back|vanishing|exploding/.test(kind)) return "bad";
  if (/saved|restored|finished|ready|formed|reachable|recovered/.test(kind)) return "good";
  return "change";
}

function entry(event) {
  const hasData = Object.keys(event.data ?? {}).length > 0;
  const head = [h("span", { class: "what" }, event.message),
    h("span", { class: "quiet small block" },
      h("time", { datetime: event.at }, clock(event.at)), ` · ${event.kind} · ${event.actor}`)];
  return h("li", { "data-tone": tone(event.kind), "data-kind": event.kind },
    hasData ? h("details", {}, h("summary", {}, head), h("pre", {}, JSON.stringify(event.data, null, 1))) : h("div", {}, head));
}

/** Takes events in ascending order; one that was shown is not shown again. */
export function showEvents(events) {
  const fresh = events.filter((event) => !seen.has(event.id));
  if (!fresh.length) return;
  for (const event of fresh) seen.add(event.id);
  const list = byId("timeline");
  list.prepend(...fresh.slice(-MOST_SHOWN).reverse().map(entry));
  while (list.children.length > MOST_SHOWN) list.lastElementChild.remove();
  const older = seen.size - list.children.length;
  say(byId("event-count"), older ? `newest ${list.children.length} of ${seen.size}` : `${seen.size} events`);
}
