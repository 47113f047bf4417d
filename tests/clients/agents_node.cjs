// Prints the tool loops, structured answers and errors of OpenAI's Agents SDK for JavaScript as one JSON document.
const { createRequire } = require("node:module");
const load = createRequire(process.env.CLIENT_MODULES + "/");
const agents = load("@openai/agents");
const OpenAI = load("openai");
const { z } = load("zod");

const { CLIENT_URL: baseURL, CLIENT_KEY, CLIENT_LIMITED_KEY, CLIENT_TOOL_MODEL } = process.env;
const client = (apiKey, maxRetries = 0) => new OpenAI({ baseURL, apiKey, maxRetries });
const settings = { temperature: 0, maxTokens: 128 };
const given = [];
const weather = agents.tool({
  name: "get_weather",
  description: "Tell the weather in a city.",
  parameters: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async ({ city }) => {
    given.push(city);
    return "sunny";
  },
});
const fact = z.object({ city: z.enum(["Paris", "Rome"]), isCapital: z.boolean() });

async function surface(Model) {
  const model = new Model(client(CLIENT_KEY), CLIENT_TOOL_MODEL);
  const agent = new agents.Agent({ name: "Weather", model, modelSettings: settings, tools: [weather] });
  const question = "What is the weather in Rome?";
  const whole = await agents.run(agent, question, { maxTurns: 3 });
  const stream = await agents.run(agent, question, { maxTurns: 3, stream: true });
  let numParts = 0;
  for await (const event of stream) numParts += event.type === "raw_model_stream_event" ? 1 : 0;
  await stream.completed;
  const next = await agents.run(agent, [...whole.history, { role: "user", content: "Who are you?" }], { maxTurns: 3 });
  const teller = new agents.Agent({ name: "Teller", model, modelSettings: settings, outputType: fact });
  const parsed = await agents.run(teller, "What is the capital of France?");
  return {
    whole: { answer: whole.finalOutput, usage: whole.state.usage.totalTokens },
    streamed: { answer: stream.finalOutput, usage: stream.state.usage.totalTokens, "is streamed": numParts > 6 },
    next: next.finalOutput,
    structured: parsed.finalOutput.city,
  };
}

async function refused(name, key = CLIENT_KEY) {
  const model = new agents.OpenAIChatCompletionsModel(client(key), name);
  try {
    await agents.run(new agents.Agent({ name: "Any", model }), "Hi");
  } catch (error) {
    return error.status;
  }
}

// Sends two requests with a retrying client under a limit of one request per five seconds.
async function waited() {
  const begun = performance.now();
  const model = new agents.OpenAIChatCompletionsModel(client(CLIENT_LIMITED_KEY, 4), CLIENT_TOOL_MODEL);
  const agent = new agents.Agent({ name: "Any", model, modelSettings: { maxTokens: 64 } });
  for (let i = 0; i < 2; i++) await agents.run(agent, "Hi");
  return performance.now() - begun > 4000;
}

async function main() {
  agents.setTracingDisabled(true);
  const found = {
    chat: await surface(agents.OpenAIChatCompletionsModel),
    responses: await surface(agents.OpenAIResponsesModel),
  };
  found.given = given;
  found.errors = [await refused("nothing"), await refused(CLIENT_TOOL_MODEL, "wrong")];
  found.waited = await waited();
  console.log(JSON.stringify(found));
}

main();
