// What both pages show: the pill of a state, a bar of progress, a problem, the line to the control plane.

import { byId, fill, h, say } from "./dom.js";

const OVER = ["SUCCEEDED", "FAILED", "CANCELLED"];

export const isOver = (state) => OVER.includes(state);

export const pill = (state) => h("span", { class: "pill", "data-state": state }, state.toLowerCase());

/** `done` of `all`, as a bar with the figures in its label. */
export function bar(done, all, state, name) {
  const share = all ? Math.min(1, done / all) : 0;
  return h("div", {
    class: "bar", role: "progressbar", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": all,
    "aria-valuenow": done, "data-state": state,
  }, h("div", { class: "bar-fill", style: `width:${(100 * share).toFixed(2)}%` }));
}

/** A problem document: what went wrong, each field at fault, what to do. */
export function showProblem(element, problem) {
  element.hidden = !problem;
  if (!problem) return fill(element);
  const fields = problem.errors.map((error) => h("li", {},
    h("code", {}, error.field ?? ""), ` ${error.cause ?? ""}`, error.fix ? ` → ${error.fix}` : null));
  fill(element,
    h("p", {}, h("strong", {}, problem.title || "That did not work"), ` — ${problem.detail}`),
    fields.length ? h("ul", {}, fields) : null,
    problem.fix ? h("p", { class: "fix" }, problem.fix) : null);
}

/** Says at the top of the page whether what it shows is current. */
export function showLink(up) {
  const link = byId("link");
  link.dataset.state = up ? "live" : "lost";
  say(link, up ? "live" : "reconnecting");
}

/** Whether a text is an address that a link may lead to. */
export const isWeb = (url) => /^https?:/.test(url ?? "");

export function showDashboard(cluster) {
  const link = byId("dashboard");
  const usable = isWeb(cluster.dashboard_url);
  link.hidden = !usable;
  if (usable) link.href = cluster.dashboard_url;
}
