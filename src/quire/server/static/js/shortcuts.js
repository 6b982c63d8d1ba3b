// Keyboard shortcuts, and the list of them. Those of a single key can be turned off (WCAG 2.1.4): speech input types.

import { h } from "./dom.js";

const OFF = "quire.shortcuts-off";
const SINGLE = { "/": "message", n: "new", s: "search" };
const LIST = [
  ["Enter", "Send the message"],
  ["Shift + Enter", "Start a new line"],
  ["Ctrl + Enter", "Finish editing a message, or give the results of tool calls"],
  ["Escape", "Stop the answer, or close what is open"],
  ["/", "Go to the message field"],
  ["n", "New conversation"],
  ["s", "Search conversations"],
  ["?", "Show this list"],
];

function areOff() {
  try {
    return localStorage.getItem(OFF) !== null;
  } catch {
    return false;
  }
}

function turn(on) {
  try {
    if (on) localStorage.removeItem(OFF);
    else localStorage.setItem(OFF, "1");
  } catch {
    // not kept
  }
}

/** Listen. `actions` by name, which are taken while `active()`. */
export function onShortcuts(actions, active) {
  document.addEventListener("keydown", (event) => {
    const { key, target, ctrlKey, metaKey, altKey } = event;
    if (ctrlKey || metaKey || altKey || areOff() || document.querySelector("dialog[open]")) return;
    if (target.closest("input, textarea, select, [role=menu]")) return;
    if (key === "?") askForShortcuts();
    else if (SINGLE[key] && active()) actions[SINGLE[key]]();
    else return;
    event.preventDefault();
  });
}

/** Show the list. */
export function askForShortcuts() {
  const single = h("input", { type: "checkbox", checked: !areOff(), onchange: () => turn(single.checked) });
  const dialog = h(
    "dialog",
    { class: "sheet-dialog", id: "shortcuts-dialog", "aria-labelledby": "shortcuts-title", onclose: () => dialog.remove() },
    h("h2", { id: "shortcuts-title" }, "Keyboard shortcuts"),
    h("dl", { class: "shortcuts" }, ...LIST.flatMap(([keys, what]) => [h("dt", {}, h("kbd", {}, keys)), h("dd", {}, what)])),
    h("label", { class: "check" }, single, "Shortcuts of a single key"),
    h("div", { class: "row" }, h("button", { class: "button primary", type: "button", onclick: () => dialog.close() }, "Close")),
  );
  document.body.append(dialog);
  dialog.showModal();
}
