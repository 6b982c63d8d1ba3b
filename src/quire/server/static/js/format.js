// Numbers for people.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** 12,345 */
export function count(value) {
  return value === null || value === undefined ? "-" : WHOLE.format(value);
}

/** 950, 12.3k, 4.1M: at most four characters or so. */
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  for (const [unit, name] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    if (value >= unit * 10) return `${(value / unit).toFixed(value >= unit * 100 ? 0 : 1)}${name}`;
  }
  return WHOLE.format(value);
}

/** A rate: 3.2, 48, 1,204. */
export function rate(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  return value > 0 && value < 10 ? value.toFixed(1) : WHOLE.format(value);
}

/** A duration given in seconds: 340 us, 4.2 ms, 180 ms, 3.41 s, 2 min 5 s. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "-";
  if (seconds < 0.0009995) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 0.00995) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1e3)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(seconds < 9.995 ? 2 : 1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** 37 % of a whole. */
export function percent(part, whole) {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : "-";
}

/** A client's request id, short enough for a table. */
export function shortId(id, choice = 0) {
  const tail = id.replace(/^(chatcmpl|cmpl)-/, "").slice(0, 8);
  return choice ? `${tail}.${choice}` : tail;
}

/** The value below which `share` of the sorted values lie. */
export function quantile(sorted, share) {
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : null;
}
