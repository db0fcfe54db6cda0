// A page of another origin in headless Chromium, called by test_browser.py.
import { chromium } from "playwright-core";

async function onPage(executablePath, page, run, given) {
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
  try {
    const tab = await browser.newPage();
    await tab.goto(page);
    return await tab.evaluate(run, given);
  } finally {
    await browser.close();
  }
}

const post = (executablePath, page, given) =>
  onPage(
    executablePath,
    page,
    async ({ url, body, key }) => {
      const headers = { "content-type": "application/json", authorization: `Bearer ${key}`, "x-request-id": "mine" };
      try {
        const response = await fetch(url, { method: "POST", headers, body: JSON.stringify(body) });
        const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
        let text = "";
        for (let part = await reader.read(); !part.done; part = await reader.read()) text += part.value;
        return { status: response.status, requestId: response.headers.get("x-request-id"), text };
      } catch (error) {
        return { refused: error.name };
      }
    },
    given,
  );

// Reads events until the browser stays away, as it does after a 204, or has come back.
const follow = (executablePath, page, given) =>
  onPage(
    executablePath,
    page,
    ({ url }) =>
      new Promise((resolve) => {
        const source = new EventSource(url);
        const events = [];
        let opened = 0;
        source.onopen = () => ++opened > 1 && resolve({ cameBack: true, events });
        source.onmessage = (event) => events.push([event.lastEventId, event.data]);
        source.onerror = () => source.readyState === EventSource.CLOSED && resolve({ cameBack: false, events });
      }),
    given,
  );
