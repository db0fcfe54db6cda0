// The playground in headless Chromium, called by test_playground.py.
import { readFile, unlink } from "node:fs/promises";
import { chromium } from "playwright-core";

const FIELDS = { max_tokens: "24", temperature: "1", top_p: "1", top_k: "0", seed: "1" };

/** Run `use` with a function that opens the playground, and return its result with what the pages complained of. */
async function withPages(executablePath, url, key, use) {
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
  const complaints = [];
  const open = async ({ staysOnChat = false, ...options } = {}, fragment = "") => {
    const tab = await (await browser.newContext(options)).newPage();
    tab.on("pageerror", (error) => complaints.push(error.message));
    tab.on("console", (message) => /Content Security|TrustedHTML/.test(message.text()) && complaints.push(message.text()));
    await tab.goto(`${url}/${fragment}`);
    await tab.getByRole("textbox", { name: "Key" }).fill(key);
    await tab.getByRole("button", { name: "Use it" }).click();
    await tab.waitForSelector("#run:enabled");
    if (!fragment && !staysOnChat) await tab.check("#modes [value=prompt]", { force: true });
    return tab;
  };
  try {
    return { ...(await use(open)), complaints };
  } finally {
    await browser.close();
  }
}

async function ask(tab, prompt, fields = FIELDS) {
  for (const [name, value] of Object.entries(fields)) await tab.fill(`[name=${name}]`, value);
  await tab.fill("#prompt", prompt);
  await begin(tab, () => tab.keyboard.press("Control+Enter"));
}

/** Do what begins an answer, and wait until it has begun. An observer sees that even if it has ended since. */
async function begin(tab, act) {
  await tab.evaluate(() => {
    const stop = document.querySelector("#stop");
    window.begun = new Promise((resolve) => new MutationObserver(() => stop.hidden || resolve()).observe(stop, { attributes: true }));
  });
  await act();
  await tab.evaluate(() => window.begun);
}

const ended = (tab) => tab.waitForSelector("#run:visible");
const textOf = (tab) => tab.$$eval(".token", (tokens) => tokens.map((token) => token.textContent).join("").replace(/ ∎$/, ""));
const tokensOf = (tab) => tab.$$eval(".token", (tokens) => tokens.map((token) => token.textContent));
const numTokens = (tab, least) => tab.waitForFunction((n) => document.querySelectorAll(".token").length >= n, least);

/** Type, see tokens come, reload while the engine is held, let it go, and read to the end. */
const reloadMidStream = (executablePath, url, key, gate, least) =>
  withPages(executablePath, url, key, async (open) => {
    const tab = await open();
    await ask(tab, "The cat");
    await numTokens(tab, least);
    const before = await textOf(tab);
    await tab.reload();
    await numTokens(tab, least);
    const after = await textOf(tab);
    const wasRunning = await tab.isVisible("#stop");
    await unlink(gate);
    await ended(tab);
    return { before, after, wasRunning, whole: await textOf(tab), keys: await tab.evaluate(() => localStorage.length) };
  });

/** Complete while the server is killed after the first token, and read to the end at the one that takes its place. */
const loseServer = (executablePath, url, key, pid) =>
  withPages(executablePath, url, key, async (open) => {
    const tab = await open();
    await ask(tab, "The cat");
    await numTokens(tab, 1);
    const before = await textOf(tab);
    process.kill(-Number(pid), "SIGKILL");
    await tab.waitForSelector("#run:visible", { timeout: 120_000 });
    return { before, whole: await textOf(tab), status: await tab.textContent("#status") };
  });

/** Say what the page opens on, and answer what is typed there. */
const opensOnChat = (executablePath, url, key) =>
  withPages(executablePath, url, key, async (open) => {
    const tab = await open({ staysOnChat: true });
    const opened = [await tab.inputValue("#prompt"), await tab.textContent("#run")];
    await ask(tab, "The cat");
    await ended(tab);
    await tab.screenshot({ path: "chat.png" });
    return { opened, text: await textOf(tab), said: await tab.textContent("#turns") };
  });

/** Begin, and stop while the engine is held. */
const stopMidStream = (executablePath, url, key) =>
  withPages(executablePath, url, key, async (open) => {
    const tab = await open();
    await ask(tab, "The cat");
    await numTokens(tab, 1);
    await tab.click("#stop");
    await ended(tab);
    return { status: await tab.textContent("#status") };
  });

/** Complete, go on from an alternative by keyboard, and open the links of both in other tabs. */
const branchAndLink = (executablePath, url, key) =>
  withPages(executablePath, url, key, async (open) => {
    const tab = await open();
    await ask(tab, "The cat");
    await ended(tab);
    const first = await tokensOf(tab);
    const links = [await linkOf(tab)];
    await tab.focus(".token");
    for (const pressed of ["ArrowRight", "ArrowRight", "Enter", "ArrowDown"]) await tab.keyboard.press(pressed);
    await tab.waitForFunction(() => document.activeElement.textContent.endsWith("%"));
    await tab.keyboard.press("Enter");
    await tab.waitForSelector(".chosen");
    await ended(tab);
    links.push(await linkOf(tab));
    const repeated = [];
    for (const link of links) {
      const other = await open({}, link);
      await begin(other, () => other.click("#run"));
      await ended(other);
      repeated.push({ text: await textOf(other), notice: await other.textContent("#notice") });
    }
    const changed = Buffer.from(JSON.stringify({ prompt: "x", fingerprint: "gptserve-other" })).toString("base64url");
    const foreign = await (await open({}, `#${changed}`)).textContent("#notice");
    return { first, branch: await tokensOf(tab), text: await textOf(tab), repeated, foreign };
  });

async function linkOf(tab) {
  await tab.click("#link");
  return new URL(tab.url()).hash;
}

/** Look at the page in both colour schemes, narrow and wide, with an answer and alternatives on it. */
const lookAround = (executablePath, url, key) =>
  withPages(executablePath, url, key, async (open) => {
    const axe = await readFile("node_modules/axe-core/axe.min.js", "utf8");
    const found = [];
    for (const [colorScheme, width] of [["light", 1280], ["dark", 360]]) {
      const tab = await open({ colorScheme, viewport: { width, height: 740 } });
      await tab.check("#modes [value=chat]", { force: true });
      await ask(tab, "Who are you?");
      await ended(tab);
      await tab.focus(".token");
      await tab.waitForSelector("#alternatives:visible");
      await tab.evaluate(axe);
      const { violations } = await tab.evaluate(() => window.axe.run(document));
      const [paper, scrolls] = await tab.evaluate(() => [
        getComputedStyle(document.body).backgroundColor,
        document.documentElement.scrollWidth > window.innerWidth,
      ]);
      found.push({ violations: violations.map(({ id, nodes }) => [id, nodes.map(({ html }) => html)]), paper, scrolls, text: await textOf(tab), said: await tab.textContent("#turns"), map: await tab.getAttribute("#blocks", "aria-label") });
    }
    return { found };
  });

/** Chat in two turns with a model that marks its reasoning; open the link of a branch of the first answer. */
const chatInChannels = (executablePath, url, key) =>
  withPages(executablePath, url, key, async (open) => {
    const tab = await open();
    await tab.check("#modes [value=chat]", { force: true });
    await ask(tab, "Two and two?", { ...FIELDS, max_tokens: "200" });
    await ended(tab);
    const shown = (tab, channel) => tab.$$eval(`.token.${channel}`, (tokens) => tokens.map((token) => token.textContent).join(""));
    const first = { text: await shown(tab, "text"), reasoning: await shown(tab, "reasoning"), seen: await tab.innerText("#output") };
    await tab.focus("[tabindex='0'].token");
    await tab.keyboard.press("End");
    for (const pressed of ["ArrowLeft", "Enter", "ArrowDown"]) await tab.keyboard.press(pressed);
    await tab.waitForFunction(() => document.activeElement.textContent.endsWith("%"));
    await tab.keyboard.press("Enter");
    await tab.waitForSelector(".chosen");
    await ended(tab);
    const other = await open({}, await linkOf(tab));
    const linked = { text: await shown(other, "text"), reasoning: await shown(other, "reasoning") };
    await ask(tab, "And three?", {});
    await ended(tab);
    return { first, linked, turns: await tab.$$eval("#turns p", (turns) => turns.map((turn) => turn.textContent)) };
  });
