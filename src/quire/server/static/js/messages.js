// How a message looks: its text, what it cost, and what can be done with it.

import { copy, fill, h, icon } from "./dom.js";
import { count, duration, rate } from "./format.js";
import { renderMarkdown } from "./markdown.js";

/** One message on the page. `actions` has what the user may do: edit, retry, go on, switch to completion. */
export class MessageElement {
  constructor(message, actions, prompt = null) {
    this.message = message;
    this.actions = actions;
    this.prompt = prompt;
    this.body = h("div", { class: "message-body" });
    this.foot = h("div", { class: "message-foot" });
    this.root = h("article", { class: `message ${message.role}`, "data-role": message.role }, this.body, this.foot);
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
      if (message.role === "user") this.body.textContent = message.content;
      else if (message.mode === "completion") fill(this.body, this.document());
      else renderMarkdown(this.body, message.content);
    }
    this.root.classList.toggle("running", Boolean(message.running));
    this.root.classList.toggle("waiting", Boolean(message.running) && !message.content);
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
    return [
      this.button("copy", "Copy", (button) => copy(this.message.content, button)),
      this.actions.isLast(this.message) && this.button("edit", "Edit and send again", () => this.edit()),
    ];
  }

  answerFoot() {
    const { message, actions } = this;
    if (message.running) return [this.statistics()];
    const last = actions.isLast(message);
    const unfinished =
      message.finish === "length" || message.finish === "stopped" || message.finish === "abort" || !message.finish;
    return [
      message.error && this.errorCard(),
      message.content && this.button("copy", "Copy", (button) => copy(message.content, button)),
      last && message.mode === "completion" && this.button("edit", "Edit the prompt", () => this.edit()),
      last && !message.error && this.button("retry", "Another answer", () => actions.retry(message)),
      last &&
        !message.error &&
        message.content &&
        unfinished &&
        this.button("forward", "Go on", () => actions.goOn(message)),
      message.id &&
        message.content &&
        h(
          "a",
          {
            class: "icon-button",
            href: `#live/${encodeURIComponent(message.id)}`,
            title: "Where the time went",
            "aria-label": "Where the time went",
          },
          icon("trace"),
        ),
      this.statistics(),
    ];
  }

  button(name, label, action) {
    const button = h("button", { class: "icon-button", type: "button", title: label, "aria-label": label }, icon(name));
    button.addEventListener("click", () => action(button));
    return button;
  }

  statistics() {
    const { stats, finish, running, error, clamped } = this.message;
    const parts = [];
    if (stats) {
      const { prompt, cached, output, ttft, seconds } = stats;
      if (prompt !== null)
        parts.push([
          `${count(prompt)} prompt${cached ? `, ${count(cached)} cached` : ""}`,
          "Tokens of the prompt, and those of them that were not computed anew",
        ]);
      parts.push([`${count(output)} ${output === 1 ? "token" : "tokens"}`, "Tokens of the answer"]);
      if (seconds > 0 && output > 1)
        parts.push([`${rate((output - 1) / seconds)} tok/s`, "After the first token, as seen by this page"]);
      if (ttft !== null) parts.push([`${duration(ttft)} to first`, "Time to the first token, as seen by this page"]);
    }
    if (!running && !error) {
      if (finish === "length")
        parts.push([
          "reached its length limit",
          clamped ? "The context has no more room" : "max_tokens, or the context's end",
        ]);
      else if (finish === "stopped" || finish === "abort") parts.push(["stopped", "Stopped before its end"]);
      else if (!finish) parts.push(["interrupted", "The page was closed while this was written"]);
    }
    return h("span", { class: "statistics" }, ...parts.map(([text, title]) => h("span", { title }, text)));
  }

  errorCard() {
    const { error } = this.message;
    const { actions, message } = this;
    const noTemplate =
      error.status === 400 && (error.code === "chat_template_error" || /chat template/i.test(error.message));
    const buttons = [
      h(
        "button",
        { class: "button", type: "button", onclick: () => actions.retry(message) },
        icon("retry"),
        "Try again",
      ),
    ];
    if (noTemplate && message.mode === "chat")
      buttons.unshift(
        h(
          "button",
          { class: "button primary", type: "button", onclick: () => actions.complete(message) },
          "Continue as plain text",
        ),
      );
    return h(
      "div",
      { class: "error-card", role: "alert" },
      h("strong", {}, titleOf(error, noTemplate)),
      h("p", {}, error.message),
      h("div", { class: "row" }, ...buttons),
      error.label && h("small", {}, `request ${error.label}`),
    );
  }

  edit() {
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
    };
    const submit = () => area.value.trim() && this.actions.edited(this.message, area.value);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit();
    });
    fill(
      this.body,
      area,
      h(
        "div",
        { class: "row" },
        h("button", { class: "button", type: "button", onclick: cancel }, "Cancel"),
        h("button", { class: "button primary", type: "button", onclick: submit }, "Send"),
      ),
    );
    fill(this.foot);
    area.focus();
  }
}

function titleOf(error, noTemplate) {
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
