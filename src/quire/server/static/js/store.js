// Conversations and settings, kept in this browser. Each conversation has a key of its own, so that two tabs
// do not overwrite each other's. What is kept is bounded; the oldest go first.

import { asTree, newKey } from "./thread.js";

const PREFIX = "quire.conversation.";
const SETTINGS = "quire.settings";
const MAX_CONVERSATIONS = 60;
const MAX_CHARACTERS = 3_000_000; // browsers allow about five million in all

export const DEFAULTS = {
  system: "",
  temperature: null,
  top_p: null,
  top_k: null,
  min_p: null,
  max_tokens: null,
  seed: null,
  presence_penalty: null,
  frequency_penalty: null,
  repetition_penalty: null,
  stop: "", // one a line
  schema: "", // JSON
  reasoning_effort: "",
  thinking_token_budget: null,
  mode: null, // what suits the model
};

function storage() {
  try {
    return window.localStorage;
  } catch {
    return null; // blocked by the browser's settings: everything works, nothing is kept
  }
}

function readJson(key) {
  try {
    return JSON.parse(storage().getItem(key));
  } catch {
    return null;
  }
}

export function loadSettings() {
  return { ...DEFAULTS, ...readJson(SETTINGS) };
}

export function saveSettings(settings) {
  try {
    storage()?.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // full or off
  }
}

export function newConversation(mode) {
  return { id: newKey(), title: "", mode, updated: Date.now(), messages: [], leaf: null, tools: "", toolChoice: "auto" };
}

/** All conversations, newest first. What cannot be read is left out. */
export function loadConversations() {
  const found = [];
  for (const key of keys()) {
    const conversation = checkedConversation(readJson(key));
    if (conversation) found.push(conversation);
  }
  return found.sort((a, b) => b.updated - a.updated);
}

/** A conversation that was kept or exported, ready for use; null if it is none. */
export function checkedConversation(found) {
  const isText = (value) => typeof value === "string";
  const isCall = (one) => one === null || (isText(one?.name) && isText(one.arguments));
  const areCalls = (all) => all === undefined || all === null || (Array.isArray(all) && all.every(isCall));
  const isMessage = (one) => one && isText(one.role) && isText(one.content) && areCalls(one.toolCalls);
  if (!found || !isText(found.id) || !Array.isArray(found.messages) || !found.messages.every(isMessage)) return null;
  asTree(found);
  for (const message of found.messages) message.running = false; // whatever ran has ended with its page
  return {
    mode: "chat",
    ...found,
    title: isText(found.title) ? found.title : "",
    updated: Number(found.updated) || 0,
    tools: isText(found.tools) ? found.tools : "",
    toolChoice: isText(found.toolChoice) ? found.toolChoice : "auto",
  };
}

/** Keep a conversation that holds something; makes room by dropping the oldest others. Returns the dropped ids. */
export function saveConversation(conversation) {
  const place = storage();
  if (!place || !(conversation.messages.length || conversation.tools)) return [];
  const text = JSON.stringify(conversation);
  const key = PREFIX + conversation.id;
  const dropped = bound(key, text.length);
  for (;;) {
    try {
      place.setItem(key, text);
      return dropped;
    } catch {
      const oldest = others(key).pop();
      if (!oldest) return dropped;
      place.removeItem(oldest.key);
      dropped.push(oldest.key.slice(PREFIX.length));
    }
  }
}

export function deleteConversation(id) {
  storage()?.removeItem(PREFIX + id);
}

function keys() {
  const place = storage();
  return place ? Object.keys(place).filter((key) => key.startsWith(PREFIX)) : [];
}

function others(key) {
  return keys()
    .filter((other) => other !== key)
    .map((other) => ({ key: other, length: storage().getItem(other).length, updated: readJson(other)?.updated ?? 0 }))
    .sort((a, b) => b.updated - a.updated);
}

function bound(key, length) {
  const dropped = [];
  let total = length;
  others(key).forEach(({ key: other, length: size }, index) => {
    total += size;
    if (index + 1 >= MAX_CONVERSATIONS || total > MAX_CHARACTERS) {
      storage().removeItem(other);
      dropped.push(other.slice(PREFIX.length));
    }
  });
  return dropped;
}
