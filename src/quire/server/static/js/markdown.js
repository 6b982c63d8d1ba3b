// Answers are Markdown. Raw HTML in them stays text, and nothing in them can load anything.

import MarkdownIt from "../vendor/markdown-it/markdown-it.esm.min.js";
import { copy, h, iconButton } from "./dom.js";
import { highlighted, loadHighlight } from "./highlight.js";
import { loadMath, withMath } from "./math.js";

const HIGHEST_HEADING = 3; // those above are the page's own
const NUMBER = /^[^\p{L}]*\d[^\p{L}]*(\p{L}{1,3}\.?)?$/u; // with signs and a short unit: -1,234.50 €, 2024-01-01, 12 ms

const parser = new MarkdownIt("default", { html: false, linkify: false, typographer: false, breaks: true });
withMath(parser);
parser.core.ruler.after("inline", "tasks", ({ tokens, Token }) => {
  tokens.forEach((token, index) => {
    const done = /^\[([ xX])\] /.exec(token.content)?.[1];
    const item = tokens[index - 2];
    if (token.type !== "inline" || item?.type !== "list_item_open" || !done || token.children[0].type !== "text") return;
    token.children[0].content = token.children[0].content.slice(4);
    token.children.unshift(Object.assign(new Token("task", "input", 0), { hidden: true, info: done === " " ? "" : "done" }));
    item.attrJoin("class", "task");
  });
});

const { rules } = parser.renderer;
const plain = (tokens, index, options, env, self) => self.renderToken(tokens, index, options);
const plainLink = rules.link_open || plain;
rules.link_open = (tokens, index, ...rest) => {
  tokens[index].attrSet("target", "_blank");
  tokens[index].attrSet("rel", "noopener noreferrer nofollow");
  return plainLink(tokens, index, ...rest);
};
rules.task = (tokens, index) => {
  const { info } = tokens[index];
  return `<input type="checkbox" disabled${info && " checked"} aria-label="${info ? "done" : "to do"}">`;
};
/** An image's address could carry away what was said, so only one that is there already is shown; others are links. */
rules.image = (tokens, index, options, env, self) => {
  const source = parser.utils.escapeHtml(tokens[index].attrGet("src"));
  const text = parser.utils.escapeHtml(self.renderInlineAsText(tokens[index].children, options, env));
  if (source.startsWith("data:image/")) return `<img src="${source}" alt="${text}">`;
  const name = `${text || "image"} <small>(image, not loaded)</small>`;
  const before = tokens.slice(0, index).map(({ type }) => type);
  if (before.lastIndexOf("link_open") > before.lastIndexOf("link_close")) return name; // in a link
  return `<a href="${source}" target="_blank" rel="noopener noreferrer nofollow">${name}</a>`;
};
rules.heading_open = rules.heading_close = (tokens, index, ...rest) => {
  const token = tokens[index];
  if (!token.meta) {
    token.tag = `h${Math.min(6, Number(token.tag[1]) + HIGHEST_HEADING - 1)}`;
    token.meta = true;
  }
  return plain(tokens, index, ...rest);
};
rules.fence = rules.code_block = (tokens, index, options, env) => {
  const { content, info } = tokens[index];
  const language = info.trim().split(/\s+/)[0].toLowerCase();
  const html = highlighted(content, language, env) || parser.utils.escapeHtml(content);
  return `<pre data-language="${parser.utils.escapeHtml(language)}"><code>${html}</code></pre>\n`;
};

const LIBRARIES = { math: loadMath, highlight: loadHighlight };
const texts = new WeakMap(); // what each element shows, for when a library comes

/** Show `text` in `element`. */
export function renderMarkdown(element, text) {
  const wants = new Set();
  texts.set(element, text);
  element.innerHTML = parser.render(text, { wants }); // safe: `html: false` escapes all markup of the text
  for (const block of element.querySelectorAll("pre")) frame(block);
  for (const table of element.querySelectorAll("table")) {
    const wide = h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(wide);
    wide.append(table);
    for (const cell of table.querySelectorAll("td, th")) cell.classList.toggle("number", NUMBER.test(cell.textContent));
  }
  if (wants.size)
    Promise.all([...wants].map((name) => LIBRARIES[name]())).then(
      () => texts.get(element) === text && renderMarkdown(element, text),
    );
}

/** Above a block of code stand its language and a button that copies it. */
function frame(block) {
  const code = block.querySelector("code");
  const button = iconButton("copy", "Copy code", () => copy(code.textContent, button), "code-copy");
  const box = h("div", { class: "code-block" }, h("div", { class: "code-head" }, h("span", {}, block.dataset.language), button));
  block.replaceWith(box);
  block.tabIndex = 0; // it may be wider than the page, and the keyboard must reach its end
  box.append(block);
}
