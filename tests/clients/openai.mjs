// openai for JavaScript, called by test_openai_js.py.
import OpenAI from "openai";

const clientOf = (url, options = {}) => new OpenAI({ baseURL: url, apiKey: "secret", maxRetries: 0, ...options });

async function texts(url, fields) {
  const client = clientOf(url);
  const whole = await client.completions.create(fields);
  let streamed = "";
  for await (const chunk of await client.completions.create({ ...fields, stream: true }))
    streamed += chunk.choices[0].text;
  return [whole.choices[0].text, streamed];
}

async function chats(url, fields) {
  const client = clientOf(url);
  const whole = await client.chat.completions.create(fields);
  let streamed = "";
  let usage = null;
  const asked = { ...fields, stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create(asked)) {
    streamed += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  const helper = await client.chat.completions.stream(fields).finalChatCompletion();
  const contents = [whole, helper].map((completion) => completion.choices[0].message.content);
  return { texts: [...contents, streamed], usage: [whole.usage.completion_tokens, usage.completion_tokens] };
}

async function feedBack(url, fields, how) {
  const client = clientOf(url);
  const first =
    how === "helper"
      ? await client.chat.completions.stream(fields).finalChatCompletion()
      : await client.chat.completions.create(fields);
  const message = first.choices[0].message;
  const messages = [...fields.messages, message, { role: "user", content: "and then?" }];
  const second = await client.chat.completions.create({ ...fields, messages });
  return [message.content, second.choices[0].message.content];
}

async function errorsOf(url, cases) {
  const found = [];
  for (const [fields, options] of cases)
    try {
      await clientOf(url, options).completions.create({ model: "tiny", prompt: "The cat", max_tokens: 5, ...fields });
      found.push(["none"]);
    } catch (error) {
      found.push([error.constructor.name, error.status, error.code, error.param]);
    }
  return found;
}

async function breakOff(url, fields) {
  const stream = await clientOf(url).completions.create({ ...fields, stream: true });
  for await (const chunk of stream) return chunk.choices.length;
}

async function batch(url, lines) {
  const client = clientOf(url);
  const text = lines.map((line) => JSON.stringify(line)).join("\n");
  const file = await client.files.create({ file: new File([text], "in.jsonl"), purpose: "batch" });
  const asked = { input_file_id: file.id, endpoint: lines[0].url, completion_window: "24h" };
  let its = await client.batches.create(asked);
  while (!["completed", "failed"].includes(its.status)) its = await client.batches.retrieve(its.id);
  const output = await (await client.files.content(its.output_file_id)).text();
  const ids = [];
  for await (const one of client.files.list()) ids.push(one.id);
  for await (const one of client.batches.list()) ids.push(one.id);
  const { deleted } = await client.files.delete(file.id);
  return {
    texts: output.trim().split("\n").map((line) => JSON.parse(line).response.body.choices[0].text),
    counts: [its.request_counts.total, its.request_counts.completed],
    are_listed: [file.id, its.output_file_id, its.id].every((id) => ids.includes(id)),
    deleted,
  };
}
