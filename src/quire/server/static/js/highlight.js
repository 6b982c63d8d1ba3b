// Colours in code. The library is read when the first block of code comes, and what was coloured is kept for a while:
// an answer is drawn again and again while it grows.

const MAX_LENGTH = 40_000; // characters of a block; longer ones stay plain
const KEPT = 80;

let library = null;
let loading = null;
const kept = new Map();

/** Read the library; a promise. */
export function loadHighlight() {
  loading ??= import("../vendor/highlight/highlight.min.js").then(
    (module) => {
      library = module.default;
    },
    () => {}, // code stays plain
  );
  return loading;
}

/** Code as HTML with spans of the classes hljs-*; "" if it stays plain. `env.wants` hears of a missing library. */
export function highlighted(code, language, env) {
  if (!language || code.length > MAX_LENGTH) return "";
  if (!library) {
    env.wants?.add("highlight");
    return "";
  }
  if (!library.getLanguage(language)) return "";
  const key = `${language}\n${code}`;
  if (!kept.has(key)) {
    kept.set(key, library.highlight(code, { language, ignoreIllegals: true }).value);
    if (kept.size > KEPT) kept.delete(kept.keys().next().value);
  }
  return kept.get(key);
}
