// The panel of sampling parameters. An empty field means the server's default: then nothing is sent.

import { h } from "./dom.js";
import { DEFAULTS, saveSettings } from "./store.js";

const FIELDS = [
  [
    "temperature",
    "Temperature",
    { min: 0, max: 2, step: 0.05, slider: true },
    "0 always takes the likeliest token; higher is more varied",
  ],
  [
    "top_p",
    "Top p",
    { min: 0.01, max: 1, step: 0.01, slider: true },
    "Keep the likeliest tokens that make up this share",
  ],
  ["top_k", "Top k", { min: -1, max: 1000000, step: 1 }, "Keep this many of the likeliest tokens"],
  ["max_tokens", "Longest answer", { min: 1, max: 10000000, step: 1 }, "In tokens"],
  ["seed", "Seed", { min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 }, "The same seed gives the same answer"],
];

export class SettingsPanel {
  constructor(settings, onClose) {
    this.settings = settings;
    this.inputs = [];
    const system = h("textarea", {
      class: "field",
      rows: 4,
      placeholder: "None",
      value: settings.system,
      "aria-label": "System message",
    });
    system.addEventListener("input", () => this.set("system", system.value));
    this.system = system;
    this.root = h(
      "aside",
      { class: "settings", "aria-label": "Parameters" },
      h(
        "div",
        { class: "panel-head" },
        h("h2", {}, "Parameters"),
        h("button", { class: "button small", type: "button", onclick: () => this.reset() }, "Reset"),
        h(
          "button",
          { class: "icon-button panel-close", type: "button", "aria-label": "Close", onclick: onClose },
          "\u00d7",
        ),
      ),
      h("label", { class: "setting" }, h("span", { class: "setting-name" }, "System message"), system),
      ...FIELDS.map((field) => this.field(...field)),
    );
  }

  set(name, value) {
    this.settings[name] = value;
    saveSettings(this.settings);
  }

  field(name, label, { min, max, step, slider }, help) {
    const number = h("input", {
      class: "field number",
      type: "number",
      min,
      max,
      step: step < 1 ? "any" : step,
      placeholder: "default",
      inputmode: "decimal",
      "aria-label": label,
      "data-name": name,
    });
    const range = slider
      ? h("input", { type: "range", min, max, step, "aria-label": `${label}, slider`, tabindex: -1 })
      : null;
    const show = () => {
      const value = this.settings[name];
      number.value = value ?? "";
      if (range) {
        range.value = value ?? (name === "temperature" ? 1 : max);
        range.classList.toggle("unset", value === null);
      }
    };
    number.addEventListener("input", () => {
      const valid = number.value === "" ? !number.validity.badInput : number.validity.valid;
      number.classList.toggle("wrong", !valid);
      if (!valid) return;
      this.set(name, number.value === "" ? null : Number(number.value));
      if (range) {
        range.value = this.settings[name] ?? range.max;
        range.classList.toggle("unset", this.settings[name] === null);
      }
    });
    range?.addEventListener("input", () => {
      number.classList.remove("wrong");
      this.set(name, Number(range.value));
      show();
    });
    this.inputs.push(show);
    show();
    return h(
      "label",
      { class: "setting", title: help },
      h("span", { class: "setting-name" }, label),
      number,
      range,
      h("span", { class: "setting-help" }, help),
    );
  }

  reset() {
    const { mode } = this.settings;
    Object.assign(this.settings, DEFAULTS, { mode });
    saveSettings(this.settings);
    this.system.value = "";
    for (const show of this.inputs) show();
    for (const input of this.root.querySelectorAll(".wrong")) input.classList.remove("wrong");
  }
}
