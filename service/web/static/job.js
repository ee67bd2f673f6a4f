// The page of one job: reads the job now and then, follows its events and metrics, and hands them to the parts.

import { follow, get, jobPath, Problem, repeat } from "./api.js";
import { Curves } from "./chart.js";
import { Controls } from "./controls.js";
import { byId, fill, h, say } from "./dom.js";
import { ago, bytes, clock, duration, layout, loss, percent, short, whole } from "./format.js";
import { showGoodput } from "./goodput.js";
import { watchLogs } from "./logs.js";
import { bar, isOver, isWeb, pill, showDashboard, showLink, showProblem } from "./parts.js";
import { showEvents } from "./timeline.js";
import { showWorkers } from "./workers.js";

const asked = byId("job").dataset.job;
let job = null;
let curves = null;
let streams = [];
let controls = null;
let complete = false;

function show() {
  const { progress, workers, restarts } = job;
  say(document.querySelector("title"), `${job.name} · ${job.state.toLowerCase()} · Rubato`);
  say(byId("name"), job.name);
  fill(byId("state"), pill(job.state));
  fill(byId("reason"), job.reason.message, h("span", { class: "quiet" }, ` — ${job.reason.actor}, ${ago(job.reason.at)}`));
  const took = job.started_at && (new Date(job.finished_at ?? Date.now()) - new Date(job.started_at)) / 1000;
  fill(byId("identity"), h("code", {}, job.id), ` · project ${job.project} · submitted ${clock(job.created_at)}`,
    took ? ` · ${job.finished_at ? "ran" : "running for"} ${duration(took)}` : null,
    isWeb(job.links.ray) ? [" · ", h("a", { href: job.links.ray, rel: "noopener" }, "in the Ray dashboard")] : null);
  fill(byId("progress"), bar(progress.step, progress.steps, job.state, "Steps done"));
  const lost = Object.entries(restarts).filter(([, count]) => count > 0);
  fill(byId("figures"), [
    ["Step", whole(progress.step), `of ${whole(progress.steps)}`],
    ["Loss", loss(progress.loss), "nats a token"],
    ["Tokens/s", short(progress.tokens_per_s), progress.predicted_tokens_per_s
      ? `${short(progress.predicted_tokens_per_s)} were predicted` : `${short(progress.tokens)} in all`],
    ["MFU", percent(progress.mfu), "of the peak"],
    ["Left", isOver(job.state) ? "–" : duration(progress.eta_s), "at this speed"],
    ["Layout", layout(job.layout), "data × pipe × tensor"],
    ["Workers", workers.observed === workers.desired || isOver(job.state)
      ? whole(workers.observed) : `${workers.observed} → ${workers.desired}`,
      `${workers.min} to ${workers.max}`],
    ["Generation", whole(job.generation), job.attempts === 1 ? "1 attempt" : `${job.attempts} attempts`],
    ["Restarts", whole(lost.reduce((sum, [, count]) => sum + count, 0)),
      lost.length ? lost.map(([kind, count]) => `${count} ${kind.replace("_", " ")}`).join(", ") : "none"],
  ].map(([name, value, note]) => h("div", {}, h("dt", {}, name), h("dd", {}, value), h("dd", { class: "quiet small" }, note))));
  showWorkers(job);
  showGoodput(job.goodput);
  controls.show(job);
  say(byId("spec"), JSON.stringify(job.spec, null, 2));
  byId("job").hidden = false;
}

async function showCheckpoints() {
  let items;
  try {
    ({ items } = await get(jobPath(job.id, "/checkpoints")));
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    return fill(byId("checkpoints"), error.message);
  }
  if (!items.length) return undefined;
  return fill(byId("checkpoints"), h("table", { class: "plain" },
    h("thead", {}, h("tr", {}, ["Step", "Loss", "Size", "Layout", "Saved"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, [...items].sort((one, other) => other.step - one.step).map((checkpoint) =>
      h("tr", { "data-key": checkpoint.step, title: checkpoint.path },
        h("td", {}, whole(checkpoint.step)), h("td", {}, loss(checkpoint.loss)), h("td", {}, bytes(checkpoint.bytes)),
        h("td", {}, layout(checkpoint.layout)),
        h("td", {}, clock(checkpoint.at), checkpoint.verified ? null : h("span", { class: "bad" }, " not verified")))))));
}

/** What the profiler has recorded, to be fetched; the boards of TensorBoard are not read in a browser. */
async function showTraces() {
  let items;
  try {
    ({ items } = await get(jobPath(job.id, "/files")));
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    return; // the next event asks again
  }
  const traces = items.filter((file) => file.path.startsWith("profile/"));
  byId("traces-card").hidden = !traces.length;
  const link = (file) => jobPath(job.id, `/files/${file.path.split("/").map(encodeURIComponent).join("/")}`);
  fill(byId("traces"), h("table", { class: "plain" }, h("tbody", {}, traces.map((file) =>
    h("tr", { "data-key": file.path },
      h("td", {}, h("a", { href: link(file) }, file.path.replace("profile/", ""))), h("td", {}, bytes(file.bytes)))))));
}

async function refresh() {
  if (complete) return;
  try {
    job = await get(jobPath(asked));
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    showLink(error.code !== "unreachable");
    if (!job || error.code !== "unreachable") showProblem(byId("problem"), error);
    return;
  }
  showLink(true);
  showProblem(byId("problem"), null);
  if (!controls) begin();
  show();
  if (isOver(job.state)) {
    const whole = await Promise.all(streams.map((stream) => stream.finish()));
    await showCheckpoints();
    complete = whole.every(Boolean); // terminal states never change
  }
}

/** What is set up once, as soon as there is a job. */
function begin() {
  controls = new Controls(job.id, () => loop.now());
  byId("job").hidden = false; // the charts measure their place
  curves = new Curves();
  const metrics = follow(jobPath(job.id, "/metrics"), (metric) => metric.step, (some) => curves.take(some), showLink);
  const events = follow(jobPath(job.id, "/events"), (event) => event.id, (some, history) => {
    showEvents(some);
    loop.now();
    if (some.some((event) => event.kind.startsWith("checkpoint."))) showCheckpoints();
    if (some.some((event) => event.kind === "profile.saved")) showTraces();
    // A generation that goes on from an earlier step does the steps after it again, and so does one that went back.
    const steps = some.filter((event) => event.kind === "generation.formed").map((event) => event.data.step ?? 0);
    steps.push(...some.filter((event) => event.kind === "spike.rolled_back").map((event) => event.data.to ?? 0));
    if (!history && steps.length) metrics.rewind(Math.min(...steps));
  }, showLink);
  streams = [events, metrics];
  watchLogs(job.id, () => isOver(job.state));
  get("/v1/cluster").then(showDashboard, (error) => { if (!(error instanceof Problem)) throw error; });
}

const loop = repeat(refresh, 1500);
