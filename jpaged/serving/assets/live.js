// The engine as it runs: figures, the KV pool block by block, and who holds what, from the events of /live.

import { events, request } from "./http.js";

// As in jpaged/engine/pool_view.py.
const [FREE, CACHED, OTHER, FIRST_COLOUR, NUM_COLOURS, SHARED] = [0, 1, 2, 3, 13, 16];
const HUE_STEP = 5; // colours of neighbouring numbers are far apart: 5 and 13 have no common factor
const RATE_S = 3;
const RETRY_MS = 3000;
const LARGEST_CELL = 16;
const POOL_HEIGHT = 300;

const get = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });

let paused = false;
let watching = null; // the AbortController of the stream
let retry = null;
let history = []; // [time in s, tokens generated], of the last RATE_S seconds
let last = null; // the newest event
const figures = new Map(); // by replica: its figure

async function watch() {
  clearTimeout(retry);
  watching?.abort();
  if (paused || document.hidden) return;
  const controller = new AbortController();
  watching = controller;
  let trouble = "The live view ended.";
  try {
    const response = await request("live", { signal: controller.signal });
    for await (const event of events(response)) {
      if (controller.signal.aborted) return;
      say("Live");
      take(event);
    }
  } catch (error) {
    if (error.name === "AbortError") return;
    trouble = error.message;
    if (error.status === 401) {
      say("Needs an API key");
      return; // until there is another one
    }
  }
  if (controller !== watching) return;
  say(trouble);
  retry = setTimeout(watch, RETRY_MS);
}

function say(text) {
  const state = get("live-state");
  if (state.textContent !== text) state.textContent = text; // said once, not at every event
}

function take(event) {
  const sum = (field) => event.replicas.reduce((total, replica) => total + replica[field], 0);
  const pool = (field) => event.replicas.reduce((total, replica) => total + replica.pool[field], 0);
  const now = event.time_s;
  history.push([now, sum("generated_tokens")]);
  history = history.filter(([time]) => now - time <= RATE_S);
  const [since, before] = history[0];
  get("running").textContent = number.format(sum("running"));
  get("waiting").textContent = number.format(sum("waiting"));
  get("rate").textContent = now > since ? number.format(Math.max(0, history.at(-1)[1] - before) / (now - since)) : "–";
  get("usage").textContent = percent.format(pool("num_used") / Math.max(1, pool("num_blocks")));
  get("hits").textContent = sum("prefix_queries") ? percent.format(sum("prefix_hits") / sum("prefix_queries")) : "–";
  last = event;
  draw();
  list(event.replicas);
}

function draw() {
  for (const replica of last?.replicas ?? []) {
    const { caption, canvas } = figureOf(replica.replica);
    const pool = replica.pool;
    const unit = pool.blocks_per_cell === 1 ? "" : `; a square is ${pool.blocks_per_cell} blocks`;
    const name = last.replicas.length > 1 ? `Replica ${replica.replica}` : "KV pool";
    caption.textContent = `${name}: ${number.format(pool.num_blocks)} blocks of ${pool.block_size} tokens${unit}`;
    canvas.setAttribute(
      "aria-label",
      `${name}: ${pool.num_used} of ${pool.num_blocks} blocks in use, ${pool.num_shared} of them shared; ${pool.num_cached} free blocks kept for prefix hits.`,
    );
    canvas.dataset.used = pool.num_used;
    canvas.dataset.shared = pool.num_shared;
    canvas.dataset.cached = pool.num_cached;
    paint(canvas, bytes(pool.cells), bytes(pool.levels));
  }
}

function figureOf(replica) {
  let parts = figures.get(replica);
  if (!parts) {
    const [figure, caption, canvas] = ["figure", "figcaption", "canvas"].map((tag) => document.createElement(tag));
    canvas.setAttribute("role", "img");
    figure.append(caption, canvas);
    get("pools").append(figure);
    parts = { caption, canvas };
    figures.set(replica, parts);
  }
  return parts;
}

function bytes(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

function paint(canvas, cells, levels) {
  const width = canvas.clientWidth;
  const scale = window.devicePixelRatio || 1;
  const size = Math.max(4, Math.min(LARGEST_CELL, Math.floor(Math.sqrt((width * POOL_HEIGHT) / cells.length))));
  const columns = Math.max(1, Math.floor(width / size));
  const height = Math.ceil(cells.length / columns) * size;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const theme = themeColours();
  const side = size - 1;
  cells.forEach((cell, i) => {
    const x = (i % columns) * size;
    const y = Math.floor(i / columns) * size;
    const kind = cell & (SHARED - 1);
    context.fillStyle = theme.free;
    context.fillRect(x, y, side, side);
    if (kind === FREE) return;
    if (levels.length) context.globalAlpha = 0.3 + (0.7 * levels[i]) / 255;
    if (kind === CACHED) {
      const line = Math.max(1, Math.round(size / 7));
      context.strokeStyle = theme.cached;
      context.lineWidth = line;
      context.strokeRect(x + line / 2, y + line / 2, side - line, side - line);
    } else {
      context.fillStyle = kind === OTHER ? theme.other : theme.owned[kind - FIRST_COLOUR];
      context.fillRect(x, y, side, side);
    }
    context.globalAlpha = 1;
    if (cell & SHARED) {
      const mark = Math.max(2, Math.round(side * 0.4));
      context.fillStyle = theme.mark;
      context.fillRect(x + (side - mark) / 2, y + (side - mark) / 2, mark, mark);
    }
  });
}

function colourOf(index) {
  const hue = Math.round((((index * HUE_STEP) % NUM_COLOURS) * 360) / NUM_COLOURS);
  return `oklch(var(--owned-lightness) var(--owned-chroma) ${hue})`; // equally light, whatever the hue
}

function themeColours() {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(name).trim();
  const owned = Array.from({ length: NUM_COLOURS }, (_, index) =>
    colourOf(index).replace(/var\((--[\w-]+)\)/g, (_match, name) => value(name)),
  );
  return { free: value("--free"), cached: value("--cached"), other: value("--other"), mark: value("--mark"), owned };
}

function list(replicas) {
  const holders = replicas.flatMap((replica) => replica.pool.holders);
  const all = replicas.reduce((total, replica) => total + replica.pool.num_holders, 0);
  const table = get("holders");
  table.hidden = !holders.length;
  table.caption.textContent =
    all > holders.length ? `The ${holders.length} requests with the most blocks, of ${number.format(all)}` : "Requests that hold blocks";
  table.tBodies[0].replaceChildren(
    ...holders.map((holder) => {
      const row = document.createElement("tr");
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = colourOf(holder.number % NUM_COLOURS);
      const name = row.insertCell();
      name.append(swatch, `#${holder.number}`);
      row.insertCell().textContent = number.format(holder.blocks);
      row.insertCell().textContent = number.format(holder.shared);
      return row;
    }),
  );
}

get("pause").addEventListener("click", (event) => {
  paused = !paused;
  event.currentTarget.setAttribute("aria-pressed", String(paused));
  history = [];
  if (paused) say("Paused");
  watch();
});

document.addEventListener("visibilitychange", watch); // a page that nobody sees asks nothing of the engine
document.addEventListener("jpaged-key", watch);
new ResizeObserver(draw).observe(get("pools"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
watch();
