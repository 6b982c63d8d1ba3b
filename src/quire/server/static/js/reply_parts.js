// What stands around an answer's text: the reasoning before it, folded, and the tool calls after it, a card each.

import { copy, fill, h, icon, iconButton, setText } from "./dom.js";
import { renderMarkdown } from "./markdown.js";

export class Reasoning {
  constructor() {
    this.label = h("span", {});
    this.body = h("div", { class: "message-body" });
    this.root = h("details", { class: "reasoning", hidden: true }, h("summary", {}, this.label));
    this.root.addEventListener("toggle", () => this.draw());
    this.message = null;
    this.shown = null;
  }

  /** Show a message's reasoning; it is drawn only while it is open. */
  update(message) {
    this.message = message;
    this.root.hidden = !message.reasoning;
    if (message.reasoning) this.draw();
  }

  draw() {
    const { reasoning, running, content, stats } = this.message;
    const tokens = stats?.reasoning ? `, ${stats.reasoning} tokens` : "";
    setText(this.label, running && !content ? "Thinking ..." : `Reasoning${tokens}`);
    if (!this.root.open || this.shown === reasoning) return;
    this.shown = reasoning;
    this.root.append(this.body);
    renderMarkdown(this.body, reasoning);
  }
}

/** A tool call as a card; its arguments grow while they are written. */
function card({ name, arguments: text }, running) {
  const code = h("code", {}, running ? text : pretty(text));
  return h(
    "section",
    { class: "tool-call", "aria-label": `Call of ${name}` },
    h("div", { class: "tool-head" }, icon("tool"), h("strong", {}, name), iconButton("copy", "Copy the arguments", (button) => copy(text, button))),
    h("pre", { tabindex: 0 }, code),
  );
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // cut off
  }
}

export class ToolCalls {
  constructor() {
    this.root = h("div", { class: "tool-calls" });
    this.shown = "";
  }

  update({ toolCalls, running }) {
    const state = JSON.stringify([toolCalls ?? [], Boolean(running)]);
    if (state === this.shown) return;
    this.shown = state;
    fill(this.root, ...(toolCalls ?? []).filter(Boolean).map((call) => card(call, running)));
  }
}
