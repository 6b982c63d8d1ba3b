// Messages: the user's turns, the model's answers with their numbers, errors that say what to do.

import { copy, fill, h, icon, iconButton, menuButton } from "./dom.js";
import { count, duration, rate } from "./format.js";
import { renderMarkdown } from "./markdown.js";
import { Reasoning, ToolCalls } from "./reply_parts.js";
import { callsOf } from "./thread.js";

/** One message on the page. `actions` has what the user may do with it, `names` whom it is of. */
export class MessageElement {
  constructor(message, actions, name, prompt = null) {
    this.message = message;
    this.actions = actions;
    this.prompt = prompt; // a completion's message, which is shown with it
    this.body = h("div", { class: "message-body" });
    this.foot = h("div", { class: "message-foot" });
    const title = h("h2", { class: "for-readers" }, name);
    const [reasoning, calls] = message.role === "assistant" ? [new Reasoning(), new ToolCalls(actions)] : [];
    this.parts = [reasoning, calls].filter(Boolean);
    const content = [title, reasoning?.root, this.body, calls?.root, this.foot];
    this.root = h("article", { class: `message ${message.role}`, "data-role": message.role }, ...content);
    this.shown = null;
    this.pending = 0;
    this.update();
  }

  /** Show what the message holds now. While it grows, drawing takes at most a fifth of the time. */
  update() {
    if (!this.message.running) {
      clearTimeout(this.pending);
      this.pending = 0;
      this.draw();
    } else if (!this.pending) {
      const begin = performance.now();
      this.draw();
      const cost = performance.now() - begin;
      this.pending = setTimeout(
        () => {
          this.pending = 0;
          if (this.message.running && this.root.isConnected) this.draw();
        },
        Math.max(40, 4 * cost),
      );
    }
  }

  draw() {
    const { message } = this;
    if (this.shown !== message.content) {
      this.shown = message.content;
      if (message.role === "user") fill(this.body, ...(message.files ?? []).map(attached), message.content);
      else if (message.mode === "completion") fill(this.body, this.document());
      else renderMarkdown(this.body, message.content);
    }
    for (const part of this.parts) part.update(message);
    this.root.classList.toggle("running", Boolean(message.running));
    const begun = message.content || message.reasoning || message.toolCalls?.length;
    this.root.classList.toggle("waiting", Boolean(message.running) && !begun);
    this.root.classList.toggle("left-out", this.actions.isLeftOut(message));
    fill(this.foot, ...(message.role === "user" ? this.userFoot() : this.answerFoot()));
    this.actions.drawn();
  }

  /** Prompt and continuation as one text. */
  document() {
    return h(
      "pre",
      { class: "document" },
      h("span", { class: "prompt" }, this.prompt),
      h("span", { class: "continuation" }, this.message.content),
    );
  }

  userFoot() {
    const { message, actions } = this;
    if (actions.isBusy()) return [this.versions()];
    return [
      this.versions(),
      iconButton("copy", "Copy", (button) => copy(message.content, button)),
      iconButton("edit", "Edit", () => this.edit()),
      this.menu(),
    ];
  }

  answerFoot() {
    const { message, actions } = this;
    if (message.running) return [this.statistics()];
    const completion = message.mode === "completion";
    const isLast = actions.isLast(message);
    const unfinished = !["stop", "tool_calls"].includes(message.finish);
    return [
      message.error && this.errorCard(isLast),
      this.versions(),
      message.content && iconButton("copy", "Copy", (button) => copy(message.content, button)),
      !actions.isBusy() && !message.error && iconButton("retry", "Another answer", () => actions.retry(message)),
      isLast && unfinished && !message.error && message.content && !callsOf(message).length && iconButton("forward", "Go on", () => actions.goOn(message)),
      !actions.isBusy() &&
        (completion || message.content) &&
        iconButton("edit", completion ? "Edit the prompt" : "Edit the answer", () => this.edit()),
      !actions.isBusy() && this.menu(),
      this.statistics(),
    ];
  }

  menu() {
    const { message, actions } = this;
    return menuButton("More", () => [
      ["branch", "New conversation from here", () => actions.branch(message)],
      message.id && message.content && ["trace", "Where the time went", () => actions.trace(message)],
      ["trash", "Delete this turn", () => actions.removeTurn(message)],
    ]);
  }

  /** Which of several this is, and the way to the others. */
  versions() {
    const { message, actions } = this;
    const all = actions.versions(message);
    if (all.length < 2) return null;
    const index = all.indexOf(message);
    const other = (step, name, label) => {
      const button = iconButton(name, label, () => actions.show(all[index + step]));
      button.disabled = actions.isBusy() || !all[index + step];
      return button;
    };
    return h(
      "span",
      { class: "versions", role: "group", "aria-label": "Versions" },
      other(-1, "left", "Previous version"),
      h("span", {}, `${index + 1} / ${all.length}`),
      other(1, "right", "Next version"),
    );
  }

  statistics() {
    const { stats, finish, running, error, clamped, loosened } = this.message;
    const parts = [];
    if (stats) {
      const { prompt, cached, output, ttft, seconds } = stats;
      if (prompt !== null)
        parts.push([
          `${count(prompt)} prompt${cached ? `, ${count(cached)} cached` : ""}`,
          "Prompt tokens, and how many of them were cached",
        ]);
      parts.push([`${count(output)} ${output === 1 ? "token" : "tokens"}`, "Output tokens"]);
      if (seconds > 0 && output > 1)
        parts.push([`${rate((output - 1) / seconds)} tok/s`, "After the first token, as seen by this page"]);
      if (ttft !== null) parts.push([`${duration(ttft)} to first`, "Time to the first token, as seen by this page"]);
    }
    if (!running && !error) {
      if (finish === "length")
        parts.push([
          "reached its length limit",
          clamped ? "The context is full" : "max_tokens, or the end of the context",
        ]);
      else if (finish === "stopped" || finish === "abort") parts.push(["stopped", "Stopped early"]);
      else if (finish === "edited") parts.push(["edited", "Edited"]);
      else if (!finish) parts.push(["interrupted", "The page was closed while this was written"]);
      if (loosened) parts.push(["arguments were any JSON", `Not all of a tool's schema can be enforced. ${loosened}`]);
    }
    return h("span", { class: "statistics" }, ...parts.map(([text, title]) => h("span", { title }, text)));
  }

  errorCard(isLast) {
    const { actions, message } = this;
    const { error } = message;
    const noTemplate =
      error.status === 400 && (error.code === "chat_template_error" || /chat template/i.test(error.message));
    const [field, called] = fieldOf(error);
    const act = (text, action, primary) =>
      h("button", { class: `button${primary ? " primary" : ""}`, type: "button", onclick: action }, text);
    const buttons = [
      noTemplate && message.mode === "chat" && act("Continue as plain text", () => actions.complete(message), true),
      error.code === "context_length_exceeded" &&
        actions.canLeaveOut() &&
        act("Drop the oldest turns and try again", () => actions.leaveOutOldest(message), true),
      field && act(`Change the ${called}`, () => actions.showSetting(field)),
      message.content && !callsOf(message).length && act("Continue from here", () => actions.goOn(message), true),
      act([icon("retry"), "Try again"], () => actions.retry(message)),
      (message.content || callsOf(message).length > 0) && act("Keep the text so far", () => actions.keep(message)),
    ];
    return h(
      "div",
      { class: "error-card", role: "alert" },
      h("strong", {}, titleOf(error, noTemplate)),
      h("p", {}, error.message),
      isLast && !actions.isBusy() && h("div", { class: "row" }, ...buttons.filter(Boolean)),
      h("small", {}, "Not part of the conversation: the model will not see this turn."),
      error.label && h("small", { class: "mono" }, `request ${error.label}`),
    );
  }

  /** Change the text: a question can be sent again, as another version; all texts can be changed as they stand. */
  edit() {
    const isPrompt = this.message.role === "user" || this.message.mode === "completion";
    const text = this.message.mode === "completion" ? this.prompt : this.message.content;
    const area = h("textarea", {
      class: "field edit-area",
      value: text,
      rows: Math.min(14, text.split("\n").length + 1),
      "aria-label": "Edit",
    });
    const cancel = () => {
      this.shown = null;
      this.draw();
      this.foot.querySelector("[title^=Edit]")?.focus();
    };
    const done = (action) => () => area.value.trim() && action(this.message, area.value);
    const send = done(this.actions.sendEdited);
    const save = done(this.actions.saveEdited);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) (isPrompt ? send : save)();
    });
    const button = (label, action, primary) =>
      h("button", { class: `button${primary ? " primary" : ""}`, type: "button", onclick: action }, label);
    fill(
      this.body,
      area,
      h(
        "div",
        { class: "row" },
        button("Cancel", cancel),
        this.message.mode !== "completion" && button("Save", save, !isPrompt),
        isPrompt && button("Send", send, true),
      ),
    );
    fill(this.foot);
    area.focus();
  }
}

function attached({ name, text }) {
  const lines = text.split("\n").length;
  const about = h("small", {}, ` ${count(lines)} ${lines === 1 ? "line" : "lines"}`);
  return h("details", { class: "attached" }, h("summary", {}, name, about), h("pre", { tabindex: 0 }, text));
}

const FIELDS = [ // of the panel, what it is called in a sentence, and the fields of a request that it gives
  ["tools", "tools", /^tool/],
  ["schema", "schema", /^(response_format|structured_outputs)/],
  ["reasoning_effort", "reasoning", /^(reasoning_effort|chat_template_kwargs)/],
  ["thinking_token_budget", "reasoning", /^thinking_token_budget/],
];

/** The field of the panel that an error is about: [its name, what it is called]; [] if it is about none. */
export function fieldOf({ param }) {
  return FIELDS.find(([, , fields]) => fields.test(param ?? "")) ?? [];
}

function titleOf(error, noTemplate) {
  if (error.status === null) return "Nothing was sent";
  if (noTemplate) return "This model has no usable chat template";
  if (error.code === "context_length_exceeded")
    return "The conversation no longer fits. Shorten it, or start a new one";
  if (error.status === 0) return "Connection lost";
  if (error.status === 401) return "The key was not accepted";
  if (error.status === 429)
    return `The server is busy${error.retryAfter ? `; try again in ${error.retryAfter} s` : ""}`;
  if (error.status === 503) return "The server cannot take requests now";
  return error.status < 500 ? "The request was refused" : "The server failed on this request";
}
