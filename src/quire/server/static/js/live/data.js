// What the page remembers of the engine: the documents of /view, joined into steps, lanes and curves.

import { quantile } from "../format.js";

const KEPT_SECONDS = 75;
const MAX_SPANS = 150_000; // in all steps that are kept
const MAX_BUCKETS = 600; // ten minutes of seconds
const LANE_REST = 0.3; // seconds after which a request that is in no step gives its lane to another

/** Where blocks come from that are not in the pool. */
export const SOURCES = { host: "host memory", disk: "disk", peer: "another engine", remote: "another node" };

export const CURVES = ["output", "prefill", "gap50", "gap99", "ttft", "running", "waiting"];

export class LiveData {
  constructor() {
    this.last = null; // the newest document
    this.forget();
  }

  forget() {
    this.steps = [];
    this.numSpans = 0;
    this.next = 0; // number of the first step that we do not have
    this.lanes = new Map(); // request and choice -> {lane, end}
    this.prompts = new Map(); // request and choice -> tokens of its prompt
    this.finished = new Map(); // request and choice -> document
    this.curves = { time: [] };
    for (const name of CURVES) this.curves[name] = [];
    this.bucket = null;
    this.rates = { output: 0, prefill: 0 };
    this.received = 0;
  }

  /** Take in a document. */
  add(document) {
    const before = this.last;
    const another = before && (document.engine !== before.engine || document.boot !== before.boot);
    if (another || document.uptime < before?.uptime) this.forget();
    const same = before && this.next > 0 ? before : null;
    this.last = document;
    for (const request of document.requests) this.prompts.set(keyOf(request), request.prompt);
    const ended = document.finished.filter((one) => !this.finished.has(keyOf(one)));
    for (const one of document.finished) {
      this.prompts.set(keyOf(one), one.prompt);
      this.finished.delete(keyOf(one)); // so that the newest stand last
      this.finished.set(keyOf(one), one);
    }
    const steps = document.steps.filter((step) => step.number >= this.next);
    for (const step of steps) this.addStep(step);
    this.received = steps.length;
    this.drop(document);
    this.addToCurves(document, same, steps, same ? ended : []);
    if (!steps.length && this.next === 0) this.next = 1; // an engine that has not run anything yet
  }

  addStep(step) {
    this.next = step.number + 1;
    step.end = step.begin + step.schedule_seconds + step.seconds;
    step.prefill = 0;
    step.decode = 0;
    step.decoding = 0; // requests
    step.made = 0; // tokens that those sampled
    for (const [key, place] of this.lanes) if (step.begin - place.end > LANE_REST) this.lanes.delete(key);
    step.spans = step.spans.map(([id, choice, start, length, sampled, drafted]) => {
      const key = `${id}|${choice}`;
      const prompt = this.prompts.get(key);
      const prefill = prompt === undefined ? length > 1 + drafted : start < prompt;
      step[prefill ? "prefill" : "decode"] += length;
      if (!prefill) {
        step.decoding += 1;
        step.made += sampled;
      }
      return { id, choice, key, start, length, sampled, drafted, prefill, lane: this.laneOf(key, step.end) };
    });
    this.numSpans += step.spans.length;
    this.steps.push(step);
  }

  laneOf(key, end) {
    let place = this.lanes.get(key);
    if (!place) {
      const taken = new Set([...this.lanes.values()].map((one) => one.lane));
      let lane = 0;
      while (taken.has(lane)) lane += 1;
      place = { lane, end };
      this.lanes.set(key, place);
    }
    place.end = end;
    return place.lane;
  }

  drop(document) {
    let old = 0;
    while (
      old < this.steps.length &&
      (this.steps[old].end < document.now - KEPT_SECONDS || this.numSpans > MAX_SPANS)
    ) {
      this.numSpans -= this.steps[old].spans.length;
      old += 1;
    }
    if (old) this.steps.splice(0, old);
    const surplus = this.finished.size - 256;
    for (const key of [...this.finished.keys()].slice(0, Math.max(0, surplus))) this.finished.delete(key);
    if (this.prompts.size > 4096) this.prompts = new Map([...this.prompts].slice(-1024));
  }

  // -- curves: one point a second ------------------------------------------------------------------------

  addToCurves(document, before, steps, ended) {
    if (!before || document.now - before.now > 5)
      this.closeBucket(document.now, true); // the page looked away
    else this.measureRates(document, before);
    this.bucket ??= {
      begin: document.now,
      output: document.stats.output_tokens,
      prefill: document.stats.prefill_tokens,
      gaps: [],
      ttfts: [],
    };
    steps.forEach((step, index) => {
      const previous = steps[index - 1];
      if (previous && step.number === previous.number + 1 && step.made && previous.decode)
        this.bucket.gaps.push(((step.end - previous.end) * step.decoding) / step.made); // a token, where drafts give more
    });
    for (const one of ended) if (one.ttft_seconds !== null) this.bucket.ttfts.push(one.ttft_seconds);
    if (document.now - this.bucket.begin >= 1) this.closeBucket(document.now, false, document);
  }

  /** Rates of the last moments, for the tiles: the mean over about a second and a half. */
  measureRates(document, before) {
    const seconds = document.now - before.now;
    const weight = 1 - Math.exp(-seconds / 0.8);
    for (const [name, counter] of [
      ["output", "output_tokens"],
      ["prefill", "prefill_tokens"],
    ]) {
      const now = (document.stats[counter] - before.stats[counter]) / Math.max(seconds, 1e-3);
      this.rates[name] += weight * (now - this.rates[name]);
      if (this.rates[name] < 0.05) this.rates[name] = 0;
    }
  }

  closeBucket(now, gap, document = null) {
    const { bucket, curves } = this;
    this.bucket = null;
    if (gap) {
      if (curves.time.length) this.point(now, {});
      return;
    }
    const seconds = now - bucket.begin;
    const gaps = bucket.gaps.sort((a, b) => a - b);
    const ttfts = bucket.ttfts.sort((a, b) => a - b);
    this.point(now, {
      output: (document.stats.output_tokens - bucket.output) / seconds,
      prefill: (document.stats.prefill_tokens - bucket.prefill) / seconds,
      gap50: quantile(gaps, 0.5),
      gap99: quantile(gaps, 0.99),
      ttft: quantile(ttfts, 0.5),
      running: document.stats.running,
      waiting: document.stats.waiting,
    });
  }

  point(time, values) {
    const { curves } = this;
    curves.time.push(time);
    for (const name of CURVES) curves[name].push(values[name] ?? null);
    if (curves.time.length > MAX_BUCKETS) for (const name of ["time", ...CURVES]) curves[name].shift();
  }

  /** The median time to the first token of the last requests that ended. */
  recentTtft() {
    const times = [...this.finished.values()]
      .slice(-32)
      .map((one) => one.ttft_seconds)
      .filter((time) => time !== null);
    return quantile(
      times.sort((a, b) => a - b),
      0.5,
    );
  }
}

export function keyOf(one) {
  return `${one.id}|${one.choice}`;
}
