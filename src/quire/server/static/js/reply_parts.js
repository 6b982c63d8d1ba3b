// What stands around an answer's text: the reasoning before it, folded, and the tool calls after it, a card each,
// which takes the call's result.

import { copy, fill, h, icon, iconButton, setText } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { callsOf } from "./thread.js";

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

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it is being written, or was cut off
  }
}

/** The tool calls of an answer, a card each, with their arguments while they stream, and then their results. */
export class ToolCalls {
  /** `actions` has what the user may do with a message. */
  constructor(actions) {
    this.actions = actions;
    this.root = h("div", { class: "tool-calls" });
    this.shown = "";
    this.editing = false; // results that were sent are being changed
  }

  update(message) {
    const { toolCalls, running } = message;
    const written = (toolCalls ?? []).filter(Boolean);
    const isOpen = !running && !message.error && callsOf(message).length > 0 && (this.editing || this.actions.isLast(message));
    const canEdit = !isOpen && !message.error && !this.actions.isBusy();
    const state = JSON.stringify([written, running, isOpen, canEdit, this.editing], (name, value) => (name === "draft" ? undefined : value));
    if (state === this.shown) return;
    this.shown = state;
    this.message = message;
    this.fields = [];
    fill(this.root, ...written.map((call, index) => this.card(call, index, isOpen, canEdit)), isOpen && this.buttons());
  }

  card(call, index, isOpen, canEdit) {
    const { name, arguments: text } = call;
    const { running, toolCalls } = this.message;
    const number = toolCalls.length > 1 ? `${index + 1}` : "";
    const label = `Call ${number && `${number} `}of ${name}`;
    return h(
      "section",
      { class: "tool-call", "aria-label": label },
      h(
        "div",
        { class: "tool-head" },
        icon("tool"),
        h("strong", {}, name),
        iconButton("copy", "Copy the arguments", (button) => copy(text, button)),
      ),
      h("pre", { tabindex: 0, "aria-label": "Arguments" }, h("code", {}, running ? text : pretty(text))),
      !running && this.result(call, isOpen, canEdit, label),
    );
  }

  /** What the call resulted in: told, asked for, or why there is none. */
  result(call, isOpen, canEdit, label) {
    if (!callsOf(this.message).includes(call))
      return h("p", { class: "tool-note" }, "Cut off: this is not a call, and the model will not see it.");
    if (isOpen) return this.field(call, label);
    const told = call.result
      ? h("pre", { tabindex: 0, "aria-label": "Result" }, call.result)
      : h("p", { class: "tool-note" }, typeof call.result === "string" ? "Empty" : "None given");
    const edit = canEdit && iconButton("edit", "Edit the results", () => this.edit());
    return h("div", { class: "tool-result" }, h("div", { class: "tool-label" }, "Result", edit), told);
  }

  field(call, label) {
    const area = h("textarea", {
      class: "field mono",
      rows: 2,
      value: call.draft ?? call.result ?? "",
      placeholder: "What the model receives; may be empty",
      "aria-label": `Result of ${label.replace(/^Call/, "call")}`,
      spellcheck: "false",
    });
    area.addEventListener("input", () => {
      call.draft = area.value;
    });
    area.addEventListener("change", () => this.actions.keepDraft());
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.editing) this.close();
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      this.send();
    });
    this.fields.push(area);
    return h("div", { class: "tool-result" }, h("div", { class: "tool-label", "aria-hidden": "true" }, "Result"), area);
  }

  buttons() {
    const button = (label, action, primary) =>
      h("button", { class: `button${primary ? " primary" : ""}`, type: "button", onclick: action }, label);
    const noun = this.fields.length > 1 ? "results" : "result";
    return h(
      "div",
      { class: "row tool-row" },
      this.editing && button("Cancel", () => this.close()),
      this.editing && button("Save", () => this.actions.saveResults(this.message, this.values())),
      h("span", { class: "keys" }, "Ctrl+Enter"),
      button(`Send the ${noun}`, () => this.send(), true),
    );
  }

  values() {
    return this.fields.map((field) => field.value);
  }

  send() {
    this.actions.sendResults(this.message, this.values());
  }

  /** Show fields for results that are there already. */
  edit() {
    this.editing = true;
    this.update(this.message);
    this.fields[0].focus();
  }

  close() {
    for (const call of callsOf(this.message)) delete call.draft;
    this.editing = false;
    this.update(this.message);
    this.root.querySelector(".tool-label button")?.focus();
  }
}
