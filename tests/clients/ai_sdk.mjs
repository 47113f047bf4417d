// Prints the tool loops, structured answers and errors of Vercel's AI SDK as one JSON document.
import { pathToFileURL } from "node:url";
const modules = `${process.env.CLIENT_MODULES}/node_modules`;
const load = (path) => import(pathToFileURL(`${modules}/${path}`));
const { generateObject, generateText, stepCountIs, streamText, tool } = await load("ai/dist/index.js");
const { createOpenAI } = await load("@ai-sdk/openai/dist/index.mjs");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible/dist/index.mjs");
const { z } = await load("zod/index.js");

const { CLIENT_URL: baseURL, CLIENT_KEY: apiKey, CLIENT_LIMITED_KEY, CLIENT_TOOL_MODEL } = process.env;
const openai = createOpenAI({ baseURL, apiKey });
const served = { name: "served", baseURL, includeUsage: true, supportsStructuredOutputs: true };
const compatible = createOpenAICompatible({ ...served, apiKey });
// Otherwise, follow-ups through the Responses API refer to stored items, and this tenant's are not stored.
const providerOptions = { openai: { store: false } };
const chat = { temperature: 0, maxOutputTokens: 128, maxRetries: 0, providerOptions };
const given = [];
const weather = tool({
  description: "Tell the weather in a city.",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async ({ city }) => {
    given.push(city);
    return "sunny";
  },
});
const user = (content) => ({ role: "user", content });

async function surface(model) {
  const loop = {
    ...chat,
    model,
    messages: [user("What is the weather in Rome?")],
    tools: { get_weather: weather },
    stopWhen: stepCountIs(3),
  };
  const whole = await generateText(loop);
  const stream = streamText({ ...loop, onError: ({ error }) => Promise.reject(error) });
  let numParts = 0;
  for await (const part of stream.textStream) numParts += part.length > 0 ? 1 : 0;
  const history = [...loop.messages, ...whole.response.messages, user("Who are you?")];
  const next = await generateText({ ...loop, messages: history });
  const schema = z.object({ city: z.enum(["Paris", "Rome"]), isCapital: z.boolean() });
  const parsed = await generateObject({ ...chat, model, schema, prompt: "What is the capital of France?" });
  return {
    whole: { answer: whole.text, usage: whole.totalUsage.totalTokens },
    streamed: { answer: await stream.text, usage: (await stream.totalUsage).totalTokens, "is streamed": numParts > 3 },
    next: next.text,
    structured: parsed.object.city,
  };
}

async function refused(name, key = apiKey) {
  const model = createOpenAICompatible({ ...served, apiKey: key })(name);
  try {
    await generateText({ ...chat, model, prompt: "Hi" });
  } catch (error) {
    return error.statusCode;
  }
}

// Sends two requests with a retrying client under a limit of one request per five seconds.
async function waited() {
  const begun = performance.now();
  const model = createOpenAICompatible({ ...served, apiKey: CLIENT_LIMITED_KEY })(CLIENT_TOOL_MODEL);
  for (let i = 0; i < 2; i++) await generateText({ model, prompt: "Hi", maxOutputTokens: 1, maxRetries: 4 });
  return performance.now() - begun > 4000;
}

const found = {
  chat: await surface(openai.chat(CLIENT_TOOL_MODEL)),
  responses: await surface(openai.responses(CLIENT_TOOL_MODEL)),
  compatible: await surface(compatible(CLIENT_TOOL_MODEL)),
};
found.given = given;
found.errors = [await refused("nothing"), await refused(CLIENT_TOOL_MODEL, "wrong")];
found.waited = await waited();
console.log(JSON.stringify(found));
