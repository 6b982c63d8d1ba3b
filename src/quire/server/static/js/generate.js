// Runs one answer: builds the request, streams the text in, and measures.

import { ServerError, stream } from "./api.js";
import { COMPLETION_TOKENS, schemaOf, stopStrings } from "./settings.js";
import { callsOf, hasResults, path, turns, turnsInContext, withFiles } from "./thread.js";
import { toolFields } from "./tools.js";

const NUMBERS = [
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "max_tokens",
  "seed",
  "presence_penalty",
  "frequency_penalty",
  "repetition_penalty",
];

function parameters(settings) {
  const chosen = {};
  for (const name of NUMBERS) if (settings[name] !== null) chosen[name] = settings[name];
  const stop = stopStrings(settings.stop);
  if (stop.length) chosen.stop = stop;
  const schema = field("response_format", "The JSON schema", () => schemaOf(settings.schema));
  if (schema) chosen.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  return chosen;
}

/** What a field of the panel gives. Where it is not valid nothing is sent, and the answer says why. */
function field(param, name, read) {
  try {
    return read();
  } catch (error) {
    throw new ServerError(null, `${name}: ${error.message}`, { param });
  }
}

/** The messages before `answer`, as the API wants them; the answer's own beginning too if it is to go on. */
export function history(conversation, answer, system) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of turnsInContext(conversation, answer).flat()) messages.push(...sent(message));
  return messages;
}

/** A message as the API has it, and the results of its calls behind it: all of them or, where some are not there, none. */
function sent(message) {
  const { role, reasoning } = message;
  const content = withFiles(message);
  const calls = callsOf(message);
  if (!content && !calls.length) return [];
  const one = { role, content: content || null, ...(reasoning ? { reasoning } : {}) };
  if (!calls.length) return [one];
  const id = (call, index) => call.id || `call_${index + 1}`;
  one.tool_calls = calls.map((call, index) => ({
    id: id(call, index),
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  if (!hasResults(message)) return [one];
  return [one, ...calls.map((call, index) => ({ role: "tool", tool_call_id: id(call, index), content: call.result }))];
}

/** Take a delta of a chat into its answer; whether it said anything. */
function take(answer, { content, reasoning, tool_calls: calls }) {
  if (content) answer.content += content;
  if (reasoning) answer.reasoning = (answer.reasoning ?? "") + reasoning;
  for (const { index, id, function: called } of calls ?? []) {
    answer.toolCalls ??= [];
    const call = (answer.toolCalls[index] ??= { id, name: called.name, arguments: "" });
    call.arguments += called.arguments ?? "";
  }
  return Boolean(content || reasoning || calls?.length);
}

function chatRequest(conversation, answer, settings) {
  const isFirst = turns(conversation).at(-1).at(-2)?.role !== "assistant";
  const tools = field("tools", "The tools", () => toolFields(settings.tools, settings.toolChoice, isFirst));
  const body = { messages: history(conversation, answer, settings.system), ...tools };
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  if (settings.thinking_token_budget !== null) body.thinking_token_budget = settings.thinking_token_budget;
  if (answer.content) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  return ["/v1/chat/completions", body, (choice) => choice.delta ?? {}];
}

function completionRequest(conversation, answer) {
  const prompt = withFiles(path(conversation).at(-2));
  return ["/v1/completions", { prompt: prompt + answer.content, max_tokens: COMPLETION_TOKENS }, (choice) => ({ content: choice.text })];
}

export class Generation {
  /** `answer` is the last message that `conversation` shows; what it holds already is continued. */
  constructor(conversation, answer, settings, model) {
    this.conversation = conversation;
    this.answer = answer;
    this.settings = settings;
    this.model = model;
    this.abort = new AbortController();
  }

  stop() {
    this.abort.abort();
  }

  /** Runs to the end; never throws for what the server or the user did: that is told in the answer. */
  async run(onChange) {
    const { answer } = this;
    Object.assign(answer, { running: true, finish: null, error: null, stats: null, toolCalls: null });
    onChange();
    try {
      await this.receive(onChange);
    } catch (error) {
      if (error.name === "AbortError") answer.finish = "stopped";
      else if (error instanceof ServerError) answer.error = { ...error, message: error.message };
      else {
        answer.error = { status: 0, message: "The server's answer could not be understood." };
        console.error(error);
      }
    } finally {
      answer.running = false;
      onChange();
    }
  }

  async receive(onChange) {
    const { answer } = this;
    const build = answer.mode === "completion" ? completionRequest : chatRequest;
    const [address, body, deltaOf] = build(this.conversation, answer, this.settings);
    Object.assign(body, parameters(this.settings), {
      model: this.model,
      stream: true,
      stream_options: { include_usage: true },
    });
    const begin = performance.now();
    let first = null;
    let last = begin;
    let pieces = 0;
    const measure = (usage) => {
      answer.stats = {
        prompt: usage?.prompt_tokens ?? null,
        cached: usage?.prompt_tokens_details?.cached_tokens ?? null,
        output: usage?.completion_tokens ?? pieces,
        reasoning: usage?.completion_tokens_details?.reasoning_tokens ?? 0,
        exact: Boolean(usage),
        ttft: first === null ? null : (first - begin) / 1000,
        seconds: first === null ? 0 : (last - first) / 1000,
      };
    };
    const headers = await stream(address, body, this.abort.signal, (chunk) => {
      answer.id = chunk.id;
      for (const choice of chunk.choices) {
        if (take(answer, deltaOf(choice))) {
          last = performance.now();
          first ??= last;
          pieces += 1;
        }
        if (choice.finish_reason) answer.finish = choice.finish_reason;
      }
      measure(chunk.usage);
      onChange();
    });
    answer.clamped = headers.get("x-quire-clamped");
    answer.loosened = headers.get("x-quire-loosened");
  }
}
