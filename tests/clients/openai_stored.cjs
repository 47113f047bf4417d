// Prints what the official Node client finds of stored chats, conversations and responses in the background.
const { createRequire } = require("node:module");
const OpenAI = createRequire(process.env.CLIENT_MODULES + "/")("openai");

const { CLIENT_URL, CLIENT_STORING_KEY, CLIENT_MODEL } = process.env;
const question = "What is the capital of France?";
const chat = { model: CLIENT_MODEL, messages: [{ role: "user", content: question }], temperature: 0, max_tokens: 48 };
const asked = { model: CLIENT_MODEL, input: question, temperature: 0, max_output_tokens: 48 };
const client = new OpenAI({ baseURL: CLIENT_URL, apiKey: CLIENT_STORING_KEY, maxRetries: 0 });

async function all(pages) {
  const found = [];
  for await (const one of pages) found.push(one);
  return found;
}

async function isMissing(call) {
  try {
    await call();
  } catch (error) {
    return error instanceof OpenAI.NotFoundError;
  }
  return false;
}

function areEqual(one, other) {
  return JSON.stringify(one) === JSON.stringify(other);
}

async function storedChats() {
  const chats = client.chat.completions;
  const made = [];
  for (const turn of ["0", "1", "2"]) made.push(await chats.create({ ...chat, store: true, metadata: { turn } }));
  const ids = made.map((one) => one.id);
  await chats.update(ids[2], { metadata: { turn: "1" } });
  const found = {
    text: (await chats.retrieve(ids[0])).choices[0].message.content,
    messages: (await all(chats.messages.list(ids[0]))).map((message) => message.content),
    listed: areEqual((await all(chats.list({ limit: 2 }))).map((one) => one.id), ids),
    filtered: areEqual((await all(chats.list({ metadata: { turn: "1" } }))).map((one) => one.id), ids.slice(1)),
    deleted: [],
  };
  for (const id of ids) found.deleted.push((await chats.delete(id)).deleted);
  return { ...found, missing: await isMissing(() => chats.retrieve(ids[0])) };
}

async function conversation() {
  const made = await client.conversations.create({ metadata: { topic: "demo" } });
  const response = await client.responses.create({ ...asked, conversation: made.id });
  const items = await all(client.conversations.items.list(made.id, { order: "asc", limit: 1 }));
  const again = await client.responses.create({ ...asked, input: [{ type: "item_reference", id: items[0].id }] });
  const found = {
    text: response.output_text,
    referred: again.output_text,
    roles: items.map((item) => item.role),
    "is of it": response.conversation.id === made.id,
    deleted: (await client.conversations.delete(made.id)).deleted,
  };
  return { ...found, missing: await isMissing(() => client.conversations.retrieve(made.id)) };
}

async function endOfCancelled(id) {
  try {
    return (await client.responses.cancel(id)).status;
  } catch (error) {
    return error.code;
  }
}

async function inBackground() {
  let made = await client.responses.create({ ...asked, background: true });
  const first = made.status;
  while (["queued", "in_progress"].includes(made.status)) {
    await new Promise((resolve) => setTimeout(resolve, 100));
    made = await client.responses.retrieve(made.id);
  }
  const events = [];
  for await (const event of await client.responses.create({ ...asked, background: true, stream: true })) {
    events.push(event);
    if (events.length === 2) break;
  }
  const rest = { stream: true, starting_after: events[1].sequence_number };
  for await (const event of await client.responses.retrieve(events[0].response.id, rest)) events.push(event);
  // The answer has no limit, so it runs until it is cancelled or fills the context.
  const long = await client.responses.create({
    model: CLIENT_MODEL, input: question, ignore_eos: true, background: true,
  });
  return {
    first,
    status: made.status,
    text: made.output_text,
    streamed: events.map((event) => (event.type === "response.output_text.delta" ? event.delta : "")).join(""),
    numbers: areEqual(events.map((event) => event.sequence_number), events.map((_, index) => index)),
    last: events.at(-1).type,
    cancelled: await endOfCancelled(long.id),
  };
}

async function main() {
  const found = {
    chats: await storedChats(), conversation: await conversation(), background: await inBackground(),
  };
  console.log(JSON.stringify(found));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
