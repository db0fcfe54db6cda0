// Anthropic's client for JavaScript, called by test_anthropic_js.py.
import Anthropic from "@anthropic-ai/sdk";

const clientOf = (url, options = {}) => new Anthropic({ baseURL: url, apiKey: "secret", maxRetries: 0, ...options });

async function messages(url, fields) {
  const client = clientOf(url);
  const whole = await client.messages.create(fields);
  let streamed = "";
  for await (const event of await client.messages.create({ ...fields, stream: true }))
    if (event.type === "content_block_delta") streamed += event.delta.text;
  const helper = await client.messages.stream(fields).finalMessage();
  const { model, messages } = fields;
  const { input_tokens: counted } = await client.messages.countTokens({ model, messages });
  const tokens = (usage) => [usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens];
  return {
    texts: [whole.content[0].text, helper.content[0].text, streamed],
    usage: [tokens(whole.usage), tokens(helper.usage)],
    counted,
  };
}

async function loop(url, model, tool) {
  const client = clientOf(url);
  const messages = [{ role: "user", content: "Weather in Oslo?" }];
  const found = { inputs: [], texts: [], deltas: "" };
  for (let turn = 0; turn < 2; turn++) {
    const stream = client.messages.stream({ model, max_tokens: 500, messages, tools: [tool] });
    stream.on("inputJson", (added) => (found.deltas += added));
    const answer = await stream.finalMessage();
    const calls = answer.content.filter((block) => block.type === "tool_use");
    found.inputs.push(...calls.map((block) => block.input));
    found.texts.push(...answer.content.filter((block) => block.type === "text").map((block) => block.text));
    const results = calls.map((block) => ({ type: "tool_result", tool_use_id: block.id, content: "Rain" }));
    messages.push({ role: "assistant", content: answer.content }, { role: "user", content: results });
  }
  return found;
}

async function classes(url, fields) {
  const found = [];
  const note = async (options, changed) => {
    try {
      await clientOf(url, options).messages.create({ ...fields, ...changed });
    } catch (error) {
      found.push([error.constructor.name, error.status, error.error.error.type]);
    }
  };
  await note({ apiKey: "wrong" }, {});
  await note({}, { model: "claude-opus-5" });
  await note({}, { max_tokens: 0 });
  return found;
}
