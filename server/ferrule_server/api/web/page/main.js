// Listens to the server and hands each view to the parts of the page; says so when no news comes.
import { makeCharts } from "./charts.js";
import { num, span } from "./format.js";
import { Pool } from "./pool.js";
import { Series } from "./series.js";
import { showPrincipals, showTotals } from "./tables.js";
import { Tree } from "./tree.js";

const STALE_MS = 3500;
const AGAIN_MS = 2000;
const CLOSED = 2;

const STATES = { ready: "Ready", starting: "Starting", draining: "Draining", closing: "Closing", failed: "Failed" };

const state = document.getElementById("state");
const about = document.getElementById("about");
const series = new Series();
const drawCharts = makeCharts(document.getElementById("charts"));
const pool = new Pool(document.getElementById("pool"));
const tree = new Tree(document.getElementById("tree"));

let told = null;
let heardAt = performance.now();
let source = null;

function connect() {
  source?.close();
  source = new EventSource(new URL("events", import.meta.url));
  source.onmessage = (event) => take(JSON.parse(event.data));
  source.onerror = () => {
    // The browser tries again by itself unless the server has refused.
    if (source.readyState === CLOSED) setTimeout(connect, AGAIN_MS);
    sayState();
  };
}

function take(message) {
  told = message;
  if (message.problem === undefined) heardAt = performance.now();
  if (message.view !== undefined) show(message);
  sayState();
}

function show({ run, view, instance, version }) {
  if (series.add(run, view)) tree.clear();
  drawCharts(series.points);
  pool.show(view);
  tree.show(view);
  showPrincipals(view, series.principals());
  showTotals(view);
  const executor = view.status?.executor;
  const notes = [instance, view.model_id, executor, `version ${version}`, `up ${span(num(view.uptime))}`];
  if (view.status?.debug?.preparation) notes.push(view.status.debug.preparation);
  about.textContent = notes.filter(Boolean).join("  ·  ");
  document.title = `${instance} – Ferrule`;
}

function sayState() {
  const silentMs = performance.now() - heardAt;
  const isStale = silentMs > STALE_MS;
  document.getElementById("main").classList.toggle("stale", isStale);
  if (isStale) say("stale", `${told?.problem ?? "No news"} for ${span(silentMs / 1000)}, trying again`);
  else if (told === null) say("waiting", "Connecting");
  else if (told.phase === "starting") say("waiting", loading(told.load));
  else say(told.phase === "ready" ? "ready" : "leaving", STATES[told.phase] ?? told.phase);
}

function loading({ stage, share } = {}) {
  return `Starting: ${stage ?? ""} ${Math.round((share ?? 0) * 100)}%`;
}

function say(kind, text) {
  if (state.textContent !== text) state.textContent = text;
  state.dataset.state = kind;
}

setInterval(sayState, 500);
connect();
