// Text files that go with the next message: chosen or dropped, shown above it, and read here, in the browser.

import { fill, h, icon, iconButton, toast } from "./dom.js";

const MOST_BYTES = 1 << 20;

/** The text of a file. Throws Error where it has none that can be sent. */
async function textOf(file) {
  if (file.size > MOST_BYTES) throw new Error(`"${file.name}" is larger than 1 MiB`);
  const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  if (text.includes("\0")) throw new Error(`"${file.name}" is not text`);
  return text.replace(/\r\n/g, "\n").replace(/\n$/, "");
}

export class Attachments {
  constructor() {
    this.files = []; // [{ name, text }, ...]
    this.root = h("ul", { class: "attachments", "aria-label": "Attached files", hidden: true });
    const field = h("input", { type: "file", multiple: true, hidden: true, "aria-label": "Files to attach" });
    field.addEventListener("change", async () => {
      await this.add([...field.files]);
      field.value = "";
    });
    this.button = iconButton("attach", "Attach text files", () => field.click());
    this.field = field;
  }

  /** Let files be dropped on an element. */
  receive(element) {
    element.addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
    element.addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }

  async add(files) {
    for (const file of files) {
      try {
        this.files.push({ name: file.name, text: await textOf(file) });
      } catch (error) {
        toast(error instanceof TypeError ? `"${file.name}" is not text (UTF-8).` : `${error.message}.`);
      }
    }
    this.draw();
  }

  /** The files, which are no longer here then. */
  take() {
    const taken = this.files;
    this.files = [];
    this.draw();
    return taken;
  }

  draw() {
    const remove = (file) => () => {
      this.files = this.files.filter((one) => one !== file);
      this.draw();
    };
    fill(this.root, ...this.files.map((file) => h("li", {}, icon("attach"), h("span", {}, file.name), iconButton("close", `Remove ${file.name}`, remove(file)))));
    this.root.hidden = !this.files.length;
  }
}
