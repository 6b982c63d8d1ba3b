// Conversations as files: JSON, which can be read in again with all versions of all answers, and Markdown to read.

import { h } from "./dom.js";
import { checkedConversation } from "./store.js";
import { callsOf, fenced, newKey, path, withFiles } from "./thread.js";

const FORMAT = "quire.conversations";

function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";

export function exportJson(conversations, title) {
  download(`${fileName(title)}.json`, "application/json", JSON.stringify({ format: FORMAT, conversations }, null, 1));
}

function callAsMarkdown({ name, arguments: text, result }) {
  const call = `Calls \`${name}\`:\n\n${fenced(text, "json")}`;
  return typeof result === "string" ? `${call}\nResult:\n\n${fenced(result)}` : call;
}

/** The thread that is shown, as Markdown. */
export function asMarkdown(conversation, model) {
  const parts = path(conversation).map((one) => {
    const text = withFiles(one).trim();
    const said = [text && `${text}\n`, ...callsOf(one).map(callAsMarkdown)].filter(Boolean);
    return `## ${one.role === "user" ? "You" : model}\n\n${said.join("\n")}`;
  });
  return `# ${conversation.title || "Untitled"}\n\n${parts.join("\n")}`;
}

export function exportMarkdown(conversation, model) {
  download(`${fileName(conversation.title)}.md`, "text/markdown", asMarkdown(conversation, model));
}

/** The conversations of an exported file, under new names. Throws Error where it is none. */
export function importJson(text) {
  let document = null;
  try {
    document = JSON.parse(text);
  } catch {
    // told below
  }
  const found = (Array.isArray(document?.conversations) ? document.conversations : []).map(checkedConversation).filter(Boolean);
  if (document?.format !== FORMAT || !found.length) throw new Error("This file has no exported conversations.");
  return found.map((one) => ({ ...one, id: newKey() }));
}
