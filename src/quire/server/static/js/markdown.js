// Answers are Markdown. Raw HTML in them stays text, and nothing in them can load anything.

import MarkdownIt from "/static/vendor/markdown-it/markdown-it.esm.min.js";
import { copy, h, icon } from "./dom.js";

const parser = new MarkdownIt("default", { html: false, linkify: false, typographer: false, breaks: true });
parser.disable("image"); // an image's address could carry away what was said

const plainOpen =
  parser.renderer.rules.link_open || ((tokens, i, options, env, self) => self.renderToken(tokens, i, options));
parser.renderer.rules.link_open = (tokens, i, options, env, self) => {
  tokens[i].attrSet("target", "_blank");
  tokens[i].attrSet("rel", "noopener noreferrer nofollow");
  return plainOpen(tokens, i, options, env, self);
};

/** Show `text` in `element`. */
export function renderMarkdown(element, text) {
  element.innerHTML = parser.render(text); // safe: `html: false` escapes all markup of the text
  for (const block of element.querySelectorAll("pre")) {
    const button = h(
      "button",
      { class: "icon-button code-copy", type: "button", title: "Copy", "aria-label": "Copy code" },
      icon("copy"),
    );
    button.addEventListener("click", () => copy(block.querySelector("code").textContent, button));
    block.append(button);
  }
  for (const table of element.querySelectorAll("table")) {
    const frame = h("div", { class: "wide" });
    table.replaceWith(frame);
    frame.append(table);
  }
}
