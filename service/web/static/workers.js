// The workers of a job as the mesh they form: a panel a replica, in it a row a pipeline stage, a column a tensor rank.

import { byId, fill, h, say } from "./dom.js";

const UNPLACED = Number.MAX_SAFE_INTEGER;

/** Replicas in the order of the data axis; those outside the generation last. */
function replicas(members) {
  const found = new Map();
  for (const worker of members) {
    if (!found.has(worker.replica)) found.set(worker.replica, { name: worker.replica, data: worker.data, workers: [] });
    const replica = found.get(worker.replica);
    replica.data ??= worker.data;
    replica.workers.push(worker);
  }
  return [...found.values()].sort((one, other) =>
    (one.data ?? UNPLACED) - (other.data ?? UNPLACED) || one.name.localeCompare(other.name));
}

function describe(worker) {
  const place = [
    worker.rank === null || worker.rank === undefined ? "not in this generation" : `rank ${worker.rank}`,
    `pipeline ${worker.pipeline}, tensor ${worker.tensor}`,
  ];
  return [...place, worker.state, worker.pid ? `pid ${worker.pid}` : null,
    worker.node_ip ? `node ${worker.node_ip}` : null].filter(Boolean).join(" · ");
}

function cell(worker) {
  const label = worker.rank ?? "·";
  return h("li", {
    class: "worker", "data-state": worker.state, tabindex: 0, title: describe(worker), "aria-label": describe(worker),
    style: `grid-row:${worker.pipeline + 1};grid-column:${worker.tensor + 1}`,
  }, h("span", { "aria-hidden": "true" }, String(label)),
  h("span", { class: "pid", "aria-hidden": "true" }, worker.pid ? String(worker.pid) : ""));
}

function panel(replica) {
  const lost = replica.workers.some((worker) => worker.state === "lost");
  const state = lost ? "lost" : replica.workers.every((worker) => worker.state === "training") ? "training" : "starting";
  const where = replica.data === null || replica.data === undefined ? "joining" : `data ${replica.data}`;
  return h("section", { class: "replica", "data-key": replica.name, "data-state": state, "aria-label": `Replica ${replica.name}` },
    h("h3", {}, h("span", {}, state === "lost" ? "lost a worker" : where), h("span", { class: "quiet" }, replica.name)),
    h("ul", { class: "mesh" }, [...replica.workers]
      .sort((one, other) => one.pipeline - other.pipeline || one.tensor - other.tensor).map(cell)));
}

/** Draws the workers of a job. */
export function showWorkers(job) {
  const { members } = job.workers;
  const counts = new Map();
  for (const worker of members) counts.set(worker.state, (counts.get(worker.state) ?? 0) + 1);
  say(byId("layout"), job.layout
    ? `data ${job.layout.data} × pipeline ${job.layout.pipeline} × tensor ${job.layout.tensor}` : "");
  if (!members.length) {
    fill(byId("workers"), h("p", { class: "quiet small" }, "No worker runs for this job."));
    return;
  }
  fill(byId("workers"),
    h("div", { class: "replicas" }, replicas(members).map(panel)),
    h("p", { class: "legend small" }, ["training", "starting", "lost"].filter((state) => counts.has(state)).map((state) =>
      h("span", { class: "key", "data-worker": state }, `${counts.get(state)} ${state}`))));
}
