// Where the seconds of a job went, as one bar of all its time and a line a kind.

import { byId, fill, h, say } from "./dom.js";
import { duration, percent } from "./format.js";

const KINDS = [
  ["training", "training_s"], ["saving", "checkpoint_s"], ["starting", "starting_s"], ["recovering", "recovering_s"],
  ["resizing", "resizing_s"], ["redone", "redone_s"], ["waiting", "waiting_s"],
];

export function showGoodput(goodput) {
  const parts = KINDS.map(([name, field]) => [name, goodput[field]]).filter(([, seconds]) => seconds > 0);
  const all = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  say(byId("goodput-ratio"), percent(goodput.ratio));
  if (!all) {
    fill(byId("goodput"), h("p", { class: "quiet small" }, "Nothing has run yet."));
    return;
  }
  fill(byId("goodput"),
    h("div", { class: "stack", "aria-hidden": "true" }, parts.map(([name, seconds]) =>
      h("span", { "data-kind": name, style: `flex-grow:${(seconds / all).toFixed(5)}`, title: `${name}: ${duration(seconds)}` }))),
    h("dl", { class: "kinds" }, parts.map(([name, seconds]) => h("div", {},
      h("dt", { class: "key", "data-kind": name }, name),
      h("dd", {}, duration(seconds), h("span", { class: "quiet" }, ` ${percent(seconds / all)}`))))));
}
