// What the charts show: rates and quantiles from views that follow one another.
import { num, percent } from "./format.js";

export const SPAN_S = 300;
const WINDOW_S = 5;

const HISTOGRAMS = ["step_times", "queue_times", "first_token_times", "inter_token_times", "decode_times"];

/** Views of the last minutes as points; begins anew with every server run. */
export class Series {
  #run = "";
  #readings = [];
  points = [];

  /** Takes a view; returns whether it is of another server run than the one before. */
  add(run, view) {
    const reading = read(view);
    const last = this.#readings.at(-1);
    const isNew = run !== this.#run || (last !== undefined && reading.at < last.at);
    if (isNew) this.clear();
    this.#run = run;
    if (!isNew && last !== undefined && reading.at === last.at) return false;
    this.#readings.push(reading);
    this.points.push(pointOf(this.#readings));
    while (this.points[0].at < reading.at - SPAN_S) this.points.shift();
    while (this.#readings[0].at < reading.at - 2 * WINDOW_S) this.#readings.shift();
    return isNew;
  }

  clear() {
    this.#readings = [];
    this.points = [];
  }

  /** What each principal did over the last seconds, by name. */
  principals() {
    const now = this.#readings.at(-1);
    const then = before(this.#readings);
    const told = new Map();
    for (const [name, sums] of now?.principals ?? []) {
      const old = then.principals.get(name) ?? sums;
      const appends = sums.appends - old.appends;
      if (appends <= 0) continue;
      told.set(name, {
        tokens: (sums.tokens - old.tokens) / Math.max(now.at - then.at, 1e-3),
        queue: (sums.queue - old.queue) / appends,
        run: (sums.run - old.run) / appends,
      });
    }
    return told;
  }
}

function read(view) {
  const { status = {}, cache_metrics: cache = {} } = view;
  const held = num(cache.used_blocks) + num(cache.cached_blocks);
  const total = held + num(cache.empty_blocks);
  return {
    at: num(view.uptime),
    steps: num(status.num_steps),
    rows: num(view.num_step_rows),
    prompt: num(status.num_prefill_tokens),
    decoded: num(status.num_decode_tokens),
    used: percent(num(cache.used_blocks), total),
    held: percent(held, total),
    histograms: Object.fromEntries(HISTOGRAMS.map((name) => [name, readHistogram(view[name])])),
    principals: new Map((view.principals ?? []).map((each) => [each.principal ?? "", readPrincipal(each)])),
  };
}

function readHistogram(histogram = {}) {
  return { bounds: (histogram.upper_bounds_ns ?? []).map((bound) => num(bound) / 1e9), counts: (histogram.counts ?? []).map(num) };
}

function readPrincipal(each) {
  return {
    appends: num(each.num_appends),
    tokens: num(each.num_tokens),
    queue: num(each.queue_ns) / 1e9,
    run: num(each.run_ns) / 1e9,
  };
}

/** The newest reading that is older than the window, else the oldest. */
function before(readings) {
  const limit = readings.at(-1).at - WINDOW_S + 0.2;
  return readings.findLast((each) => each.at <= limit) ?? readings[0];
}

function pointOf(readings) {
  const now = readings.at(-1);
  const last = readings.at(-2);
  const then = before(readings);
  const over = (name) => (last === undefined ? null : now[name] - last[name]);
  const elapsed = last === undefined ? 0 : now.at - last.at;
  const rate = (name) => (elapsed > 0 ? over(name) / elapsed : null);
  const point = {
    at: now.at,
    decoded: rate("decoded"),
    prompt: rate("prompt"),
    rows: over("steps") > 0 ? over("rows") / over("steps") : null,
    steps: rate("steps"),
    used: now.used,
    held: now.held,
  };
  for (const name of HISTOGRAMS) {
    const [p50, p99] = quantiles(now.histograms[name], then.histograms[name], [0.5, 0.99]);
    Object.assign(point, { [`${name}_p50`]: p50, [`${name}_p99`]: p99 });
  }
  return point;
}

/** Quantiles of what lies between two readings of a histogram, straight within a range; null where there is nothing. */
export function quantiles(now, then, shares) {
  const counts = now.counts.map((value, index) => value - (then.counts[index] ?? 0));
  const total = counts.reduce((sum, value) => sum + value, 0);
  if (total <= 0) return shares.map(() => null);
  return shares.map((share) => {
    let wanted = share * total;
    for (const [index, value] of counts.entries()) {
      if (value > 0 && wanted <= value) {
        const low = index ? now.bounds[index - 1] : 0;
        return low + ((now.bounds[index] ?? low) - low) * (wanted / value);
      }
      wanted -= value;
    }
    return now.bounds.at(-1) ?? null;
  });
}
