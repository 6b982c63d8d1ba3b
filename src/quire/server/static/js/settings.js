// The panel of sampling parameters. An empty field means the server's default, which is shown: then nothing is sent.

import { h, iconButton } from "./dom.js";
import { DEFAULTS, saveSettings } from "./store.js";

const FIELDS = [
  ["temperature", "Temperature", { max: 2, step: 0.05 }, "0 always takes the likeliest token; higher is more varied"],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01 }, "Keep the likeliest tokens that make up this share"],
  ["top_k", "Top k", { max: 1000000, slides: 200 }, "Keep this many of the likeliest tokens; 0 keeps all"],
  ["min_p", "Min p", { max: 1, step: 0.01 }, "Drop tokens less likely than this share of the likeliest"],
  ["max_tokens", "Longest answer", { min: 1, max: 10000000, slides: 0 }, "In tokens; empty: to the end of the context"],
  ["seed", "Seed", { max: Number.MAX_SAFE_INTEGER, slides: 0 }, "The same seed gives the same answer"],
];
const PENALTIES = [
  ["repetition_penalty", "Repetition", { min: 0.1, max: 2, step: 0.05 }, "Above 1: tokens that are there already become less likely"],
  ["presence_penalty", "Presence", { min: -2, max: 2, step: 0.1 }, "Subtracted once a token is in the answer"],
  ["frequency_penalty", "Frequency", { min: -2, max: 2, step: 0.1 }, "Subtracted each time that a token is in the answer"],
];
const NEUTRAL = { temperature: 1, top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1, presence_penalty: 0, frequency_penalty: 0 };

/** What strings end an answer: one a line of the field; \n in it is a line's end. */
export function stopStrings(text) {
  return text
    .split("\n")
    .filter((line) => line)
    .map((line) => line.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]));
}

/** The JSON schema of the field; null if there is none. Throws SyntaxError where it is not an object of JSON. */
export function schemaOf(text) {
  if (!text.trim()) return null;
  const schema = JSON.parse(text);
  if (typeof schema !== "object" || schema === null || Array.isArray(schema)) throw new SyntaxError("a schema is an object");
  return schema;
}

export class SettingsPanel {
  constructor(settings, onClose) {
    this.settings = settings;
    this.defaults = {};
    this.shown = []; // functions that show what is set
    const system = this.text("system", "System message", { rows: 4, placeholder: "None" });
    const stop = this.text("stop", "Stop at", { rows: 2, placeholder: "None", mono: true }, "One string a line; \\n is a line's end");
    const schema = this.text(
      "schema",
      "JSON schema",
      { rows: 3, placeholder: '{"type": "object", ...}', mono: true },
      "The answer will be JSON that meets it",
      (value) => schemaOf(value),
    );
    this.root = h(
      "aside",
      { class: "settings", "aria-label": "Parameters" },
      h(
        "div",
        { class: "panel-head" },
        h("h2", {}, "Parameters"),
        h("button", { class: "button small", type: "button", onclick: () => this.reset() }, "Reset"),
        iconButton("close", "Close", onClose, "panel-close"),
      ),
      system,
      ...FIELDS.map((field) => this.number(...field)),
      stop,
      h("details", { class: "more" }, h("summary", {}, "Penalties"), ...PENALTIES.map((field) => this.number(...field))),
      h("details", { class: "more", open: Boolean(settings.schema) }, h("summary", {}, "Structured output"), schema),
    );
    for (const show of this.shown) show();
  }

  /** The model's own defaults, which unset fields mean. */
  meet(defaults) {
    this.defaults = defaults ?? {};
    for (const show of this.shown) show();
  }

  set(name, value) {
    this.settings[name] = value;
    saveSettings(this.settings);
  }

  /** A field for text; `check` throws for what is not allowed. */
  text(name, label, { rows, placeholder, mono }, help, check) {
    const id = `setting-${name}`;
    const area = h("textarea", { class: `field${mono ? " mono" : ""}`, id, rows, placeholder, "data-name": name, spellcheck: mono ? "false" : null });
    const note = help && h("span", { class: "setting-help", id: `${id}-help` }, help);
    if (note) area.setAttribute("aria-describedby", note.id);
    const judge = () => {
      let wrong = "";
      try {
        check?.(area.value);
      } catch (error) {
        wrong = `Not sent: ${error.message}`;
      }
      mark(area, Boolean(wrong));
      if (note) note.textContent = wrong || help;
    };
    area.addEventListener("input", () => {
      this.set(name, area.value);
      judge();
    });
    this.shown.push(() => {
      if (area.value !== this.settings[name]) area.value = this.settings[name];
      judge();
    });
    return h("div", { class: "setting" }, h("label", { class: "setting-name", for: id }, label), area, note);
  }

  /** A field for a number, with a slider if it `slides`: to that value, by default to the largest. */
  number(name, label, { min = 0, max, step = 1, slides = max }, help) {
    const id = `setting-${name}`;
    const number = h("input", {
      class: "field number",
      id,
      type: "number",
      min,
      max,
      step: step < 1 ? "any" : step,
      inputmode: "decimal",
      "aria-describedby": `${id}-help`,
      "data-name": name,
    });
    const range = slides ? h("input", { type: "range", min, max: slides, step, "aria-label": `${label}, slider` }) : null;
    const show = () => {
      const value = this.settings[name];
      const usual = this.defaults[name] ?? NEUTRAL[name];
      number.placeholder = usual ?? (name === "seed" ? "random" : "none");
      if (document.activeElement !== number || Number(number.value) !== value) number.value = value ?? "";
      mark(number, false);
      if (!range) return;
      range.value = value ?? usual;
      range.classList.toggle("unset", value === null);
      range.setAttribute("aria-valuetext", value === null ? `${usual}, the model's default` : `${value}`);
    };
    number.addEventListener("input", () => {
      const valid = number.value === "" ? !number.validity.badInput : number.validity.valid;
      mark(number, !valid);
      if (!valid) return;
      this.set(name, number.value === "" ? null : Number(number.value));
      show();
    });
    range?.addEventListener("input", () => {
      this.set(name, Number(range.value));
      show();
    });
    this.shown.push(show);
    return h(
      "div",
      { class: "setting" },
      h("label", { class: "setting-name", for: id }, label),
      number,
      range,
      h("span", { class: "setting-help", id: `${id}-help` }, help),
    );
  }

  reset() {
    const { mode } = this.settings;
    Object.assign(this.settings, DEFAULTS, { mode });
    saveSettings(this.settings);
    for (const show of this.shown) show();
  }
}

function mark(field, wrong) {
  field.classList.toggle("wrong", wrong);
  field.setAttribute("aria-invalid", String(wrong));
}
