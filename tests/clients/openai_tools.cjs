// Prints the tool loops of the official Node client as one JSON document: `runTools` free, forced, and streamed.
const { createRequire } = require("node:module");
const load = createRequire(process.env.CLIENT_MODULES + "/");
const OpenAI = load("openai");

const { CLIENT_URL, CLIENT_KEY, CLIENT_TOOL_MODEL } = process.env;
const openai = new OpenAI({ baseURL: CLIENT_URL, apiKey: CLIENT_KEY, maxRetries: 0 });
const question = { role: "user", content: "What is the weather in Rome?" };
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const chat = { model: CLIENT_TOOL_MODEL, temperature: 0, max_tokens: 64, reasoning_effort: "none" };

async function loop(stream) {
  const given = [];
  const tell = (one) => {
    given.push(one);
    return "sunny";
  };
  const tool = {
    type: "function",
    function: { name: "get_weather", strict: true, function: tell, parse: JSON.parse, parameters },
  };
  const runner = openai.chat.completions.runTools({
    ...chat,
    stream,
    messages: [question],
    tools: [tool],
    tool_choice: { type: "function", function: { name: "get_weather" } },
  });
  let numChunks = 0;
  if (stream) {
    runner.on("chunk", () => (numChunks += 1));
  }
  await runner.done();
  // The runner answers one forced call itself and stops; the last turn is ours.
  const { parsed, ...call } = runner.messages.find((message) => message.role === "assistant");
  const result = runner.messages.find((message) => message.role === "tool");
  const { function: _, parse: __, ...plain } = tool.function;
  const answer = await openai.chat.completions.create({
    ...chat,
    messages: [question, call, result],
    tools: [{ type: "function", function: plain }],
    tool_choice: "none",
  });
  return {
    name: call.tool_calls[0].function.name,
    arguments: given[0],
    content: call.content,
    answer: answer.choices[0].message.content,
    usage: answer.usage.total_tokens,
    "is streamed": numChunks > 3,
  };
}

async function auto() {
  const given = [];
  const tell = (one) => {
    given.push(one);
    return "sunny";
  };
  const tool = { type: "function", function: { name: "get_weather", function: tell, parse: JSON.parse, parameters } };
  const runner = openai.chat.completions.runTools({ ...chat, messages: [question], tools: [tool] });
  const answer = await runner.finalContent();
  const call = runner.messages.find((message) => message.role === "assistant");
  return {
    name: call.tool_calls[0].function.name,
    arguments: given[0],
    content: call.content,
    answer,
  };
}

async function main() {
  const found = {
    version: load("openai/version").VERSION,
    auto: await auto(),
    whole: await loop(false),
    streamed: await loop(true),
  };
  console.log(JSON.stringify(found));
}

main();
