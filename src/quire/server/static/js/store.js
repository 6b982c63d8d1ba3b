// What is kept in this browser: conversations with their settings in a database, each under its id; in the local storage
// the settings that were used last, and presets, each under its name. So two tabs do not overwrite each other's. Nothing is
// dropped to make room: what cannot be kept is told.

import { asTree, newKey } from "./thread.js";

const SETTINGS = "quire.settings";
const PRESET = "quire.preset."; // before the name of one
const DATABASE = "quire";
const CONVERSATIONS = "conversations";
const EARLIER = "quire.conversation."; // keys of conversations in the local storage, where they were kept before
const PATIENCE = 3000; // milliseconds, for a database that never opens

/** The settings of a conversation. */
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
  tools: "", // JSON
  toolChoice: "auto",
  mode: null, // "chat" or "completion"; null is what suits the model
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

/** Settings that were kept or exported; what is missing, or is none, has its default. */
function checkedSettings(found) {
  const fits = {
    string: (value) => typeof value === "string",
    object: (value) => value === null || Number.isFinite(value), // a number that is not set
    mode: (value) => [null, "chat", "completion"].includes(value),
  };
  const check = ([name, usual]) => [name, (fits[name] ?? fits[typeof usual])(found?.[name]) ? found[name] : usual];
  return Object.fromEntries(Object.entries(DEFAULTS).map(check));
}

/** The settings that were used last: new conversations begin with them. */
export function loadSettings() {
  return checkedSettings(readJson(SETTINGS));
}

export function saveSettings(settings) {
  try {
    storage()?.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // full or off
  }
}

/** All presets, by name in order: Map(name -> settings). */
export function loadPresets() {
  const keys = Object.keys(storage() ?? {}).filter((key) => key.startsWith(PRESET));
  return new Map(keys.sort().map((key) => [key.slice(PRESET.length), checkedSettings(readJson(key))]));
}

/** Keep settings under a name; null: none any more. Throws Error where they cannot be kept. */
export function savePreset(name, settings) {
  const place = storage();
  if (!place) throw new Error("this browser keeps nothing for this page");
  if (settings) place.setItem(PRESET + name, JSON.stringify(settings));
  else place.removeItem(PRESET + name);
}

export function newConversation(settings = DEFAULTS) {
  return { id: newKey(), title: "", updated: Date.now(), messages: [], leaf: null, settings: { ...settings } };
}

let database = null; // once it is open

/** Open the database; null where the browser has none for this page. */
async function opened() {
  database ??= await new Promise((resolve) => {
    setTimeout(() => resolve(null), PATIENCE);
    try {
      const request = indexedDB.open(DATABASE, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return database;
}

/** Do something with the conversations' store. Throws Error where nothing can be kept. Begins at once if it is open. */
async function inDatabase(mode, action) {
  const place = database ?? (await opened());
  if (!place) throw new Error("this browser keeps nothing for this page");
  return new Promise((resolve, reject) => {
    const transaction = place.transaction(CONVERSATIONS, mode, { durability: "relaxed" });
    const request = action(transaction.objectStore(CONVERSATIONS));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error ?? request?.error);
  });
}

/** All conversations, newest first. What cannot be read is left out, and left where it is. */
export async function loadConversations() {
  const found = new Map();
  const kept = await inDatabase("readonly", (store) => store.getAll()).catch(() => []);
  for (const one of kept.map(checkedConversation)) if (one) found.set(one.id, one);
  const moved = new Map();
  for (const key of Object.keys(storage() ?? {}).filter((name) => name.startsWith(EARLIER))) {
    const one = checkedConversation(readJson(key));
    if (one) moved.set(key, one);
    if (one && !(found.get(one.id)?.updated > one.updated)) found.set(one.id, one);
  }
  if (moved.size) await move(moved, found).catch(() => {}); // they stay where they are, and are read again
  return [...found.values()].sort((a, b) => b.updated - a.updated);
}

async function move(moved, found) {
  await inDatabase("readwrite", (store) => {
    for (const { id } of moved.values()) store.put(found.get(id));
  });
  for (const key of moved.keys()) storage().removeItem(key);
}

/** A conversation that was kept or exported, ready for use; null if it is none. */
export function checkedConversation(found) {
  const isText = (value) => typeof value === "string";
  const isCall = (one) => one === null || (isText(one?.name) && isText(one.arguments));
  const areCalls = (all) => all === undefined || all === null || (Array.isArray(all) && all.every(isCall));
  const areFiles = (all) => all === undefined || (Array.isArray(all) && all.every((one) => isText(one?.name) && isText(one.text)));
  const isMessage = (one) => one && isText(one.role) && isText(one.content) && areCalls(one.toolCalls) && areFiles(one.files);
  if (!found || !isText(found.id) || !Array.isArray(found.messages) || !found.messages.every(isMessage)) return null;
  asTree(found);
  for (const message of found.messages) message.running = false; // whatever ran has ended with its page
  const { mode = "chat", tools = "", toolChoice = "auto", ...rest } = found; // all settings it had, in the earlier form
  return {
    ...rest,
    title: isText(found.title) ? found.title : "",
    updated: Number(found.updated) || 0,
    settings: checkedSettings(found.settings ?? { ...loadSettings(), mode, tools, toolChoice }),
  };
}

/** Keep a conversation. Throws Error where it cannot be kept. */
export async function saveConversation(conversation) {
  await inDatabase("readwrite", (store) => store.put(conversation));
}

export async function deleteConversation(id) {
  await inDatabase("readwrite", (store) => store.delete(id)).catch(() => {}); // what was never kept
}
