// Ties the page together: views by hash, the server's state, the theme, the key.

import { apiKey, getJson, health, setApiKey, ServerError } from "./api.js";
import { ChatView } from "./chat.js";
import { fill, h, icon, setText, sign } from "./dom.js";
import { LiveView } from "./live/live.js";
import { askForShortcuts, onShortcuts } from "./shortcuts.js";
import { loadConversations } from "./store.js";

const $ = (id) => document.getElementById(id);

/** What all views know of the server. Views subscribe with `onChange`. */
class Server {
  constructor() {
    this.state = "connecting"; // connecting | loading | ok | restarting | stalled | failed | draining | unreachable | locked
    this.health = null;
    this.model = null;
    this.maxModelLength = null;
    this.defaults = {}; // what unset sampling parameters mean
    this.suggested = {}; // what is sent for unset ones: it suits people better
    this.description = null; // of a model that ships with Quire
    this.listeners = [];
    this.timer = null;
  }

  onChange(listener) {
    this.listeners.push(listener);
  }

  get ready() {
    return this.state === "ok";
  }

  /** Ask now, and from then on at a pace that fits the state. `key`: there is a new one. */
  async poll(key = false) {
    clearTimeout(this.timer);
    const found = await health();
    this.health = found;
    let state = found ? found.status : "unreachable";
    if (state === "ok" && (!this.ready || key))
      state = this.state === "locked" && !key ? "locked" : await this.identify(); // it may be another server by now
    if (key || state !== this.state || state === "loading" || state === "restarting") this.become(state);
    clearTimeout(this.timer);
    const pace = state === "ok" ? 5000 : state === "locked" ? 15000 : 500;
    this.timer = setTimeout(() => this.poll(), document.hidden ? 4 * pace : pace);
  }

  become(state) {
    this.state = state;
    for (const listener of this.listeners) listener(this);
  }

  /** A call was answered 401: the key is needed, or is not the right one any more. */
  lock() {
    this.become("locked");
  }

  /** Learn the model's name; this is the first call that needs a key. */
  async identify() {
    try {
      const [model] = (await getJson("/v1/models")).data;
      this.model = model.id;
      this.maxModelLength = model.max_model_len ?? null;
      this.defaults = model.sampling_defaults ?? {};
      this.suggested = model.sampling_suggestions ?? {};
      this.description = model.description ?? null;
      return "ok";
    } catch (error) {
      if (!(error instanceof ServerError)) throw error;
      return error.status === 401 ? "locked" : error.status === 503 ? "loading" : "unreachable";
    }
  }
}

const server = new Server();

// -- the key ----------------------------------------------------------------------------------------------

let keyDialog = null;

function askForKey() {
  if (keyDialog?.open) return;
  const wrong = apiKey() !== "";
  const field = h("input", {
    class: `field${wrong ? " wrong" : ""}`,
    type: "password",
    name: "key",
    autocomplete: "off",
    "aria-label": "API key",
    placeholder: "API key",
  });
  const remember = h("input", { type: "checkbox" });
  const submit = (event) => {
    event.preventDefault();
    setApiKey(field.value.trim(), remember.checked);
    keyDialog.close();
    server.poll(true);
  };
  keyDialog = h(
    "dialog",
    { class: "sheet-dialog", id: "key-dialog", onclose: (event) => event.target.remove() },
    h(
      "form",
      { onsubmit: submit },
      h("h2", {}, wrong ? "The key was not accepted" : "This server requires a key"),
      h(
        "p",
        {},
        "It was started with --api-key. The key is sent to this server only, and kept for this tab unless you say otherwise.",
      ),
      field,
      h("label", { class: "check" }, remember, "Remember it in this browser"),
      h("div", { class: "row" }, h("button", { class: "button primary", type: "submit" }, icon("key"), "Continue")),
    ),
  );
  document.body.append(keyDialog);
  keyDialog.showModal();
}

// -- the server's state, on the page ----------------------------------------------------------------------

const TEXTS = {
  connecting: ["busy", "connecting"],
  loading: ["busy", "loading"],
  restarting: ["busy", "restarting", "The engine is being restarted. Open answers continue when it is back."],
  stalled: ["bad", "stalled", "The engine has made no progress for a while. The server's log may say why.", "bad"],
  failed: ["bad", "failed", "The engine has failed and will not be restarted. The server's log says why.", "bad"],
  draining: [
    "busy",
    "shutting down",
    "The server is shutting down: running answers may finish, new requests are refused.",
  ],
  unreachable: ["bad", "unreachable", "The server cannot be reached. Trying again ...", "bad"],
  locked: ["busy", "key needed", "This server requires an API key. Click here to enter it."],
};

function showState() {
  const [tone, text, banner, kind] = TEXTS[server.state] || ["ok", server.model];
  $("status").dataset.state = tone;
  setText($("status-text"), text);
  $("status").title = server.ready ? `${server.model}: ready` : text;
  $("banner").hidden = !banner;
  if (banner) {
    setText($("banner"), banner);
    $("banner").dataset.kind = kind || "warn";
  }
  if (server.state === "locked") askForKey();
  if (server.ready) document.title = `${server.model} - Quire`;
  showLoading();
}

function showLoading() {
  const box = $("loading");
  box.hidden = server.state !== "loading";
  if (box.hidden) return;
  if (!box.firstChild) {
    const bar = h("i", { style: "width: 0" });
    fill(
      box,
      h(
        "div",
        { class: "loading-box" },
        sign(),
        h("h1", {}, "The model is loading"),
        h("p", { id: "loading-phase" }),
        h("div", { class: "progress" }, bar),
        h("div", { class: "loading-percent" }),
      ),
    );
  }
  const { phase = "starting", percent = 0 } = server.health || {};
  setText($("loading-phase"), phase);
  box.querySelector(".progress i").style.width = `${percent}%`;
  setText(box.querySelector(".loading-percent"), `${percent} %`);
}

// -- views ------------------------------------------------------------------------------------------------

const conversations = await loadConversations();
const views = { chat: new ChatView($("chat-view"), server, conversations), live: new LiveView($("live-view"), server) };

/** The hash is "#view" or "#view/detail". */
function showView() {
  const [name, detail] = location.hash.slice(1).split("/");
  const current = name in views ? name : "chat";
  for (const [other, view] of Object.entries(views)) {
    $(`${other}-view`).hidden = other !== current;
    if (other !== current) view.hide();
  }
  for (const link of document.querySelectorAll(".tabs a")) {
    if (link.dataset.view === current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  views[current].show(detail ? decodeURIComponent(detail) : null);
}

$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("quire.theme", root.dataset.theme);
  } catch {
    // not kept
  }
  dispatchEvent(new Event("themechange"));
});

onShortcuts({ message: () => views.chat.input.focus(), new: () => views.chat.open(null), search: () => views.chat.find() }, () => !$("chat-view").hidden);
$("shortcuts").addEventListener("click", askForShortcuts);
$("banner").addEventListener("click", () => server.state === "locked" && askForKey());
addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", () => document.hidden || server.poll());
server.onChange(showState);
showState();
showView();
server.poll();
