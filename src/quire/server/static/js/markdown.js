// Answers are Markdown. Raw HTML in them stays text, and nothing in them can load anything.

import MarkdownIt from "../vendor/markdown-it/markdown-it.esm.min.js";
import { copy, h, iconButton } from "./dom.js";
import { highlighted, loadHighlight } from "./highlight.js";
import { loadMath, withMath } from "./math.js";

const HIGHEST_HEADING = 3; // those above are the page's own

const parser = new MarkdownIt("default", { html: false, linkify: false, typographer: false, breaks: true });
parser.disable("image"); // an image's address could carry away what was said
withMath(parser);

const { rules } = parser.renderer;
const plain = (tokens, index, options, env, self) => self.renderToken(tokens, index, options);
const plainLink = rules.link_open || plain;
rules.link_open = (tokens, index, ...rest) => {
  tokens[index].attrSet("target", "_blank");
  tokens[index].attrSet("rel", "noopener noreferrer nofollow");
  return plainLink(tokens, index, ...rest);
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
