// The page of all jobs: what the cluster has, and a row a job, both kept current.

import { get, Problem, repeat } from "./api.js";
import { byId, fill, h, say } from "./dom.js";
import { ago, clock, layout, loss, percent, short, whole } from "./format.js";
import { bar, isOver, pill, showDashboard, showLink } from "./parts.js";

const PAGE = 50;
let pages = 1;
let filter = "all";
let shown = [];

async function refreshJobs() {
  const jobs = [];
  let cursor = null;
  try {
    for (let page = 0; page < pages; page += 1) {
      const query = new URLSearchParams({ limit: PAGE, ...(cursor && { cursor }) });
      const reply = await get(`/v1/jobs?${query}`);
      jobs.push(...reply.items);
      cursor = reply.next;
      if (cursor === null) break;
    }
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    showLink(false);
    return;
  }
  showLink(true);
  byId("more").hidden = cursor === null;
  shown = jobs;
  draw();
}

function draw() {
  const jobs = shown.filter((job) => filter === "all" || isOver(job.state) === (filter === "over"));
  byId("empty").hidden = shown.length > 0;
  byId("none").hidden = !shown.length || jobs.length > 0;
  fill(byId("jobs"), jobs.map(row));
  const active = shown.filter((job) => !isOver(job.state)).length;
  say(document.querySelector("title"), active ? `${active} active · Rubato` : "Jobs · Rubato");
}

function row(job) {
  const { progress, workers } = job;
  const moving = workers.observed !== workers.desired && !isOver(job.state);
  return h("tr", { "data-key": job.id },
    h("th", { scope: "row" },
      h("a", { href: `/jobs/${encodeURIComponent(job.id)}` }, job.name),
      h("span", { class: "quiet small block" }, job.project)),
    h("td", {}, pill(job.state), h("span", { class: "quiet small block clip", title: job.reason.message }, job.reason.message)),
    h("td", { class: "wide", "data-label": "Progress" },
      bar(progress.step, progress.steps, job.state, `Steps of ${job.name}`),
      h("span", { class: "quiet small block" },
        `${whole(progress.step)} of ${whole(progress.steps)} steps · ${percent(progress.step / progress.steps)}`)),
    h("td", { class: "number", "data-label": "Loss" }, loss(progress.loss)),
    h("td", { class: "number", "data-label": "Tokens/s" }, short(progress.tokens_per_s)),
    h("td", { class: "number", "data-label": "Workers" }, moving ? `${workers.observed} → ${workers.desired}` : whole(workers.observed)),
    h("td", { class: "nowrap", "data-label": "Layout" }, layout(job.layout)),
    h("td", { class: "number nowrap", "data-label": "Started", title: job.started_at ? clock(job.started_at) : "" }, ago(job.started_at)));
}

async function refreshCluster() {
  let cluster;
  try {
    cluster = await get("/v1/cluster");
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    fill(byId("cluster-body"), h("span", {}, error.message));
    return;
  }
  showDashboard(cluster);
  if (cluster.state !== "reachable") {
    fill(byId("cluster-body"), h("span", { class: "dot", "data-state": "lost" }), `Ray cannot be reached: ${cluster.detail}`);
    return;
  }
  const alive = cluster.nodes.filter((node) => node.alive);
  fill(byId("cluster-body"),
    h("span", { class: "dot", "data-state": "live" }),
    h("span", {}, `${alive.length} node${alive.length === 1 ? "" : "s"}`),
    use("CPUs", cluster.cpus, cluster.cpus_free),
    cluster.gpus ? use("GPUs", cluster.gpus, cluster.gpus_free) : null,
    h("span", { class: "quiet" }, `Ray ${cluster.ray_version ?? ""}`),
    h("span", { class: "nodes" }, cluster.nodes.length > 1 ? cluster.nodes.map(node) : null));
}

function use(what, all, free) {
  const used = all - free;
  return h("span", { class: "use" },
    bar(used, all, "RUNNING", `${what} in use`), `${short(used)} of ${short(all)} ${what} in use`);
}

function node(view) {
  const used = view.cpus - view.cpus_free;
  const share = view.cpus ? used / view.cpus : 0;
  const what = `${view.ip}: ${view.alive ? `${short(used)} of ${short(view.cpus)} CPUs` : "gone"}`;
  return h("span", { class: "node", title: what, "data-alive": String(view.alive), style: `--share:${share}` },
    h("span", { class: "hidden" }, what));
}

for (const button of document.querySelectorAll("[data-filter]")) {
  button.addEventListener("click", () => {
    filter = button.dataset.filter;
    for (const other of document.querySelectorAll("[data-filter]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    draw();
  });
}
const jobs = repeat(refreshJobs, 2000);
repeat(refreshCluster, 5000);
byId("more").addEventListener("click", () => { pages += 1; jobs.now(); });
