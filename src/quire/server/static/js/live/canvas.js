// A canvas that fits its place, is sharp on every screen, and can say what lies under the pointer.

import { h, tooltip } from "../dom.js";

export class Picture {
  /**
   * @param draw (context, width, height): draws everything; sizes are in CSS pixels.
   * @param under (x, y): text about what is there, or null.
   */
  constructor(label, height, draw, under = () => null) {
    this.drawAll = draw;
    this.under = under;
    this.height = height;
    this.width = 0;
    this.pointer = null;
    this.cost = 0; // milliseconds that the last drawing took
    this.canvas = h("canvas", { role: "img", "aria-label": label });
    this.context = this.canvas.getContext("2d", { alpha: true });
    this.root = h("div", { class: "picture" }, this.canvas);
    this.canvas.style.height = `${height}px`;
    new ResizeObserver(() => this.draw()).observe(this.root);
    addEventListener("themechange", () => this.draw());
    this.canvas.addEventListener("pointermove", (event) => {
      this.pointer = event;
      this.tell();
    });
    this.canvas.addEventListener("pointerleave", () => {
      this.pointer = null;
      tooltip(null);
    });
  }

  /** Where the pointer is on the picture; null if elsewhere. */
  get at() {
    if (!this.pointer) return null;
    const { left, top } = this.canvas.getBoundingClientRect();
    return { x: this.pointer.clientX - left, y: this.pointer.clientY - top };
  }

  tell() {
    const { at } = this;
    if (at) tooltip(this.under(at.x, at.y), this.pointer);
  }

  resize(height) {
    this.height = Math.round(height);
  }

  draw() {
    const width = this.root.clientWidth;
    if (!width) return; // not shown
    const begin = performance.now();
    const scale = devicePixelRatio || 1;
    const [pixels, rows] = [Math.round(width * scale), Math.round(this.height * scale)];
    if (this.canvas.width !== pixels || this.canvas.height !== rows) {
      this.canvas.width = pixels;
      this.canvas.height = rows;
      this.canvas.style.height = `${this.height}px`;
    }
    this.width = width;
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.context.clearRect(0, 0, width, this.height);
    this.drawAll(this.context, width, this.height);
    this.cost = performance.now() - begin;
    if (this.pointer) this.tell();
  }
}

/** Write on a canvas in the page's type. */
export function label(context, text, x, y, fill, { align = "left", size = 11, weight = 400 } = {}) {
  context.font = `${weight} ${size}px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif`;
  context.textAlign = align;
  context.textBaseline = "middle";
  context.fillStyle = fill;
  context.fillText(text, x, y);
}

/** A round step for an axis: about `wanted` of them fit into `range`. */
export function tick(range, wanted) {
  const rough = range / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough * (1 - 1e-9));
}
