// The AI SDK with @ai-sdk/openai in its defaults, which speaks responses; called by test_ai_responses.py.
import { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { createOpenAI } from "@ai-sdk/openai";

async function conversation(url, asked) {
  const bodies = [];
  const openai = createOpenAI({
    baseURL: url,
    apiKey: "none",
    fetch: (address, options) => {
      bodies.push(JSON.parse(options.body));
      return fetch(address, options);
    },
  });
  const fields = { model: openai.responses(asked.model), maxRetries: 0, ...asked.fields };
  const whole = await generateText({ ...fields, prompt: asked.prompt });
  const stream = streamText({ ...fields, prompt: asked.prompt });
  let streamed = "";
  for await (const part of stream.textStream) streamed += part;
  const said = [{ role: "user", content: asked.prompt }, ...whole.response.messages];
  const second = await generateText({ ...fields, messages: [...said, { role: "user", content: "and then?" }] });
  return {
    texts: [whole.text, streamed],
    second: second.text,
    types: bodies[2].input.map((item) => item.type ?? item.role),
    usage: [whole.usage.outputTokens, (await stream.usage).outputTokens],
    reasons: [whole.finishReason, await stream.finishReason],
    warnings: whole.warnings,
  };
}

async function agent(url, asked) {
  const openai = createOpenAI({ baseURL: url, apiKey: "none" });
  const schema = jsonSchema({
    type: "object",
    properties: { city: { type: "string" } },
    required: ["city"],
    additionalProperties: false,
  });
  const weather = tool({ description: "the weather", inputSchema: schema, execute: ({ city }) => `Rain in ${city}` });
  const fields = {
    model: openai.responses(asked.model),
    tools: { get_weather: weather, web_search: openai.tools.webSearch({}) },
    stopWhen: stepCountIs(3),
    maxRetries: 0,
    prompt: "Is it raining in Oslo?",
  };
  const whole = await generateText(fields);
  const stream = streamText(fields);
  let streamed = "";
  for await (const part of stream.textStream) streamed += part;
  return {
    texts: [whole.text, streamed],
    inputs: [whole.steps[0].toolCalls[0].input, (await stream.steps)[0].toolCalls[0].input],
    results: [whole.steps[0].toolResults[0].output, (await stream.steps)[0].toolResults[0].output],
  };
}

async function object(url, asked) {
  const openai = createOpenAI({ baseURL: url, apiKey: "none" });
  const schema = jsonSchema({
    type: "object",
    properties: { city: { type: "string", maxLength: 8 } },
    required: ["city"],
    additionalProperties: false,
  });
  const model = openai.responses(asked.model);
  return (await generateObject({ model, schema, prompt: "Is it raining?", maxRetries: 0, ...asked.fields })).object;
}
