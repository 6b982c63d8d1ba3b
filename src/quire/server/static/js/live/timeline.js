// The steps of the last seconds: a lane for each request, and above them how many tokens each step held.

import { h, segments, setText } from "../dom.js";
import { count, duration, shortId } from "../format.js";
import { label, Picture, tick } from "./canvas.js";
import { color } from "./colors.js";

const BAND = 40; // the tokens of a step
const TOP = 6;
const AXIS = 18;
const DELAY = 0.6; // seconds that the picture is behind the engine, so that it can flow
const FRAME = 45; // milliseconds between two pictures, at least
const MAX_LANE = 16;
const [TOUCHING, NARROW] = [1.6, 6]; // pixels: narrow spans of a request that lie so close are drawn as one
const IDLE = 8; // lanes' worth of height when there is little to show

export class TimelinePanel {
  constructor() {
    this.data = null;
    this.window = 10;
    this.clock = null; // {engine, page}: the engine's time, and ours at that moment
    this.timer = null;
    this.paused = false;
    this.seen = false; // somebody looks
    this.picture = new Picture(
      "The last steps of the engine",
      230,
      (...place) => this.draw(...place),
      (x, y) => this.under(x, y),
    );
    this.note = h("span", { class: "card-note" });
    const choose = segments(
      [
        [2, "2 s"],
        [10, "10 s"],
        [60, "60 s"],
      ],
      10,
      (seconds) => {
        this.window = seconds;
        this.picture.draw();
      },
      "Seconds to show",
    );
    const items = [
      ["prefill", "prompt"],
      ["decode", "output"],
    ].map(([name, text]) =>
      h("span", { class: "legend-item" }, h("i", { style: `background:var(--c-${name})` }), text),
    );
    this.root = h(
      "section",
      { class: "card wide-card", id: "timeline" },
      h("header", {}, h("h2", {}, "Steps"), this.note, choose),
      this.picture.root,
      h(
        "div",
        { class: "legend" },
        ...items,
        h("span", {}, "top: tokens of each step; below: a lane for each request"),
      ),
    );
  }

  update(data) {
    this.data = data;
    this.seen = true;
    this.clock = { engine: data.last.now, page: performance.now() };
    const last = data.steps.at(-1);
    setText(
      this.note,
      last
        ? `${count(data.last.stats.steps)} so far; the last took ${duration(last.seconds)}, after ${duration(last.schedule_seconds)} of scheduling`
        : "",
    );
    if (!this.timer) this.flow();
  }

  /** Draw again and again while there is something that moves, but never more than a tenth of the time. */
  flow() {
    clearTimeout(this.timer);
    this.timer = null;
    if (this.paused || !this.seen) return;
    this.picture.draw();
    const newest = this.data.steps.at(-1);
    const still =
      matchMedia("(prefers-reduced-motion: reduce)").matches || !newest || newest.end < this.right() - this.window;
    if (!still)
      this.timer = setTimeout(() => requestAnimationFrame(() => this.flow()), Math.max(FRAME, 9 * this.picture.cost));
  }

  stop() {
    this.seen = false;
    clearTimeout(this.timer);
    this.timer = null;
  }

  /** The engine's time at the right edge. */
  right() {
    if (this.paused) return this.frozen;
    return this.clock.engine + Math.min(1.5, (performance.now() - this.clock.page) / 1000) - DELAY;
  }

  pause(paused) {
    if (paused && this.clock) this.frozen = this.right();
    this.paused = paused && Boolean(this.clock);
    if (!this.paused) this.flow();
  }

  // -- drawing --------------------------------------------------------------------------------------------

  draw(context, width, height) {
    if (!this.data) return;
    const right = this.right();
    const left = right - this.window;
    const scale = width / this.window;
    const steps = this.visible(left, right);
    const lanes = steps.reduce((most, step) => step.spans.reduce((top, span) => Math.max(top, span.lane + 1), most), 0);
    const lane = Math.max(2, Math.min(MAX_LANE, (height - TOP - BAND - AXIS) / Math.max(lanes, IDLE)));
    this.view = { left, scale, lane, steps };
    this.drawAxis(context, width, height, left, right, scale);
    if (!steps.length) {
      label(context, `No step in the last ${this.window} seconds`, width / 2, height / 2, color("faint"), {
        align: "center",
        size: 13,
      });
      return;
    }
    this.drawTokens(context, steps, left, scale);
    this.drawLanes(context, steps, left, scale, lane);
  }

  visible(left, right) {
    const { steps } = this.data;
    let [low, high] = [0, steps.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle].end < left) low = middle + 1;
      else high = middle;
    }
    let end = low;
    while (end < steps.length && steps[end].begin < right) end += 1;
    return steps.slice(low, end);
  }

  drawAxis(context, width, height, left, right, scale) {
    const step = tick(this.window, width / 110);
    context.fillStyle = color("c-grid");
    context.fillRect(0, TOP + BAND, width, 1);
    for (let time = Math.ceil(left / step) * step; time < right; time += step) {
      const x = (time - left) * scale;
      context.fillStyle = color("c-grid");
      context.fillRect(x, 0, 1, height - AXIS);
      const ago = right - time;
      const text = step < 1 ? `-${ago.toFixed(1)} s` : `-${Math.round(ago)} s`;
      if (x > 16 && ago >= step / 2 && x < width - 16)
        label(context, text, x, height - 7, color("faint"), { align: "center" });
    }
  }

  /** Bars on a logarithmic scale: a decoding step of 30 tokens can be seen beside a prompt of 2,000. */
  drawTokens(context, steps, left, scale) {
    const most = Math.log2(1 + Math.max(64, this.data.last.max_num_batched_tokens || 0));
    const tall = (tokens) => (BAND - 4) * Math.min(1, Math.log2(1 + tokens) / most);
    for (const step of steps) {
      const x = (step.begin - left) * scale;
      const wide = Math.max(1, (step.end - step.begin) * scale - 0.5);
      const all = tall(step.prefill + step.decode);
      const decode = all * (step.decode / Math.max(1, step.prefill + step.decode));
      context.fillStyle = color("c-decode");
      context.fillRect(x, TOP + BAND - decode, wide, decode);
      context.fillStyle = color("c-prefill");
      context.fillRect(x, TOP + BAND - all, wide, all - decode);
    }
  }

  /** Neighbours of one kind in one lane become one bar where they would touch. */
  drawLanes(context, steps, left, scale, lane) {
    const open = new Map(); // lane -> {x, end, prefill, key}
    const bars = { true: [], false: [] };
    for (const step of steps) {
      const x = (step.begin - left) * scale;
      const end = (step.end - left) * scale;
      for (const span of step.spans) {
        const bar = open.get(span.lane);
        if (bar && bar.key === span.key && bar.prefill === span.prefill && x - bar.end < TOUCHING && end - x < NARROW) {
          bar.end = end;
          continue;
        }
        const fresh = { x, end, lane: span.lane, prefill: span.prefill, key: span.key };
        bars[span.prefill].push(fresh);
        open.set(span.lane, fresh);
      }
    }
    const tall = lane - (lane > 5 ? 2 : lane > 3 ? 1 : 0.5);
    for (const prefill of [false, true]) {
      context.fillStyle = color(prefill ? "c-prefill" : "c-decode");
      for (const bar of bars[prefill])
        context.fillRect(bar.x, TOP + BAND + 6 + bar.lane * lane, Math.max(1, bar.end - bar.x - 0.6), tall);
    }
  }

  under(x, y) {
    if (!this.view?.steps.length) return null;
    const { left, scale, lane, steps } = this.view;
    const time = left + x / scale;
    const margin = 2 / scale;
    const step = steps.find((one) => time >= one.begin - margin && time <= one.end + margin);
    if (!step) return null;
    const row = Math.floor((y - TOP - BAND - 6) / lane);
    const span = row < 0 ? null : step.spans.find((one) => one.lane === row);
    const lines = [
      `Step ${count(step.number)}`,
      `${duration(step.seconds)}, scheduled in ${duration(step.schedule_seconds)}`,
    ];
    lines.push(
      `${count(step.tokens)} tokens in ${step.spans.length} ${step.spans.length === 1 ? "span" : "spans"}: ${count(step.prefill)} of prompts, ${count(step.decode)} of outputs`,
    );
    if (step.drafted) lines.push(`${count(step.drafted)} of them drafts, ${count(step.accepted)} accepted`);
    if (span) {
      const drafts = span.drafted ? `, ${span.sampled - 1} of ${span.drafted} drafts accepted` : "";
      const kind = span.prefill ? "prompt" : "output";
      lines.push(`Here: ${shortId(span.id, span.choice)}, ${kind}, ${positions(span)}${drafts}`);
    }
    return lines.join("\n");
  }
}

function positions({ start, length }) {
  return length === 1 ? `position ${count(start)}` : `positions ${count(start)} to ${count(start + length - 1)}`;
}
