// Prints what Anthropic's Node client receives as one JSON document. CLIENT_MODULES is the client's npm directory.
const { createRequire } = require("node:module");
const load = createRequire(process.env.CLIENT_MODULES + "/");
const Anthropic = load("@anthropic-ai/sdk");

const { CLIENT_URL, CLIENT_KEY, CLIENT_LIMITED_KEY, CLIENT_TOOL_MODEL } = process.env;
const question = { role: "user", content: "What is the weather in Rome?" };
const city = { type: "string", enum: ["Paris", "Rome"] };
const weather = {
  name: "get_weather",
  description: "Tell the weather in a city.",
  input_schema: { type: "object", properties: { city }, required: ["city"] },
};
const asked = { model: CLIENT_TOOL_MODEL, max_tokens: 200, messages: [question], tools: [weather], temperature: 0 };

function client(apiKey = CLIENT_KEY, maxRetries = 0) {
  return new Anthropic({ baseURL: CLIENT_URL.replace(/\/v1$/, ""), apiKey, maxRetries });
}

function shown(message) {
  const use = message.content.find((block) => block.type === "tool_use");
  const { input_tokens, cache_read_input_tokens, output_tokens } = message.usage;
  return {
    blocks: message.content.map((block) => block.type),
    reason: message.stop_reason,
    call: use ? [use.name, use.input] : null,
    text: message.content.map((block) => block.text ?? "").join(""),
    usage: input_tokens + cache_read_input_tokens + output_tokens,
  };
}

async function loop(fields) {
  const whole = await client().messages.create({ ...asked, ...fields });
  const stream = client().messages.stream({ ...asked, ...fields });
  let count = 0;
  for await (const _event of stream) count += 1;
  const streamed = await stream.finalMessage();
  const use = streamed.content.find((block) => block.type === "tool_use");
  const result = { type: "tool_result", tool_use_id: use.id, content: "sunny" };
  const messages = [question, { role: "assistant", content: streamed.content }, { role: "user", content: [result] }];
  const answer = await client().messages.create({ ...asked, ...fields, messages });
  return { whole: shown(whole), streamed: shown(streamed), "is streamed": count > 5, answer: shown(answer) };
}

async function refusal(call, kind) {
  try {
    await call();
  } catch (error) {
    if (error instanceof kind) return [kind.name, error.status, error.error.error.type, Boolean(error.requestID)];
    throw error;
  }
  return ["nothing was thrown"];
}

async function limits() {
  for (let number = 0; number < 8; number += 1) {
    try {
      await client(CLIENT_LIMITED_KEY).messages.create(asked);
    } catch (error) {
      const after = Number(error.headers.get("retry-after"));
      return { status: error.status, "retry after": after > 0 && after <= 60 };
    }
  }
  return { status: "never limited" };
}

async function main() {
  const models = [];
  for await (const model of client().models.list({ limit: 1 })) models.push(model.id);
  const found = {
    plain: await loop({}),
    thinking: await loop({ thinking: { type: "adaptive" } }),
    together: (await Promise.all([1, 2, 3, 4].map(() => client().messages.create(asked)))).map(shown),
    models: models.sort(),
    model: (await client().models.retrieve(CLIENT_TOOL_MODEL)).id,
    "unknown model": await refusal(
      () => client().messages.create({ ...asked, model: "nobody/nothing" }),
      Anthropic.NotFoundError,
    ),
    "wrong key": await refusal(() => client("wrong").messages.create(asked), Anthropic.AuthenticationError),
    "wrong call": await refusal(
      () => client().messages.create({ ...asked, stop_sequences: [""] }),
      Anthropic.BadRequestError,
    ),
    limit: await limits(),
  };
  console.log(JSON.stringify(found));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
