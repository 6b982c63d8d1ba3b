// The chat: conversations at the side, the thread, and the composer.

import { fill, h, icon, segments, setText, sign } from "./dom.js";
import { count } from "./format.js";
import { Generation } from "./generate.js";
import { MessageElement } from "./messages.js";
import { SettingsPanel } from "./settings.js";
import {
  deleteConversation,
  loadConversations,
  loadSettings,
  newConversation,
  saveConversation,
  saveSettings,
} from "./store.js";

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
  constructor(root, server) {
    this.root = root;
    this.server = server;
    this.settings = loadSettings();
    this.conversations = loadConversations();
    this.generations = new Map(); // by conversation id: those that run
    this.saved = 0;
    this.following = true; // the thread is at its end, and is kept there while it grows
    this.build();
    this.open(this.conversations[0] || null);
    server.onChange(() => this.meet());
    addEventListener("pagehide", () =>
      this.conversations.forEach((one) => this.generations.has(one.id) && saveConversation(one)),
    );
  }

  show() {
    if (!this.coarse) this.input.focus({ preventScroll: true });
    this.scroll(true);
  }

  hide() {}

  // -- building -------------------------------------------------------------------------------------------

  build() {
    this.coarse = matchMedia("(pointer: coarse)").matches;
    this.list = h("ul", { class: "conversations" });
    this.thread = h("div", { class: "thread" });
    this.scroller = h("div", { class: "scroller" }, this.thread);
    this.panel = new SettingsPanel(this.settings, () => this.root.classList.remove("with-settings"));
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
    const side = h(
      "aside",
      { class: "side", "aria-label": "Conversations" },
      h(
        "button",
        { class: "button new", type: "button", onclick: () => this.open(null) },
        icon("plus"),
        "New conversation",
      ),
      this.list,
    );
    const shade = h("div", { class: "shade", onclick: () => this.root.classList.remove("with-side", "with-settings") });
    fill(
      this.root,
      side,
      h("section", { class: "middle" }, this.scroller, this.jump, this.composer()),
      this.panel.root,
      shade,
    );
    if (matchMedia("(min-width: 1240px)").matches) this.root.classList.add("with-settings");
  }

  composer() {
    this.input = h("textarea", { id: "prompt", rows: 1, "aria-label": "Message" });
    this.input.addEventListener("input", () => this.grow());
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || this.coarse) return;
      event.preventDefault();
      if (!this.generations.has(this.conversation.id)) this.submit();
    });
    this.mode = segments(
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
    const toggle = (name) => () => this.root.classList.toggle(name);
    const submit = (event) => {
      event.preventDefault();
      const running = this.generations.get(this.conversation.id);
      if (running) running.stop();
      else this.submit();
    };
    return h(
      "form",
      { class: "composer", onsubmit: submit },
      this.input,
      h(
        "div",
        { class: "composer-row" },
        h(
          "button",
          {
            class: "icon-button side-toggle",
            type: "button",
            title: "Conversations",
            "aria-label": "Conversations",
            onclick: toggle("with-side"),
          },
          icon("list"),
        ),
        this.mode,
        h(
          "button",
          {
            class: "icon-button",
            type: "button",
            id: "parameters",
            title: "Parameters",
            "aria-label": "Parameters",
            onclick: toggle("with-settings"),
          },
          icon("sliders"),
        ),
        this.hint,
        this.sendButton,
      ),
    );
  }

  // -- showing --------------------------------------------------------------------------------------------

  /** Show a conversation; null begins a new one. */
  open(conversation) {
    this.conversation = conversation || newConversation(this.suitableMode());
    this.root.classList.remove("with-side");
    this.mode.press(this.conversation.mode);
    this.drawThread();
    this.drawList();
    this.showServer();
    if (!this.coarse) this.input.focus({ preventScroll: true });
  }

  drawThread() {
    this.elements = new Map();
    const { messages } = this.conversation;
    if (!messages.length) {
      fill(this.thread, this.welcome());
      return;
    }
    fill(this.thread);
    messages.forEach((message, index) => {
      const next = messages[index + 1];
      if (message.role === "user" && next?.mode === "completion") return; // shown with its continuation
      const element = new MessageElement(message, this.actions(), messages[index - 1]?.content);
      this.elements.set(message, element);
      this.thread.append(element.root);
    });
    this.scroll(true);
  }

  welcome() {
    const { mode } = this.conversation;
    const use = (text) => () => {
      this.input.value = text;
      this.grow();
      this.input.focus();
    };
    this.welcomeTitle = h("h1", {});
    this.welcomeAbout = h("p", { class: "about" });
    const text =
      mode === "chat"
        ? "It runs on this server alone: nothing you write goes anywhere else."
        : "Write a beginning; the model goes on from there.";
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

  drawList() {
    const now = Date.now();
    fill(
      this.list,
      ...this.conversations.map((one) =>
        h(
          "li",
          { class: one.id === this.conversation.id ? "current" : "" },
          h(
            "button",
            { class: "conversation", type: "button", onclick: () => this.open(one) },
            h("span", { class: "title" }, one.title || "Untitled"),
            h("small", {}, this.generations.has(one.id) ? "writing ..." : when(one.updated, now)),
          ),
          h(
            "button",
            {
              class: "icon-button remove",
              type: "button",
              title: "Delete",
              "aria-label": `Delete ${one.title}`,
              onclick: () => this.remove(one),
            },
            icon("trash"),
          ),
        ),
      ),
    );
  }

  showServer() {
    const running = this.generations.has(this.conversation.id);
    this.sendButton.disabled = !running && !this.server.ready;
    this.sendButton.title = running ? "Stop" : "Send";
    this.sendButton.setAttribute("aria-label", running ? "Stop" : "Send");
    this.sendButton.classList.toggle("stop", running);
    fill(this.sendButton, icon(running ? "stop" : "send"));
    const chat = this.conversation.mode === "chat";
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

  /** What new conversations are: as the last one that was chosen, else what suits the model. Embedded ones only complete. */
  suitableMode() {
    return this.settings.mode ?? (this.server.description ? "completion" : "chat");
  }

  /** The server is another one, or in another state. */
  meet() {
    const { conversation } = this;
    if (!conversation.messages.length && conversation.mode !== this.suitableMode()) {
      conversation.mode = this.suitableMode();
      this.mode.press(conversation.mode);
      this.drawThread();
    }
    this.showServer();
  }

  contextHint() {
    const { stats } = this.conversation.messages.at(-1) || {};
    if (!stats?.prompt) return this.coarse ? "" : "Enter sends, Shift+Enter breaks the line";
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
    return {
      isLast: (message) =>
        this.conversation.messages.slice(message.role === "user" ? -2 : -1).includes(message) &&
        !this.generations.has(this.conversation.id),
      retry: (message) => this.answer(blank(message.mode), message),
      goOn: (message) => this.answer(message, message),
      complete: (message) => {
        this.setMode("completion");
        this.answer(blank("completion"), message);
      },
      edited: (message, text) => this.edited(message, text),
      drawn: () => this.scroll(false),
    };
  }

  setMode(mode) {
    this.conversation.mode = this.settings.mode = mode;
    this.mode.press(mode);
    saveSettings(this.settings);
    if (!this.conversation.messages.length) this.drawThread();
    this.showServer();
  }

  submit() {
    const text = this.input.value;
    if (!text.trim() || !this.server.ready) return;
    this.input.value = "";
    this.grow();
    this.ask(text);
  }

  ask(text) {
    const { conversation } = this;
    conversation.title ||= text.trim().replace(/\s+/g, " ").slice(0, 60);
    conversation.messages.push({ role: "user", content: text });
    if (!this.conversations.includes(conversation)) this.conversations.unshift(conversation);
    this.answer(blank(conversation.mode), null);
  }

  /** The user has changed what was sent last: send it again. */
  edited(message, text) {
    const { messages } = this.conversation;
    const index = messages.indexOf(message);
    messages.length = message.role === "user" ? index : index - 1;
    this.ask(text);
  }

  /** Run an answer at the end of the thread, in place of `old` if there is one. */
  async answer(message, old) {
    const { conversation } = this;
    if (this.generations.has(conversation.id)) return;
    if (old) conversation.messages.splice(conversation.messages.indexOf(old));
    conversation.messages.push(message);
    conversation.updated = Date.now();
    const generation = new Generation(conversation, message, { ...this.settings }, this.server.model);
    this.generations.set(conversation.id, generation);
    message.running = true;
    this.drawThread();
    this.drawList();
    this.showServer();
    await generation.run(() => this.changed(conversation, message));
    this.generations.delete(conversation.id);
    this.ended(conversation, message);
  }

  changed(conversation, message) {
    if (Date.now() - this.saved > SAVE_EVERY) {
      this.saved = Date.now();
      this.save(conversation);
    }
    if (conversation !== this.conversation) return;
    this.elements.get(message)?.update();
  }

  ended(conversation, message) {
    conversation.updated = Date.now();
    this.save(conversation);
    if (message.error?.status === 401) this.server.lock();
    else if (message.error && [0, 503].includes(message.error.status)) this.server.poll();
    if (conversation === this.conversation) {
      for (const element of this.elements.values()) element.draw();
      this.showServer();
    }
    this.drawList();
  }

  save(conversation) {
    if (!this.conversations.includes(conversation)) return; // deleted while it ran
    const dropped = saveConversation(conversation);
    if (dropped.length) this.conversations = this.conversations.filter((one) => !dropped.includes(one.id));
  }

  remove(conversation) {
    this.generations.get(conversation.id)?.stop();
    this.conversations = this.conversations.filter((one) => one !== conversation);
    deleteConversation(conversation.id);
    if (conversation === this.conversation) this.open(this.conversations[0] || null);
    else this.drawList();
  }
}

function blank(mode) {
  return { role: "assistant", mode: mode || "chat", content: "", finish: null };
}

function when(time, now) {
  const minutes = (now - time) / 60000;
  if (minutes < 1) return "now";
  if (minutes < 60) return `${Math.floor(minutes)} min ago`;
  if (minutes < 24 * 60) return `${Math.floor(minutes / 60)} h ago`;
  return new Date(time).toLocaleDateString();
}
