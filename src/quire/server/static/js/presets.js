// Named sets of settings, kept in this browser: chosen, saved under a name, deleted. Which one is in use is not kept
// anywhere: it is the one whose settings are those that are set.

import { fill, h, toast } from "./dom.js";
import { DEFAULTS, loadPresets, savePreset } from "./store.js";

const COMPARED = Object.keys(DEFAULTS).filter((name) => name !== "mode"); // what a preset sets

export class Presets {
  /** `read()` gives the settings that are set, `take(settings, said)` sets others, and tells so. */
  constructor({ read, take }) {
    this.read = read;
    const choose = () => {
      const { value } = this.field;
      const found = loadPresets().get(value);
      if (found) take(found, `"${value}" was chosen.`);
      else this.show(); // another tab has deleted it
    };
    const remove = () => {
      this.keep(this.field.value, null, "deleted");
      this.field.focus();
    };
    this.field = h("select", { class: "field", id: "preset", "aria-describedby": "preset-help", onchange: choose });
    this.deletion = h("button", { class: "button small", type: "button", onclick: remove }, "Delete");
    this.root = h(
      "div",
      { class: "setting" },
      h("label", { class: "setting-name", for: "preset" }, "Preset"),
      this.field,
      h("span", { class: "setting-help", id: "preset-help" }, "Sets all that stands below. Kept in this browser"),
      h(
        "div",
        { class: "setting-actions" },
        h("button", { class: "button small", type: "button", onclick: () => this.askForName() }, "Save as ..."),
        this.deletion,
      ),
    );
  }

  /** The name of the preset in use, of several that are the same the `preferred` one; null if what is set is none. */
  chosen(preferred = this.field.value) {
    const set = this.read();
    const isSet = ([, settings]) => COMPARED.every((name) => settings[name] === set[name]);
    const names = [...loadPresets()].filter(isSet).map(([name]) => name);
    return names.includes(preferred) ? preferred : (names[0] ?? null);
  }

  show(preferred) {
    const chosen = this.chosen(preferred);
    const names = [...loadPresets().keys()];
    const none = h("option", { value: "", disabled: true }, names.length ? "None" : "None saved");
    fill(this.field, none, ...names.map((name) => h("option", { value: name }, name)));
    this.field.value = chosen ?? "";
    this.deletion.disabled = !this.field.value;
  }

  /** Keep these settings under a name, or nothing (null); what was there before can be brought back. */
  keep(name, settings, done) {
    const put = (all) => {
      try {
        savePreset(name, all);
      } catch (error) {
        toast(`"${name}" is not kept: ${error.message}.`);
        return false;
      }
      this.show(name);
      return true;
    };
    const before = loadPresets().get(name) ?? null;
    if (put(settings)) toast(`"${name}" was ${done ?? (before ? "replaced" : "saved")}.`, "Undo", () => put(before));
  }

  askForName() {
    const field = h("input", { class: "field", id: "preset-name", required: true, pattern: ".*\\S.*", maxlength: 60, autocomplete: "off" });
    const save = (event) => {
      event.preventDefault();
      dialog.close();
      this.keep(field.value.trim(), this.read());
    };
    const dialog = h(
      "dialog",
      { class: "sheet-dialog", id: "preset-dialog", "aria-labelledby": "preset-title", onclose: () => dialog.remove() },
      h(
        "form",
        { onsubmit: save },
        h("h2", { id: "preset-title" }, "Save as a preset"),
        h("p", {}, "The parameters as they are set now. A preset that has the same name is replaced."),
        h("label", { class: "setting-name", for: "preset-name" }, "Name"),
        field,
        h(
          "div",
          { class: "row" },
          h("button", { class: "button", type: "button", onclick: () => dialog.close() }, "Cancel"),
          h("button", { class: "button primary", type: "submit" }, "Save"),
        ),
      ),
    );
    document.body.append(dialog);
    dialog.showModal();
  }
}
