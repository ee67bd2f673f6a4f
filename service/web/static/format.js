// Numbers, durations and times as people read them.

const NONE = "–";

/** 1234567 -> 1.23M; three significant digits. */
export function short(value) {
  if (value === null || value === undefined) return NONE;
  const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  for (const [size, unit] of units) {
    if (Math.abs(value) >= size) return Number((value / size).toPrecision(3)) + unit;
  }
  return String(Number(value.toPrecision(3)));
}

export const whole = (value) => (value === null || value === undefined ? NONE : value.toLocaleString("en-US"));
export const loss = (value) => (value === null || value === undefined ? NONE : value.toFixed(4));
export const percent = (ratio) => (ratio === null || ratio === undefined ? NONE : `${(100 * ratio).toFixed(1)} %`);

/** Seconds -> 850 ms, 4.2 s, 3 min 05 s, 2 h 10 min. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = value, unit = 0;
  while (size >= 1000 && unit < units.length - 1) { size /= 1000; unit += 1; }
  return `${Number(size.toPrecision(3))} ${units[unit]}`;
}

/** 14:03:22 today, with the date before it on other days. */
export function clock(iso) {
  const at = new Date(iso);
  const time = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date().toDateString() ? time : `${at.toISOString().slice(0, 10)} ${time}`;
}

export function ago(iso) {
  if (!iso) return NONE;
  const seconds = (Date.now() - new Date(iso)) / 1000;
  if (seconds < 10) return "just now";
  return `${seconds < 60 ? `${Math.floor(seconds)} s` : duration(seconds).replace(/ \d\d s$/, "")} ago`;
}

export const layout = (view) => (view ? `${view.data} × ${view.pipeline} × ${view.tensor}` : NONE);
