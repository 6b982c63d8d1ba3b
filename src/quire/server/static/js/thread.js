// A conversation is a tree of messages: another answer, or a question put otherwise, stands beside the first and has
// the same parent. One way through the tree is shown, from a root to the message that `leaf` names.
//
// A turn is a question and what follows it up to the next question. One that failed is not part of the conversation:
// the model does not see it. Neither does it see turns that the user left out because the context is full.
//
// What a tool call resulted in is kept in the call itself, so whatever is done with the message is done with both.

/** A key for a new message or conversation. */
export function newKey() {
  return `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
}

function byKey(conversation, key) {
  return conversation.messages.find((one) => one.key === key) ?? null;
}

function children(conversation, parent) {
  return conversation.messages.filter((one) => one.parent === parent);
}

/** The messages that are shown, in order. */
export function path(conversation) {
  const found = [];
  for (let one = byKey(conversation, conversation.leaf); one; one = byKey(conversation, one.parent)) found.unshift(one);
  return found;
}

/** Put a message below `parent` (null: at the beginning), and show it. Returns it. */
export function add(conversation, message, parent) {
  Object.assign(message, { key: newKey(), parent: parent?.key ?? null });
  conversation.messages.push(message);
  conversation.leaf = message.key;
  return message;
}

/** What stands at a message's place: itself, and others with the same parent. */
export function versions(conversation, message) {
  return children(conversation, message.parent);
}

/** Show the thread that goes through the message with this key, or begins (null), to its newest end. */
export function showThrough(conversation, key) {
  for (;;) {
    const next = children(conversation, key).at(-1);
    if (!next) break;
    key = next.key;
  }
  conversation.leaf = key;
}

/** The shown messages by turn: [[question, answer, ...], ...]. */
export function turns(conversation) {
  const found = [];
  for (const message of path(conversation)) {
    if (message.role === "user" || !found.length) found.push([]);
    found.at(-1).push(message);
  }
  return found;
}

/** The tool calls of a message. One that was cut off (its arguments are no object) is none. */
export function callsOf(message) {
  return (message.toolCalls ?? []).filter((call) => call && isObject(call.arguments));
}

function isObject(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" && value !== null && !Array.isArray(value);
  } catch {
    return false;
  }
}

/** Whether there are results of all that a message calls. */
export function hasResults(message) {
  const calls = callsOf(message);
  return calls.length > 0 && calls.every((call) => typeof call.result === "string");
}

/**
 * Give the results of a message's calls, in order, to go on from there. If something went on from it already, another
 * version of it gets them. Returns the one that has them.
 */
export function giveResults(conversation, message, results) {
  const target = children(conversation, message.key).length
    ? add(conversation, structuredClone(message), byKey(conversation, message.parent))
    : message;
  setResults(target, results);
  return target;
}

export function setResults(message, results) {
  callsOf(message).forEach((call, index) => {
    call.result = results[index];
    delete call.draft;
  });
}

/** A block of code, behind more backticks than there are in it. */
export function fenced(text, language = "") {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}\n`;
}

/** What a message says to the model: the files that are attached to it, and its text. */
export function withFiles({ content, files }) {
  return [...(files ?? []).map(({ name, text }) => `${name}:\n\n${fenced(text)}`), content].join("\n");
}

/** All that a message says, files, calls and their results included. */
export function textOf(message) {
  const called = (message.toolCalls ?? []).filter(Boolean).flatMap((call) => [call.name, call.arguments, call.result ?? ""]);
  return [withFiles(message), ...called].join("\n");
}

/** Whether a turn ended in nothing that the conversation could build on. */
export function failed(turn) {
  const last = turn.at(-1);
  return last.role === "assistant" && !last.running && Boolean(last.error || !(last.content || callsOf(last).length));
}

/** The turns that the model is shown when `answer`, the end of the thread, is to be written. */
export function turnsInContext(conversation, answer) {
  return turns(conversation).filter((turn) => turn.includes(answer) || (!turn[0].leftOut && !failed(turn)));
}

/** Take out a question with all its answers. What followed them moves up; the thread stays as it was otherwise. */
export function removeTurn(conversation, question) {
  const gone = new Set([question.key]);
  for (const one of conversation.messages) if (one.role !== "user" && gone.has(one.parent)) gone.add(one.key);
  conversation.messages = conversation.messages.filter((one) => !gone.has(one.key));
  for (const one of conversation.messages) if (gone.has(one.parent)) one.parent = question.parent;
  if (gone.has(conversation.leaf)) showThrough(conversation, question.parent);
}

/** A new conversation with the shown thread up to `message`. */
export function branch(conversation, message) {
  const shown = path(conversation);
  const messages = structuredClone(shown.slice(0, shown.indexOf(message) + 1));
  messages.forEach((one, index) => Object.assign(one, { parent: messages[index - 1]?.key ?? null, running: false }));
  const title = `${conversation.title || "Untitled"} (branch)`;
  const settings = { ...conversation.settings };
  return { ...conversation, settings, id: newKey(), title, updated: Date.now(), messages, leaf: messages.at(-1).key };
}

const length = (turn) => turn.reduce((sum, one) => sum + textOf(one).length, 0);

/** Leave out the oldest turns until at most half of the text before the last question is left. Returns how many. */
export function leaveOutOldest(conversation) {
  const kept = turns(conversation)
    .slice(0, -1)
    .filter((turn) => !turn[0].leftOut && !failed(turn));
  let rest = kept.reduce((sum, turn) => sum + length(turn), 0);
  const allowed = rest / 2;
  let dropped = 0;
  for (const turn of kept) {
    if (dropped && rest <= allowed) break;
    turn[0].leftOut = true;
    rest -= length(turn);
    dropped += 1;
  }
  return dropped;
}

/** Give the messages of a conversation that was kept as a list their places in a tree. */
export function asTree(conversation) {
  if (conversation.leaf !== undefined) return;
  conversation.messages.forEach((one, index, all) =>
    Object.assign(one, { key: `${conversation.id}.${index}`, parent: all[index - 1]?.key ?? null }),
  );
  conversation.leaf = conversation.messages.at(-1)?.key ?? null;
}
