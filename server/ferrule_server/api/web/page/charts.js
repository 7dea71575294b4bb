// Line charts of the last five minutes; the large number is the newest value, or the one under the pointer.
import { count, duration, element, shape } from "./format.js";
import { SPAN_S } from "./series.js";

const SPANS = [60, 120, SPAN_S];
const WIDTH = 300;
const HEIGHT = 100;
const GAP_S = 3.5;
const asCount = (value) => [count(value), ""];
const asPercent = (value) => [value === null ? "–" : value.toFixed(value < 10 && value > 0 ? 1 : 0), "%"];

/**
 * One row per chart: `first` is drawn in the accent colour, `second` behind it; `label` says what the large number is,
 * `also` what the small one is, which is `second` or what `small` names.
 */
const CHARTS = [
  { name: "Tokens per second", first: "decoded", second: "prompt", show: asCount, label: "decoded", also: "prompt", area: true },
  { name: "Rows per step", first: "rows", show: asCount, also: "steps/s", small: "steps", area: true },
  { name: "KV pool in use", first: "used", second: "held", show: asPercent, also: "with cached", top: 100, area: true },
  { name: "Step time", quantiles: "step_times" },
  { name: "Wait for a step", quantiles: "queue_times" },
  { name: "Time to first token", quantiles: "first_token_times" },
  { name: "Between tokens of a Generate", quantiles: "inter_token_times" },
  { name: "Decode of a client's own loop", quantiles: "decode_times" },
].map((chart) =>
  chart.quantiles
    ? { ...chart, first: `${chart.quantiles}_p50`, second: `${chart.quantiles}_p99`, show: duration, label: "p50", also: "p99", isLog: true }
    : chart,
);

/** Makes the charts in an element; returns what draws points into them. */
export function makeCharts(parent) {
  const charts = CHARTS.map((chart) => new Chart(chart));
  parent.append(...charts.map((chart) => chart.figure));
  return (points) => charts.forEach((chart) => chart.draw(points));
}

class Chart {
  #spec;
  #points = [];
  #age = null;
  #parts = {};
  #span = SPANS[0];

  constructor(spec) {
    this.#spec = spec;
    this.figure = element("figure");
    this.figure.tabIndex = 0;
    this.figure.dataset.chart = spec.first;
    const caption = element("figcaption");
    for (const parts of [["name", "when"], ["value", "also"]]) {
      const line = element("div");
      line.append(...parts.map((part) => (this.#parts[part] = element("span", part))));
      caption.append(line);
    }
    this.#parts.name.textContent = spec.name;
    this.figure.append(caption, this.#makePlot(), this.#makeEnds());
    this.figure.addEventListener("keydown", (event) => this.#onKey(event));
    this.figure.addEventListener("blur", () => this.#point(null));
  }

  #makePlot() {
    const plot = element("div", "plot");
    const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    for (const part of ["grid", "areaSecond", "area", "second", "first", "cursor"]) {
      svg.append((this.#parts[part] = shape("path", { class: part === "areaSecond" ? "area second" : part })));
    }
    this.#parts.labels = element("div", "labels");
    plot.append(svg, this.#parts.labels);
    plot.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      this.#point(Math.max(0, (1 - (event.clientX - box.left) / box.width) * this.#span));
    });
    plot.addEventListener("pointerleave", () => this.#point(null));
    return plot;
  }

  #makeEnds() {
    const ends = element("div", "ends");
    ends.append((this.#parts.begin = element("span")), element("span", "", "now"));
    return ends;
  }

  #onKey(event) {
    const by = { ArrowLeft: 5, ArrowRight: -5 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    this.#point(Math.min(this.#span, Math.max(0, (this.#age ?? 0) + by)));
  }

  #point(age) {
    this.#age = age;
    this.#say();
  }

  draw(points) {
    this.#points = points;
    const { first, second, area } = this.#spec;
    const values = points.flatMap((point) => [point[first], point[second]]).filter((value) => value > 0);
    const axis = this.#spec.isLog ? decades(values) : straight(values, this.#spec.top);
    this.#drawAxis(axis);
    const age = points.length ? points.at(-1).at - points[0].at : 0;
    this.#span = SPANS.find((span) => age <= span) ?? SPAN_S;
    const path = (name, isArea) => lines(points, name, axis.place, this.#span, isArea);
    this.#parts.first.setAttribute("d", path(first));
    if (second) this.#parts.second.setAttribute("d", path(second));
    if (area) this.#parts.area.setAttribute("d", path(first, true));
    if (area && second) this.#parts.areaSecond.setAttribute("d", path(second, true));
    this.#parts.begin.textContent = `${this.#span / 60} min ago`;
    this.#say();
  }

  #drawAxis({ ticks, place }) {
    const heights = ticks.map((tick) => HEIGHT * (1 - place(tick)));
    this.#parts.grid.setAttribute("d", heights.map((y) => `M0 ${y}H${WIDTH}`).join(""));
    const labels = ticks.map((tick, index) => {
      const label = element("span", "", tick ? this.#spec.show(tick).join(" ").replace(/\.0+(?= )/, "").trim() : "");
      label.style.top = `${heights[index]}%`;
      return label;
    });
    this.#parts.labels.replaceChildren(...labels);
  }

  /** Writes the newest values, or those of the moment pointed at. */
  #say() {
    const { first, second, small, show, also, label = "" } = this.#spec;
    const now = this.#points.at(-1);
    if (now === undefined) return;
    const at = now.at - (this.#age ?? 0);
    const point = this.#age === null ? now : nearest(this.#points, at);
    const [value, unit] = show(point[first]);
    this.#parts.value.replaceChildren(value, element("small", "", `${unit} ${label}`));
    if (also) this.#parts.also.textContent = [...show(point[small ?? second]), also].filter(Boolean).join(" ");
    this.#parts.when.textContent = this.#age === null ? "" : `${Math.round(now.at - point.at)} s ago`;
    const x = WIDTH * (1 - (now.at - point.at) / this.#span);
    this.#parts.cursor.setAttribute("d", this.#age === null ? "" : `M${x} 0V${HEIGHT}`);
    this.figure.setAttribute("aria-label", `${this.#spec.name}: ${value} ${unit}; arrow keys look back`);
  }
}

/** An axis from 0 to a round number above all values, or to `top`. */
function straight(values, top) {
  const most = Math.max(1, ...values);
  const unit = 10 ** Math.floor(Math.log10(most));
  const last = top ?? [1, 2, 4, 6, 8, 10].map((step) => step * unit).find((step) => step >= most * 0.999) ?? most;
  return { ticks: [0, last / 2, last], place: (value) => Math.min(value / last, 1) };
}

/** An axis on which every factor of ten is as high: latencies of one chart lie far apart. */
function decades(values) {
  const low = Math.floor(Math.log10(Math.min(...values, 1e-2)));
  const high = Math.max(Math.ceil(Math.log10(Math.max(...values, 1e-3))), low + 2);
  const ticks = Array.from({ length: high - low + 1 }, (_, index) => 10 ** (low + index));
  const place = (value) => Math.min(1, Math.max(0, (Math.log10(value) - low) / (high - low)));
  return { ticks, place };
}

function nearest(points, at) {
  return points.reduce((best, point) => (Math.abs(point.at - at) < Math.abs(best.at - at) ? point : best));
}

/** The path of a line with gaps where there is no value; closed down to the axis where `isArea`. */
function lines(points, name, place, span, isArea = false) {
  const now = points.at(-1)?.at ?? 0;
  let path = "";
  let last = null;
  for (const point of points) {
    const value = point[name];
    if (value === null || value === undefined) {
      if (last !== null && isArea) path += `V${HEIGHT}Z`;
      last = null;
      continue;
    }
    const x = (WIDTH * (1 - (now - point.at) / span)).toFixed(1);
    const y = (HEIGHT * (1 - place(value))).toFixed(1);
    const isNext = last !== null && point.at - last < GAP_S;
    if (!isNext && last !== null && isArea) path += `V${HEIGHT}Z`;
    path += isNext ? `L${x} ${y}` : isArea ? `M${x} ${HEIGHT}V${y}` : `M${x} ${y}h0.4`;
    last = point.at;
  }
  return isArea && last !== null ? `${path}V${HEIGHT}Z` : path;
}
