// The conversations at the side: find, open, rename, export, delete.

import { fill, h, icon, iconButton, menuButton, toast } from "./dom.js";
import { exportJson, exportMarkdown, importJson } from "./export.js";
import { textOf } from "./thread.js";

export class Sidebar {
  /** `chat` has the conversations, and what is done with them. */
  constructor(chat) {
    this.chat = chat;
    this.search = h("input", { class: "field search", type: "search", placeholder: "Search", "aria-label": "Search conversations" });
    this.search.addEventListener("input", () => this.draw());
    this.list = h("ul", { class: "conversations" });
    this.empty = h("p", { class: "no-conversations" });
    const file = h("input", { type: "file", accept: ".json,application/json", hidden: true, "aria-label": "File to import" });
    file.addEventListener("change", async () => {
      const [chosen] = file.files;
      file.value = "";
      if (chosen) this.read(await chosen.text());
    });
    this.root = h(
      "aside",
      { class: "side", "aria-label": "Conversations" },
      h("button", { class: "button new", type: "button", onclick: () => chat.open(null) }, icon("plus"), "New conversation"),
      this.search,
      this.list,
      this.empty,
      h(
        "div",
        { class: "side-foot" },
        iconButton("upload", "Import conversations from a file", () => file.click()),
        iconButton("download", "Export all conversations to a file", () => exportJson(chat.conversations, "conversations")),
        h("span", {}, "Stored in this browser"),
        file,
      ),
    );
  }

  read(text) {
    try {
      this.chat.take(importJson(text));
    } catch (error) {
      toast(error.message);
    }
  }

  draw() {
    const wanted = this.search.value.trim().toLowerCase();
    const has = (one) => `${one.title}\n${one.messages.map(textOf).join("\n")}`.toLowerCase().includes(wanted);
    const found = wanted ? this.chat.conversations.filter(has) : this.chat.conversations;
    fill(this.list, ...found.map((one) => this.item(one)));
    this.empty.textContent = wanted ? "Nothing found." : "No conversations yet.";
    this.empty.hidden = found.length > 0;
  }

  item(conversation) {
    const { chat } = this;
    const current = conversation.id === chat.conversation.id;
    const title = conversation.title || "Untitled";
    const menu = () => [
      ["edit", "Rename", () => this.rename(item, conversation)],
      ["download", "Export as Markdown", () => exportMarkdown(conversation, chat.server.model || "Model")],
      ["download", "Export as JSON", () => exportJson([conversation], title)],
      ["trash", "Delete", () => chat.remove(conversation)],
    ];
    const item = h(
      "li",
      { class: current ? "current" : "" },
      h(
        "button",
        { class: "conversation", type: "button", "aria-current": current ? "true" : null, onclick: () => chat.open(conversation) },
        h("span", { class: "title" }, title),
        h("small", {}, chat.generations.has(conversation.id) ? "writing ..." : when(conversation.updated, Date.now())),
      ),
      menuButton(`Actions for ${title}`, menu, "item-menu"),
    );
    return item;
  }

  rename(item, conversation) {
    const field = h("input", { class: "field", value: conversation.title, maxlength: 200, "aria-label": "Title" });
    let open = true;
    const end = (keep) => {
      if (!open) return;
      open = false; // removing the field blurs it
      if (keep && field.value.trim()) this.chat.retitle(conversation, field.value.trim());
      this.draw();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation(); // Escape would also close the panel
      end(event.key === "Enter");
    });
    field.addEventListener("blur", () => end(true));
    fill(item, field);
    field.focus();
    field.select();
  }
}

function when(time, now) {
  const minutes = (now - time) / 60000;
  if (minutes < 1) return "now";
  if (minutes < 60) return `${Math.floor(minutes)} min ago`;
  if (minutes < 24 * 60) return `${Math.floor(minutes / 60)} h ago`;
  return new Date(time).toLocaleDateString();
}
