// The REST API: requests, errors as the problem documents they are, lists to their end, and streams that go on.

/** An error reply (RFC 9457): `title`, `detail`, `fix`, and the fields at fault in `errors`. */
export class Problem extends Error {
  constructor(document) {
    super(document.detail);
    Object.assign(this, { title: "", fix: "", code: "", status: 0, errors: [] }, document);
  }
}

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { Accept: "application/json", ...options.headers } });
  } catch (error) {
    throw new Problem({
      code: "unreachable", title: "Control plane unreachable", detail: `The control plane does not answer (${error.message}).`,
      fix: "Running jobs go on meanwhile; this page catches up by itself.",
    });
  }
  if (response.ok) return response;
  const body = await response.text();
  let document;
  try {
    document = JSON.parse(body);
  } catch {
    document = { detail: `${response.status} ${response.statusText}` };
  }
  throw new Problem({ ...document, status: response.status });
}

export const get = async (path) => (await request(path)).json();
export const getText = async (path) => (await request(path, { headers: { Accept: "text/plain" } })).text();
export const post = async (path, body) => (await request(path, {
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
})).json();

export const jobPath = (job, below = "") => `/v1/jobs/${encodeURIComponent(job)}${below}`;

/** Everything a list holds beyond a cursor; `take` gets a page of items at a time, `cursorOf` an item. */
async function rest(path, after, cursorOf, take) {
  for (;;) {
    const page = await get(`${path}?after=${after}&limit=1000`);
    if (page.items.length) {
      take(page.items);
      after = cursorOf(page.items.at(-1));
    }
    if (page.next === null || !page.items.length) return after;
  }
}

/**
 * Follows a list for as long as the page is looked at: what is there, then what is added.
 * A hidden page holds no connection, since a browser has only six for one host.
 * `take` gets lists of items, some of them twice, and whether they were there when the page opened; `onLink` hears
 * whether the line is up.
 */
export function follow(path, cursorOf, take, onLink) {
  let after = 0, source = null, turn = 0, over = false, history = true;

  const catchUp = async () => {
    after = await rest(path, after, cursorOf, (items) => take(items, history));
    history = false;
  };

  async function open() {
    const mine = ++turn;
    try {
      await catchUp();
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      onLink(false);
      if (mine === turn) setTimeout(() => mine === turn && open(), 2000);
      return;
    }
    if (mine !== turn || over) return;
    source = new EventSource(`${path}?after=${after}`);
    source.onopen = () => onLink(true);
    source.onmessage = (message) => {
      const item = JSON.parse(message.data);
      after = cursorOf(item);
      take([item], false);
    };
    source.addEventListener("end", close); // the job is over: what is left comes with finish()
    source.onerror = () => { close(); if (!over) setTimeout(() => mine === turn - 1 && open(), 1000); };
  }

  function close() {
    turn += 1;
    source?.close();
    source = null;
  }

  document.addEventListener("visibilitychange", () => (document.hidden ? close() : over || open()));
  if (!document.hidden) open();
  return {
    /** What came after a cursor is out of date: reads it again. */
    rewind(cursor) {
      if (over || cursor >= after) return;
      after = cursor;
      close();
      if (!document.hidden) open();
    },
    /** The list grows no more: fetches what is left and hangs up. False when that failed, to be tried again. */
    async finish() {
      if (over) return true;
      over = true;
      close();
      try {
        await catchUp();
      } catch (error) {
        if (!(error instanceof Problem)) throw error;
        over = false;
      }
      return over;
    },
  };
}

/** Calls `task` now and then every `ms` after it ended, only while the page is looked at; `now()` calls it at once. */
export function repeat(task, ms) {
  let timer = null, running = false, again = false;
  async function run() {
    clearTimeout(timer);
    if (running) { again = true; return; }
    running = true;
    try {
      await task();
    } finally {
      running = false;
      timer = document.hidden ? null : setTimeout(run, again ? 0 : ms);
      again = false;
    }
  }
  document.addEventListener("visibilitychange", () => document.hidden || run());
  run();
  return { now: run };
}
