// The end of one log of a job: the driver's, or a worker's by rank.

import { get, getText, jobPath, Problem, repeat } from "./api.js";
import { byId, h, say } from "./dom.js";

const LINES = 200;

const query = (source) => (source.rank === null || source.rank === undefined ? `source=${source.source}` : `rank=${source.rank}`);
const name = (source) => (source.rank === null || source.rank === undefined ? source.source : `rank ${source.rank}`);

export function watchLogs(job, isOver) {
  const select = byId("log-source"), log = byId("log");
  let known = "";

  async function refreshSources() {
    const { items } = await get(jobPath(job, "/logs/sources"));
    const next = JSON.stringify(items);
    if (next === known) return;
    known = next;
    const chosen = select.value;
    select.replaceChildren(...items.map((source) => h("option", { value: query(source) }, name(source))));
    if ([...select.options].some((option) => option.value === chosen)) select.value = chosen;
  }

  async function refresh() {
    try {
      await refreshSources();
      if (!select.value) { say(log, "Nothing was logged yet."); return; }
      const text = await getText(jobPath(job, `/logs?${select.value}&tail=${LINES}`));
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 8;
      say(log, text || "This log is empty.");
      if (atEnd) log.scrollTop = log.scrollHeight;
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      say(log, error.message);
    }
  }

  const loop = repeat(async () => { if (!known || !isOver()) await refresh(); }, 3000);
  select.addEventListener("change", async () => { await refresh(); log.scrollTop = log.scrollHeight; });
  return loop;
}
