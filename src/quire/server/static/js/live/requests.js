// The requests that run and wait, each with how far it has come.

import { h, setText } from "../dom.js";
import { count, duration, shortId } from "../format.js";
import { keyOf, SOURCES } from "./data.js";

const MAX_ROWS = 40;

export class RequestsPanel {
  constructor() {
    this.rows = new Map();
    this.body = h("tbody", {});
    this.note = h("span", { class: "card-note" });
    this.empty = h("p", { class: "empty" }, "No request is open. Send one from the chat, or from any OpenAI client.");
    const head = [
      ["Request"],
      ["State"],
      ["Progress"],
      ["Prompt", "tokens, and those found in the prefix cache"],
      ["Output", "tokens so far, of at most"],
      ["Blocks"],
      ["Age"],
    ];
    this.table = h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ...head.map(([text, title]) => h("th", { title }, text)))),
      this.body,
    );
    this.more = h("p", { class: "more", hidden: true });
    this.root = h(
      "section",
      { class: "card", id: "requests" },
      h("header", {}, h("h2", {}, "Open requests"), this.note),
      h("div", { class: "table-frame", tabindex: 0, role: "region", "aria-label": "Table" }, this.table, this.empty, this.more),
      h(
        "div",
        { class: "legend" },
        ...[
          ["cached", "prompt, cached"],
          ["prefill", "prompt, computed"],
          ["decode", "output"],
        ].map(([name, text]) =>
          h("span", { class: "legend-item" }, h("i", { style: `background:var(--c-${name})` }), text),
        ),
      ),
    );
  }

  update(data) {
    const { requests, stats } = data.last;
    setText(this.note, `${stats.running} running, ${stats.waiting} waiting`);
    const shown = requests.slice(0, MAX_ROWS);
    const keys = new Set(shown.map(keyOf));
    for (const [key, row] of this.rows) {
      if (keys.has(key)) continue;
      row.root.remove();
      this.rows.delete(key);
    }
    shown.forEach((request, index) => {
      const key = keyOf(request);
      if (!this.rows.has(key)) this.rows.set(key, new Row());
      const row = this.rows.get(key);
      row.update(request);
      if (this.body.children[index] !== row.root) this.body.insertBefore(row.root, this.body.children[index] || null);
    });
    this.table.hidden = !shown.length;
    this.empty.hidden = shown.length > 0;
    const total = Math.max(requests.length, stats.running + stats.waiting);
    this.more.hidden = total <= shown.length;
    setText(this.more, `and ${count(total - shown.length)} more`);
  }
}

class Row {
  constructor() {
    this.cells = ["id mono", "state", "progress-cell", "number", "number", "number", "number"].map((name) =>
      h("td", { class: name }),
    );
    this.parts = ["cached", "prefill", "decode"].map((name) => h("i", { class: name }));
    this.bar = h("div", { class: "bar-track" }, ...this.parts);
    this.badge = h("span", { class: "badge" });
    this.cells[1].append(this.badge);
    this.cells[2].append(this.bar);
    this.root = h("tr", {}, ...this.cells);
  }

  update(request) {
    const { cached, computed, prompt, output, max_tokens: limit } = request;
    const whole = prompt + limit;
    const known = Math.min(cached, computed);
    const parts = [known, Math.max(0, Math.min(computed, prompt) - known), output];
    parts.forEach((part, index) => {
      this.parts[index].style.width = `${(100 * part) / whole}%`;
    });
    this.bar.title = `${count(known)} cached, ${count(parts[1])} of the prompt computed, ${count(output)} of at most ${count(limit)} output tokens`;
    if (request.origins) this.bar.title = `${request.origins}; ${count(output)} of at most ${count(limit)} output tokens`;
    const fetch = request.status === "awaiting" && (request.fetches || []).at(-1);
    if (fetch) this.bar.title = `waits for ${count(fetch.tokens)} tokens from ${SOURCES[fetch.source] ?? fetch.source}`;
    setText(this.badge, request.status);
    this.badge.dataset.state = request.status;
    this.cells[0].title = `${request.id}, choice ${request.choice}, priority ${request.priority}`;
    setText(this.cells[0], shortId(request.id, request.choice));
    setText(this.cells[3], cached ? `${count(prompt)} (${count(cached)})` : count(prompt));
    setText(this.cells[4], `${count(output)} / ${count(limit)}`);
    if (request.drafted)
      this.cells[4].title = `${count(request.accepted)} of ${count(request.drafted)} drafts accepted`;
    setText(this.cells[5], count(request.blocks));
    setText(this.cells[6], duration(request.age) + (request.preemptions ? `, preempted ${request.preemptions}x` : ""));
  }
}
