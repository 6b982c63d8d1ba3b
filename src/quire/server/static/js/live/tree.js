// The prefix tree, lying on its side: from left to right the tokens of a prefix, from top to bottom its branches.

import { h } from "../dom.js";
import { count, duration } from "../format.js";
import { label, Picture, tick } from "./canvas.js";
import { color, holders, onHolders } from "./colors.js";

const AXIS = 20;
const [MIN_ROW, MAX_ROW, WANTED_HEIGHT] = [5, 22, 280];

export class TreePanel {
  constructor() {
    this.boxes = [];
    this.depth = 0;
    this.leaves = 0;
    this.text = "";
    this.picture = new Picture(
      "The tree of cached prefixes",
      90,
      (...place) => this.draw(...place),
      (x, y) => this.under(x, y),
    );
    this.note = h("span", { class: "card-note" });
    this.frame = h("div", { class: "tree-frame" }, this.picture.root);
    this.root = h(
      "section",
      { class: "card", id: "tree" },
      h("header", {}, h("h2", {}, "Prefix tree"), this.note),
      this.frame,
    );
  }

  update(data) {
    const { tree } = data.last;
    const text = JSON.stringify(tree.map(({ age, ...node }) => node));
    if (text === this.text) return;
    this.text = text;
    this.place(tree);
    const tokens = tree.reduce((sum, node) => sum + node.tokens, 0);
    this.note.textContent = tree.length
      ? `${count(tokens)} tokens in ${count(this.leaves)} ${this.leaves === 1 ? "prefix" : "prefixes"}`
      : "";
    const row = Math.max(MIN_ROW, Math.min(MAX_ROW, Math.floor(WANTED_HEIGHT / Math.max(1, this.leaves))));
    this.row = row;
    this.picture.resize(Math.max(90, this.leaves * row + AXIS + 4));
    this.picture.draw();
  }

  /** Give each node its first token and its rows. Children whose parent was left out begin at the edge. */
  place(tree) {
    const children = new Map([[null, []]]);
    const ids = new Set(tree.map((node) => node.id));
    for (const node of tree) {
      const parent = ids.has(node.parent) ? node.parent : null;
      if (!children.has(parent)) children.set(parent, []);
      children.get(parent).push(node);
    }
    this.boxes = [];
    this.depth = 0;
    this.leaves = 0;
    const todo = children
      .get(null)
      .reverse()
      .map((node) => ({ node, start: 0, parent: null, level: 0 }));
    while (todo.length) {
      const { node, start, parent, level } = todo.pop();
      const below = children.get(node.id) || [];
      const box = { node, start, level, parent, top: this.leaves, rows: 0 };
      this.boxes.push(box);
      this.depth = Math.max(this.depth, start + node.tokens);
      if (!below.length) {
        this.leaves += 1;
        for (let up = box; up; up = up.parent) up.rows += 1;
      }
      for (const child of [...below].reverse())
        todo.push({ node: child, start: start + node.tokens, parent: box, level: level + 1 });
    }
  }

  draw(context, width, height) {
    if (!this.boxes.length) {
      label(context, "Nothing is cached yet", width / 2, height / 2, color("faint"), { align: "center", size: 13 });
      return;
    }
    const scale = width / this.depth;
    this.drawAxis(context, width, height, scale);
    for (const { node, start, top, rows } of this.boxes) {
      const [x, y] = [start * scale, top * this.row + AXIS];
      const [wide, high] = [
        Math.max(1.5, node.tokens * scale - 1.5),
        Math.max(1, rows * this.row - (this.row > 6 ? 2 : 1)),
      ];
      context.fillStyle = holders(node.references);
      context.beginPath();
      context.roundRect(x, y, wide, high, Math.min(4, wide / 2, high / 2));
      context.fill();
      if (wide > 44 && high > 12)
        label(context, count(node.tokens), x + 7, y + high / 2, onHolders(node.references), { weight: 550 });
    }
  }

  drawAxis(context, width, height, scale) {
    const step = tick(this.depth, width / 90);
    for (let token = 0; token < this.depth; token += step) {
      context.fillStyle = color("c-grid");
      context.fillRect(token * scale, AXIS - 6, 1, height);
      label(context, token ? count(token) : "token 0", token * scale + 4, 8, color("faint"));
    }
  }

  under(x, y) {
    const scale = this.picture.width / this.depth;
    const row = Math.floor((y - AXIS) / this.row);
    const token = x / scale;
    const box = this.boxes.find(
      ({ node, start, top, rows }) => token >= start && token < start + node.tokens && row >= top && row < top + rows,
    );
    if (!box) return null;
    const { node, start, rows } = box;
    const use = node.references ? `used by ${node.references} now` : "nobody uses it now";
    const age = node.age === undefined ? "" : `\nlast used ${duration(node.age)} ago`;
    const share = rows > 1 ? `\nbegins ${rows} prefixes` : "";
    return `Tokens ${count(start)} to ${count(start + node.tokens - 1)}\n${count(node.tokens)} tokens in ${count(node.blocks)} blocks, ${use}${share}${age}`;
  }
}
