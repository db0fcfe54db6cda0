// The live view of the engine: the queue, a map of the KV cache, three small plots. It asks once a second while the
// page can be seen.
import { send } from "./api.js";

const PERIOD_MS = 1000;
const NUM_POINTS = 60;
const MAX_HEIGHT = 200; // of the map, in CSS pixels
const SVG = "http://www.w3.org/2000/svg";
const PLOTS = [
  ["tokens/s", (d) => d.of("generation_tokens_total") / d.seconds, (v) => v.toFixed(v < 10 ? 1 : 0)],
  ["time to first token", (d) => d.mean("time_to_first_token_seconds"), asTime],
  ["between tokens", (d) => d.mean("inter_token_latency_seconds"), asTime],
];

const $ = (id) => document.getElementById(id);

/** Begin to look; `onState` gets what GET /playground/engine says. Returns the first state. */
export async function watchEngine(onState) {
  const plots = PLOTS.map(([name, value, format]) => ({ value, show: addPlot(name, format), points: [] }));
  let before = null;
  let blocks = null;
  const look = async () => {
    const state = await (await send("playground/engine")).json();
    const now = parseMetrics(await (await send("metrics")).text());
    onState(state);
    showQueue(state, now);
    blocks = state.blocks;
    drawBlocks(state);
    if (before) {
      const change = changeOf(before, now);
      for (const plot of plots) {
        plot.points = [...plot.points, plot.value(change)].slice(-NUM_POINTS);
        plot.show(plot.points);
      }
    }
    before = now;
    $("engine-note").textContent = blocks ? "" : "No engine is ready.";
    return state;
  };
  const first = await look();
  (async () => {
    for (;;) {
      await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
      if (document.hidden) before = null;
      else await look().catch((error) => ($("engine-note").textContent = error.message));
    }
  })();
  return first;
}

/** Return the numbers of /metrics without the prefix, by name; those with several labels are left to Prometheus. */
function parseMetrics(text) {
  const found = { at: performance.now() };
  for (const [, name, value] of text.matchAll(/^gptserve_(\w+)\{model_name="[^"]*"\} (\S+)$/gm)) found[name] = Number(value);
  return found;
}

function changeOf(before, now) {
  const of = (name) => Math.max(0, now[name] - before[name]); // a server that was restarted counts from 0
  const mean = (name) => (of(`${name}_count`) ? of(`${name}_sum`) / of(`${name}_count`) : null);
  return { of, mean, seconds: (now.at - before.at) / 1000 };
}

function showQueue(state, now) {
  $("running").textContent = state.num_running;
  $("waiting").textContent = state.num_waiting;
  const asked = now.prefix_cache_queries_total;
  $("hits").textContent = asked ? `${Math.round((100 * now.prefix_cache_hits_total) / asked)} %` : "–";
}

/** Draw a square for each cell: the more sequences share its blocks, the stronger. */
function drawBlocks({ blocks, num_blocks, block_size }) {
  const canvas = $("blocks");
  const cells = blocks ? blocks.cells : "";
  const width = canvas.parentElement.clientWidth;
  let pitch = 14;
  while (pitch > 3 && Math.ceil(cells.length / Math.floor(width / pitch)) * pitch > MAX_HEIGHT) pitch--;
  const columns = Math.floor(width / pitch);
  const height = Math.max(1, Math.ceil(cells.length / columns)) * pitch;
  const scale = window.devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const colour = new Map([...$("marks").querySelectorAll("i")].map((i) => [i.dataset.mark, getComputedStyle(i).backgroundColor]));
  const gap = pitch > 5 ? 2 : 1;
  [...cells].forEach((mark, i) => {
    context.fillStyle = colour.get(mark) ?? colour.get("4");
    context.fillRect((i % columns) * pitch, Math.floor(i / columns) * pitch, pitch - gap, pitch - gap);
  });
  const shared = cells.replace(/[.c1]/g, "").length;
  const held = cells.replace(/[.c]/g, "").length;
  const each = blocks?.blocks_per_cell > 1 ? `${blocks.blocks_per_cell} blocks` : "a block";
  $("blocks-note").textContent = `${num_blocks.toLocaleString("en")} blocks of ${block_size}; a square is ${each}`;
  canvas.setAttribute("aria-label", `Map of the KV cache: ${held} of ${cells.length} squares in use, ${shared} shared`);
}

/** Add a plot and return the function that draws points into it; null is a gap. */
function addPlot(name, format) {
  const figure = document.createElement("figure");
  const caption = figure.appendChild(document.createElement("figcaption"));
  caption.append(name, " ");
  const latest = caption.appendChild(document.createElement("b"));
  const svg = figure.appendChild(document.createElementNS(SVG, "svg"));
  svg.setAttribute("viewBox", `0 0 ${NUM_POINTS - 1} 24`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${name}, the last minute`);
  const line = svg.appendChild(document.createElementNS(SVG, "path"));
  $("plots").append(figure);
  latest.textContent = "–";
  return (points) => {
    const top = Math.max(...points, 1e-9);
    const start = NUM_POINTS - points.length;
    let isOpen = false;
    line.setAttribute("d", points.map((point, i) => {
      const step = point === null ? "" : `${isOpen ? "L" : "M"}${start + i} ${(23 - (22 * point) / top).toFixed(2)}${isOpen ? "" : "h.01"}`;
      isOpen = point !== null;
      return step;
    }).join(""));
    const last = points.findLast((point) => point !== null);
    if (last !== undefined) latest.textContent = format(last);
  };
}

function asTime(seconds) {
  return seconds < 1 ? `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(1)} s`;
}
