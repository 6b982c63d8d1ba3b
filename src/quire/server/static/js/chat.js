// The chat: conversations at the side, the thread, and the composer.

import { Announcer } from "./announce.js";
import { Attachments } from "./attachments.js";
import { fill, h, icon, iconButton, segments, setText, sign, toast } from "./dom.js";
import { exportJson } from "./export.js";
import { count } from "./format.js";
import { Generation } from "./generate.js";
import { fieldOf, MessageElement } from "./messages.js";
import { SettingsPanel } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import {
  deleteConversation,
  loadSettings,
  newConversation,
  saveConversation,
  saveSettings,
} from "./store.js";
import {
  add,
  branch,
  failed,
  giveResults,
  leaveOutOldest,
  path,
  removeTurn,
  setResults,
  showThrough,
  turns,
  versions,
} from "./thread.js";

const EXAMPLES = {
  chat: [
    "Write a function that reverses the words of a sentence.",
    "What is a generator in Python?",
    "Explain what a prefix cache does, in three sentences.",
  ],
  completion: ["def fibonacci(n):\n    ", "import os\n\ndef find_files(folder, suffix):\n    ", "class Stack:\n    def push(self, item):\n        "],
};
const SAVE_EVERY = 1500; // milliseconds, while an answer grows

export class ChatView {
  /** `conversations`: those that were kept, newest first. */
  constructor(root, server, conversations) {
    this.root = root;
    this.server = server;
    this.lastUsed = loadSettings(); // what new conversations begin with
    this.conversations = conversations;
    this.unkept = false; // what was last to be kept could not be, and that was told
    this.generations = new Map(); // by conversation id: those that run
    this.saved = 0;
    this.following = true; // the thread is at its end, and is kept there while it grows
    this.build();
    this.open(this.conversations[0] || null);
    server.onChange(() => this.meet());
    addEventListener("pagehide", () =>
      this.conversations.forEach((one) => this.generations.has(one.id) && this.save(one)),
    );
  }

  show() {
    if (!this.coarse) this.input.focus({ preventScroll: true });
    this.scroll(true);
  }

  hide() {}

  /** Go to the search of conversations. */
  find() {
    this.showPanel("side", true);
    this.sidebar.search.focus();
  }

  // -- building -------------------------------------------------------------------------------------------

  build() {
    this.coarse = matchMedia("(pointer: coarse)").matches;
    this.sidebar = new Sidebar(this);
    this.announcer = new Announcer();
    this.title = h("h1", { class: "for-readers" });
    this.thread = h("div", { class: "thread" });
    this.scroller = h("div", { class: "scroller", tabindex: 0, role: "region", "aria-label": "Thread" }, this.thread);
    this.panel = new SettingsPanel({
      onClose: () => this.showPanel("settings", false),
      onChange: (conversation) => this.keepSettings(conversation),
    });
    this.jump = h(
      "button",
      { class: "jump", type: "button", "aria-label": "To the end", hidden: true, onclick: () => this.scroll(true) },
      "\u2193",
    );
    this.scroller.addEventListener(
      "scroll",
      () => {
        this.following = this.atEnd();
        this.jump.hidden = this.following;
      },
      { passive: true },
    );
    this.shade = h("div", { class: "shade", onclick: () => this.hidePanels() });
    this.root.addEventListener("keydown", ({ key, target }) => {
      if (key !== "Escape") return;
      if (this.shade.checkVisibility()) this.hidePanels();
      else if (target.closest(".middle")) this.stop();
    });
    fill(
      this.root,
      this.sidebar.root,
      h("section", { class: "middle", "aria-label": "Conversation" }, this.title, this.scroller, this.jump, this.composer()),
      this.panel.root,
      this.shade,
      this.announcer.root,
    );
    this.showPanel("side", false);
    this.showPanel("settings", matchMedia("(min-width: 1240px)").matches);
  }

  composer() {
    this.input = h("textarea", { id: "prompt", rows: 1, "aria-label": "Message" });
    this.input.addEventListener("input", () => this.grow());
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || this.coarse) return;
      event.preventDefault();
      if (!this.generations.has(this.conversation.id)) this.submit();
    });
    this.modes = segments(
      [
        ["chat", "Chat"],
        ["completion", "Complete"],
      ],
      "chat",
      (mode) => this.setMode(mode),
      "How the text is used",
    );
    this.hint = h("span", { class: "hint" });
    this.sendButton = h("button", { class: "send", id: "send", type: "submit" });
    const toggle = (panel) => () => this.showPanel(panel, !this.root.classList.contains(`with-${panel}`));
    this.toggles = {
      side: iconButton("list", "Conversations", toggle("side"), "side-toggle"),
      settings: iconButton("sliders", "Parameters", toggle("settings")),
    };
    const submit = (event) => {
      event.preventDefault();
      if (this.generations.has(this.conversation.id)) this.stop();
      else this.submit();
    };
    this.attachments = new Attachments();
    const form = h(
      "form",
      { class: "composer", onsubmit: submit },
      this.attachments.root,
      this.input,
      h(
        "div",
        { class: "composer-row" },
        this.toggles.side,
        this.modes,
        this.toggles.settings,
        this.attachments.button,
        this.attachments.field,
        this.hint,
        this.sendButton,
      ),
    );
    this.attachments.receive(form);
    return form;
  }

  /** Show or hide what stands at a side; in a narrow window it lies over the thread, with a shade around it. */
  showPanel(panel, on) {
    this.root.classList.toggle(`with-${panel}`, on);
    this.toggles[panel].setAttribute("aria-expanded", String(on));
  }

  hidePanels() {
    const [open] = Object.keys(this.toggles).filter((panel) => this.root.classList.contains(`with-${panel}`));
    for (const panel of Object.keys(this.toggles)) this.showPanel(panel, false);
    this.toggles[open]?.focus();
  }

  // -- showing --------------------------------------------------------------------------------------------

  /** Show a conversation; null begins a new one. */
  open(conversation) {
    this.conversation = conversation || newConversation(this.lastUsed);
    this.showPanel("side", false);
    this.panel.open(this.conversation);
    this.showMode();
    this.drawThread();
    this.sidebar.draw();
    this.showServer();
    if (!this.coarse) this.input.focus({ preventScroll: true });
  }

  drawThread() {
    this.elements = new Map();
    setText(this.title, this.conversation.title || "New conversation");
    const messages = path(this.conversation);
    if (!messages.length) {
      fill(this.thread, this.welcome());
      return;
    }
    const actions = this.actions();
    const leftOut = turns(this.conversation).findLast((turn) => turn[0].leftOut)?.at(-1);
    fill(this.thread);
    messages.forEach((message, index) => {
      const next = messages[index + 1];
      if (message.role === "user" && next?.mode === "completion") return; // shown with its continuation
      const name = message.role === "user" ? "You" : this.server.model || "Answer";
      const element = new MessageElement(message, actions, name, messages[index - 1]?.content);
      this.elements.set(message, element);
      this.thread.append(element.root);
      if (message === leftOut) this.thread.append(this.cut());
    });
    this.scroll(true);
  }

  /** The line below the turns that are not sent any more. */
  cut() {
    const takeBack = () => {
      for (const message of this.conversation.messages) message.leftOut = false;
      this.save(this.conversation);
      this.drawThread();
    };
    return h(
      "p",
      { class: "cut" },
      h("span", {}, "What is above is no longer sent to the model. "),
      h("button", { class: "link", type: "button", onclick: takeBack }, "Send it again"),
    );
  }

  welcome() {
    const { mode } = this;
    const use = (text) => () => {
      this.input.value = text;
      this.grow();
      this.input.focus();
    };
    this.welcomeTitle = h("h1", {});
    this.welcomeAbout = h("p", { class: "about" });
    const text =
      mode === "chat"
        ? "It runs on this server; nothing that you write is sent anywhere else."
        : "Write the beginning of a text; the model continues it.";
    return h(
      "div",
      { class: "welcome" },
      sign(),
      this.welcomeTitle,
      this.welcomeAbout,
      h("p", {}, text),
      h(
        "div",
        { class: "examples" },
        ...EXAMPLES[mode].map((example) =>
          h(
            "button",
            { type: "button", class: mode === "chat" ? "" : "code", onclick: use(example) },
            example.trimEnd(),
          ),
        ),
      ),
    );
  }

  showServer() {
    const running = this.generations.has(this.conversation.id);
    this.sendButton.disabled = !running && !this.server.ready;
    this.sendButton.title = running ? "Stop (Escape)" : "Send";
    this.sendButton.setAttribute("aria-label", running ? "Stop" : "Send");
    this.sendButton.classList.toggle("stop", running);
    fill(this.sendButton, icon(running ? "stop" : "send"));
    const chat = this.mode === "chat";
    this.input.placeholder = chat ? `Message ${this.server.model || "the model"}` : "Text to continue";
    if (this.welcomeTitle)
      setText(
        this.welcomeTitle,
        this.server.model ? `${chat ? "Talk to" : "Write with"} ${this.server.model}` : "Quire",
      );
    if (this.welcomeAbout) {
      setText(this.welcomeAbout, this.server.description ? `This is ${this.server.description}.` : "");
      this.welcomeAbout.hidden = !this.server.description;
    }
    setText(this.hint, this.contextHint());
  }

  /** How what is written is used: as was chosen, else as suits the model. Embedded ones only complete. */
  showMode() {
    const mode = this.conversation.settings.mode ?? (this.server.description ? "completion" : "chat");
    if (mode === this.mode) return;
    this.mode = mode;
    this.modes.press(mode);
    if (!this.conversation.messages.length) this.drawThread();
  }

  /** The server is another one, or in another state. */
  meet() {
    this.showMode();
    this.panel.meet(this.server.defaults, this.server.suggested);
    this.showServer();
  }

  contextHint() {
    if (this.generations.has(this.conversation.id)) return this.coarse ? "" : "Escape stops";
    const { stats } = path(this.conversation).at(-1) || {};
    if (!stats?.prompt) return this.coarse ? "" : "Enter sends, Shift+Enter starts a new line";
    const used = count(stats.prompt + stats.output);
    return this.server.maxModelLength
      ? `${used} of ${count(this.server.maxModelLength)} tokens of context`
      : `${used} tokens`;
  }

  grow() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight, 0.4 * innerHeight)}px`;
  }

  atEnd() {
    return this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < 60;
  }

  scroll(force) {
    if (force || this.following) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  // -- doing ----------------------------------------------------------------------------------------------

  actions() {
    const { conversation } = this;
    const turnOf = (message) => turns(conversation).find((turn) => turn.includes(message));
    const redraw = () => {
      this.save(conversation);
      this.drawThread();
      this.showServer();
      if (document.activeElement === document.body) this.scroller.focus({ preventScroll: true }); // what had it is gone
    };
    return {
      isBusy: () => this.generations.has(conversation.id),
      isLast: (message) => conversation.leaf === message.key && !this.generations.has(conversation.id),
      isLeftOut: (message) => {
        const turn = turnOf(message);
        return Boolean(turn) && !turn.some((one) => one.running) && (turn[0].leftOut || failed(turn));
      },
      versions: (message) => versions(conversation, message),
      show: (message) => {
        showThrough(conversation, message.key);
        redraw();
      },
      retry: (message) => this.retry(message, message.mode),
      complete: (message) => {
        this.setMode("completion");
        this.retry(message, "completion");
      },
      goOn: (message) => this.answer(message),
      keep: (message) => {
        Object.assign(message, { error: null, finish: "stopped" });
        redraw();
      },
      canLeaveOut: () => turns(conversation).some((turn, index, all) => index < all.length - 1 && !turn[0].leftOut && !failed(turn)),
      leaveOutOldest: (message) => {
        leaveOutOldest(conversation);
        this.retry(message, message.mode);
      },
      sendEdited: (message, text) => {
        const question = turnOf(message)[0];
        const parent = conversation.messages.find((one) => one.key === question.parent) ?? null;
        this.ask(text, question.files, parent);
      },
      saveEdited: (message, text) => {
        message.content = text;
        if (message.role === "assistant") Object.assign(message, { finish: "edited", stats: null, error: null });
        redraw();
      },
      keepDraft: () => this.save(conversation),
      sendResults: (message, results) => {
        if (this.generations.has(conversation.id)) return;
        this.answer(add(conversation, blank(message.mode), giveResults(conversation, message, results)));
        (this.coarse ? this.scroller : this.input).focus({ preventScroll: true });
      },
      saveResults: (message, results) => {
        setResults(message, results);
        redraw();
      },
      showSetting: (name) => {
        this.showPanel("settings", true);
        this.panel.show(name);
      },
      branch: (message) => this.take([branch(conversation, message)]),
      trace: (message) => {
        location.hash = `#live/${encodeURIComponent(message.id)}`;
      },
      removeTurn: (message) => {
        const before = structuredClone(conversation);
        removeTurn(conversation, turnOf(message)[0]);
        if (!conversation.messages.length) return this.remove(conversation, before);
        redraw();
        toast("The turn was deleted.", "Undo", () => {
          this.generations.get(conversation.id)?.stop();
          Object.assign(conversation, before);
          this.save(conversation);
          if (conversation === this.conversation) this.open(conversation);
        });
      },
      drawn: () => this.scroll(false),
    };
  }

  setMode(mode) {
    this.conversation.settings.mode = mode;
    this.keepSettings(this.conversation);
    this.showMode();
    this.showServer();
  }

  /** End the answer that is being written here, if there is one. */
  stop() {
    this.generations.get(this.conversation.id)?.stop();
  }

  submit() {
    const text = this.input.value;
    if (!(text.trim() || this.attachments.files.length) || !this.server.ready) return;
    this.input.value = "";
    this.grow();
    this.ask(text, this.attachments.take());
  }

  /** Ask at the end of the thread, or below `parent`: then it is another version of what follows that. */
  ask(text, files = [], parent = path(this.conversation).at(-1) ?? null) {
    const { conversation } = this;
    if (this.generations.has(conversation.id)) return;
    conversation.title ||= (text.trim() || files[0].name).replace(/\s+/g, " ").slice(0, 60);
    const question = add(conversation, { role: "user", content: text, ...(files.length ? { files } : {}) }, parent);
    if (!this.conversations.includes(conversation)) this.conversations.unshift(conversation);
    this.answer(add(conversation, blank(this.mode), question));
  }

  /** Another answer beside this one; one that failed is replaced. */
  retry(old, mode) {
    const { conversation } = this;
    if (this.generations.has(conversation.id)) return;
    const question = conversation.messages.find((one) => one.key === old.parent);
    if (old.error) conversation.messages = conversation.messages.filter((one) => one !== old);
    this.answer(add(conversation, blank(mode), question));
  }

  /** Write an answer, which is at the end of the thread, or write it on. */
  async answer(message) {
    const { conversation } = this;
    if (this.generations.has(conversation.id)) return;
    conversation.updated = Date.now();
    this.keepSettings(conversation);
    const generation = new Generation(conversation, message, this.inEffect(), this.server.model);
    this.generations.set(conversation.id, generation);
    message.running = true;
    this.drawThread();
    this.sidebar.draw();
    this.showServer();
    await generation.run(() => this.changed(conversation, message));
    this.generations.delete(conversation.id);
    this.ended(conversation, message);
  }

  /** The settings, with what is suggested for those that are not set. */
  inEffect() {
    const { suggested } = this.server;
    const { settings } = this.conversation;
    const unset = Object.keys(suggested).filter((name) => settings[name] === null);
    return { ...settings, ...Object.fromEntries(unset.map((name) => [name, suggested[name]])) };
  }

  changed(conversation, message) {
    if (Date.now() - this.saved > SAVE_EVERY) {
      this.saved = Date.now();
      this.save(conversation);
    }
    if (conversation !== this.conversation) return;
    this.elements.get(message)?.update();
    this.announcer.follow(message);
  }

  ended(conversation, message) {
    conversation.updated = Date.now();
    this.save(conversation);
    if (message.error?.status === 401) this.server.lock();
    else if (message.error && [0, 503].includes(message.error.status)) this.server.poll();
    if (conversation === this.conversation) {
      for (const element of this.elements.values()) element.draw();
      this.showServer();
      if (message.error) this.panel.refuse(fieldOf(message.error)[0], message.error.message);
    }
    this.sidebar.draw();
  }

  async save(conversation) {
    if (!this.conversations.includes(conversation)) return; // nothing was said yet, or it was deleted while it ran
    try {
      await saveConversation(conversation);
      this.unkept = false;
    } catch (error) {
      if (this.unkept) return;
      this.unkept = true;
      const why = error?.name === "QuotaExceededError" ? "the browser's storage is full" : (error?.message ?? "unknown");
      toast(`This conversation is not kept: ${why}.`, "Export it", () => exportJson([conversation], conversation.title));
    }
  }

  /** A conversation's settings were changed or used: they are kept with it, and new ones begin with them. */
  keepSettings(conversation) {
    this.lastUsed = conversation.settings;
    saveSettings(this.lastUsed);
    this.save(conversation);
  }

  /** Take in conversations (a branch, a file's), and show the first. */
  take(conversations) {
    this.conversations = [...conversations, ...this.conversations];
    for (const one of conversations) this.save(one);
    this.open(conversations[0]);
  }

  retitle(conversation, title) {
    conversation.title = title;
    this.save(conversation);
    if (conversation === this.conversation) setText(this.title, title);
  }

  /** Delete a conversation; undoing brings it back as it was `before`. */
  remove(conversation, before = conversation) {
    this.generations.get(conversation.id)?.stop();
    this.conversations = this.conversations.filter((one) => one !== conversation);
    deleteConversation(conversation.id);
    if (conversation === this.conversation) this.open(this.conversations[0] || null);
    else this.sidebar.draw();
    toast(`"${conversation.title || "Untitled"}" was deleted.`, "Undo", () => {
      this.conversations = [before, ...this.conversations].sort((a, b) => b.updated - a.updated);
      this.save(before);
      this.open(before);
    });
  }
}

function blank(mode) {
  return { role: "assistant", mode: mode || "chat", content: "", finish: null };
}
