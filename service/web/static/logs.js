// The end of one log of a job: the driver's, or a worker's by rank.

import { get, getText, jobPath, Problem, repeat } from "./api.js";
import { byId, fill, h, say } from "./dom.js";

const LINES = 200;

const query = (source) => new URLSearchParams({ source: source.source, attempt: source.attempt, tail: LINES }).toString();

/** "replica-0-rank-3" -> "replica-0, rank 3"; the attempt only where there were several. */
function name(source, sources) {
  const where = source.source.replace(/-rank-(\d+)$/, ", rank $1");
  return sources.some((other) => other.attempt !== source.attempt) ? `${where} (attempt ${source.attempt})` : where;
}

export function watchLogs(job, isOver) {
  const select = byId("log-source"), log = byId("log");
  let complete = false, chosen = false;

  async function refreshSources() {
    const { items } = await get(jobPath(job, "/logs/sources"));
    fill(select, items.map((source) => h("option", { value: query(source) }, name(source, items))));
    const speaking = items.find((source) => source.bytes > 0);
    if (!chosen && speaking) select.value = query(speaking);
  }

  async function refresh() {
    try {
      await refreshSources();
      if (!select.value) { say(log, "Nothing was logged yet."); return; }
      const text = await getText(jobPath(job, `/logs?${select.value}`));
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 8;
      say(log, text || "This log is empty.");
      if (atEnd) log.scrollTop = log.scrollHeight;
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      say(log, error.message);
    }
  }

  repeat(async () => {
    if (complete) return;
    const over = isOver();
    await refresh();
    complete = over; // nobody writes any more
  }, 3000);
  select.addEventListener("change", async () => { chosen = true; await refresh(); log.scrollTop = log.scrollHeight; });
}
