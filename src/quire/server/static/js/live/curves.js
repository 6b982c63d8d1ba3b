// Throughput and latency over the last minutes.

import uPlot from "../../vendor/uplot/uPlot.esm.js";
import { h } from "../dom.js";
import { duration, rate, short } from "../format.js";
import { tick } from "./canvas.js";
import { color } from "./colors.js";

const HEIGHT = 150;
const [SHORTEST, LONGEST] = [60, 300]; // seconds that are shown, from when the page has looked so long

const CHARTS = [
  {
    title: "Tokens a second",
    series: [
      ["output", "output", "c-decode"],
      ["prefill", "prompts", "c-prefill"],
    ],
    show: rate,
    axis: short,
  },
  {
    title: "Between two tokens",
    series: [
      ["gap50", "median", "c-decode"],
      ["gap99", "99 %", "c-cached"],
    ],
    show: duration,
    axis: duration,
  },
  {
    title: "Time to the first token",
    series: [["ttft", "median", "c-prefill"]],
    show: duration,
    axis: duration,
    points: true,
  },
  {
    title: "Requests",
    series: [
      ["running", "running", "c-text"],
      ["waiting", "waiting", "c-queue"],
    ],
    show: short,
    axis: short,
  },
];

class Chart {
  constructor(chart) {
    this.chart = chart;
    this.plot = null;
    this.place = h("div", { class: "plot" });
    this.values = chart.series.map(([, name, tone]) => {
      const value = h("b", {}, "-");
      return {
        value,
        item: h("span", { class: "legend-item" }, h("i", { style: `background:var(--${tone})` }), `${name} `, value),
      };
    });
    this.root = h(
      "section",
      { class: "card chart" },
      h("header", {}, h("h2", {}, chart.title), h("div", { class: "legend" }, ...this.values.map(({ item }) => item))),
      this.place,
    );
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.place);
    addEventListener("themechange", () => this.rebuild());
  }

  size() {
    return { width: Math.max(120, this.place.clientWidth), height: HEIGHT };
  }

  options() {
    const { series, axis, points } = this.chart;
    const grid = { stroke: () => color("c-grid"), width: 1 };
    const common = { stroke: () => color("faint"), grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    return {
      ...this.size(),
      padding: [8, 4, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 }, sync: { key: "live" } },
      scales: {
        x: {
          time: false,
          range: (plot, low, high) => [high - Math.min(LONGEST, Math.max(SHORTEST, high - low)), high],
        },
        y: { range: (plot, low, high) => [0, niceTop(high)] },
      },
      axes: [
        {
          ...common,
          size: 22,
          values: (plot, ticks) => ticks.map((time) => ago(plot.scales.x.max - time)),
          splits: (plot, index, low, high) => timesAgo(low, high),
        },
        {
          ...common,
          size: 54,
          values: (plot, ticks) => ticks.map((value) => (value === 0 ? "0" : axis(value))),
          splits: (plot, index, low, high) => multiples(tick(high, 3), high),
        },
      ],
      series: [
        {},
        ...series.map(([, label, tone]) => ({
          label,
          stroke: () => color(tone),
          width: 1.75,
          spanGaps: Boolean(points),
          points: { show: Boolean(points), size: 5, fill: () => color(tone) },
        })),
      ],
      hooks: { setCursor: [(plot) => this.showValues(plot)] },
    };
  }

  showValues(plot) {
    const index = plot.cursor.idx ?? plot.data[0].length - 1;
    this.values.forEach(({ value }, i) => {
      const number = plot.data[i + 1][index];
      value.textContent = number === null || number === undefined ? "-" : this.chart.show(number);
    });
  }

  update(curves) {
    this.data = [curves.time, ...this.chart.series.map(([name]) => curves[name])];
    if (!this.place.clientWidth) return;
    if (this.plot) this.plot.setData(this.data);
    else this.plot = new uPlot(this.options(), this.data, this.place);
    this.showValues(this.plot);
  }

  rebuild() {
    this.plot?.redraw(false);
  }
}

/** A round number not below the highest value. */
function niceTop(high) {
  const top = Math.max(1e-4, (high || 1) * 1.02);
  const step = tick(top, 3);
  return Math.ceil(top / step) * step;
}

function multiples(step, high) {
  return Array.from({ length: Math.floor(high / step + 1e-6) + 1 }, (_, i) => i * step);
}

function timesAgo(low, high) {
  const step = high - low > 200 ? 60 : high - low > 100 ? 30 : 15;
  return multiples(step, high - low)
    .slice(1)
    .map((seconds) => high - seconds)
    .reverse();
}

function ago(seconds) {
  return seconds < 59.5 ? `-${Math.round(seconds)} s` : `-${(seconds / 60).toFixed(seconds % 60 > 1 ? 1 : 0)} min`;
}

export class CurvesPanel {
  constructor() {
    this.charts = CHARTS.map((chart) => new Chart(chart));
    this.roots = this.charts.map((chart) => chart.root);
    this.drawn = null;
  }

  update(data) {
    const { time } = data.curves;
    if (time.at(-1) === this.drawn && time.length) return;
    this.drawn = time.at(-1);
    for (const chart of this.charts) chart.update(data.curves);
  }
}
