// Requests that have ended, and for the chosen one where its time went.

import { fill, h, setText } from "../dom.js";
import { count, duration, rate, shortId } from "../format.js";
import { keyOf, SOURCES } from "./data.js";

const MAX_CHUNK_ROWS = 8;
const REST = 4000; // milliseconds that one request stays when the newest are followed

export class FinishedPanel {
  constructor() {
    this.chosen = null; // key of the request that is shown; null follows the newest
    this.wanted = null; // id from the page's address
    this.shown = "";
    this.followed = { key: null, until: 0 };
    this.body = h("tbody", {});
    const head = [
      ["Request"],
      ["Ended by"],
      ["Prompt", "tokens, and those found in the prefix cache"],
      ["Output"],
      ["First token"],
      ["Total"],
    ];
    this.table = h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ...head.map(([text, title]) => h("th", { title }, text)))),
      this.body,
    );
    this.empty = h("p", { class: "empty" }, "No request has ended yet.");
    this.note = h("span", { class: "card-note" });
    this.detail = h("div", { class: "waterfall" });
    this.root = h(
      "section",
      { class: "card", id: "finished" },
      h("header", {}, h("h2", {}, "Finished requests"), this.note),
      h("div", { class: "table-frame", tabindex: 0, role: "region", "aria-label": "Table" }, this.table, this.empty),
    );
    this.waterfall = h(
      "section",
      { class: "card", id: "waterfall" },
      h("header", {}, h("h2", {}, "Where the time went"), (this.title = h("span", { class: "card-note mono" }))),
      this.detail,
    );
  }

  /** Show a request by the id that its client sees. */
  choose(id) {
    this.wanted = id;
    this.shown = "";
    if (this.data) this.update(this.data);
  }

  update(data) {
    this.data = data;
    const all = [...data.finished.values()].reverse();
    if (this.wanted) {
      const found = all.find((one) => one.id === this.wanted);
      if (found) [this.chosen, this.wanted] = [keyOf(found), null];
    }
    const shown = all.slice(0, 64);
    const current = data.finished.get(this.chosen) || (this.wanted ? null : this.follow(data, all[0]));
    const state = `${shown.map((one) => `${keyOf(one)} ${one.detokenize_seconds}`).join()} ${current && keyOf(current)} ${this.wanted}`;
    if (state === this.shown) return;
    this.shown = state;
    this.table.hidden = !shown.length;
    this.empty.hidden = shown.length > 0;
    setText(this.note, shown.length ? "choose one to see its times" : "");
    fill(this.body, ...shown.map((one) => this.row(one, current)));
    this.draw(current);
  }

  /** The newest request, but no other one every moment. */
  follow(data, newest) {
    const shown = data.finished.get(this.followed.key);
    if (shown && performance.now() < this.followed.until) return shown;
    this.followed = { key: newest && keyOf(newest), until: performance.now() + REST };
    return newest;
  }

  row(one, current) {
    const key = keyOf(one);
    const choose = () => {
      this.chosen = this.chosen === key ? null : key;
      this.wanted = null;
      this.update(this.data);
    };
    const cells = [
      count(one.prompt) + (one.cached ? ` (${count(one.cached)})` : ""),
      count(one.output),
      duration(one.ttft_seconds),
      duration(one.total_seconds),
    ];
    const button = h("button", { class: "link mono", type: "button", title: one.id }, shortId(one.id, one.choice));
    return h(
      "tr",
      { class: `choosable${current && keyOf(current) === key ? " chosen" : ""}`, onclick: choose },
      h("td", {}, button),
      h("td", {}, h("span", { class: "badge", "data-state": one.reason }, one.reason)),
      ...cells.map((text) => h("td", { class: "number" }, text)),
    );
  }

  draw(one) {
    setText(this.title, one ? one.id : "");
    if (!one) {
      const text = this.wanted
        ? `${this.wanted} is still running, or ended too long ago: the engine remembers its last 64 requests.`
        : "The times of a finished request appear here.";
      fill(this.detail, h("p", { class: "empty" }, text));
      return;
    }
    const rows = phases(one);
    const end = Math.max(one.total_seconds, ...rows.map((row) => row.begin + row.seconds), 1e-6);
    const origins = one.origins ? [h("p", { class: "fall-note" }, one.origins)] : [];
    fill(this.detail, ...rows.map((row) => bar(row, end)), ...origins, summary(one));
  }
}

/** What happened to a request, in order: {name, tone, begin, seconds, help}; times from its arrival. */
function phases(one) {
  const rows = [
    {
      name: "Tokenize",
      tone: "text",
      begin: 0,
      seconds: one.tokenize_seconds,
      help: "Rendering the chat template and tokenizing, before the engine saw it",
    },
  ];
  const waited = Math.max(0, one.queue_seconds - one.tokenize_seconds);
  const match = one.match_seconds ?? 0;
  rows.push({
    name: "Queue",
    tone: "queue",
    begin: one.tokenize_seconds,
    seconds: waited,
    help: "Waiting for its first step",
  });
  rows.push(...(one.fetches || []).map((fetch) => fetchRow(fetch, one)));
  if (one.match_seconds !== null)
    rows.push({
      name: "Match prefix",
      tone: "cached",
      begin: one.queue_seconds,
      seconds: match,
      help: `The scheduling that admitted it; ${count(one.cached)} tokens were found in the cache`,
    });
  rows.push(...chunkRows(one));
  const first = one.ttft_seconds ?? one.total_seconds;
  if (one.output > 1)
    rows.push({
      name: "Decode",
      tone: "decode",
      begin: first,
      seconds: Math.max(0, one.total_seconds - first),
      help: `${duration(one.decode_seconds)} of it in steps that held this request`,
    });
  if (one.detokenize_seconds !== null)
    rows.push({
      name: "Detokenize",
      tone: "text",
      begin: first,
      seconds: one.detokenize_seconds,
      help: "Turning tokens into text, in sum; it runs beside the decoding",
    });
  return rows;
}

function fetchRow({ source, tokens, begin, seconds, engine }, one) {
  const took = seconds ?? Math.max(0, one.queue_seconds - (begin - one.arrived));
  return {
    name: `From ${SOURCES[source] ?? source}`,
    tone: "cached",
    begin: begin - one.arrived,
    seconds: took,
    help:
      seconds === null
        ? "Not waited for to the end"
        : `${count(tokens)} tokens of the prompt were fetched${engine ? ` from ${engine}` : ""}`,
  };
}

function chunkRows(one) {
  const chunks = one.chunks.map(([begin, seconds, tokens]) => ({ begin: begin - one.arrived, seconds, tokens }));
  if (chunks.length <= MAX_CHUNK_ROWS) {
    return chunks.map(({ begin, seconds, tokens }, i) => ({
      name: chunks.length > 1 ? `Prefill ${i + 1}` : "Prefill",
      tone: "prefill",
      begin,
      seconds,
      help: `${count(tokens)} tokens of the prompt`,
    }));
  }
  const pieces = chunks.map(({ begin, seconds }) => [begin, seconds]);
  const [first, last] = [chunks[0], chunks.at(-1)];
  const tokens = chunks.reduce((sum, chunk) => sum + chunk.tokens, 0);
  return [
    {
      name: `Prefill, ${chunks.length} chunks`,
      tone: "prefill",
      begin: first.begin,
      seconds: last.begin + last.seconds - first.begin,
      pieces,
      help: `${count(tokens)} tokens of the prompt`,
    },
  ];
}

function bar({ name, tone, begin, seconds, pieces, help }, end) {
  const place = (from, length) =>
    h("i", {
      style: `left:${(100 * Math.max(0, from)) / end}%;width:${(100 * length) / end}%;background:var(--c-${tone})`,
    });
  const bars = (pieces || [[begin, seconds]]).map(([from, length]) => place(from, length));
  return h(
    "div",
    { class: "fall", title: help },
    h("span", { class: "fall-name" }, name),
    h("div", { class: "fall-track" }, ...bars),
    h("span", { class: "fall-time" }, duration(seconds)),
  );
}

function summary(one) {
  const speed =
    one.output > 1 && one.ttft_seconds !== null ? (one.output - 1) / (one.total_seconds - one.ttft_seconds) : null;
  const facts = [
    ["first token", duration(one.ttft_seconds)],
    ["total", duration(one.total_seconds)],
    ["prompt", `${count(one.prompt)}, ${count(one.cached)} cached`],
    ["output", count(one.output)],
    ["tok/s", rate(speed)],
    ["preempted", one.preemptions ? `${one.preemptions}x` : "no"],
  ];
  if (one.drafted) facts.push(["drafts accepted", `${count(one.accepted)} of ${count(one.drafted)}`]);
  return h(
    "dl",
    { class: "facts" },
    ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}
