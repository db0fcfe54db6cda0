// The AI SDK with @ai-sdk/openai-compatible, called by test_ai.py.
import { generateObject, generateText, jsonSchema, streamText, tool, APICallError } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

const providerOf = (url) =>
  createOpenAICompatible({
    name: "gptserve",
    baseURL: url,
    apiKey: "none",
    includeUsage: true,
    supportsStructuredOutputs: true,
  });

async function chats(url, fields) {
  const model = providerOf(url).chatModel("tiny");
  const asked = { model, system: "Be brief.", maxRetries: 0, ...fields };
  const whole = await generateText({ ...asked, prompt: "The cat sat" });
  const stream = streamText({ ...asked, prompt: "The cat sat" });
  let streamed = "";
  for await (const part of stream.textStream) streamed += part;
  const said = [{ role: "user", content: "The cat sat" }, ...whole.response.messages];
  const messages = [...said, { role: "user", content: "and then?" }];
  const second = await generateText({ ...asked, messages });
  return {
    texts: [whole.text, streamed],
    second: second.text,
    usage: [whole.usage.outputTokens, (await stream.usage).outputTokens],
    reasons: [whole.finishReason, await stream.finishReason],
  };
}

async function texts(url, fields) {
  const model = providerOf(url).completionModel("storyteller");
  const asked = { model, prompt: "Once upon a time", maxRetries: 0, ...fields };
  let streamed = "";
  for await (const part of streamText(asked).textStream) streamed += part;
  return [(await generateText(asked)).text, streamed];
}

async function objects(url, fields) {
  const schema = jsonSchema({
    type: "object",
    properties: { city: { type: "string", maxLength: 8 } },
    required: ["city"],
    additionalProperties: false,
  });
  const asked = { model: providerOf(url).chatModel("storyteller"), prompt: "Is it raining?", maxRetries: 0, ...fields };
  const made = await generateObject({ ...asked, schema });
  const tools = { get_weather: tool({ description: "the weather of a city", inputSchema: schema }) };
  const forced = { ...asked, tools, toolChoice: { type: "tool", toolName: "get_weather" } };
  const whole = await generateText(forced);
  const stream = streamText(forced);
  const streamed = await stream.toolCalls;
  return {
    object: made.object,
    inputs: [whole.toolCalls[0].input, streamed[0].input],
    reasons: [whole.finishReason, await stream.finishReason],
  };
}

async function errorOf(url, name) {
  try {
    await generateText({ model: providerOf(url).chatModel(name), prompt: "The cat", maxRetries: 0 });
  } catch (error) {
    return [APICallError.isInstance(error), error.statusCode, error.isRetryable, error.message];
  }
  throw new Error("it was answered");
}
