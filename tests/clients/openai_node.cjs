// Prints what the official Node client receives as one JSON document. CLIENT_MODULES is the client's npm directory.
const { createRequire } = require("node:module");
const load = createRequire(process.env.CLIENT_MODULES + "/");
const OpenAI = load("openai");
const { zodResponseFormat, zodTextFormat } = load("openai/helpers/zod");
const { z } = load("zod");

const { CLIENT_URL, CLIENT_KEY, CLIENT_LIMITED_KEY, CLIENT_MODEL } = process.env;
const chat = {
  model: CLIENT_MODEL,
  messages: [{ role: "user", content: "What is the capital of France?" }],
  temperature: 0,
  max_tokens: 48,
};

function client(apiKey = CLIENT_KEY, maxRetries = 0) {
  return new OpenAI({ baseURL: CLIENT_URL, apiKey, maxRetries });
}

async function refusal(call, kind) {
  try {
    await call();
  } catch (error) {
    if (error instanceof kind) {
      return [kind.name, error.status, error.code, error.type, Boolean(error.requestID)];
    }
    throw error;
  }
  return ["nothing was thrown"];
}

async function joined(chunks) {
  let [text, usage, reason, count, last] = ["", null, null, 0, null];
  for await (const chunk of chunks) {
    count += 1;
    last = chunk;
    usage = chunk.usage ?? usage;
    for (const choice of chunk.choices) {
      text += choice.delta.content ?? "";
      reason = choice.finish_reason ?? reason;
    }
  }
  return {
    text,
    reason,
    usage: usage?.total_tokens ?? null,
    "is streamed": count > 3,
    "usage comes last": last.choices.length === 0,
  };
}

async function limits() {
  for (let number = 0; number < 8; number += 1) {
    try {
      await client(CLIENT_LIMITED_KEY).chat.completions.create(chat);
    } catch (error) {
      const after = Number(error.headers.get("retry-after"));
      return { status: error.status, code: error.code, "retry after": after > 0 && after <= 60 };
    }
  }
  return { status: "never limited" };
}

// If a client disconnects mid-stream, the server has to end the request by itself.
async function leave() {
  const stream = await client().chat.completions.create({ ...chat, max_tokens: 512, ignore_eos: true, stream: true });
  let count = 0;
  for await (const _chunk of stream) {
    count += 1;
    if (count === 3) break;
  }
  return stream.controller.signal.aborted;
}

// The same question through the Responses API, whole, streamed and with a schema.
async function responded(Fact) {
  const asked = { model: CLIENT_MODEL, input: chat.messages, temperature: 0, max_output_tokens: 48 };
  const whole = await client().responses.create(asked);
  const stream = client().responses.stream(asked);
  const [kinds, deltas] = [[], []];
  for await (const event of stream) {
    kinds.push(event.type);
    if (event.type === "response.output_text.delta") deltas.push(event.delta);
  }
  const last = await stream.finalResponse();
  const text = { format: zodTextFormat(Fact, "fact") };
  return {
    text: whole.output_text,
    usage: whole.usage.total_tokens,
    stored: whole.store,
    deltas: deltas.join(""),
    "is streamed": deltas.length > 1,
    kinds: [kinds[0], kinds[1], kinds.at(-1)],
    "streamed usage": last.usage.total_tokens,
    structured: (await client().responses.parse({ ...asked, text })).output_parsed,
    previous: await refusal(
      () => client().responses.create({ ...asked, previous_response_id: "resp_1" }),
      OpenAI.NotFoundError,
    ),
  };
}

// The same question, and an unknown model, in a batch.
async function batched() {
  const line = (custom_id, model) => JSON.stringify({
    custom_id, method: "POST", url: "/v1/chat/completions", body: { ...chat, model },
  });
  const content = `${line("good", CLIENT_MODEL)}\n${line("bad", "nobody/nothing")}\n`;
  const api = client();
  const file = await api.files.create({ file: await OpenAI.toFile(Buffer.from(content), "in.jsonl"), purpose: "batch" });
  let batch = await api.batches.create({
    input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h", metadata: { job: "test" },
  });
  while (!["completed", "failed", "expired"].includes(batch.status)) {
    await new Promise((resolve) => setTimeout(resolve, 200));
    batch = await api.batches.retrieve(batch.id);
  }
  const read = async (id) => (await (await api.files.content(id)).text()).trim().split("\n").map(JSON.parse);
  const answers = await read(batch.output_file_id);
  const errors = await read(batch.error_file_id);
  const listed = [];
  for await (const one of api.batches.list()) listed.push(one.id);
  const found = {
    status: batch.status,
    counts: batch.request_counts,
    metadata: batch.metadata,
    text: answers.map((one) => one.response.body.choices[0].message.content),
    usage: answers.map((one) => one.response.body.usage.total_tokens),
    errors: errors.map((one) => [one.custom_id, one.response.status_code]),
    "is listed": listed.includes(batch.id),
    file: (await api.files.retrieve(file.id)).bytes === content.length,
    cancelled: await refusal(() => api.batches.cancel(batch.id), OpenAI.ConflictError),
  };
  for (const id of [file.id, batch.output_file_id, batch.error_file_id]) await api.files.delete(id);
  return { ...found, "files left": (await api.files.list()).data.length };
}

// The client asks for base64 and decodes it, unless told otherwise.
async function embedded() {
  const asked = { model: CLIENT_MODEL, input: [chat.messages[0].content, "Yes"] };
  const whole = await client().embeddings.create(asked);
  const numbers = await client().embeddings.create({ ...asked, encoding_format: "float" });
  const short = await client().embeddings.create({ ...asked, dimensions: 4 });
  return {
    vectors: whole.data.map((one) => Array.from(one.embedding)),
    "as numbers": numbers.data.map((one) => one.embedding),
    dimensions: short.data[0].embedding.length,
    usage: whole.usage.total_tokens,
  };
}

async function main() {
  const answer = await client().chat.completions.create(chat);
  const probable = await client().chat.completions.create({ ...chat, logprobs: true, top_logprobs: 2 });
  const several = await client().chat.completions.create({ ...chat, temperature: 1.5, n: 3, seed: 7 });
  const stopped = await client().chat.completions.create({ ...chat, stop: ["capital"] });
  const completion = { model: CLIENT_MODEL, prompt: "The capital of", max_tokens: 8, temperature: 0 };
  const whole = await client().completions.create(completion);
  let parts = "";
  for await (const part of await client().completions.create({ ...completion, stream: true })) {
    parts += part.choices[0]?.text ?? "";
  }
  const models = [];
  for await (const model of client().models.list()) models.push(model.id);
  const together = await Promise.all([1, 2, 3, 4].map(() => client().chat.completions.create(chat)));
  const Fact = z.object({ city: z.enum(["Paris", "Rome"]), is_capital: z.boolean() });
  const structured = await client().chat.completions.parse({ ...chat, response_format: zodResponseFormat(Fact, "fact") });
  const patient = client(CLIENT_LIMITED_KEY, 5);
  const found = {
    version: load("openai/version").VERSION,
    text: answer.choices[0].message.content,
    reason: answer.choices[0].finish_reason,
    usage: answer.usage.total_tokens,
    stream: await joined(await client().chat.completions.create({ ...chat, stream: true })),
    "stream with usage": await joined(
      await client().chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } }),
    ),
    logprobs: probable.choices[0].logprobs.content.map((token) => token.token).join(""),
    "logprobs are whole": probable.choices[0].logprobs.content.every((token) => token.top_logprobs.length === 2),
    n: several.choices.map((choice) => choice.index).sort(),
    stop: [stopped.choices[0].message.content, stopped.choices[0].finish_reason],
    completion: whole.choices[0].text,
    "completion stream": parts,
    models: models.sort(),
    model: (await client().models.retrieve(CLIENT_MODEL)).id,
    structured: structured.choices[0].message.parsed,
    response: await responded(Fact),
    batch: await batched(),
    embeddings: await embedded(),
    together: together.map((one) => one.choices[0].message.content),
    left: await leave(),
    "unknown model": await refusal(
      () => client().chat.completions.create({ ...chat, model: "nobody/nothing" }),
      OpenAI.NotFoundError,
    ),
    "wrong key": await refusal(() => client("wrong").chat.completions.create(chat), OpenAI.AuthenticationError),
    "wrong call": await refusal(
      () => client().chat.completions.create({ ...chat, temperature: 9 }),
      OpenAI.BadRequestError,
    ),
    limit: await limits(),
    retries: (await Promise.all([1, 2, 3].map(() => patient.chat.completions.create(chat)))).length,
  };
  console.log(JSON.stringify(found));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
