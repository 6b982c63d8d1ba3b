// Mathematics in Markdown: $a$, \(a\), and by themselves $$a$$, \[a\]. Temml makes MathML of it, which browsers show
// without fonts of ours. It is read when the first formula comes; until then, and where it fails, the source is shown.

import { address } from "./api.js";

const MAX_LENGTH = 5000; // characters of a formula; longer ones stay source
const SIGNS = [
  ["$$", "$$", true],
  ["\\[", "\\]", true],
  ["\\(", "\\)", false],
  ["$", "$", false],
];

/** Where the formula that begins at `start` ends: [source, end, display]; null if none begins there. */
function formulaAt(text, start, limit) {
  for (const [open, close, display] of SIGNS) {
    if (!text.startsWith(open, start)) continue;
    const begin = start + open.length;
    let end = text.indexOf(close, begin);
    while (end > 0 && close[0] === "$" && text[end - 1] === "\\") end = text.indexOf(close, end + 1);
    if (end <= begin || end >= limit) return null;
    const source = text.slice(begin, end);
    // A dollar sign may be one: "$5 and $6" is no formula (the rule is Pandoc's).
    if (open === "$" && (/^\s|\s$|\n\n/.test(source) || /\d/.test(text[end + 1] ?? ""))) return null;
    return [source, end + close.length, display];
  }
  return null;
}

function inlineRule(state, silent) {
  if (!"$\\".includes(state.src[state.pos])) return false;
  const found = formulaAt(state.src, state.pos, state.posMax);
  if (!found) return false;
  if (!silent) Object.assign(state.push("math", "", 0), { content: found[0], meta: { display: found[2] } });
  state.pos = found[1];
  return true;
}

/** A formula that begins a line and stands alone; one that is not complete is shown as source while it is written. */
function blockRule(state, startLine, endLine, silent) {
  const begin = state.bMarks[startLine] + state.tShift[startLine];
  const open = state.src.slice(begin, begin + 2);
  if (open !== "$$" && open !== "\\[") return false;
  const close = open === "$$" ? "$$" : "\\]";
  const end = state.src.indexOf(close, begin + 2);
  let line = startLine;
  while (line < endLine && end >= 0 && state.eMarks[line] < end) line += 1;
  if (end >= 0 && (line >= endLine || state.src.slice(end + 2, state.eMarks[line]).trim())) return false;
  if (silent) return true;
  const content = state.src.slice(begin + 2, end < 0 ? state.eMarks[endLine - 1] : end);
  const token = state.push("math", "", 0);
  Object.assign(token, { block: true, content, meta: { display: true, open: end < 0 }, map: [startLine, line + 1] });
  state.line = end < 0 ? endLine : line + 1;
  return true;
}

let temml = null;
let loading = null;

/** Read Temml; a promise. */
export function loadMath() {
  loading ??= new Promise((resolve) => {
    const add = (tag, properties) => document.head.append(Object.assign(document.createElement(tag), properties));
    add("link", { rel: "stylesheet", href: address("/static/vendor/temml/Temml-Local.css").href });
    const done = () => {
      temml = window.temml ?? null;
      resolve();
    };
    add("script", { src: address("/static/vendor/temml/temml.min.js").href, onload: done, onerror: done });
  });
  return loading;
}

/** Teach a markdown-it parser formulas. A render's `env.wants` hears "math" if Temml is not there yet. */
export function withMath(parser) {
  parser.inline.ruler.before("escape", "math", inlineRule);
  parser.block.ruler.before("fence", "math", blockRule, { alt: ["paragraph", "blockquote", "list"] });
  parser.renderer.rules.math = (tokens, index, options, env) => {
    const { content, meta, block } = tokens[index];
    const html = meta.open || content.length > MAX_LENGTH ? null : rendered(content, meta.display, env);
    if (html) return block ? `<div class="formula">${html}</div>\n` : html;
    const source = `<code class="formula-source">${parser.utils.escapeHtml(content)}</code>`;
    return block ? `<div class="formula">${source}</div>\n` : source;
  };
}

function rendered(source, displayMode, env) {
  if (!temml) {
    env.wants?.add("math");
    return null;
  }
  try {
    return temml.renderToString(source.trim(), { displayMode, throwOnError: true, trust: false });
  } catch {
    return null; // not LaTeX, or not what Temml knows: the source says more than an error would
  }
}
