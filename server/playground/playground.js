// The page: what the fields say becomes a completion, whose tokens stream in. A completion is kept by the server, so a
// reload takes it up; the fragment of the address repeats one. tokens.js shows tokens, engine.js the engine.
import { ApiError, askForKeys, begin, follow, post, send, textOf } from "./api.js";
import { parts } from "./channels.js";
import { watchEngine } from "./engine.js";
import { fragmentOf, linked } from "./link.js";
import { TokenView, tokensOf } from "./tokens.js";

const RUN = "gptserve-run"; // in sessionStorage: the completion that a reload takes up
const NUM_ALTERNATIVES = 8;
const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k"];

const $ = (id) => document.getElementById(id);
const field = (name) => $("ask").elements[name];
const view = new TokenView($("output"), $("alternatives"), branch);

let engine = null; // what the server last said of itself
let turns = []; // of a chat, before the message in the field
let run = null; // the completion on the sheet: { asked, promptIds, chosen, id, seed, fingerprint }
let aborting = null; // while it runs

/** Return what the fields ask for; with the seed and the fingerprint of a run this is what a link holds. */
function asked() {
  const values = Object.fromEntries(NUMBERS.map((name) => [name, Number(field(name).value)]));
  const stop = field("stop").value.replaceAll("\\n", "\n");
  const seed = field("seed").value;
  const mode = field("mode").value;
  return { mode, turns, prompt: $("prompt").value, ...values, stop, seed: seed === "" ? null : Number(seed) };
}

function fill(given) {
  for (const name of NUMBERS) if (Number.isFinite(given[name])) field(name).value = given[name];
  field("stop").value = String(given.stop ?? "").replaceAll("\n", "\\n");
  field("seed").value = Number.isSafeInteger(given.seed) ? given.seed : "";
  field("mode").value = given.mode === "chat" ? "chat" : "prompt";
  turns = Array.isArray(given.turns) ? given.turns.map(({ role, content }) => ({ role: String(role), content: String(content) })) : [];
  $("prompt").value = String(given.prompt ?? "");
  showMode();
}

async function promptOf({ mode, turns, prompt }) {
  if (mode !== "chat") return prompt;
  const messages = [...turns, { role: "user", content: prompt }];
  return (await post("tokenize", { messages, add_special_tokens: false })).tokens;
}

/** Complete what `wanted` asks for. `chosen`: tokens after the prompt that are given, of a branch or a link. */
async function start(wanted, { promptIds = null, chosen = [] } = {}) {
  await halt();
  const mine = { asked: wanted, promptIds, chosen };
  await read(mine, async (signal) => {
    const prompt = promptIds ? [...promptIds, ...chosen.map((token) => token.id)] : await promptOf(wanted);
    const body = { ...fieldsOf(wanted), max_tokens: Math.max(1, wanted.max_tokens - chosen.length), prompt };
    const begun = await begin(body, signal);
    const { seed } = begun;
    keep(Object.assign(mine, { id: begun.id, seed, fingerprint: begun.system_fingerprint, body: { ...body, seed } }));
  });
}

function keep(mine) {
  sessionStorage.setItem(RUN, JSON.stringify(mine));
}

/** Begin a completion again that the server has lost, and return its id. Throws ApiError if it would be another one. */
async function beginAgain(mine, signal) {
  const { id, system_fingerprint: fingerprint } = await begin(mine.body, signal);
  if (fingerprint !== mine.fingerprint) {
    cancel(id);
    throw new ApiError(0, { message: "The server has lost this completion, and computes another one now.", code: null });
  }
  keep(Object.assign(mine, { id }));
  return id;
}

/** Return the fields of a request. */
function fieldsOf(wanted) {
  return {
    ...Object.fromEntries(NUMBERS.map((name) => [name, wanted[name]])),
    ...(wanted.stop && { stop: wanted.stop }),
    ...(wanted.seed !== null && { seed: wanted.seed }),
    logprobs: NUM_ALTERNATIVES,
    return_token_ids: true,
    return_tokens_as_token_ids: true,
  };
}

/** Take up the completion that this tab was reading when it was reloaded. */
async function resume(kept) {
  fill(kept.asked);
  if (kept.asked.mode === "chat") $("prompt").value = "";
  await read(kept);
}

/** Show a completion until its end. `prepare` begins it, unless it has an id. */
async function read(mine, prepare = async () => {}) {
  run = mine;
  aborting = new AbortController();
  const { signal } = aborting;
  view.clear(marksFor(mine.asked));
  showTurns();
  for (const token of mine.chosen) view.add(token);
  setBusy(true);
  showStatus(["waiting for the first token"]);
  const pace = new Pace();
  let reason = null;
  const tell = (end) => showStatus([end, countOf(view.tokens.length), pace.rate(), mine.id && `seed ${mine.seed}`]);
  try {
    await prepare(signal);
    for await (const { choices: [choice] } of follow(mine.id, signal, () => beginAgain(mine, signal))) {
      if (run !== mine) return;
      mine.promptIds ??= choice.prompt_token_ids;
      for (const token of choice.token_ids.length ? tokensOf(choice) : []) {
        view.add(token);
        pace.count();
      }
      reason = choice.finish_reason;
      tell(`first token ${pace.first()}`);
    }
    setBusy(false);
    view.end();
    tell(reason === "length" ? "max tokens reached" : "ended");
  } catch (error) {
    if (run !== mine) return;
    setBusy(false);
    if (error.code === "cancelled" || signal.aborted) tell("stopped");
    else fail(error);
  }
}

/** Return the marks of the channels in the answer to what is asked for. */
function marksFor({ mode }) {
  return mode === "chat" ? engine.marks : null;
}

/** The pace of tokens as this page sees it. */
class Pace {
  #startedAt = performance.now();
  #firstAt = null;
  #number = 0;

  count() {
    this.#firstAt ??= performance.now();
    this.#number++;
  }

  first() {
    return `${Math.round(this.#firstAt - this.#startedAt)} ms`;
  }

  rate() {
    const seconds = (performance.now() - this.#firstAt) / 1000;
    return this.#number > 9 && seconds > 0.5 ? `${(this.#number / seconds).toFixed(1)} tokens/s` : "";
  }
}

/** Go on from an alternative to a token: the same prompt, tokens and seed, up to there. */
function branch(index, id, logprob) {
  view.hide();
  const [token, before] = [view.tokens[index], view.tokens.slice(0, index)];
  const wanted = { ...run.asked, seed: run.seed };
  const promptIds = run.promptIds;
  textOf(id)
    .then((text) => start(wanted, { promptIds, chosen: [...before, { id, text, logprob, top: token.top, chosen: true }] }))
    .catch(fail);
}

/** Cancel what runs. */
async function halt() {
  if (!aborting) return;
  const [before, { id }] = [aborting, run];
  run = null; // whoever reads it stops
  setBusy(false);
  before.abort();
  if (id) await cancel(id);
}

async function cancel(id) {
  await post(`v1/completions/${id}/cancel`, {}).catch(() => {}); // it may be unknown by now
}

function showStatus(parts) {
  $("status").classList.remove("error");
  $("status").textContent = parts.filter(Boolean).join(" · ");
}

function fail(error) {
  setBusy(false);
  if (error.code === "completion_not_found") sessionStorage.removeItem(RUN); // its time is over
  $("status").classList.add("error");
  $("status").textContent = error instanceof ApiError || error.name === "AbortError" ? error.message : `The server cannot be reached: ${error.message}`;
}

function countOf(number) {
  return number === 1 ? "1 token" : `${number} tokens`;
}

function setBusy(isBusy) {
  if (!isBusy) aborting = null;
  $("run").hidden = isBusy;
  $("stop").hidden = !isBusy;
  $("link").hidden = isBusy || !run?.id;
  $("output").setAttribute("aria-busy", isBusy);
  $("status").setAttribute("aria-live", isBusy ? "off" : "polite"); // read at the end, not at every token
}

function showMode() {
  const isChat = field("mode").value === "chat";
  $("prompt-label").textContent = isChat ? "Message" : "Prompt";
  $("prompt").placeholder = isChat ? "Say something" : "Begin a text";
  $("run").textContent = isChat ? "Send" : "Continue";
  $("clear").hidden = !isChat;
  document.body.classList.toggle("chat", isChat);
  if (isChat) $("sheet").append($("prompt")); // below the answer
  else $("sheet").insertBefore($("prompt"), $("output"));
  showTurns();
}

function showTurns() {
  const isChat = field("mode").value === "chat";
  const said = run?.asked.mode === "chat" ? [...run.asked.turns, { role: "user", content: run.asked.prompt }] : turns;
  const shown = isChat ? said : [];
  $("turns").replaceChildren(...shown.map(({ role, content }) => {
    const turn = document.createElement("p");
    turn.className = role;
    turn.textContent = content;
    return turn;
  }));
}

/** In a chat the answer on the sheet becomes a turn before the next message. */
function takeTurn() {
  if (field("mode").value !== "chat" || run?.asked.mode !== "chat" || !view.tokens.length) return;
  turns = [...run.asked.turns, { role: "user", content: run.asked.prompt }, { role: "assistant", content: view.text }];
}

/** Return the fragment that repeats the run. A branch goes by its token ids, which no spelling changes. */
function fragment() {
  const { asked: wanted, seed, fingerprint, promptIds, chosen } = run;
  const ids = chosen.length ? { promptIds, chosen: chosen.map((token) => token.id) } : {};
  return fragmentOf({ ...wanted, seed, fingerprint, ...ids });
}

let repeating = null; // the branch of a link, until a field changes

async function openLink(given) {
  await halt();
  run = null;
  fill(given);
  view.clear(marksFor(asked()));
  const isSame = given.fingerprint === engine.system_fingerprint;
  const [there, here] = [String(given.fingerprint).slice(0, 40), engine.system_fingerprint];
  notify(
    !isSame
      ? `This link was made with ${there}. This server computes as ${here}, so the text may be another one.`
      : engine.batch_invariant
        ? `This link repeats a completion of ${there}, token for token.`
        : `This link repeats a completion of ${there}. What runs beside it may change this server's numbers, and so the text.`,
    isSame,
  );
  if (Array.isArray(given.chosen) && Array.isArray(given.promptIds)) {
    const chosen = [];
    for (const ids of parts(given.chosen, marksFor(asked()))) {
      const { prompt: text } = await post("detokenize", { tokens: ids });
      chosen.push(...ids.map((id, i) => ({ id, text: i ? "" : text, logprob: 0, top: [], chosen: true })));
    }
    repeating = { promptIds: given.promptIds, chosen };
    for (const token of chosen) view.add(token);
  }
}

function notify(text, isGood) {
  $("notice").textContent = text;
  $("notice").classList.toggle("differs", !isGood);
  $("notice").hidden = false;
}

function askKey(complaint) {
  $("key-error").textContent = complaint;
  $("key").value = "";
  const dialog = $("key-dialog");
  dialog.showModal();
  return new Promise((resolve, reject) => {
    const close = () => {
      const key = $("key").value.trim();
      if (key) resolve(key);
      else reject(new ApiError(401, { message: "This server needs an API key." }));
    };
    dialog.addEventListener("close", close, { once: true });
  });
}

function listen() {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if ($("run").disabled || !$("stop").hidden) return;
    takeTurn();
    const [wanted, given] = [asked(), repeating ?? {}];
    if (wanted.mode === "chat" && !repeating) $("prompt").value = "";
    start(wanted, given).catch(fail);
  });
  $("ask").addEventListener("input", () => (repeating = null));
  $("ask").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
  });
  $("modes").addEventListener("change", async () => {
    await halt();
    run = null;
    view.clear();
    showMode();
  });
  $("stop").addEventListener("click", () => (run.id ? cancel(run.id) : aborting.abort()));
  $("clear").addEventListener("click", async () => {
    await halt();
    run = null;
    turns = [];
    view.clear();
    showTurns();
    sessionStorage.removeItem(RUN);
  });
  $("link").addEventListener("click", async () => {
    history.replaceState(null, "", fragment());
    await navigator.clipboard?.writeText(location.href).catch(() => {}); // the address bar has it, too
    notify("The address of this page now repeats this completion.", true);
  });
  window.addEventListener("hashchange", () => linked() && openLink(linked()).catch(fail));
}

async function main() {
  askForKeys(askKey);
  listen();
  engine = await watchEngine((state) => (engine = state));
  $("model").textContent = `${engine.model} · ${engine.system_fingerprint}`;
  $("modes").hidden = !engine.has_chat_template;
  if (engine.has_chat_template) {
    field("mode").value = "chat";
    if ($("prompt").value === $("prompt").defaultValue) $("prompt").value = ""; // the beginning of a text is no message
  }
  const models = await (await send("v1/models")).json();
  const defaults = models.data[0].sampling_defaults;
  for (const name of NUMBERS) if (name in defaults) field(name).value = defaults[name];
  showMode();
  const kept = JSON.parse(sessionStorage.getItem(RUN) ?? "null");
  const given = linked();
  run = kept;
  const isLink = given && !(kept && fragment() === location.hash);
  if (isLink) await openLink(given);
  $("run").disabled = false; // the fields say by now what they will
  if (kept && !isLink) await resume(kept);
}

main().catch((error) => {
  $("run").disabled = false;
  fail(error);
});
