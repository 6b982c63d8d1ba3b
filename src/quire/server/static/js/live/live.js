// The live view: asks the engine for its picture a few times a second while somebody looks, and shows it.

import { send, ServerError } from "../api.js";
import { fill, h, icon, setText, tooltip } from "../dom.js";
import { count, duration, percent, rate } from "../format.js";
import { CurvesPanel } from "./curves.js";
import { LiveData } from "./data.js";
import { PoolPanel } from "./pool.js";
import { RequestsPanel } from "./requests.js";
import { TimelinePanel } from "./timeline.js";
import { TreePanel } from "./tree.js";
import { FinishedPanel } from "./waterfall.js";

const PACE = 400; // milliseconds between two documents; the engine makes a new picture of its pool as often
const FAST = 250; // when it runs so many steps that some would be forgotten in between
const RETRY = 2000;
const KEPT_BY_ENGINE = 256;

const TILES = [
  ["running", "Running", "Requests in the batch"],
  ["waiting", "Waiting", "Requests in the queue"],
  ["output", "Output tok/s", "Tokens generated a second, over the last moments"],
  ["prefill", "Prompt tok/s", "Prompt tokens computed a second, over the last moments"],
  ["ttft", "First token", "Median time to the first token of the last 32 requests"],
  ["hits", "Cache hits", "Share of all prompt tokens that were found in the prefix cache"],
  ["kv", "KV in use", "Share of the blocks that requests hold now"],
  ["drafts", "Tok/verification", "Speculation: accepted drafts and one more token, each time that drafts were verified"],
  ["experts", "Busiest rank", "Expert parallelism: what the busiest rank has to do lately, over the mean of all"],
];
const AT_TIMES = ["drafts", "experts"]; // of engines that have them

export class LiveView {
  constructor(root, server) {
    this.root = root;
    this.server = server;
    this.data = new LiveData();
    this.engine = null; // the replica that was chosen, where there are several; else one that is ready
    this.visible = false;
    this.paused = false;
    this.timer = null;
    this.request = null;
    this.panels = null;
    document.addEventListener("visibilitychange", () => this.resume());
    server.onChange(() => server.ready && this.resume());
  }

  show(detail) {
    this.visible = true;
    if (!this.panels) this.build();
    if (detail) {
      this.finished.choose(detail);
      this.finished.waterfall.scrollIntoView({ block: "center" });
    }
    this.resume();
  }

  hide() {
    this.visible = false;
    tooltip(null);
    this.stop();
  }

  // -- building -------------------------------------------------------------------------------------------

  build() {
    this.timeline = new TimelinePanel();
    this.finished = new FinishedPanel();
    const [pool, requests, tree, curves] = [new PoolPanel(), new RequestsPanel(), new TreePanel(), new CurvesPanel()];
    this.panels = [this.timeline, requests, pool, tree, curves, this.finished];
    this.tiles = new Map();
    const tiles = TILES.map(([name, label, title]) => {
      const [value, small] = [h("strong", {}, "-"), h("small", {})];
      this.tiles.set(name, { value, small });
      const hidden = AT_TIMES.includes(name);
      return h("div", { class: "tile", title, id: `tile-${name}`, hidden }, h("span", {}, label), value, small);
    });
    this.notice = h("div", { class: "notice", hidden: true });
    this.pauseButton = h(
      "button",
      { class: "button small", type: "button", onclick: () => this.pause(!this.paused) },
      icon("pause"),
      "Pause",
    );
    this.uptime = h("span", { class: "card-note" });
    this.engines = h("select", { id: "engines", hidden: true, "aria-label": "Engine", onchange: () => this.choose() });
    this.content = h(
      "div",
      { class: "live-content" },
      h("div", { class: "live-head" }, h("h1", {}, "The engine, live"), this.engines, this.uptime, this.pauseButton),
      h("div", { class: "tiles" }, ...tiles),
      this.timeline.root,
      h(
        "div",
        { class: "columns" },
        h("div", { class: "column" }, requests.root, tree.root),
        h("div", { class: "column" }, pool.root, this.finished.root),
      ),
      this.finished.waterfall,
      h("div", { class: "charts" }, ...curves.roots),
    );
    fill(this.root, this.notice, this.content);
  }

  // -- asking ---------------------------------------------------------------------------------------------

  resume() {
    if (!this.visible || document.hidden || this.paused) this.stop();
    else if (!this.timer && !this.request) this.poll();
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = null;
    this.request?.abort();
    this.request = null;
    this.timeline?.stop();
  }

  pause(paused) {
    this.paused = paused;
    fill(this.pauseButton, icon(paused ? "play" : "pause"), paused ? "Go on" : "Pause");
    this.timeline.pause(paused);
    this.resume();
  }

  async poll() {
    const request = (this.request = new AbortController());
    let pace = RETRY;
    try {
      const which = this.engine === null ? "" : `&engine=${this.engine}`;
      const response = await send(`/view?since=${this.data.next}${which}`, { signal: request.signal });
      this.take(await response.json());
      pace = this.data.received > KEPT_BY_ENGINE / 2 ? FAST : PACE;
    } catch (error) {
      if (request.signal.aborted) return;
      if (error instanceof ServerError) pace = this.refused(error);
      else console.error(error);
    } finally {
      if (this.request === request) this.request = null;
    }
    if (pace && this.visible && !this.paused && !document.hidden) {
      this.timer = setTimeout(() => {
        this.timer = null;
        this.poll();
      }, pace);
    }
  }

  /** Another replica was chosen. */
  choose() {
    this.engine = Number(this.engines.value);
    this.stop();
    this.data.forget();
    this.resume();
  }

  take(document) {
    this.notice.hidden = true;
    this.content.hidden = false;
    this.data.add(document);
    this.showEngines(document.engine, document.engines || []);
    this.showTiles();
    for (const panel of this.panels) panel.update(this.data);
  }

  /** What replicas there are, how they do, and which one is shown. */
  showEngines(shown, states) {
    this.engines.hidden = states.length < 2;
    if (states.join() === this.states) return;
    this.states = states.join();
    fill(this.engines, ...states.map((state, index) => h("option", { value: index }, `${index}: ${state}`)));
    this.engines.value = shown;
  }

  /** Why there is no picture. Returns milliseconds after which to ask again; 0: not by itself. */
  refused(error) {
    if (error.status === 401) this.server.lock();
    const reasons = {
      401: ["A key is needed", "Give the server's API key to see its engine."],
      403: [
        "Only for the operator",
        "Several API keys are set. The live view shows everybody's requests, so it opens for the first of the keys only.",
      ],
      404: ["No live view here", "This server does not offer it."],
      503: ["The engine is not ready", error.message],
      0: ["No connection", error.message],
    };
    const [title, text] = reasons[error.status] || ["The live view failed", error.message];
    const transient = error.status === 503 || error.status === 0 || error.status >= 500;
    this.content.hidden = !transient || !this.data.last;
    this.notice.hidden = transient && Boolean(this.data.last);
    const another = h("button", { class: "button", type: "button", onclick: () => this.server.lock() }, "Give another key");
    fill(this.notice, h("h2", {}, title), h("p", {}, text), error.status === 403 && another);
    return transient ? RETRY : 0;
  }

  showTiles() {
    const { last, rates } = this.data;
    const { stats, kv } = last;
    const looked = stats.cached_tokens + stats.prefill_tokens;
    const values = {
      running: [count(stats.running), `of ${count(last.max_num_seqs)}`],
      waiting: [count(stats.waiting), stats.preemptions ? `${count(stats.preemptions)} preemptions` : ""],
      output: [rate(rates.output), `${count(stats.output_tokens)} in total`],
      prefill: [rate(rates.prefill), `${count(stats.prefill_tokens)} in total`],
      ttft: [duration(this.data.recentTtft()), "median"],
      hits: [percent(stats.cached_tokens, stats.prompt_tokens || looked), `${count(stats.cached_tokens)} tokens`],
      kv: [percent(kv.held, kv.num_blocks), `${count(kv.held)} of ${count(kv.num_blocks)}`],
    };
    if (stats.draft_depth !== undefined) {
      const tokens = stats.verifications ? (1 + stats.accepted / stats.verifications).toFixed(2) : "-";
      values.drafts = [tokens, stats.drafted ? `${percent(stats.accepted, stats.drafted)} accepted` : ""];
    }
    if (stats.rank_imbalance !== undefined) {
      const moves = `${count(stats.expert_moves)} moves`;
      values.experts = [`${stats.rank_imbalance.toFixed(2)} x`, stats.expert_moves ? moves : ""];
    }
    for (const name of AT_TIMES) this.tiles.get(name).value.parentElement.hidden = values[name] === undefined;
    for (const [name, [value, small]] of Object.entries(values)) {
      setText(this.tiles.get(name).value, value);
      setText(this.tiles.get(name).small, small);
    }
    setText(
      this.uptime,
      `up ${duration(last.uptime)}; ${count(stats.finished)} finished, ${count(stats.aborted)} aborted, ${count(stats.failed)} failed`,
    );
  }
}
