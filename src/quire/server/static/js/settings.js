// The panel of parameters: the settings of the conversation that is open. An empty field means the server's default, which
// is shown: then nothing is sent.

import { fill, h, iconButton, toast } from "./dom.js";
import { Presets } from "./presets.js";
import { DEFAULTS } from "./store.js";
import { choicesOf, EXAMPLE, toolsOf } from "./tools.js";

/** The longest continuation of a text, unless another one is set: a model of texts may never end. */
export const COMPLETION_TOKENS = 256;

const FIELDS = [
  ["temperature", "Temperature", { max: 2, step: 0.05 }, "0 always takes the likeliest token; higher is more varied"],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01 }, "Keep the most likely tokens whose probabilities add up to this"],
  ["top_k", "Top k", { max: 1000000, slides: 200 }, "Keep this many of the most likely tokens; 0 keeps all"],
  ["min_p", "Min p", { max: 1, step: 0.01 }, "Drop tokens below this fraction of the top token's probability"],
  ["max_tokens", "Longest answer", { min: 1, max: 10000000, slides: 0 }, `In tokens; empty: up to the end of the context, or ${COMPLETION_TOKENS} when completing a text`],
  ["seed", "Seed", { max: Number.MAX_SAFE_INTEGER, slides: 0 }, "The same seed gives the same answer"],
];
const PENALTIES = [
  ["repetition_penalty", "Repetition", { min: 0.1, max: 2, step: 0.05 }, "Above 1: tokens that have occurred become less likely"],
  ["presence_penalty", "Presence", { min: -2, max: 2, step: 0.1 }, "Subtracted from the logits of tokens that have occurred"],
  ["frequency_penalty", "Frequency", { min: -2, max: 2, step: 0.1 }, "Subtracted once per occurrence"],
];
const EFFORTS = [["", "The model's own"], ["none", "No reasoning"], ["low", "Low"], ["medium", "Medium"], ["high", "High"]];
const BUDGET = [
  "thinking_token_budget",
  "At most",
  { max: 10000000, slides: 0 },
  "In tokens; then the model must answer. Empty: no limit",
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
  /** `onChange(conversation)`: its settings were changed. */
  constructor({ onClose, onChange }) {
    this.conversation = { settings: { ...DEFAULTS } };
    this.onChange = onChange;
    this.defaults = {};
    this.suggested = {};
    this.shown = []; // functions that show what is set
    this.judges = {}; // by field: says what is wrong with it, or what the server says
    this.presets = new Presets({ read: () => this.settings, take: (settings, said) => this.take(settings, said) });
    this.shown.push(() => this.presets.show());
    const system = this.text("system", "System message", { rows: 4, placeholder: "None" });
    const stop = this.text("stop", "Stop at", { rows: 2, placeholder: "None", mono: true }, "One string per line; \\n stands for a line break");
    const schema = this.text(
      "schema",
      "JSON schema",
      { rows: 3, placeholder: '{"type": "object", ...}', mono: true },
      "The answer will be JSON that conforms to it",
      (value) => schemaOf(value),
    );
    this.root = h(
      "aside",
      { class: "settings", "aria-label": "Parameters" },
      h(
        "div",
        { class: "panel-head" },
        h("h2", {}, "Parameters"),
        h("button", { class: "button small", type: "button", onclick: () => this.take(DEFAULTS, "The parameters were reset.") }, "Reset"),
        iconButton("close", "Close", onClose, "panel-close"),
      ),
      this.presets.root,
      system,
      ...FIELDS.map((field) => this.number(...field)),
      stop,
      h(
        "details",
        { class: "setting-group" },
        h("summary", {}, "Reasoning"),
        this.choice("reasoning_effort", "Effort", () => EFFORTS, "For chats, if the model's template supports it"),
        this.number(...BUDGET),
      ),
      h("details", { class: "setting-group" }, h("summary", {}, "Penalties"), ...PENALTIES.map((field) => this.number(...field))),
      h("details", { class: "setting-group" }, h("summary", {}, "Structured output"), schema),
      this.tools(),
    );
    for (const show of this.shown) show();
  }

  get settings() {
    return this.conversation.settings;
  }

  /** The model's own defaults, which unset fields mean, and what is sent instead of some. */
  meet(defaults, suggested) {
    this.defaults = { ...defaults, ...suggested };
    this.suggested = suggested;
    for (const show of this.shown) show();
  }

  /** Another conversation is open, or its settings are others; what is set does not lie folded. */
  open(conversation) {
    this.conversation = conversation;
    for (const show of this.shown) show();
    const isSet = ({ dataset: { name } }) => this.settings[name] !== DEFAULTS[name];
    for (const box of this.root.querySelectorAll("details")) box.open ||= [...box.querySelectorAll("[data-name]")].some(isSet);
  }

  /** Unfold a field, and put the cursor there. */
  show(name) {
    const field = this.root.querySelector(`[data-name=${name}]`);
    for (const box of this.root.querySelectorAll("details")) box.open ||= box.contains(field);
    field.focus();
  }

  /** What the server says against a field's text; it stands there until the text is changed. */
  refuse(name, message) {
    this.judges[name]?.(message);
  }

  set(name, value) {
    this.settings[name] = value;
    this.onChange(this.conversation);
    this.presets.show();
  }

  /** Set all that stands here at once. What was set is lost then, unless a preset has it; so that can be undone. */
  take(settings, said) {
    const { conversation } = this;
    const before = conversation.settings;
    const put = (all) => {
      conversation.settings = { ...all, mode: conversation.settings.mode };
      this.onChange(conversation);
      if (conversation === this.conversation) this.open(conversation);
    };
    const isKept = this.presets.chosen() !== null;
    put(settings);
    if (!isKept) toast(said, "Undo", () => put(before));
  }

  /** What may be called, and whether it must be. */
  tools() {
    const help = "In OpenAI's format. You enter the results of calls yourself";
    const list = this.text("tools", "List of functions", { rows: 9, placeholder: '[{"type": "function", ...}]', mono: true }, help, toolsOf);
    const area = list.querySelector("textarea");
    const insert = () => {
      area.value = EXAMPLE;
      area.dispatchEvent(new Event("input"));
      area.focus();
    };
    const example = h("p", { class: "setting-more" }, h("button", { class: "link", type: "button", onclick: insert }, "Insert an example"));
    const choice = this.choice(
      "toolChoice",
      "Tool choice",
      () => choicesOf(this.settings.tools, this.settings.toolChoice),
      "For the first reply to a message; with results, the model decides",
    );
    const showChoice = this.shown.at(-1);
    const showExample = () => {
      example.hidden = Boolean(this.settings.tools.trim());
    };
    area.addEventListener("input", () => {
      showChoice();
      showExample();
    });
    this.shown.push(showExample);
    return h("details", { class: "setting-group" }, h("summary", {}, "Tools"), list, example, choice);
  }

  /** A field for text; `check` throws for what is not allowed. */
  text(name, label, { rows, placeholder, mono }, help, check) {
    const id = `setting-${name}`;
    const area = h("textarea", { class: `field${mono ? " mono" : ""}`, id, rows, placeholder, "data-name": name, spellcheck: mono ? "false" : null });
    const note = help && h("span", { class: "setting-help", id: `${id}-help` }, help);
    if (note) area.setAttribute("aria-describedby", note.id);
    const judge = (refusal = "") => {
      let wrong = refusal;
      try {
        check?.(area.value);
      } catch (error) {
        wrong = `Not valid: ${error.message}`;
      }
      mark(area, Boolean(wrong));
      if (!note) return;
      note.textContent = wrong || help;
      note.classList.toggle("wrong", Boolean(wrong));
    };
    this.judges[name] = judge;
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

  /** A field for one of `options()`: [[value, label], ...]. */
  choice(name, label, options, help) {
    const id = `setting-${name}`;
    const field = h("select", { class: "field", id, "data-name": name, "aria-describedby": `${id}-help` });
    field.addEventListener("change", () => this.set(name, field.value));
    this.shown.push(() => {
      fill(field, ...options().map(([value, text]) => h("option", { value }, text)));
      field.value = this.settings[name];
    });
    return h(
      "div",
      { class: "setting" },
      h("label", { class: "setting-name", for: id }, label),
      field,
      h("span", { class: "setting-help", id: `${id}-help` }, help),
    );
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
    const note = h("span", { class: "setting-help", id: `${id}-help` }, help);
    const range = slides ? h("input", { type: "range", min, max: slides, step, "aria-label": `${label}, slider` }) : null;
    const show = () => {
      const value = this.settings[name];
      const usual = this.defaults[name] ?? NEUTRAL[name];
      number.placeholder = usual ?? (name === "seed" ? "random" : "none");
      if (document.activeElement !== number || Number(number.value) !== value) number.value = value ?? "";
      mark(number, false);
      const why = `${usual} if you set none: the model is small, and its files give none`;
      note.textContent = name in this.suggested ? `${help}. ${why}` : help;
      if (!range) return;
      range.value = value ?? usual;
      range.classList.toggle("unset", value === null);
      range.setAttribute("aria-valuetext", value === null ? `${usual}, the default` : `${value}`);
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
      note,
    );
  }
}

function mark(field, wrong) {
  field.classList.toggle("wrong", wrong);
  field.setAttribute("aria-invalid", String(wrong));
}
