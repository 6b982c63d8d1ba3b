// The block pool as a grid: one square a block (or a few blocks), coloured by who holds it.

import { h } from "../dom.js";
import { count } from "../format.js";
import { Picture } from "./canvas.js";
import { color, holders } from "./colors.js";

const MAX_HEIGHT = 300;

export class PoolPanel {
  constructor() {
    this.kv = null;
    this.grid = { columns: 1, side: 8 };
    this.picture = new Picture(
      "The pool of KV blocks",
      160,
      (...place) => this.draw(...place),
      (x, y) => this.under(x, y),
    );
    this.note = h("span", { class: "card-note" });
    this.legend = h("div", { class: "legend" });
    this.root = h(
      "section",
      { class: "card", id: "pool" },
      h("header", {}, h("h2", {}, "KV blocks"), this.note),
      this.picture.root,
      this.legend,
    );
    this.drawLegend();
    addEventListener("themechange", () => this.drawLegend());
  }

  drawLegend() {
    const square = (fill, text) => h("span", { class: "legend-item" }, h("i", { style: `background:${fill}` }), text);
    const ramp = h("i", {
      class: "ramp",
      style: `background:linear-gradient(90deg,${[2, 4, 6, 9].map(holders).join(",")})`,
    });
    this.legend.replaceChildren(
      square(color("p-free"), "free"),
      square(color("p-idle"), "cached, unused"),
      square(holders(1), "one holder"),
      h("span", { class: "legend-item" }, ramp, "shared by 2 to 9 or more"),
    );
  }

  update(data) {
    const kv = data.last.kv;
    if (this.kv?.cells === kv.cells && this.kv.free === kv.free) return;
    this.kv = kv;
    const each = kv.blocks_per_cell > 1 ? `, ${kv.blocks_per_cell} a square` : "";
    this.note.textContent = `${count(kv.num_blocks)} blocks of ${kv.block_size} tokens${each}: ${count(kv.held)} held, ${count(kv.cached)} cached, ${count(kv.free)} free`;
    this.picture.draw();
  }

  /** The largest squares with which all cells fit the place. */
  measure(width, cells) {
    let side = 18;
    while (side > 3 && Math.ceil(cells / Math.floor(width / side)) * side > MAX_HEIGHT) side -= 1;
    const columns = Math.max(1, Math.floor(width / side));
    this.grid = { side, columns, rows: Math.ceil(cells / columns) };
  }

  draw(context, width) {
    if (!this.kv) return;
    const { cells } = this.kv;
    this.measure(width, cells.length);
    const { side, columns, rows } = this.grid;
    if (this.picture.height !== rows * side) {
      this.picture.resize(rows * side);
      this.picture.draw();
      return;
    }
    const gap = side >= 9 ? 2 : 1;
    const byState = new Map();
    for (let i = 0; i < cells.length; i += 1) {
      if (!byState.has(cells[i])) byState.set(cells[i], []);
      byState.get(cells[i]).push(i);
    }
    for (const [state, places] of byState) {
      context.fillStyle = state === "f" ? color("p-free") : holders(state === "c" ? 0 : Number(state));
      for (const i of places)
        context.fillRect((i % columns) * side, Math.floor(i / columns) * side, side - gap, side - gap);
    }
  }

  under(x, y) {
    if (!this.kv) return null;
    const { side, columns } = this.grid;
    const [column, row] = [Math.floor(x / side), Math.floor(y / side)];
    const index = row * columns + column;
    const state = this.kv.cells[index];
    if (column >= columns || state === undefined) return null;
    const each = this.kv.blocks_per_cell;
    const first = 1 + index * each;
    const last = Math.min(this.kv.num_blocks, first + each - 1);
    const name = each > 1 ? `Blocks ${first} to ${last}` : `Block ${first}`;
    const text =
      {
        f: "free",
        c: "holds a cached prefix that nobody uses now",
        1: "held by one request",
        9: "held by nine or more",
      }[state] || `held by ${state}`;
    return `${name}\n${each > 1 ? "the busiest of them: " : ""}${text}`;
  }
}
