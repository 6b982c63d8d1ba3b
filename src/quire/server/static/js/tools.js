// The tools that the model may call in a conversation, as OpenAI has them: their list, and which of them must be called.

const NAME = /^[a-zA-Z0-9_.-]{1,128}$/;
const CHOSEN = "function:"; // before the name of a tool that must be called

export const CHOICES = [
  ["auto", "The model decides"],
  ["required", "At least one is called"],
  ["none", "None: the model does not see them"],
];

export const EXAMPLE = JSON.stringify(
  [
    {
      type: "function",
      function: {
        name: "weather",
        description: "The weather in a city.",
        parameters: {
          type: "object",
          properties: { city: { enum: ["Rome", "Oslo"] }, unit: { enum: ["celsius", "fahrenheit"] } },
          required: ["city", "unit"],
          additionalProperties: false,
        },
      },
    },
  ],
  null,
  1,
);

/** The tools of the field, [] if it is empty. Throws SyntaxError where they are no list of functions with names. */
export function toolsOf(text) {
  if (!text.trim()) return [];
  const tools = JSON.parse(text);
  if (!Array.isArray(tools)) throw new SyntaxError("it must be a list: [{...}, ...]");
  const names = new Set();
  tools.forEach((tool, index) => {
    const at = `tool ${index + 1}`;
    if (tool?.type !== "function" || typeof tool.function !== "object" || tool.function === null)
      throw new SyntaxError(`${at} must be {"type": "function", "function": {"name": ...}}`);
    const { name } = tool.function;
    if (name === undefined) throw new SyntaxError(`${at} has no name`);
    if (typeof name !== "string" || !NAME.test(name))
      throw new SyntaxError(`${at} has the name ${JSON.stringify(name)}; letters, digits, "_", "-" and "." are allowed, at most 128`);
    if (names.has(name)) throw new SyntaxError(`${at} has the name "${name}", which another one has`);
    names.add(name);
  });
  return tools;
}

/** What can be chosen: [[value, label], ...]. `chosen` is among them even if its tool is not there any more. */
export function choicesOf(text, chosen) {
  let names = [];
  try {
    names = toolsOf(text).map((tool) => tool.function.name);
  } catch {
    // while it is written
  }
  if (chosen.startsWith(CHOSEN) && !names.includes(chosen.slice(CHOSEN.length))) names.push(chosen.slice(CHOSEN.length));
  return [...CHOICES, ...names.map((name) => [CHOSEN + name, `${name} is called`])];
}

/** The fields of a request. What must be called holds for the first answer to a message: later ones have the results. */
export function toolFields(text, choice, isFirst) {
  const tools = toolsOf(text);
  if (!tools.length) return {};
  if (choice.startsWith(CHOSEN)) {
    const name = choice.slice(CHOSEN.length);
    if (!tools.some((tool) => tool.function.name === name)) throw new SyntaxError(`"${name}" must be called, but is not in the list`);
    return { tools, tool_choice: isFirst ? { type: "function", function: { name } } : "auto" };
  }
  return { tools, tool_choice: choice === "required" && !isFirst ? "auto" : choice };
}
